// This file owns the device's clock: the time at which a decision takes effect there.

package trace

import (
	"cmp"
	"math"
	"slices"
)

// Clock maps decisions to times on the device.
type Clock struct {
	marks  []mark // by number; empty if compute has no spans
	graphs map[uint64]graph
}

// graph is a replayed graph, from begin for took, and the time from first to last in
// which the host took the decisions inside of it.
type graph struct{ begin, took, first, last int64 }

// mark is the border before a piece of work of the compute stream: over is the time
// at which the piece before it ended, and began the time at which it began itself.
type mark struct {
	first       uint64
	over, began int64
}

// Clock returns the clock of the compute stream, made from its spans. If the trace
// has none, because the device was not observed, the clock uses the times at which
// the host decided.
func (t *Trace) Clock() *Clock {
	c := &Clock{graphs: map[uint64]graph{}}
	whole := t.wholeSteps()
	for e := range t.All() {
		if e.Kind.Span() && e.Stream == t.Header.Compute && e.Rank == t.Header.Rank {
			c.mark(mark{e.First, e.Time, e.Time})
			c.mark(mark{e.Last, e.Time + e.Took, e.Time + e.Took})
			if e.Kind == Graph || whole[e.First] {
				c.graphs[e.First] = graph{e.Time, e.Took, math.MaxInt64, math.MinInt64}
			}
		}
	}
	for e := range t.All() {
		if len(c.graphs) == 0 {
			break
		}
		if g, ok := c.graphs[e.First]; ok && !e.Kind.Span() && !e.owned() {
			g.first, g.last = min(g.first, e.Time), max(g.last, e.Time)
			c.graphs[e.First] = g
		}
	}
	c.sort()
	return c
}

// wholeSteps returns the pieces of work of compute that were a whole step each: a graph, or
// the wait for a graph of several ranks that the stream of another rank replays.
func (t *Trace) wholeSteps() map[uint64]bool {
	whole, begin := map[uint64]bool{}, uint64(math.MaxUint64)
	for e := range t.All() {
		switch e.Kind {
		case Begin:
			begin = e.First
		case End:
			if e.First == begin {
				whole[begin] = true
			}
		}
	}
	return whole
}

// sort sorts the borders and joins those of the same number.
func (c *Clock) sort() {
	slices.SortFunc(c.marks, func(a, b mark) int { return cmp.Compare(a.first, b.first) })
	sorted := c.marks
	c.marks = sorted[:0]
	for _, m := range sorted {
		c.mark(m)
	}
}

// mark adds a border. It joins one that follows the last, as where one span ends and the
// next begins.
func (c *Clock) mark(m mark) {
	if n := len(c.marks) - 1; n >= 0 && c.marks[n].first == m.first {
		c.marks[n].over, c.marks[n].began = min(c.marks[n].over, m.over), max(c.marks[n].began, m.began)
		return
	}
	if n := len(c.marks); n == cap(c.marks) && n >= many {
		if c.sort(); len(c.marks) > n/2 {
			c.marks = slices.Grow(c.marks, n)
		}
	}
	c.marks = append(c.marks, m)
}

// many is how many borders a clock has before it looks for those that it can join.
const many = 1 << 16

// beginning returns the time at which compute began the piece of work with a number,
// after all pieces before it. It assumes that the pieces of one span take equally long.
func (c *Clock) beginning(first uint64) int64 {
	i, found := slices.BinarySearchFunc(c.marks, first, func(m mark, n uint64) int { return cmp.Compare(m.first, n) })
	switch {
	case found:
		return c.marks[i].began
	case i == 0:
		return c.marks[0].began
	case i == len(c.marks):
		return c.marks[i-1].began
	}
	a, b := c.marks[i-1], c.marks[i]
	return a.began + int64(float64(b.over-a.began)*float64(first-a.first)/float64(b.first-a.first))
}

// Of returns the time at which a decision takes effect on the device, or at which a
// span begins. It returns the event's own time if compute has no spans, or if the
// event is about memory without a storage. The decisions inside of a replayed graph
// are known all at once; Of spreads them over the graph, in order.
func (c *Clock) Of(e *Event) int64 {
	if len(c.marks) == 0 || e.Kind.Span() || e.owned() {
		return e.Time
	}
	if g, ok := c.graphs[e.First]; ok && e.Time >= g.first && e.Time <= g.last {
		return g.begin + int64(float64(g.took)*float64(e.Time-g.first)/float64(g.last-g.first+1))
	}
	return c.beginning(e.First)
}

// owned reports whether the event is about memory of an owner, not of a storage.
func (e *Event) owned() bool { return e.Storage == 0 && (e.Kind == Alloc || e.Kind == Free) }
