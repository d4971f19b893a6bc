// This file owns the tests of how a value is found.

package planview

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/plan/search"
)

// foreseen returns a question about values whose outcome is known beforehand.
func foreseen(q Question, fits func(v int) bool) *asking {
	a := &asking{Question: q, tried: map[int]Trial{}}
	for v := range 300 {
		a.tried[v] = Trial{Value: v, Fits: fits(v)}
	}
	return a
}

// Bisection finds the last value that fits and the first that does not, wherever it begins
// and wherever the limit is.
func TestBisect(t *testing.T) {
	for _, step := range []int{1, 3} {
		const most = 60
		for limit := 0; limit <= most+step; limit += step {
			for start := 0; start <= most+5; start++ {
				q := Question{Step: step, Start: start, Most: most}
				best, next := foreseen(q, func(v int) bool { return v <= limit }).bisect()
				if wantBest, wantNext := min(limit, most), limit+step; best != wantBest || next != wantNext && (wantNext <= most || next != 0) {
					t.Errorf("largest, multiples of %d up to %d from %d: got %d and %d", step, limit, start, best, next)
				}
				q.Smallest = true
				best, next = foreseen(q, func(v int) bool { return v > limit }).bisect()
				wantBest, wantNext := limit+step, min(limit, most)
				if wantBest > most {
					wantBest = 0
				}
				if best != wantBest || next != wantNext {
					t.Errorf("smallest, multiples of %d above %d from %d: got %d and %d", step, limit, start, best, next)
				}
			}
		}
	}
}

// A scan finds the best value even if values below it do not fit.
func TestScan(t *testing.T) {
	odd := func(v int) bool { return v == 2 || v == 8 }
	q := Question{Values: []int{1, 2, 4, 8, 16}}
	if best, next := foreseen(q, odd).scan(); best != 8 || next != 16 {
		t.Errorf("largest: %d, %d", best, next)
	}
	q.Smallest = true
	if best, next := foreseen(q, odd).scan(); best != 2 || next != 1 {
		t.Errorf("smallest: %d, %d", best, next)
	}
	// What cannot be set up is not the next value.
	a := foreseen(q, odd)
	a.Smallest = false
	a.tried[16] = Trial{Value: 16}
	a.Values = []int{2, 8, 16, 20}
	a.tried[20] = Trial{Value: 20, Problem: "it does not divide"}
	if best, next := a.scan(); best != 8 || next != 16 {
		t.Errorf("with a value that is not possible: %d, %d", best, next)
	}
	if best, next := foreseen(q, func(int) bool { return false }).scan(); best != 0 || next != 16 {
		t.Errorf("none: %d, %d", best, next)
	}
}

// A trial says what stops it.
func TestTrialWords(t *testing.T) {
	node := &Node{GPUs: 8, Pinned: 12 * memory.GiB, Room: 10 * memory.GiB, Missing: 2 * memory.GiB}
	for want, x := range map[string]Trial{
		"7 would need up to 12.00 GiB on rank 3: 2.00 GiB more than the 10.00 that it may hold; device memory stops it": {Value: 7, Need: 12 * memory.GiB, Budget: 10 * memory.GiB, Rank: 3, Limit: deviceLimit},
		"even with what needs least, recomputation of mlp: 2.00 GiB more":                                               {Value: 7, Need: 12 * memory.GiB, Budget: 10 * memory.GiB, Limit: deviceLimit, Policy: "recomputation of mlp"},
		"7 would pin 12.00 GiB of host memory on a node of 8 GPUs, 2.00 GiB more than its 10.00; host memory stops it":  {Value: 7, Limit: hostLimit, Node: node},
		"7 cannot be set up: it does not divide":                                                                        {Value: 7, Problem: "it does not divide"},
	} {
		if got := x.words(); !strings.Contains(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	var none *NoneFits
	q := Question{What: "microbatch", Values: []int{1}, Setup: nil, Flags: func(int) string { return "" }}
	a := foreseen(q, func(int) bool { return false })
	if err := error(&NoneFits{What: q.What, Nearest: a.tried[1]}); !errors.As(err, &none) || !strings.HasPrefix(err.Error(), "no microbatch fits: 1 would need") {
		t.Errorf("%v", err)
	}
}

// A value that no policy makes fit says what the search says: how much is needed, on which
// rank, and by which policy. Stages differ, so each of them is the fullest once.
func TestTrialOfASearch(t *testing.T) {
	for fullest := range 3 {
		s := experts(t)
		layer := s.Model.Layers[0]
		first := 0
		s.Layout = plan.Layout{World: 3, PP: 3}
		for i := range 3 {
			n := 1
			if i == fullest {
				n = 9
			}
			s.Layout.Stages = append(s.Layout.Stages, plan.Stage{First: first, Last: first + n, Embedding: i == 0, Loss: i == 2})
			first += n
		}
		s.Model.Layers = slices.Repeat([]model.Layer{layer}, first)
		s.Batch.Global, s.Budget = 3, memory.GiB
		var small *search.TooSmall
		if _, err := search.Policy(s, search.Options{}); !errors.As(err, &small) || small.Rank != fullest {
			t.Fatalf("%v, want rank %d", err, fullest)
		}
		a := &asking{Question: Question{Search: Policies, Setup: func(int) (*plan.Setup, error) { return s, nil }}}
		want := Trial{Need: small.Least, Rank: small.Rank, Budget: small.Budget, Policy: small.Policy, Limit: deviceLimit}
		if got := a.plan(7); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
}
