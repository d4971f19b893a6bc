// This file tests what the page shows in a browser, on made-up figures.

package page

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/observe/report"
)

// saved writes a report as a file and gives its address.
func saved(t *testing.T, r *report.Report) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "report.html")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := Write(f, r); err != nil {
		t.Fatal(err)
	}
	return "file://" + name
}

// size writes bytes as the page does.
func size(n int64) string {
	v, units := float64(n), []string{"B", "KiB", "MiB", "GiB", "TiB"}
	i := 0
	for ; v >= 1024*0.9995 && i < len(units)-1; i++ {
		v /= 1024
	}
	switch {
	case i == 0:
		return fmt.Sprintf("%d B", n)
	case v >= 99.95:
		return fmt.Sprintf("%.0f %s", v, units[i])
	case v >= 9.995:
		return fmt.Sprintf("%.1f %s", v, units[i])
	}
	return fmt.Sprintf("%.2f %s", v, units[i])
}

func (b *browser) wantText(selector, want string) {
	b.T.Helper()
	if got := b.text(selector); !strings.Contains(got, want) {
		b.T.Errorf("%s says %q, want %q in it", selector, got, want)
	}
}

// alive counts the storages of a detail at a time.
func alive(d *report.Detail, t float64) (n int, device int64) {
	for _, s := range d.Storages {
		for _, y := range s.Stays {
			if t >= y.Begin && t < y.End {
				n++
				if y.Where != "host" {
					device += s.Bytes
				}
				break
			}
		}
	}
	return n, device
}

// SPEC S6.5: one looks at a report with mouse and keyboard, in both themes, at the widths
// of a desk and of a telephone; the page says what the figures say, and sends no request.
func TestPageInBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a browser")
	}
	b := startBrowser(t)
	r := sample(policies, 4, 12, 40)
	r.Runs[3].Name = "offload+recompute" // as long as names of policies are
	const kernels = `{"profile":{"steps":3,"profiled_step_ms":130.25,"step_ms":124.5,"model_tflops":421.7,"mfu_percent":51.9,"limits":{"product_tflops":812,"product_format":"bf16","copy_gbps":4240},
		"kernels":[{"name":"grouped_nt","ms":32,"share_percent":83,"launches":32,"tflops":677,"gbps":417,"limit_percent":83.4},{"name":"adamw","ms":4.4,"share_percent":17,"launches":3,"gbps":3788}]}}`
	if err := json.Unmarshal([]byte(kernels), &r.Runs[4]); err != nil {
		t.Fatal(err)
	}
	url := saved(t, r)
	for _, theme := range []string{"dark", "light"} {
		for _, width := range []int{390, 768, 1440} {
			b.Window(width, theme)
			b.open(url)
			name := fmt.Sprintf("report-%s-%d", theme, width)
			b.picture(name)
			if got := eval[int](b, "document.documentElement.scrollWidth"); got > width {
				t.Errorf("%s: the page is %d wide and scrolls sideways: %s", name, got, eval[string](b, `[...document.querySelectorAll("body *")].filter((e) => !e.closest("nav, .scroll") && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.tagName + "." + e.className).slice(0, 8).join(" ")`))
			}
			if over := eval[float64](b, `document.querySelector("table.compare").getBoundingClientRect().right - document.querySelector("#compare .body").getBoundingClientRect().right`); over > 1 {
				t.Errorf("%s: the comparison runs %.0f pixels off its card", name, over)
			}
			if got := eval[string](b, "document.documentElement.dataset.theme"); got != theme {
				t.Errorf("%s: the theme is %q", name, got)
			}
			for _, c := range b.Complaints(url) {
				t.Errorf("%s: %s", name, c)
			}
		}
	}
	run, rank := &r.Runs[4], &r.Runs[4].Ranks[3] // least memory, and the rank that decides it
	t.Run("figures", func(t *testing.T) { testFigures(b, run, rank) })
	t.Run("pointer", func(t *testing.T) { testPointer(b, rank) })
	t.Run("zoom", func(t *testing.T) { testZoom(b) })
	t.Run("keys", func(t *testing.T) { testKeys(b, rank) })
	t.Run("choices", func(t *testing.T) { testChoices(b, r) })
	for _, c := range b.Complaints(url) {
		t.Error(c)
	}
}

func testFigures(b *browser, run *report.Run, rank *report.Rank) {
	b.wantText("#card-device", size(int64(run.Figures[0].Value)))
	b.wantText("#card-device", "predicted "+size(int64(*run.Figures[0].Predicted)))
	b.wantText("#card-host", size(int64(run.Figures[1].Value)))
	b.wantText("#card-loss", fmt.Sprintf("%.4f", run.Figures[2].Value))
	b.wantText("#card-sum", "equal bit for bit in 5 runs")
	b.wantText("#kernels .body", "A dense bf16 product reaches 812 TFLOP/s on this device, and a copy 4.24 TB/s.")
	b.wantText("#kernels .body", "422 TFLOP/s, an MFU of 51.9 % of the dense product.")
	b.wantText("#kernels tbody tr", "677")
	b.wantText("#memory .readout .when", fmt.Sprintf("the peak, step %d", rank.Memory.Peak.Step))
	b.wantText("#memory .readout .tier b", size(rank.Memory.Peak.Bytes))
	for i := range rank.Details {
		d := &rank.Details[i]
		if d.Step != rank.Memory.Peak.Step {
			continue
		}
		n, device := alive(d, rank.Memory.Peak.Time)
		b.wantText("#tensors .about", fmt.Sprintf("%d tensors, %s on the device", n, size(device)))
	}
	if rows := eval[int](b, `document.querySelectorAll("#compare tbody tr").length`); rows < 5 {
		b.T.Errorf("%d policies are compared", rows)
	}
}

// The moment under the pointer follows from the chart's place; what is read out there
// must be the sample that holds then.
func testPointer(b *browser, rank *report.Rank) {
	eval[bool](b, `document.getElementById("memory").scrollIntoView(), true`)
	const share = 0.437
	b.mouse("mouseMoved", "#memory .plot", share, 0.5)
	b.frame()
	end := rank.Steps[len(rank.Steps)-1].End
	width := eval[float64](b, `document.querySelector("#memory .plot").clientWidth`)
	at := (share*width - 60) / (width - 72) * end
	i := 0
	for i+1 < len(rank.Memory.Time) && rank.Memory.Time[i+1] <= at {
		i++
	}
	var total int64
	for _, s := range rank.Memory.Series {
		if s.Tier == "device" {
			total += s.Bytes[i]
		}
	}
	b.wantText("#memory .readout .when", "Here: ")
	b.wantText("#memory .readout .tier b", size(total))

	b.click("#memory .plot", share, 0.5)
	b.frame()
	for _, s := range rank.Steps {
		if at >= s.Begin && at <= s.End {
			b.wantText("#tensors h2", fmt.Sprintf("s alive in step %d at %.0f", s.Step, at-s.Begin))
		}
	}
	if top := eval[float64](b, `document.getElementById("tensors").getBoundingClientRect().top / innerHeight`); top > 1 {
		b.T.Errorf("after a click the tensors are not in sight, at %.2f windows", top)
	}
	b.click("#tensors .tools button", 0.5, 0.5)
	b.wantText("#tensors h2", "Tensors alive at the peak")

	eval[bool](b, `document.getElementById("streams").scrollIntoView(), true`)
	b.frame()
	b.mouse("mouseMoved", "#streams .plot:nth-of-type(1)", 0.5, 0.5)
	b.wantText("#tip", ": device ")
	b.mouse("mouseMoved", `#streams .plot[aria-label^="Timelines"]`, 0.5, 0.17)
	b.wantText("#tip", "kernel")
	b.wantText("#streams .legend", "idle") // streams other than compute do not wait
	// Dragging across zooms, a double click does the opposite.
	before := eval[string](b, `document.querySelector("#streams .plot").dataset.shown`)
	const lanes = `#streams .plot[aria-label^="Timelines"]`
	b.mouse("mousePressed", lanes, 0.4, 0.3)
	b.mouse("mouseMoved", lanes, 0.5, 0.3)
	b.mouse("mouseReleased", lanes, 0.5, 0.3)
	b.frame()
	if after := eval[string](b, `document.querySelector("#streams .plot").dataset.shown`); after == before {
		b.T.Error("dragging across the streams did not zoom")
	}
	b.click(`#streams .tools > button`, 0.5, 0.5)
	b.frame()
	if after := eval[string](b, `document.querySelector("#streams .plot").dataset.shown`); after != before {
		b.T.Errorf("the whole step is %q, was %q", after, before)
	}
}

// testZoom zooms with the wheel and with two fingers; without Ctrl the page scrolls.
func testZoom(b *browser) {
	eval[bool](b, `document.activeElement.blur(), document.getElementById("memory").scrollIntoView(), true`)
	b.frame()
	shown := func() string {
		b.frame()
		return eval[string](b, `document.querySelector("#memory .plot").dataset.shown`)
	}
	box := eval[[]float64](b, `(() => { const r = document.querySelector("#memory .plot").getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; })()`)
	x, y := box[0]+box[2]/2, box[1]+box[3]/2
	all := shown()
	wheel := func(modifiers int) {
		b.Do(nil, "Input.dispatchMouseEvent", map[string]any{"type": "mouseWheel", "x": x, "y": y, "deltaX": 0, "deltaY": -100, "modifiers": modifiers})
	}
	wheel(0)
	if got := shown(); got != all {
		b.T.Error("the wheel alone zooms, so that the page cannot be scrolled past the chart")
	}
	wheel(2) // Ctrl
	b.Until(fmt.Sprintf(`document.querySelector("#memory .plot").dataset.shown !== %q`, all))
	eval[bool](b, `document.querySelector("#memory .tools > button").click(), true`)
	if got := shown(); got != all {
		b.T.Errorf("the whole run is %q, was %q", got, all)
	}
	touch := func(kind string, points ...float64) {
		list := []map[string]any{}
		for i, p := range points {
			list = append(list, map[string]any{"x": p, "y": y, "id": i})
		}
		b.Do(nil, "Input.dispatchTouchEvent", map[string]any{"type": kind, "touchPoints": list})
	}
	touch("touchStart", x-40, x+40)
	for d := 50.0; d < 150; d += 20 {
		touch("touchMove", x-d, x+d)
	}
	touch("touchEnd")
	if shown() == all {
		b.T.Error("two fingers do not zoom")
	}
	eval[bool](b, `document.querySelector("#memory .tools > button").click(), true`)
	shown()
}

func testKeys(b *browser, rank *report.Rank) {
	shown := func() string { return eval[string](b, `document.querySelector("#memory .plot").dataset.shown`) }
	focus := func() string { return eval[string](b, `document.activeElement.closest("section, dialog")?.id || ""`) }
	b.Press("?")
	if !eval[bool](b, `document.getElementById("help").open`) {
		b.T.Error("? does not open the help")
	}
	b.Press("Escape")
	if eval[bool](b, `document.getElementById("help").open`) {
		b.T.Error("Escape does not close the help")
	}
	b.Press("m")
	if got := focus(); got != "memory" {
		b.T.Errorf("m puts the focus on %q", got)
	}
	value := func() string { return eval[string](b, `document.activeElement.getAttribute("aria-valuetext")`) }
	if got := value(); !strings.Contains(got, "the peak") || !strings.Contains(got, size(rank.Memory.Peak.Bytes)) {
		b.T.Errorf("the slider says %q, want the peak of %s", got, size(rank.Memory.Peak.Bytes))
	}
	first := value()
	b.Press("ArrowRight", "ArrowRight")
	if got := value(); got == first {
		b.T.Error("an arrow key does not move the moment")
	}
	all := shown()
	b.Press("+")
	b.frame()
	if shown() == all {
		b.T.Error("+ does not zoom")
	}
	b.Press("0")
	b.frame()
	if got := shown(); got != all {
		b.T.Errorf("0 shows %q, want %q", got, all)
	}
	b.Press("Enter")
	if got := focus(); got != "tensors" {
		b.T.Errorf("Enter puts the focus on %q", got)
	}
	b.Press("p")
	b.wantText("#said", "peak: "+size(rank.Memory.Peak.Bytes))
	b.Press("g", "ArrowRight", "ArrowRight")
	d := &rank.Details[0]
	s := &d.Streams[0]
	b.wantText("#span-said", s.Name+": "+s.Names[s.Of[1]])
	b.Press("ArrowDown")
	b.wantText("#span-said", d.Streams[1].Name+": ")
	b.Press("t")
	if got := eval[string](b, "document.documentElement.dataset.theme"); got != "light" {
		b.T.Errorf("t chooses %q first, want light", got)
	}
	before := eval[string](b, "getComputedStyle(document.body).backgroundColor")
	b.Press("t")
	if after := eval[string](b, "getComputedStyle(document.body).backgroundColor"); after == before {
		b.T.Error("the dark theme looks like the light one")
	}
	b.Press("t")
}

func testChoices(b *browser, r *report.Report) {
	eval[bool](b, `document.getElementById("memory").scrollIntoView(), true`)
	b.frame()
	b.Press("R")
	b.Until(`document.getElementById("said").textContent === "auto, rank 2"`)
	b.wantText("#memory .readout .tier b", size(r.Runs[4].Ranks[2].Memory.Peak.Bytes))
	eval[bool](b, `(() => { const s = document.getElementById("pick-rank"); s.value = "0"; s.dispatchEvent(new Event("change")); return true; })()`)
	b.Until(`document.getElementById("said").textContent === "auto, rank 0"`)
	b.wantText("#memory .readout .tier b", size(r.Runs[4].Ranks[0].Memory.Peak.Bytes))
	// Another run is shown by the rank that decides its peak, whichever was looked at.
	b.Press("[", "[")
	b.Until(`document.getElementById("said").textContent === "offload, rank 3"`)
	b.wantText("#card-device", size(r.Runs[2].Ranks[3].Memory.Peak.Bytes))
	b.wantText("#memory .readout .tier b", size(r.Runs[2].Ranks[3].Memory.Peak.Bytes))
	b.wantText("#card-host", size(int64(r.Runs[2].Figures[1].Value)))
	step := b.text("#streams .small:not(.span-said)")
	eval[bool](b, `document.getElementById("streams").scrollIntoView(), true`)
	b.frame()
	b.Press("n")
	b.frame()
	if got := b.text("#streams .small:not(.span-said)"); got == step {
		b.T.Errorf("n stays at %q", got)
	}
	eval[bool](b, `document.querySelectorAll("details").forEach((d) => { d.open = true; }), true`)
	b.frame()
	if n := eval[int](b, `[...document.querySelectorAll(".alternative")].filter((d) => !d.closest("[hidden]") && !d.querySelector("tbody tr")).length`); n > 0 {
		b.T.Errorf("%d charts have no table", n)
	}
	b.wantText("#pools tbody", "pages, ")
}
