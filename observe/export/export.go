// Package export writes traces in formats that other programs open.
//
// [Perfetto] writes for ui.perfetto.dev, which shows what ran when. [MemoryViz] writes a
// memory snapshot for pytorch.org/memory_viz, which shows what was alive when. Both
// write as they go: beyond the traces they need memory only for what is alive at one
// time and for the order of spans.
package export

import (
	"cmp"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/observe/trace"
)

// latest bounds times so that the sum of two stays in 63 bits: 2^61 ns are 73 years.
const latest = 1 << 61

// timeline maps the events of one trace to the common clock of all traces.
type timeline struct {
	clock *trace.Clock
	shift int64 // the common time of the trace's time zero
	last  int64 // the time of the last decision
}

// at returns the common time of a time of the trace. Times before its beginning become
// the beginning.
func (l *timeline) at(t int64) int64 { return l.shift + min(max(t, 0), latest) }

// decided returns the time at which a decision takes effect on the device. Decisions stay
// in order, even if the trace is damaged.
func (l *timeline) decided(e *trace.Event) int64 {
	l.last = max(l.last, l.at(l.clock.Of(e)))
	return l.last
}

// owned reports whether an event is about memory of an owner. Such an event has no place
// in the order of work; its own time counts.
func owned(e *trace.Event) bool {
	return (e.Kind == trace.Alloc || e.Kind == trace.Free) && e.Storage == 0
}

// byRank returns the traces in the order of their ranks.
func byRank(traces []*trace.Trace) []*trace.Trace {
	return slices.SortedStableFunc(slices.Values(traces), func(a, b *trace.Trace) int {
		return cmp.Compare(a.Header.Rank, b.Header.Rank)
	})
}

// began returns the time at which the first trace began. Traces without that time, such as
// a simulator's, begin together with it.
func began(traces []*trace.Trace) int64 {
	first := int64(latest)
	for _, t := range traces {
		if b := t.Header.Began; b > 0 {
			first = min(first, b)
		}
	}
	return first
}

// text returns a name as valid UTF-8, which both formats require.
func text(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
