package live

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/golden"
)

var start = time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)

// sample returns a step of four ranks, of which the last exceeds its budget.
func sample(policy string, n int) Step {
	s := Step{Policy: policy, Number: n, Loss: 5 * math.Exp(-float64(n)/20), Tokens: 4096, Seconds: 0.25, Reruns: n / 30}
	for i := range int64(4) {
		s.Ranks = append(s.Ranks, Rank{
			Device: Memory{InUse: (8 + 2*i) << 20, Peak: (12 + 3*i) << 20, Budget: 20 << 20, Capacity: 1 << 30},
			Host:   Memory{InUse: i << 20, Peak: 2 * i << 20, Capacity: 1 << 30},
			Out:    3 << 20, In: 2 << 20, Evicted: int(i) / 3, Spilled: int64(n) / 10,
		})
	}
	return s
}

// draw returns a frame without colours.
func draw(v *view, width, height int, l letters, now time.Time) string {
	var b strings.Builder
	for _, x := range v.frame(width, height, l, now) {
		x.write(&b, false)
		b.WriteByte('\n')
	}
	return b.String()
}

// one is a run in step 45 of 100; compared is a comparison in which three policies have
// begun.
func one() *view {
	v := newView(Run{Model: "tiny-moe", Layout: "pp 2 x vpp 1 x dp 2 (ep 2)", Policies: []string{"stash"}, Steps: 100}, start)
	for n := 1; n <= 45; n++ {
		v.add(sample("stash", n), start.Add(time.Duration(n)*1300*time.Millisecond))
	}
	return v
}

func compared() *view {
	v := newView(Run{Model: "tiny-moe", Layout: "pp 2 x vpp 1 x dp 2 (ep 2)", Policies: []string{"none", "static", "stash", "offload", "offload+recompute", "budget", "graphs"}, Steps: 9}, start)
	for i, p := range []string{"none", "static", "stash"} {
		for n := 1; n <= 4; n++ {
			v.add(sample(p, n), start.Add(time.Duration(4*i+n)*time.Second))
		}
	}
	return v
}

// SPEC S6.5
func TestFrames(t *testing.T) {
	now := start.Add(59 * time.Second)
	held := 1.25
	evaluated := one()
	s := sample("stash", 46)
	s.Held = &held
	evaluated.add(s, now)
	fresh := newView(Run{Model: "tiny-moe", Layout: "one rank", Policies: []string{"stash"}, Steps: 100}, start)
	long := newView(Run{Model: "a\x1b[2Jname\nwith 漢字", Layout: "one rank", Policies: []string{"none"}, Steps: 1 << 24, From: 1 << 23}, start)
	many := sample("none", 1<<23+1)
	for len(many.Ranks) < 64 {
		many.Ranks = append(many.Ranks, many.Ranks...)
	}
	long.add(many, start)
	long.add(func() Step { many.Number++; return many }(), start.Add(time.Hour))
	var all strings.Builder
	for _, x := range []struct {
		name          string
		v             *view
		width, height int
		l             letters
	}{
		{"one run", one(), 120, 40, blocks}, {"one run", one(), 79, 23, blocks}, {"one run", one(), 79, 23, ascii}, {"evaluated", evaluated, 79, 23, blocks},
		{"one run", one(), 59, 6, blocks}, {"one run", one(), 39, 9, blocks}, {"one run", one(), 19, 4, blocks}, {"one run", one(), 5, 1, blocks},
		{"compared", compared(), 120, 40, blocks}, {"compared", compared(), 79, 23, blocks}, {"compared", compared(), 79, 10, blocks},
		{"before the first step", fresh, 79, 23, blocks}, {"many ranks, a strange name", long, 100, 12, blocks},
	} {
		fmt.Fprintf(&all, "-- %s in %d x %d\n%s", x.name, x.width, x.height, draw(x.v, x.width, x.height, x.l, now))
	}
	golden.Check(t, "frames.txt", all.String())
}

// For any steps, a frame fits the terminal, has no control characters of its own, and ends
// all colours.
func TestFramesFit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		number := rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, 1<<50))
		v := newView(Run{Model: rapid.String().Draw(t, "model"), Layout: rapid.String().Draw(t, "layout"), Policies: []string{"none", "stash"}[:rapid.IntRange(1, 2).Draw(t, "policies")], Steps: rapid.IntRange(1, 1<<24).Draw(t, "steps")}, start)
		now := start
		for range rapid.IntRange(0, 20).Draw(t, "told") {
			s := Step{Policy: rapid.SampledFrom(v.run.Policies).Draw(t, "policy"), Number: rapid.IntRange(1, v.run.Steps).Draw(t, "step"), Loss: rapid.Float64().Draw(t, "loss"), Tokens: 1, Seconds: 1}
			for range rapid.IntRange(0, 5).Draw(t, "ranks") {
				mem := func() Memory {
					return Memory{InUse: number.Draw(t, "in use"), Peak: number.Draw(t, "peak"), Budget: number.Draw(t, "budget")}
				}
				s.Ranks = append(s.Ranks, Rank{Device: mem(), Host: mem(), Out: number.Draw(t, "out")})
			}
			now = now.Add(time.Duration(rapid.Int64Range(0, 1<<40).Draw(t, "later")))
			v.add(s, now)
		}
		width, height := rapid.IntRange(1, 200).Draw(t, "width"), rapid.IntRange(1, 60).Draw(t, "height")
		lines := v.frame(width, height, rapid.SampledFrom([]letters{blocks, ascii}).Draw(t, "letters"), now)
		if len(lines) > height || len(lines) == 0 {
			t.Fatalf("%d lines in %d rows", len(lines), height)
		}
		for _, l := range lines {
			var plain, coloured strings.Builder
			l.write(&plain, false)
			l.write(&coloured, true)
			if n := utf8.RuneCountInString(plain.String()); n > width || n != l.width() {
				t.Fatalf("%q has %d columns, said %d, of %d", plain.String(), n, l.width(), width)
			}
			if strings.ContainsFunc(plain.String(), func(r rune) bool { return r < ' ' || r == 0x7f }) {
				t.Fatalf("%q has control characters", plain.String())
			}
			if strings.Count(coloured.String(), "\x1b[") != 2*strings.Count(coloured.String(), "\x1b[0m") {
				t.Fatalf("%q has a colour without an end", coloured.String())
			}
		}
	})
}

// A curve shows any losses, also those of a run that diverged.
func TestCurveOfAnyLosses(t *testing.T) {
	inf := math.Inf(1)
	for _, x := range []struct {
		losses []float64
		want   string
	}{
		{[]float64{1, 1}, "__"}, {[]float64{0, 1}, "_#"}, {[]float64{-math.MaxFloat64, 0, math.MaxFloat64}, "_=#"},
		{[]float64{1, inf}, "__"}, {[]float64{-inf, 1, inf}, "___"}, {[]float64{math.NaN(), 1}, "__"},
	} {
		if got := curve(x.losses, 10, ascii); got != x.want {
			t.Errorf("%v is %q, want %q", x.losses, got, x.want)
		}
	}
}

// A bar shows small values, marks the budget in the right place, and has the requested
// width.
func TestBars(t *testing.T) {
	a := axis{most: 100}
	for _, x := range []struct {
		m    Memory
		want string
	}{
		{Memory{}, ".........."},
		{Memory{InUse: 1, Peak: 1}, "#........."},
		{Memory{InUse: 50, Peak: 70}, "#####==..."},
		{Memory{InUse: 50, Peak: 70, Budget: 100}, "#####==..|"},
		{Memory{InUse: 50, Peak: 100, Budget: 60}, "#####|===="},
		{Memory{InUse: 100, Peak: 100, Budget: 1}, "|#########"},
	} {
		var b strings.Builder
		a.bar(x.m, 10, plainInk, ascii).write(&b, false)
		if b.String() != x.want {
			t.Errorf("%+v: %q, want %q", x.m, b.String(), x.want)
		}
	}
}

// All bars of a tier share the axis of the largest peak or budget, and one is red only if its
// peak exceeds its budget.
func TestAxis(t *testing.T) {
	ranks := []Rank{{Device: Memory{Peak: 30, Budget: 40}}, {Device: Memory{Peak: 10, Budget: 20}}}
	device := func(r Rank) Memory { return r.Device }
	if a := scale(ranks, device); a != (axis{40, 40}) {
		t.Errorf("%+v below their budgets", a)
	}
	ranks[1].Device.Peak = 50
	if a := scale(ranks, device); a != (axis{50, 40}) {
		t.Errorf("%+v above a budget", a)
	}
	for peak, want := range map[int64]ink{39: blueInk, 40: blueInk, 41: redInk} {
		if got := (axis{most: 50}).bar(Memory{InUse: 5, Peak: peak, Budget: 40}, 10, blueInk, ascii)[0].ink; got != want {
			t.Errorf("a peak of %d has ink %q, want %q", peak, got, want)
		}
	}
}

// The remaining time follows from the last steps and counts down between them.
func TestTimeLeft(t *testing.T) {
	v := one()
	last := start.Add(45 * 1300 * time.Millisecond)
	for later, want := range map[time.Duration]time.Duration{0: 55 * 1300 * time.Millisecond, time.Second: 55*1300*time.Millisecond - time.Second, time.Hour: 0} {
		if got, ok := v.pace.Left(last.Add(later)); !ok || got != want {
			t.Errorf("%v later: %v, want %v", later, got, want)
		}
	}
}

// A frame names the time that is left until the last step has ended, and the steps that a
// policy had before the run was resumed.
func TestEndAndBeginning(t *testing.T) {
	v := newView(Run{Model: "m", Layout: "l", Policies: []string{"none", "static"}, Steps: 9, From: 7}, start)
	for i, p := range []string{"none", "none", "static", "static"} {
		if v.add(sample(p, 8+i%2), start.Add(time.Duration(i)*time.Second)); i == 1 && !strings.Contains(draw(v, 120, 30, ascii, start), "static             7/9") {
			t.Errorf("static has not begun:\n%s", draw(v, 120, 30, ascii, start))
		}
		if text := draw(v, 120, 30, ascii, start.Add(time.Duration(i)*time.Second)); strings.Contains(text, " left") != (i == 1 || i == 2) {
			t.Errorf("after %d of 4 steps:\n%s", i+1, text)
		}
	}
}

// A policy that starts again, with another budget, is shown as if it had not been there.
func TestPolicyStartsAgain(t *testing.T) {
	run := Run{Model: "m", Layout: "l", Policies: []string{"none", "budget"}, Steps: 9}
	again, fresh := newView(run, start), newView(run, start)
	for n := 1; n <= 6; n++ {
		s := sample("budget", n)
		s.Ranks[1].Evicted, s.Ranks[2].Late, s.Reruns, s.Ranks[0].Spilled = 5, 7, 3, 11
		again.add(s, start)
	}
	for n := 1; n <= 3; n++ {
		again.add(sample("budget", n), start)
		fresh.add(sample("budget", n), start)
	}
	again.pace, fresh.pace = nil, nil // time was spent
	if a, b := draw(again, 120, 30, ascii, start), draw(fresh, 120, 30, ascii, start); a != b {
		t.Errorf("shown\n%s, want\n%s", a, b)
	}
	h, g := newHistory(), newHistory()
	h.run, g.run = run, run
	h.add(sample("budget", 8))
	for n := 1; n <= 3; n++ {
		h.add(sample("budget", n))
		g.add(sample("budget", n))
	}
	if a, b := fmt.Sprintf("%+v", h.report()), fmt.Sprintf("%+v", g.report()); a != b {
		t.Errorf("reported\n%s, want\n%s", a, b)
	}
}
