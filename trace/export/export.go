// Package export writes traces in forms that other programs open: Perfetto's, for what
// ran when, and PyTorch's memory snapshot, for what was alive when. Both stream: beside
// the traces themselves they hold what is alive at a time, and the order of the spans.
//
// This file owns what both share: the order of traces and their common clock; ledger.go
// what is alive. perfetto.go, streams.go and packets.go write for Perfetto; memoryviz.go,
// places.go and pickle.go for PyTorch's viewer.
package export

import (
	"cmp"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/trace"
)

// latest bounds times, so that sums of two stay in 63 bits: 2^61 ns are 73 years.
const latest = 1 << 61

// timeline places the events of one trace on the clock of all.
type timeline struct {
	clock *trace.Clock
	shift int64 // of the trace's own time
	last  int64 // of its decisions
}

// at is the place of a time of the trace. None is before the trace's beginning.
func (l *timeline) at(t int64) int64 { return l.shift + min(max(t, 0), latest) }

// decided is when a decision took effect on the device. Decisions come in their order,
// whatever a damaged trace says.
func (l *timeline) decided(e *trace.Event) int64 {
	l.last = max(l.last, l.at(l.clock.Of(e)))
	return l.last
}

// owned tells whether an event is of memory that the device itself gave out. That has
// no place in the order of work; its time tells.
func owned(e *trace.Event) bool {
	return (e.What == trace.Alloc || e.What == trace.Free) && e.Storage == 0
}

// byRank is the traces in the order of their ranks.
func byRank(traces []*trace.Trace) []*trace.Trace {
	return slices.SortedStableFunc(slices.Values(traces), func(a, b *trace.Trace) int {
		return cmp.Compare(a.Header.Rank, b.Header.Rank)
	})
}

// began is when the first trace began. Those that do not know, as a simulator's, begin
// with the first.
func began(traces []*trace.Trace) int64 {
	first := int64(latest)
	for _, t := range traces {
		if b := t.Header.Began; b > 0 {
			first = min(first, b)
		}
	}
	return first
}

// text is a name as both formats want it: UTF-8.
func text(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
