// This file owns the clock beside spans in any order: goroutines emit them as they learn
// their times.

package trace_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/observe/trace"
)

func TestClockInAnyOrder(t *testing.T) {
	spans := []trace.Event{
		{Kind: trace.Work, Stream: "compute", First: 0, Last: 4, Time: 100, Took: 40},
		{Kind: trace.Launch, Stream: "compute", First: 4, Last: 5, Time: 200, Took: 10},
		{Kind: trace.Work, Stream: "compute", First: 5, Last: 10, Time: 210, Took: 50},
		{Kind: trace.Work, Stream: "compute", First: 12, Last: 14, Time: 300, Took: 20},
		{Kind: trace.Copy, Stream: "offload", First: 3, Last: 4, Time: 1, Took: 1},
	}
	want := map[uint64]int64{0: 100, 1: 110, 3: 130, 4: 200, 5: 210, 6: 220, 9: 250, 10: 260, 11: 280, 12: 300, 13: 310, 14: 320}
	rng := rand.New(rand.NewPCG(1, 9))
	for range 200 {
		rng.Shuffle(len(spans), func(i, j int) { spans[i], spans[j] = spans[j], spans[i] })
		c := (&trace.Trace{Header: trace.Header{Compute: "compute"}, Events: spans}).Clock()
		for first, at := range want {
			if got := c.Of(&trace.Event{Kind: trace.Save, First: first}); got != at {
				t.Fatalf("piece %d began at %d, want %d; spans %+v", first, got, at, spans)
			}
		}
	}
}

// A step of several ranks is one piece of work of each: the replay, or the wait for it. Its
// decisions are spread over it. Decisions before another wait are taken before it.
func TestClockOfWholeSteps(t *testing.T) {
	for _, kind := range []trace.Kind{trace.Graph, trace.Wait} {
		events := []trace.Event{
			{Kind: trace.Wait, Stream: "compute", First: 3, Last: 4, Time: 50, Took: 30},
			{Kind: trace.Save, First: 3, Time: 10}, {Kind: trace.Save, First: 3, Time: 20},
			{Kind: trace.Begin, First: 7, Time: 60}, {Kind: trace.Save, First: 7, Time: 70}, {Kind: trace.End, First: 7, Time: 79},
			{Kind: kind, Stream: "compute", First: 7, Last: 8, Time: 100, Took: 40},
		}
		c := (&trace.Trace{Header: trace.Header{Compute: "compute"}, Events: events}).Clock()
		for i, at := range map[int]int64{1: 50, 2: 50, 3: 100, 4: 120, 5: 138} {
			if got := c.Of(&events[i]); got != at {
				t.Errorf("%v: %v is at %d, want %d", kind, events[i], got, at)
			}
		}
	}
}
