// This file owns the picture on the terminal: a pure function of the steps so far, the
// size of the terminal and the time. It leaves out what does not fit, the least
// important first.

package live

import (
	"fmt"
	"strings"
	"time"

	"github.com/stowage-dev/stowage/internal/eta"
	"github.com/stowage-dev/stowage/memory"
)

// letters are the characters of bars and curves.
type letters struct {
	full, shade, empty, mark, now, cut string
	heights                            []string // the steps of a curve, the lowest first
}

var (
	blocks = letters{"█", "▒", "·", "┃", "▸", "…", []string{"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"}}
	ascii  = letters{"#", "=", ".", "|", ">", "...", []string{"_", ".", "-", "=", "+", "*", "#"}}
)

// view is the state that a frame is drawn from.
type view struct {
	run    Run
	began  time.Time
	order  []string // policies in the order of their first steps
	last   map[string]Step
	now    string // the policy of the last step
	pace   *eta.Pace
	curves map[string][]float64 // losses
	sums   map[string]sums
}

// sums are totals over all ranks and steps of a policy.
type sums struct{ evicted, late int }

// longest bounds the losses behind a curve. Beyond it, pairs are replaced by their means.
const longest = 512

func newView(r Run, now time.Time) *view {
	return &view{run: r, began: now, pace: eta.NewPace(r.Policies, r.Steps, r.From), last: map[string]Step{}, curves: map[string][]float64{}, sums: map[string]sums{}}
}

// add notes a step.
func (v *view) add(s Step, now time.Time) {
	before, seen := v.last[s.Policy]
	if !seen {
		v.order = append(v.order, s.Policy)
	}
	if s.Number <= before.Number {
		v.curves[s.Policy], v.sums[s.Policy] = nil, sums{} // the policy starts again
	}
	sum := v.sums[s.Policy]
	for _, r := range s.Ranks {
		sum.evicted, sum.late = sum.evicted+r.Evicted, sum.late+r.Late
	}
	v.sums[s.Policy] = sum
	v.last[s.Policy], v.now = s, s.Policy
	v.pace.Step(s.Policy, s.Number, now)
	c := append(v.curves[s.Policy], s.Loss)
	if len(c) >= longest {
		for i := range len(c) / 2 {
			c[i] = (c[2*i] + c[2*i+1]) / 2
		}
		c = c[:len(c)/2]
	}
	v.curves[s.Policy] = c
}

// frame draws the picture in at most width columns and height rows.
func (v *view) frame(width, height int, l letters, now time.Time) (lines []line) {
	if height > 4 {
		lines = append(lines, line{{boldInk, printable(v.run.Model)}, {faintInk, " on " + printable(v.run.Layout)}})
	}
	lines = append(lines, v.bar(width, l, now))
	if s, ok := v.last[v.now]; ok {
		lines = append(lines, v.learning(s, width, l))
		lines = append(lines, memoryBars(s, width, height-len(lines)-1, l)...)
		lines = append(lines, counts(s, v.sums[v.now], width))
		if n := len(v.run.Policies); n > 1 && height-len(lines) >= n {
			lines = append(lines, v.policies(l)...)
		}
	}
	lines = lines[:min(len(lines), height)]
	for i := range lines {
		lines[i] = lines[i].cut(width)
	}
	return lines
}

// bar draws the progress of the whole run.
func (v *view) bar(width int, l letters, now time.Time) line {
	done, all := v.pace.Progress()
	label, share, rest := "", fmt.Sprintf("%d %%", 100*done/max(1, all)), ""
	if s, ok := v.last[v.now]; ok {
		label = fmt.Sprintf("%s  step %d/%d  ", v.now, s.Number, v.run.Steps)
	}
	if d, ok := v.pace.Left(now); ok && done < all {
		rest = "  " + eta.Clock(d) + " left"
	}
	spent := "  after " + eta.Clock(now.Sub(v.began))
	for _, words := range []string{label + share + spent + rest, label + share + rest, label + share, share} {
		room := min(width-len(words)-1, 60)
		if n := room * done / max(1, all); room >= 8 {
			return line{text(words + " "), {greenInk, strings.Repeat(l.full, n)}, {faintInk, strings.Repeat(l.empty, room-n)}}
		}
		if len(words) <= width {
			return line{text(words)}
		}
	}
	return line{text(share)}
}

// learning draws the loss, its curve if there is room, and the speed.
func (v *view) learning(s Step, width int, l letters) line {
	head := line{text("loss "), {boldInk, fmt.Sprintf("%.4f", s.Loss)}, text(" ")}
	tail := line{text(fmt.Sprintf("  %.0f tokens/s", s.Speed()))}
	if s.Held != nil {
		tail = append(line{text(fmt.Sprintf("  held out %.4f", *s.Held))}, tail...)
	}
	if room := min(width-head.width()-tail.width(), 40); room >= 4 {
		head = append(head, span{blueInk, curve(v.curves[s.Policy], room, l)})
	}
	return append(head, tail...)
}

// curve draws values in at most width columns. A column is the mean of its values.
func curve(x []float64, width int, l letters) string {
	n := min(width, len(x))
	if n == 0 {
		return ""
	}
	means := make([]float64, n)
	for i := range means {
		part := x[i*len(x)/n : (i+1)*len(x)/n]
		for _, y := range part {
			means[i] += y / float64(len(part))
		}
	}
	lo, hi := means[0], means[0]
	for _, y := range means {
		lo, hi = min(lo, y), max(hi, y)
	}
	var b strings.Builder
	for _, y := range means {
		at := 0
		// Half of any range is finite. The part is no number if all are equal or one is infinite.
		if part := (y/2 - lo/2) / (hi/2 - lo/2); part > 0 {
			at = int(part*float64(len(l.heights)-1) + 0.5)
		}
		b.WriteString(l.heights[at])
	}
	return b.String()
}

// counts draws what did not go by plan, and what the step copied.
func counts(s Step, sum sums, width int) line {
	var spilled, out, in int64
	for _, r := range s.Ranks {
		spilled, out, in = spilled+r.Spilled, out+r.Out, in+r.In
	}
	l := line{}
	for _, x := range []struct {
		name string
		n    int64
		bad  bool
	}{{"spilled pages", spilled, false}, {"reruns", int64(s.Reruns), true}, {"evictions", int64(sum.evicted), true}, {"late reloads", int64(sum.late), false}} {
		look := plainInk
		if x.bad && x.n > 0 {
			look = redInk
		}
		l = append(l, span{faintInk, x.name + " "}, span{look, fmt.Sprint(x.n)}, text("  "))
	}
	l = l[:len(l)-1]
	copied := line{{faintInk, "  copied "}, text(memory.Bytes(out).Short() + " out, " + memory.Bytes(in).Short() + " in a step")}
	if out+in > 0 && l.width()+copied.width() <= width {
		l = append(l, copied...)
	}
	return l
}

// policies draws the progress of each policy of a comparison.
func (v *view) policies(l letters) (lines []line) {
	for _, name := range v.run.Policies {
		at, look := " ", plainInk
		if name == v.now {
			at, look = l.now, boldInk
		}
		s, ok := v.last[name]
		if !ok {
			lines = append(lines, line{{faintInk, fmt.Sprintf("%s %-18s %d/%d", at, name, v.run.From, v.run.Steps)}})
			continue
		}
		var device int64
		for _, r := range s.Ranks {
			device = max(device, r.Device.Peak)
		}
		lines = append(lines, line{{look, fmt.Sprintf("%s %-18s", at, name)},
			text(fmt.Sprintf(" %d/%d  loss %.4f  %6.0f tokens/s  peak %9s", s.Number, v.run.Steps, s.Loss, s.Speed(), memory.Bytes(device).Short()))})
	}
	return lines
}
