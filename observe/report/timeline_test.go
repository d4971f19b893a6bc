// This file compares when steps end with a list of all that compute did.

package report

import (
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// A step ends when compute has done the last work that was issued before its End, and no
// later than that. One that was captured whole ends with its graph, or with the wait for it.
func TestEndOfSteps(t *testing.T) {
	rng := rand.New(rand.NewPCG(256, 241))
	for range 500 {
		in := &trace.Trace{}
		in.Header.Compute = []string{"compute", "other"}[rng.IntN(2)]
		for range rng.IntN(12) {
			in.Events = append(in.Events, trace.Event{
				Kind: []trace.Kind{trace.Work, trace.Graph, trace.Wait}[rng.IntN(3)], Stream: []string{"compute", "other"}[rng.IntN(2)],
				First: uint64(rng.IntN(8)), Time: rng.Int64N(50) - 5, Took: rng.Int64N(20) - 2,
			})
		}
		p := &part{Trace: in, shift: rng.Int64N(100)}
		var turns []turn
		for range 4 {
			turns = append(turns, turn{kind: trace.Begin, first: uint64(rng.IntN(9))}, turn{kind: trace.End, first: uint64(rng.IntN(9)), at: p.shift + rng.Int64N(80)})
		}
		done := p.done(turns)
		for i := 0; i < len(turns); i += 2 {
			begin, end := turns[i], turns[i+1]
			want, graph, before := end.at, int64(-1), uint64(0)
			for _, e := range in.Events {
				if e.Stream != in.Header.Compute || e.Took < 0 {
					continue
				}
				over := p.shift + max(e.Time, 0) + e.Took
				if e.First == end.first && (e.Kind == trace.Graph || e.Kind == trace.Wait) && graph < 0 {
					graph = over
				}
				if e.First < end.first && e.First >= before {
					want, before = min(end.at, over), e.First
				}
			}
			if begin.first == end.first && graph >= 0 {
				want = graph
			}
			if got := done(begin, end); got != want {
				t.Fatalf("%+v to %+v ends at %d, want %d: %+v", begin, end, got, want, in.Events)
			}
		}
	}
}

// Events that no run makes are left out, each for one reason.
func TestSaneEvents(t *testing.T) {
	good := trace.Event{Time: latest, Took: latest, Tier: memory.Host, Bytes: 0}
	if !sane(&good) {
		t.Error("the largest event is left out")
	}
	for i, bad := range []func(e *trace.Event){
		func(e *trace.Event) { e.Time++ },
		func(e *trace.Event) { e.Took = -1 },
		func(e *trace.Event) { e.Took++ },
		func(e *trace.Event) { e.Tier++ },
		func(e *trace.Event) { e.Bytes = -1 },
	} {
		e := good
		if bad(&e); sane(&e) {
			t.Errorf("event %d is taken: %+v", i, e)
		}
	}
}

// Steps follow each other: one without an End ends where the next begins, and the last where
// the part ends; decisions belong to the step that they lie in.
func TestBordersOfSteps(t *testing.T) {
	l := &timeline{decided: 20}
	done := func(begin, end turn) int64 { return end.at - 1 }
	l.borders([]turn{
		{kind: trace.End, at: 3, index: 1}, // of a step that began before
		{kind: trace.Begin, step: 1, at: 5, index: 2},
		{kind: trace.Begin, step: 2, at: 9, index: 5},
		{kind: trace.End, step: 2, at: 15, index: 8},
		{kind: trace.Begin, step: 3, at: 16, index: 9},
		{kind: trace.End, step: 3, at: 16, index: 11}, // done says 15
		{kind: trace.Begin, step: 4, at: 18, index: 12},
	}, 30, done)
	want := []border{
		{step: 1, begin: 5, end: 9, first: 2, last: 5},
		{step: 2, begin: 9, end: 14, first: 5, last: 9},
		{step: 3, begin: 16, end: 16, first: 9, last: 12},
		{step: 4, begin: 18, end: 30, first: 12, last: 20},
	}
	if len(l.steps) != len(want) {
		t.Fatalf("%+v", l.steps)
	}
	for i := range want {
		if l.steps[i] != want[i] {
			t.Errorf("step %d is %+v, want %+v", i, l.steps[i], want[i])
		}
	}
	for at, step := range map[int64]int{0: 0, 5: 0, 8: 0, 9: 1, 14: 1, 15: 1, 16: 2, 17: 2, 18: 3, 99: 3} {
		if got := l.stepAt(at); got != step {
			t.Errorf("%d lies in step %d, want %d", at, got, step)
		}
	}
}
