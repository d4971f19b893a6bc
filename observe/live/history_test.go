package live

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/golden"
)

// The history is bounded for any number of steps. It holds real steps, evenly spread from
// the first on, and the report says that others are left out.
func TestHistoryIsBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := newHistory()
		h.run = Run{Model: "tiny", Policies: []string{"none", "stash"}}
		n := rapid.IntRange(1, 5*mostKept).Draw(t, "steps")
		for i := range n {
			held := float64(i + 1)
			h.add(Step{Policy: "none", Number: i + 1, Loss: held, Held: &held, Tokens: 1, Seconds: 1, Ranks: []Rank{{Spilled: int64(2 * i)}, {Spilled: 5}}})
		}
		r := h.report()
		if len(r.Runs) != 1 {
			t.Fatalf("%d runs", len(r.Runs))
		}
		f := r.Runs[0].Steps
		if len(f.Step) > mostKept || len(f.Step) < min(n, mostKept/2) || f.Step[0] != 1 {
			t.Fatalf("%d steps are %d, from %d on", n, len(f.Step), f.Step[0])
		}
		var spills int64
		for i, step := range f.Step {
			if spills += f.Spills[i]; spills != int64(2*(step-1)+5) { // of both ranks, also in steps that are left out
				t.Fatalf("%d pages were spilled up to step %d", spills, step)
			}
			if f.Loss[i] != float64(step) || i > 1 && step-f.Step[i-1] != f.Step[1]-1 {
				t.Fatalf("value %d is of step %d, with loss %g", i, step, f.Loss[i])
			}
		}
		if len(f.Held) > mostKept || len(f.Held) != len(f.HeldAt) || f.Held[len(f.Held)-1] != float64(f.HeldAt[len(f.HeldAt)-1]) {
			t.Fatalf("%d evaluations at %d steps", len(f.Held), len(f.HeldAt))
		}
		if said := strings.Contains(strings.Join(r.Runs[0].Missing, " "), "One step in"); said != (len(f.Step) < n) {
			t.Fatalf("%d of %d steps, and missing is %q", len(f.Step), n, r.Runs[0].Missing)
		}
	})
}

// A policy that starts again begins with an empty history.
func TestHistoryBeginsAnew(t *testing.T) {
	h := newHistory()
	h.run.Policies = []string{"budget"}
	held := 1.5
	for _, n := range []int{1, 2, 2, 1, 1, 2} {
		s := sample("budget", n)
		s.Held = &held
		h.add(s)
	}
	f := h.report().Runs[0].Steps
	v := reflect.ValueOf(f)
	for i := range v.NumField() {
		if n := v.Field(i).Len(); n != 2 {
			t.Errorf("%s has %d values of 2", v.Type().Field(i).Name, n)
		}
	}
	if f.Device[1] != 21<<20 || f.Host[1] != 6<<20 || f.Held[1] != 1.5 || f.Millis[1] != 250 {
		t.Errorf("figures are %+v", f)
	}
}

// A report that was made does not change while the run goes on and its history is thinned.
func TestReportIsACopy(t *testing.T) {
	h := newHistory()
	h.run.Policies = []string{"budget"}
	add := func(n int) {
		held := float64(n)
		h.add(Step{Policy: "budget", Number: n, Loss: held, Held: &held, Tokens: 7 * n, Seconds: 1 / held, Reruns: n, Ranks: []Rank{{Device: Memory{Peak: int64(n)}, Host: Memory{Peak: int64(2 * n)}, Spilled: int64(3 * n)}}})
	}
	for i := range mostKept - 1 {
		add(i + 1)
	}
	made := h.report()
	before, err := json.Marshal(made)
	if err != nil {
		t.Fatal(err)
	}
	for i := range mostKept {
		add(mostKept + i)
	}
	if after, err := json.Marshal(made); err != nil || !bytes.Equal(after, before) {
		t.Errorf("the report changed, %v", err)
	}
}

// Peaks of a summary are those of the fullest rank, wherever it is.
func TestPeaksOfSummary(t *testing.T) {
	for first := range 3 {
		k := &kept{last: Step{Number: 7, Loss: 2.5, Reruns: 3, Ranks: make([]Rank, 3)}}
		k.last.Ranks[first].Device.Peak, k.last.Ranks[(first+1)%3].Host.Peak = 50, 40
		k.last.Ranks[(first+2)%3].Device.Peak, k.last.Ranks[(first+2)%3].Host.Peak = 20, 10
		got := map[string]float64{}
		for _, f := range k.summary() {
			got[f.Name] = f.Value
		}
		for name, want := range map[string]float64{"steps": 7, "final_loss": 2.5, "peak_device_bytes": 50, "peak_host_bytes": 40, "reruns": 3} {
			if got[name] != want {
				t.Errorf("%s is %g, want %g", name, got[name], want)
			}
		}
	}
}

// All that a report of two policies says, with values that all differ, whole and thinned.
func TestWholeHistory(t *testing.T) {
	h := newHistory()
	h.run = Run{Model: "m", Layout: "pp 2", Policies: []string{"stash", "none", "budget"}, Steps: 9}
	var b strings.Builder
	for n := 1; n <= mostKept+3; n++ {
		held := 50 - float64(n)/1000
		s := Step{Policy: "stash", Number: n, Loss: held - 1, Tokens: 100 + n, Seconds: 0.5 + float64(n), Reruns: 2 * n, Ranks: make([]Rank, 3)}
		for i := range s.Ranks {
			s.Ranks[(i+n)%3] = Rank{Device: Memory{Peak: int64(1000*n + 10*i)}, Host: Memory{Peak: int64(7000*n + 20*(2-i))}, Spilled: int64(n * (i + 1))}
		}
		if n%2 == 0 {
			s.Held = &held
		}
		h.add(s)
		if n <= 3 {
			s.Policy, s.Loss = "none", s.Loss+3
			h.add(s)
		}
		if n != 5 && n < mostKept-1 {
			continue
		}
		text, err := json.Marshal(h.report())
		if err != nil {
			t.Fatal(err)
		}
		if n > 5 {
			text = fmt.Appendf(nil, "%x, %d bytes", sha256.Sum256(text), len(text))
		}
		fmt.Fprintf(&b, "after step %d: %s\n", n, text)
	}
	golden.Check(t, "history.txt", b.String())
}
