// This file owns the tests of the search over layouts.

package search

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/cost"
)

// The best layout is the best of all layouts with their policies.
func TestLayoutIsExact(t *testing.T) {
	s := small(t)
	s.Layout = plan.Layout{World: 4}
	o := Options{Budget: 7e9, Micro: []int{1, 2}, Top: 3}
	var told [2]int
	o.Progress = func(done, all int) {
		if done <= told[0] || done > all {
			t.Errorf("%d of %d after %d", done, all, told[0])
		}
		told = [2]int{done, all}
	}
	r, err := Layout(s, o)
	if err != nil {
		t.Fatal(err)
	}
	if told != [2]int{r.Searched, r.Possible} {
		t.Errorf("%d of %d layouts were searched, and told were %v", r.Searched, r.Possible, told)
	}
	list, err := candidates(s, o)
	if err != nil {
		t.Fatal(err)
	}
	var totals []cost.Seconds
	unfit := 0
	for _, c := range list {
		if c.search(o); c.err != nil {
			t.Fatal(c.err)
		}
		if c.best == nil {
			unfit++
			continue
		}
		if c.total < c.bound*(1-1e-9) {
			t.Errorf("%s takes %v s, less than its bound %v", c.name, c.total, c.bound)
		}
		totals = append(totals, c.total)
	}
	t.Logf("%d layouts, %d searched, %d of all do not fit; the best is %s, %v s", r.Possible, r.Searched, unfit, r.Best[0].Name(), r.Best[0].Policy.After.Step.Total)
	if unfit == 0 || unfit == len(list) || r.Possible != len(list) {
		t.Errorf("%d of %d layouts do not fit: the test says nothing", unfit, len(list))
	}
	slices.Sort(totals)
	for i, p := range r.Best {
		if got := p.Policy.After.Step.Total; got > totals[i]*(1+1e-9) {
			t.Errorf("layout %d of the answer takes %v s, and %v of all layouts", i, got, totals[i])
		}
	}
	for i, p := range r.Best {
		if i > 0 && (p.Slower < 0 || p.Reason == "" || p.Policy.After.Step.Total < r.Best[i-1].Policy.After.Step.Total*(1-0.005)) {
			t.Errorf("place %d: %+v", i, p)
		}
		for rank, h := range p.Policy.After.Needs {
			if h > o.Budget {
				t.Errorf("%s needs %d on rank %d", p.Name(), h, rank)
			}
		}
	}
}

// Every place of an answer is exact, not the first alone: the search goes on until no layout can take the last place.
func TestEveryPlaceIsExact(t *testing.T) {
	s := small(t)
	s.Layout = plan.Layout{World: 4}
	o := Options{Budget: 20e9, Micro: []int{1, 2}} // without policies it is quick
	list, err := candidates(s, o)
	if err != nil {
		t.Fatal(err)
	}
	var totals []cost.Seconds
	for _, c := range list {
		if c.search(o); c.best != nil {
			totals = append(totals, c.total)
		}
	}
	slices.Sort(totals)
	for _, o.Top = range []int{1, 7} {
		r, err := Layout(s, o)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Best) != o.Top || r.Searched >= r.Possible {
			t.Errorf("top %d: %d layouts, %d of %d searched; the test says nothing", o.Top, len(r.Best), r.Searched, r.Possible)
		}
		for i, p := range r.Best {
			if got := p.Policy.After.Step.Total; got > totals[i]*(1+1e-9) {
				t.Errorf("place %d of %d takes %v s, and %v of all layouts", i, o.Top, got, totals[i])
			}
		}
	}
}

func TestLayoutRefuses(t *testing.T) {
	s := small(t)
	s.Layout = plan.Layout{}
	if _, err := Layout(s, Options{Budget: 1e9}); err == nil || !strings.Contains(err.Error(), "GPUs") {
		t.Errorf("no GPUs: %v", err)
	}
	s.Layout.World = 8
	_, err := Layout(s, Options{Budget: 1e9})
	var tight *TooSmall
	if !errors.As(err, &tight) {
		t.Fatalf("a budget of 1 GB: %v", err)
	}
	if _, err := Layout(s, Options{Budget: tight.Least}); err != nil {
		t.Errorf("the budget that the error names is not met: %v", err)
	}
	s.Batch.Global = 7
	s.Layout.World = 11
	if _, err := Layout(s, Options{Budget: 80e9}); err == nil || !strings.Contains(err.Error(), "11 GPUs") {
		t.Errorf("a batch of 7 over 11 GPUs: %v", err)
	}
}

// SPEC S6.1: a search for layouts of DeepSeek-V3 on 256 GPUs searches few of those that
// are possible. BenchmarkDeepSeekLayout shows its time.
func TestDeepSeekLayout(t *testing.T) {
	s := deepseek(t, "gb200", 1, 1, 1)
	begin := time.Now()
	r, err := Layout(s, Options{Micro: []int{1, 2}})
	took := time.Since(begin)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d layouts, %d searched, %d of them do not fit, in %v", r.Possible, r.Searched, r.Unfit, took)
	for _, p := range r.Best {
		t.Logf("%s: %.2f s, %.0f TFLOP/s: %s; recompute %v, offload %v", p.Name(), p.Policy.After.Step.Total, p.Policy.After.Step.TFLOPS, p.Reason, p.Policy.Setup.Recompute.Modules, p.Policy.Setup.Offload.Modules)
	}
	if r.Searched > 48 {
		t.Errorf("%d layouts were searched, want 48 at most", r.Searched)
	}
}

// Hardly any layout fits on H100, so many must be searched.
func BenchmarkDeepSeekLayout(b *testing.B) {
	s := deepseek(b, "h100", 1, 1, 1)
	for b.Loop() {
		if _, err := Layout(s, Options{Micro: []int{1, 2}}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDeepSeekPolicy(b *testing.B) {
	s := deepseek(b, "h200", 16, 1, 16)
	o := Options{Budget: peakOf(b, s) * 6 / 10}
	for b.Loop() {
		if _, err := Policy(s, o); err != nil {
			b.Fatal(err)
		}
	}
}

// Interleaving needs whole groups of microbatches: layouts without are left out, and no others.
func TestInterleavedLayoutsHaveWholeGroups(t *testing.T) {
	s := small(t)
	s.Layout = plan.Layout{World: 8}
	odd := 0
	for global := 2; global <= 24; global += 2 {
		s.Batch.Global = global
		o := Options{Budget: 7e9, Micro: []int{1, 2}}
		want := map[string]bool{}
		for l := range layouts(s) {
			for _, micro := range o.Micro {
				n := withoutPolicy(s)
				n.Layout, n.Batch.Micro = l, micro
				if n, err := n.Normalise(); err == nil {
					whole := l.VPP == 1 || n.Microbatches()%l.PP == 0
					want[layoutName(n.Layout, micro)] = whole
					if !whole && n.Microbatches()%l.VPP == 0 {
						odd++
					}
				}
			}
		}
		list, err := candidates(s, o)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range list {
			if !want[c.name] {
				t.Errorf("batches of %d: %s is tried", global, c.name)
			}
			delete(want, c.name)
		}
		for name, whole := range want {
			if whole {
				t.Errorf("batches of %d: %s is left out, or was tried twice", global, name)
			}
		}
	}
	if odd == 0 {
		t.Error("no layout has whole groups of chunks alone: the test says nothing")
	}
}

// The fastest of a list is the best of all, also if bounds are close to times.
func TestFastestIsTheBest(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	p := &problem{}
	for range 300 {
		var list []*choice
		for i := range 1 + rng.IntN(30) {
			bound := cost.Seconds(1 + rng.Float64()*math.Pow(10, -float64(rng.IntN(7))))
			list = append(list, &choice{
				rec: uint32(rng.IntN(8)), off: uint32(i), moved: memory.Bytes(rng.IntN(3)), bound: bound,
				total: bound * cost.Seconds(1+rng.Float64()*math.Pow(10, -float64(rng.IntN(7)))), passes: []cost.Pass{{Forward: cost.Seconds(i)}},
				failed: rng.IntN(4) == 0,
			})
		}
		slices.SortFunc(list, order)
		var want *choice
		for _, c := range list {
			if !c.failed && (want == nil || p.beats(c, want)) {
				want = c
			}
		}
		if got := p.fastest(list, func(c *choice) bool { return !c.failed }); got != want {
			t.Fatalf("%+v is taken, and %+v is better", got, want)
		}
	}
}
