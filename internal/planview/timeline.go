// This file owns the picture of memory over time on the heaviest rank: areas
// stacked from what is always there, over the groups of saved tensors, to what
// is there for a moment.

package planview

import (
	"fmt"
	"strings"

	"github.com/stowage-dev/stowage/memory"
)

// timeline is the picture. Each pass is one unit wide; heights are in units of
// the scale over [height].
type timeline struct {
	Width  int
	Areas  []area // the topmost first: each covers all below it
	Legend []swatch
	Budget float64 // height of the budget's line in hundredths from the top; negative without one
	Peak   int     // the pass with the peak
	PeakX  float64 // in hundredths from the left
	PeakY  float64 // in hundredths from the top
	Marks  []mark
	Data   data
}

type area struct {
	Color int
	Path  string
}

// mark is a line of the scale at the left.
type mark struct {
	Y    float64
	Text string
}

// data is what the script shows under the cursor, in MiB.
type data struct {
	Names  []string    `json:"names"`
	Peak   int         `json:"peak"`
	Passes []string    `json:"passes"`
	Values [][]float64 `json:"values"`
}

// height is the number of steps that heights are rounded to; more than a screen
// has lines.
const height = 2000

// Colours of the two series that are not groups, behind the eight causes.
const (
	colorStatic    = 20
	colorTransient = 21
	colorGroups    = 8
)

func makeTimeline(r *Report) timeline {
	t := timeline{Width: len(r.Timeline), Budget: -1}
	if t.Width == 0 {
		return t
	}
	names, colors, stacks := series(r)
	scale := r.Budget
	for i, p := range r.Timeline {
		scale = max(scale, p.Bytes())
		if p.Bytes() > r.Timeline[t.Peak].Bytes() {
			t.Peak = i
		}
	}
	scale = max(scale+scale/12, 1)
	top := func(n memory.Bytes) float64 { return 100 * (1 - float64(n)/float64(scale)) }
	if r.Budget > 0 {
		t.Budget = top(r.Budget)
	}
	t.PeakX = 100 * (float64(t.Peak) + 0.5) / float64(t.Width)
	t.PeakY = top(r.Timeline[t.Peak].Bytes())
	t.Marks = marks(scale)
	for i := len(names) - 1; i >= 0; i-- {
		t.Areas = append(t.Areas, area{Color: colors[i], Path: outline(stacks, i, scale)})
		t.Legend = append(t.Legend, swatch{names[i], colors[i]})
	}
	t.Data = data{Names: names, Peak: t.Peak}
	for i, p := range r.Timeline {
		t.Data.Passes = append(t.Data.Passes, passWords(p, r.Setup.VPP))
		row := make([]float64, len(names))
		for j := range row {
			row[j] = float64(stacks[i][j]*10/(1<<20)) / 10
		}
		t.Data.Values = append(t.Data.Values, row)
	}
	return t
}

// series are the names and colours of the areas from the bottom, and their bytes
// at every pass. Groups that hold nothing throughout are left out.
func series(r *Report) (names []string, colors []int, stacks [][]memory.Bytes) {
	stacks = make([][]memory.Bytes, len(r.Timeline))
	add := func(name string, color int, of func(Point) memory.Bytes) {
		any := false
		for _, p := range r.Timeline {
			any = any || of(p) != 0
		}
		if !any {
			return
		}
		names, colors = append(names, name), append(colors, color)
		for i, p := range r.Timeline {
			stacks[i] = append(stacks[i], of(p))
		}
	}
	add("held between steps", colorStatic, func(p Point) memory.Bytes { return p.Static })
	shown := 0
	for g, group := range heaviest(r).Groups {
		before := len(names)
		add(group.Name, colorGroups+shown%12, func(p Point) memory.Bytes {
			if g < len(p.Groups) {
				return p.Groups[g]
			}
			return 0
		})
		shown += len(names) - before
	}
	// What no group accounts for is still held.
	add("other activations", colorGroups+11, func(p Point) memory.Bytes {
		rest := p.Live
		for _, n := range p.Groups {
			rest -= n
		}
		return max(rest, 0)
	})
	add("for a moment", colorTransient, func(p Point) memory.Bytes { return p.Transient })
	return names, colors, stacks
}

func heaviest(r *Report) *Rank {
	for i := range r.Ranks {
		if r.Ranks[i].Rank == r.Heaviest {
			return &r.Ranks[i]
		}
	}
	return &Rank{}
}

// outline is the area below the sum of the series up to one, as steps.
func outline(stacks [][]memory.Bytes, upTo int, scale memory.Bytes) string {
	var b strings.Builder
	fmt.Fprintf(&b, "M0 %d", height)
	last := height
	for _, s := range stacks {
		var sum memory.Bytes
		for _, n := range s[:upTo+1] {
			sum += n
		}
		y := height - int(float64(sum)/float64(scale)*height+0.5)
		if y != last {
			fmt.Fprintf(&b, "V%d", y)
			last = y
		}
		b.WriteString("h1")
	}
	fmt.Fprintf(&b, "V%dz", height)
	return b.String()
}

// marks are four to eight round values of the scale.
func marks(scale memory.Bytes) (out []mark) {
	gib := float64(scale) / (1 << 30)
	step := 0.001
	for i := 0; gib/step > 8; i++ {
		step *= [...]float64{2, 2.5, 2}[i%3] // 1, 2, 5, 10
	}
	for v := step; v < gib; v += step {
		out = append(out, mark{Y: 100 * (1 - v/gib), Text: fmt.Sprintf("%.4g", v)})
	}
	return out
}

func passWords(p Point, vpp int) string {
	text := "forward"
	if p.Backward {
		text = "backward"
	}
	text += fmt.Sprintf(" of microbatch %d", p.Microbatch)
	if vpp > 1 {
		text += fmt.Sprintf(", chunk %d", p.Chunk)
	}
	if p.What != "" {
		text += ", " + p.What
	}
	return text
}
