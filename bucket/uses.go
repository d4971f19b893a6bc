// This file owns time: the uses in a recorded order, how long each keeps memory
// live, and which units are live together.

package bucket

import (
	"cmp"
	"fmt"
	"slices"
)

// Uses lists the uses of a recorded order in order of beginning.
func Uses(s Spec) ([]Use, error) {
	if s.Prefetch < 0 || s.Behind < 0 {
		return nil, fmt.Errorf("bucket: prefetch is %d and behind %d; neither may be negative", s.Prefetch, s.Behind)
	}
	uses, err := pair(s)
	if err != nil {
		return nil, err
	}
	var units []int // the uses of units, without loose modules
	for i, u := range uses {
		if !s.Units[u.Unit].Loose {
			units = append(units, i)
		}
	}
	for n, i := range units {
		uses[i].Gather = units[max(0, n-s.Prefetch)]
		if later := units[n+min(s.Behind, len(units)-1-n)]; uses[later].End > uses[i].End {
			uses[i].Last = later
		}
	}
	until := make([]int, len(s.Units)) // one beyond the last position at which a unit is live
	for i := range uses {
		u := &uses[i]
		from, to := span(uses, i)
		u.Kept = from < until[u.Unit]
		until[u.Unit] = max(until[u.Unit], to+1)
	}
	return uses, nil
}

// pair finds the release of each use.
func pair(s Spec) ([]Use, error) {
	uses := make([]Use, 0, len(s.Order)/2)
	open := make([]int, len(s.Units)) // one more than the use under way, 0 for none
	for at, e := range s.Order {
		if e.Unit < 0 || e.Unit >= len(s.Units) {
			return nil, fmt.Errorf("bucket: entry %d of the order names unit %d and there are %d units", at, e.Unit, len(s.Units))
		}
		use := &open[e.Unit]
		switch name := s.Units[e.Unit].Name; {
		case e.Release && *use == 0:
			return nil, fmt.Errorf("bucket: entry %d of the order releases unit %q, which is not in use", at, name)
		case e.Release:
			uses[*use-1].End, *use = at, 0
		case *use != 0:
			return nil, fmt.Errorf("bucket: entry %d of the order uses unit %q again before its release", at, name)
		default:
			i := len(uses)
			uses = append(uses, Use{Unit: e.Unit, Begin: at, Gather: i, Last: i})
			*use = i + 1
		}
	}
	for i, use := range open {
		if use != 0 {
			return nil, fmt.Errorf("bucket: the order ends before the release of unit %q", s.Units[i].Name)
		}
	}
	return uses, nil
}

// span is the first and the last position at which a use's memory is live.
func span(uses []Use, i int) (from, to int) {
	return uses[uses[i].Gather].Begin, uses[uses[i].Last].End
}

// stay is a time through which a unit lies in one place: a use, with those that
// follow while the unit is still live.
type stay struct {
	unit     int
	from, to int // positions in the order
}

// timeline is what follows from a Spec before any pool is chosen.
type timeline struct {
	spec  Spec
	bytes [][]int64 // by unit and bucket, padded and aligned
	size  []int64   // by unit
	uses  []Use
	stays []stay // by from
	of    []int  // the stay of each use
	live  int
	lower int64
	graph *graph // nil until it is asked for
}

func newTimeline(s Spec) (*timeline, error) {
	t := &timeline{spec: s}
	if err := t.measure(); err != nil {
		return nil, err
	}
	var err error
	if t.uses, err = Uses(s); err != nil {
		return nil, err
	}
	t.of = make([]int, len(t.uses))
	latest := make([]int, len(s.Units)) // the last stay of each unit so far
	for i, u := range t.uses {
		from, to := span(t.uses, i)
		if !u.Kept {
			latest[u.Unit] = len(t.stays)
			t.stays = append(t.stays, stay{unit: u.Unit, from: from, to: to})
		}
		t.of[i] = latest[u.Unit]
		t.stays[t.of[i]].to = max(t.stays[t.of[i]].to, to)
	}
	t.sort()
	t.count()
	return t, nil
}

// sort puts the stays in order of time. A loose module inside a prefetched
// unit's stay is the only thing out of order before.
func (t *timeline) sort() {
	order := identity(len(t.stays))
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(t.stays[a].from, t.stays[b].from) })
	sorted, now := make([]stay, len(order)), make([]int, len(order))
	for i, old := range order {
		sorted[i], now[old] = t.stays[old], i
	}
	for use := range t.of {
		t.of[use] = now[t.of[use]]
	}
	t.stays = sorted
}

// count goes through the order and adds up what is live.
func (t *timeline) count() {
	bytes, units := make([]int64, len(t.spec.Order)+1), make([]int, len(t.spec.Order)+1) // changes
	for _, x := range t.stays {
		bytes[x.from] += t.size[x.unit]
		bytes[x.to+1] -= t.size[x.unit]
		if !t.spec.Units[x.unit].Loose {
			units[x.from]++
			units[x.to+1]--
		}
	}
	var size int64
	var n int
	for i := range bytes {
		size, n = size+bytes[i], n+units[i]
		t.lower, t.live = max(t.lower, size), max(t.live, n)
	}
}

// used are the units in use and loose modules, in order of their first stay.
func (t *timeline) used() []int {
	var units []int
	seen := make([]bool, len(t.size))
	for _, x := range t.stays {
		if !seen[x.unit] {
			seen[x.unit] = true
			units = append(units, x.unit)
		}
	}
	return units
}

// graph says which units are live together at any time: those of unit u are
// to[start[u]:start[u+1]].
type graph struct {
	start []int
	to    []int
}

func (g *graph) near(u int) []int { return g.to[g.start[u]:g.start[u+1]] }

// together is the graph of all units, whatever the time. A place that respects
// it serves all uses of a unit.
func (t *timeline) together() *graph {
	if t.graph == nil {
		t.graph = newGraph(t.stays, len(t.size))
	}
	return t.graph
}

func newGraph(stays []stay, n int) *graph {
	var pairs [][2]int
	var active []stay
	for _, x := range stays {
		active = slices.DeleteFunc(active, func(y stay) bool { return y.to < x.from })
		for _, y := range active {
			pairs = append(pairs, [2]int{x.unit, y.unit})
		}
		active = append(active, x)
	}
	start := make([]int, n+1) // where the neighbours of each unit begin, with repetitions
	for _, p := range pairs {
		start[p[0]+1]++
		start[p[1]+1]++
	}
	for u := range n {
		start[u+1] += start[u]
	}
	fill, to := slices.Clone(start), make([]int, 2*len(pairs))
	for _, p := range pairs {
		to[fill[p[0]]], to[fill[p[1]]] = p[1], p[0]
		fill[p[0]]++
		fill[p[1]]++
	}
	g := &graph{start: make([]int, n+1), to: to[:0]}
	seen := make([]int, n) // one more than the last unit that has this neighbour
	for u := range n {
		for _, near := range to[start[u]:start[u+1]] {
			if seen[near] != u+1 {
				seen[near] = u + 1
				g.to = append(g.to, near)
			}
		}
		g.start[u+1] = len(g.to)
	}
	return g
}

func identity(n int) []int {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	return order
}
