// This file owns where on the device's clock a decision lies.

package trace

import (
	"cmp"
	"math"
	"slices"
)

// Clock tells when the compute stream came to a piece of its work.
type Clock struct {
	marks  []mark // by number
	plain  bool   // they are the host's: there are no spans
	graphs map[uint64]graph
}

// graph is a replayed graph, and the time in which the host took all decisions in it.
type graph struct{ begin, took, from, to int64 }

// mark is a piece: when what lies before it was over, and when it began itself.
type mark struct {
	first       uint64
	over, began int64
}

// Clock is the compute stream's, as its spans tell. Where there are none, as on a
// device that was not watched, it has the times at which the host decided.
func (t *Trace) Clock() *Clock {
	c := &Clock{graphs: map[uint64]graph{}}
	for i := range t.Events {
		if e := &t.Events[i]; e.What.Span() && e.Stream == t.Header.Compute && e.Rank == t.Header.Rank {
			c.marks = append(c.marks, mark{e.First, e.Time, e.Time}, mark{e.Last, e.Time + e.Took, e.Time + e.Took})
			if e.What == Graph {
				c.graphs[e.First] = graph{e.Time, e.Took, math.MaxInt64, math.MinInt64}
			}
		}
	}
	if c.plain = len(c.marks) == 0; c.plain {
		for i := range t.Events {
			if e := &t.Events[i]; !e.What.Span() && !e.owned() {
				c.marks = append(c.marks, mark{e.First, e.Time, e.Time})
			}
		}
	}
	for i := range t.Events {
		e := &t.Events[i]
		if g, ok := c.graphs[e.First]; ok && !e.What.Span() && !e.owned() {
			g.from, g.to = min(g.from, e.Time), max(g.to, e.Time)
			c.graphs[e.First] = g
		}
	}
	slices.SortFunc(c.marks, func(a, b mark) int { return cmp.Compare(a.first, b.first) })
	all := c.marks[:0]
	for _, m := range c.marks {
		if n := len(all) - 1; n >= 0 && all[n].first == m.first {
			all[n].over, all[n].began = min(all[n].over, m.over), max(all[n].began, m.began)
			continue
		}
		all = append(all, m)
	}
	c.marks = all
	return c
}

// At is when compute came to the piece with a number: before it, all of those before
// were done. Inside of a span time is taken to pass evenly.
func (c *Clock) At(first uint64) int64 {
	i, found := slices.BinarySearchFunc(c.marks, first, func(m mark, n uint64) int { return cmp.Compare(m.first, n) })
	switch {
	case len(c.marks) == 0:
		return 0
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

// Of is when a decision took effect, or a span began: At its number, or, where there are
// no spans, and for memory without a storage, its own time. What a replayed graph does
// is known all at once; it is spread over the graph, in order.
func (c *Clock) Of(e *Event) int64 {
	if c.plain || e.What.Span() || e.owned() {
		return e.Time
	}
	if g, ok := c.graphs[e.First]; ok && e.Time >= g.from && e.Time <= g.to {
		return g.begin + int64(float64(g.took)*float64(e.Time-g.from)/float64(g.to-g.from+1))
	}
	return c.At(e.First)
}

// owned tells whether an event is of memory that is no storage's.
func (e *Event) owned() bool { return e.Storage == 0 && (e.What == Alloc || e.What == Free) }
