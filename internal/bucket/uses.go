// This file owns lifetimes: the uses in a recorded order, how long each keeps memory
// live, and which units are live together.

package bucket

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/memory"
)

// Uses returns the uses of a recorded order, sorted by their beginning. It returns an
// error if the order has a release without a use, a use without a release, or a use of
// a unit that is already in use.
func Uses(s Spec) ([]Use, error) {
	if s.Prefetch < 0 || s.Behind < 0 {
		return nil, fmt.Errorf("bucket: prefetch is %d and behind %d; expected zero or more", s.Prefetch, s.Behind)
	}
	uses, err := pairReleases(s)
	if err != nil {
		return nil, err
	}
	var units []int // the uses of units that are not loose
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
	until := make([]int, len(s.Units)) // by unit: one beyond the last position at which it is live
	for i := range uses {
		u := &uses[i]
		from, to := span(uses, i)
		u.Kept = from < until[u.Unit]
		until[u.Unit] = max(until[u.Unit], to+1)
	}
	return uses, nil
}

// pairReleases finds the release of each use.
func pairReleases(s Spec) ([]Use, error) {
	uses := make([]Use, 0, len(s.Order)/2)
	open := make([]int, len(s.Units)) // by unit: one more than the use under way, or zero
	for at, e := range s.Order {
		if e.Unit < 0 || e.Unit >= len(s.Units) {
			return nil, fmt.Errorf("bucket: entry %d of the order names FSDP unit %d, but there are only %d; expected an index into Spec.Units", at, e.Unit, len(s.Units))
		}
		use := &open[e.Unit]
		switch name := s.Units[e.Unit].Name; {
		case e.Release && *use == 0:
			return nil, fmt.Errorf("bucket: entry %d of the order releases FSDP unit %q, which is not in use; record a use before each release", at, name)
		case e.Release:
			uses[*use-1].End, *use = at, 0
		case *use != 0:
			return nil, fmt.Errorf("bucket: entry %d of the order uses FSDP unit %q again before its release; release it first", at, name)
		default:
			i := len(uses)
			uses = append(uses, Use{Unit: e.Unit, Begin: at, Gather: i, Last: i})
			*use = i + 1
		}
	}
	for i, use := range open {
		if use != 0 {
			return nil, fmt.Errorf("bucket: the order ends before the release of FSDP unit %q; release every unit that is used", s.Units[i].Name)
		}
	}
	return uses, nil
}

// span returns the first and the last position at which a use's memory is live.
func span(uses []Use, i int) (from, to int) {
	return uses[uses[i].Gather].Begin, uses[uses[i].Last].End
}

// stay is a period in which a unit lies in one place: a use, and the uses that follow
// while the unit is still live.
type stay struct {
	unit     int
	from, to int // positions in the order
}

// timeline holds what follows from a Spec before a kind of pool is chosen.
type timeline struct {
	spec  Spec
	bytes [][]memory.Bytes // by unit and bucket, padded and aligned
	size  []memory.Bytes   // by unit
	uses  []Use
	stays []stay // sorted by from
	of    []int  // by use: the index of its stay
	live  int
	lower memory.Bytes
	graph *graph // nil until liveTogether is called
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
	latest := make([]int, len(s.Units)) // by unit: its last stay so far
	for i, u := range t.uses {
		from, to := span(t.uses, i)
		if !u.Kept {
			latest[u.Unit] = len(t.stays)
			t.stays = append(t.stays, stay{unit: u.Unit, from: from, to: to})
		}
		t.of[i] = latest[u.Unit]
		t.stays[t.of[i]].to = max(t.stays[t.of[i]].to, to)
	}
	t.sortStays()
	t.countLive()
	return t, nil
}

// sortStays sorts the stays by time. Only loose units inside the stay of a prefetched
// unit are out of order before.
func (t *timeline) sortStays() {
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

// countLive walks the order and computes the most bytes and the most units that are
// live at once.
func (t *timeline) countLive() {
	bytes, units := make([]memory.Bytes, len(t.spec.Order)+1), make([]int, len(t.spec.Order)+1) // changes by position
	for _, x := range t.stays {
		bytes[x.from] += t.size[x.unit]
		bytes[x.to+1] -= t.size[x.unit]
		if !t.spec.Units[x.unit].Loose {
			units[x.from]++
			units[x.to+1]--
		}
	}
	var size memory.Bytes
	var n int
	for i := range bytes {
		size, n = size+bytes[i], n+units[i]
		t.lower, t.live = max(t.lower, size), max(t.live, n)
	}
}

// used returns all units in use, loose ones too, in order of their first stay.
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

// graph says which units are ever live at the same time. The neighbours of unit u are
// to[start[u]:start[u+1]].
type graph struct {
	start []int
	to    []int
}

func (g *graph) neighbours(u int) []int { return g.to[g.start[u]:g.start[u+1]] }

// liveTogether returns the graph of all units. A place that no neighbour of a unit
// overlaps serves all uses of that unit.
func (t *timeline) liveTogether() *graph {
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
	start := make([]int, n+1) // where the neighbours of each unit begin, with duplicates
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
	seen := make([]int, n) // by unit: one more than the last unit that has it as a neighbour
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

// identity returns the numbers from 0 to n-1.
func identity(n int) []int {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	return order
}
