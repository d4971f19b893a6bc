// This file owns the bar chart of pools: a panel for each model, weights beside gradients,
// and bars in multiples of the lower bound. The file is self-contained and follows the
// reader's light or dark scheme.

package bench

import (
	"bytes"
	"fmt"
	"html"
	"strings"
	"unicode"
)

// These are the measures of the chart, in pixels. The scale ends at chartMost times the
// lower bound. A longer bar is cut, and its figure shows its length.
const (
	chartWidth  = 960
	chartTop    = 64
	panelHead   = 42
	barStep     = 18
	barHeight   = 13
	panelGap    = 18
	labelWidth  = 62
	columnWidth = chartWidth / 2
	scaleWidth  = 270
	chartMost   = 3.0
)

const chartStyle = `
svg { font: 12px system-ui, sans-serif; --paper: #ffffff; --ink: #1c1e21; --faint: #5f6670; --line: #c9ced6;
  --old: #9aa3b0; --max: #c2741f; --new: #1f7a4d; --newer: #1560bd; }
@media (prefers-color-scheme: dark) { svg { --paper: #15171a; --ink: #eceef1; --faint: #a3abb6; --line: #454b54;
  --old: #717b89; --max: #e39a4c; --new: #4cc38a; --newer: #6ba6f5; } }
.paper { fill: var(--paper); } text { fill: var(--ink); } .faint { fill: var(--faint); } .h { font-weight: 600; font-size: 14px; }
.bound { stroke: var(--ink); stroke-dasharray: 3 2; } .axis { stroke: var(--line); }
.old { fill: var(--old); } .max { fill: var(--max); } .arena { fill: var(--new); } .trace { fill: var(--newer); }
`

// PoolsSVG draws the chart.
func PoolsSVG(r *Pools) []byte {
	pools := len(r.Models[0].Weights.Pools)
	panel := panelHead + pools*barStep + panelGap
	height := chartTop + len(r.Models)*panel
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-labelledby="title">`+"\n",
		chartWidth, height, chartWidth, height)
	title := fmt.Sprintf("Pools of sharded parameters: prefetch %d, DP %d, TP %d, EP %d", r.Prefetch, r.DP, r.TP, r.EP)
	fmt.Fprintf(&b, "<title id=\"title\">%s</title>\n<style>%s</style>\n", escape(title), chartStyle)
	fmt.Fprintf(&b, `<rect class="paper" width="%d" height="%d"/>`+"\n", chartWidth, height)
	chartText(&b, 16, 26, "h", title)
	chartText(&b, 16, 46, "faint", fmt.Sprintf("memory as a multiple of the lower bound (dashed); bars are cut at %g times; fallback memory is %s", chartMost, r.Fallback))
	for i, m := range r.Models {
		y := chartTop + i*panel
		chartText(&b, 16, y+16, "h", m.Model)
		chartSide(&b, 0, y, fmt.Sprintf("weights, at least %v", m.Weights.Lower), m.Weights)
		chartSide(&b, columnWidth, y, fmt.Sprintf("gradients in %s, at least %v", r.GradType, m.Gradients.Lower), m.Gradients)
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

// chartSide draws one half of a panel, with its upper left corner at x, y.
func chartSide(b *bytes.Buffer, x, y int, title string, s PoolSide) {
	left, top := x+16+labelWidth, y+panelHead
	chartText(b, x+16, y+33, "faint", title)
	for i, p := range s.Pools {
		at := top + i*barStep
		times := 1 + p.Waste
		length := scaleWidth * min(times, chartMost) / chartMost
		class := p.Pool
		switch p.Pool {
		case "dynamic", "rotary", "fixed":
			class = "old"
		}
		chartText(b, x+16, at+11, "", p.Pool)
		fmt.Fprintf(b, `<rect class="%s" x="%d" y="%d" width="%.1f" height="%d"/>`+"\n", class, left, at, length, barHeight)
		if times > 1.01*chartMost {
			// A bar that is cut ends in a slanted gap.
			fmt.Fprintf(b, `<path class="paper" d="M%d %dl6 0l-6 %dl-6 0z"/>`+"\n", left+scaleWidth-16, at, barHeight)
		}
		chartText(b, left+int(length)+6, at+11, "", fmt.Sprintf("%v  +%.0f %%", p.Bytes, 100*p.Waste))
	}
	bottom, one := top+len(s.Pools)*barStep, float64(left)+scaleWidth/chartMost
	fmt.Fprintf(b, `<line class="axis" x1="%d" y1="%d" x2="%d" y2="%d"/>`+"\n", left, top-3, left, bottom)
	fmt.Fprintf(b, `<line class="bound" x1="%.1f" y1="%d" x2="%.1f" y2="%d"/>`+"\n", one, top-3, one, bottom)
}

func chartText(b *bytes.Buffer, x, y int, class, text string) {
	fmt.Fprintf(b, `<text x="%d" y="%d" class="%s">%s</text>`+"\n", x, y, class, escape(text))
}

func escape(s string) string {
	visible := func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar // XML allows few others
	}
	return html.EscapeString(strings.Map(visible, s))
}
