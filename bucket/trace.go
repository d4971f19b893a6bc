// This file owns the trace pool: offsets from the recorded lifetimes. The least
// memory is hard to find in general (dynamic storage allocation is NP-hard). But
// where the units divide into two sides that are never live together, placing one
// side after the other is exact; otherwise units are placed in several orders, and
// what stuck out is placed earlier the next time.

package bucket

import (
	"cmp"
	"math"
	"slices"
)

// work bounds the search: so many looks at the place of a neighbour. It is a
// count and no time, so that the same plan comes out everywhere.
const work = 40_000

// strictCost is how much more than the lower bound one place for each unit may
// take before units may move.
const strictCost = 1.02

// interval is a part of the pool, from lo to hi.
type interval struct{ lo, hi int64 }

// offsets are by unit and bucket.
type offsets [][]int64

// packing puts units one after the other into the pool, each where none of the
// units ever live together with it is.
type packing struct {
	t    *timeline
	g    *graph
	left int // of the bound on work

	desc [][]int      // by unit, its buckets from the largest to the smallest
	at   offsets      // of the present attempt, where buckets are apart
	runs [][]interval // by unit, what it takes in the present attempt, from below
	busy []interval   // scratch
	gaps []interval   // scratch

	best   offsets
	height int64 // of the best
}

func (t *timeline) newPacking() *packing {
	p := &packing{
		t: t, g: t.together(), left: work, desc: make([][]int, len(t.bytes)), runs: make([][]interval, len(t.bytes)),
		at: t.newOffsets(), best: t.newOffsets(), height: math.MaxInt64,
	}
	all := make([]interval, len(t.bytes))
	for unit := range p.runs {
		p.runs[unit] = all[unit : unit : unit+1] // one is enough unless buckets are apart
	}
	return p
}

func (t *timeline) newOffsets() offsets {
	n := 0
	for _, sizes := range t.bytes {
		n += len(sizes)
	}
	all, o := make([]int64, n), make(offsets, len(t.bytes))
	for unit, sizes := range t.bytes {
		o[unit], all = all[:len(sizes)], all[len(sizes):]
	}
	return o
}

// descending are a unit's buckets from the largest to the smallest.
func (p *packing) descending(unit int) []int {
	if p.desc[unit] == nil {
		sizes := p.t.bytes[unit]
		p.desc[unit] = identity(len(sizes))
		slices.SortStableFunc(p.desc[unit], func(a, b int) int { return cmp.Compare(sizes[b], sizes[a]) })
	}
	return p.desc[unit]
}

// attempt places units in an order, each as a whole or with its buckets apart,
// and keeps the result if it is the best. It says how high that is, and which
// units reach above the lower bound. The first goes on even if the work is done.
func (p *packing) attempt(order []int, apart bool) (height int64, out []int) {
	for _, unit := range order {
		p.runs[unit] = p.runs[unit][:0]
	}
	for _, unit := range order {
		if p.left <= 0 && p.height < math.MaxInt64 {
			return math.MaxInt64, nil
		}
		p.openGaps(unit)
		end := p.put(unit, apart)
		if height = max(height, end); end > p.t.lower {
			out = append(out, unit)
		}
	}
	if height < p.height {
		p.height = height
		p.keep(apart)
	}
	return height, out
}

// keep makes the present attempt the best.
func (p *packing) keep(apart bool) {
	if apart {
		p.at, p.best = p.best, p.at
		return
	}
	for unit, runs := range p.runs {
		if len(runs) == 0 {
			continue // not in use
		}
		at := runs[0].lo
		for b, n := range p.t.bytes[unit] {
			p.best[unit][b] = at
			at += n
		}
	}
}

// put places a unit into the gaps, and says where it ends.
func (p *packing) put(unit int, apart bool) (end int64) {
	if !apart {
		n := p.t.size[unit]
		lo := p.take(n)
		p.runs[unit] = append(p.runs[unit], interval{lo, lo + n})
		return lo + n
	}
	runs := p.runs[unit]
	p.left -= len(p.t.bytes[unit])
	for _, b := range p.descending(unit) {
		n := p.t.bytes[unit][b]
		lo := p.take(n)
		p.at[unit][b] = lo
		end = max(end, lo+n)
		if last := len(runs) - 1; last >= 0 && runs[last].hi == lo {
			runs[last].hi += n
		} else {
			runs = append(runs, interval{lo, lo + n})
		}
	}
	p.runs[unit] = merge(runs)
	return end
}

// merge sorts intervals and joins those that touch.
func merge(all []interval) []interval {
	slices.SortFunc(all, func(a, b interval) int { return cmp.Compare(a.lo, b.lo) })
	n := 0
	for _, x := range all {
		switch {
		case x.lo == x.hi:
		case n > 0 && x.lo <= all[n-1].hi:
			all[n-1].hi = max(all[n-1].hi, x.hi)
		default:
			all[n] = x
			n++
		}
	}
	return all[:n]
}

// openGaps finds what the placed neighbours of a unit leave free, from below.
func (p *packing) openGaps(unit int) {
	p.busy, p.gaps = p.busy[:0], p.gaps[:0]
	for _, near := range p.g.near(unit) {
		p.busy = append(p.busy, p.runs[near]...)
	}
	p.left -= len(p.busy) + 1
	var end int64
	for _, x := range merge(p.busy) {
		if x.lo > end {
			p.gaps = append(p.gaps, interval{end, x.lo})
		}
		end = x.hi
	}
	p.gaps = append(p.gaps, interval{end, math.MaxInt64})
}

// take takes room out of the lowest gap that has it; the last has no end.
func (p *packing) take(n int64) int64 {
	i := 0
	for p.gaps[i].hi-p.gaps[i].lo < n {
		i++
	}
	at := p.gaps[i].lo
	p.gaps[i].lo += n
	return at
}

// bySide divides the units such that neighbours are on different sides, as far as
// that is possible, and puts one side first. Where it is possible, this order
// takes no more than the lower bound: the first side lies at the bottom, and each
// unit of the second on top of its largest neighbour.
func (t *timeline) bySide() []int {
	order, g := t.used(), t.together()
	second, seen := make([]bool, len(t.size)), make([]bool, len(t.size))
	var queue []int
	for _, first := range order {
		if seen[first] {
			continue
		}
		seen[first] = true
		for queue = append(queue[:0], first); len(queue) > 0; queue = queue[1:] {
			for _, near := range g.near(queue[0]) {
				if !seen[near] {
					seen[near], second[near] = true, !second[queue[0]]
					queue = append(queue, near)
				}
			}
		}
	}
	return append(
		slices.DeleteFunc(slices.Clone(order), func(unit int) bool { return second[unit] }),
		slices.DeleteFunc(order, func(unit int) bool { return !second[unit] })...)
}

// byPressure puts first what is live when most is.
func (t *timeline) byPressure() []int {
	order := t.used()
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(t.pressure[b], t.pressure[a]), cmp.Compare(t.size[b], t.size[a]))
	})
	return order
}

// byBlock puts the units of one block after those of another, the largest block
// first. Units of a block are never live together, so each lies no higher than
// the blocks before it and its own: placing them in this order takes no more than
// the blocks do.
func (t *timeline) byBlock(b blocks) []int {
	block := make([]int, len(t.size))
	for i, x := range t.stays {
		block[x.unit] = b.of[i]
	}
	order := t.used()
	slices.SortStableFunc(order, func(x, y int) int {
		return cmp.Or(cmp.Compare(b.size[block[y]], b.size[block[x]]), block[x]-block[y])
	})
	return order
}

// apart is the same time with each stay a unit of its own, which may lie in
// another place than before.
func (t *timeline) apart() *timeline {
	u := &timeline{lower: t.lower, stays: slices.Clone(t.stays)}
	for i := range u.stays {
		unit := t.stays[i].unit
		u.stays[i].unit = i
		u.bytes, u.size, u.pressure = append(u.bytes, t.bytes[unit]), append(u.size, t.size[unit]), append(u.pressure, t.pressure[unit])
	}
	return u
}

// search tries orders until the lower bound is met or the work is done. The first
// takes no more than the given blocks do; the second is exact while two units are
// live at once, there and back. Of the others, over random models, the order of
// time did best by far, and placing buckets into the smallest gap that holds them
// instead of the lowest did not help.
func (p *packing) search(b blocks) {
	known, time, pressure := p.t.byBlock(b), p.t.used(), p.t.byPressure()
	type start struct {
		order, out []int
		apart      bool
		height     int64
	}
	starts := []start{
		{order: known}, {order: p.t.bySide()},
		{order: time, apart: true}, {order: known, apart: true}, {order: pressure, apart: true},
	}
	met := func() bool { return p.height <= p.t.lower || p.left <= 0 }
	for i := range starts {
		if met() {
			return
		}
		starts[i].height, starts[i].out = p.attempt(starts[i].order, starts[i].apart)
	}
	slices.SortStableFunc(starts, func(a, b start) int { return cmp.Compare(a.height, b.height) })
	// What sticks out comes first the next time; an order is given up when that
	// has not helped for a while.
	for _, s := range starts {
		for tries := 0; tries < 8 && !met(); tries++ {
			s.order = promote(s.order, s.out)
			var height int64
			if height, s.out = p.attempt(s.order, s.apart); height < s.height {
				s.height, tries = height, 0
			}
		}
	}
}

// promote puts some units in front.
func promote(order, first []int) []int {
	promoted := slices.Clone(first)
	for _, unit := range order {
		if !slices.Contains(first, unit) {
			promoted = append(promoted, unit)
		}
	}
	return promoted
}

// planTrace takes the best that the search found with one place for each unit,
// if that is close to the lower bound and the arena needs no moves either; else
// the better of that and one in which units may move.
func (t *timeline) planTrace() *layout {
	p, free := t.newPacking(), false
	arena := t.strict()
	p.search(arena)
	if float64(p.height) > strictCost*float64(t.lower) || arena.total > t.largestSets() {
		q := t.apart().newPacking()
		if q.search(t.inSets()); q.height < p.height {
			p, free = q, true
		}
	}
	l := t.newLayout()
	end := Slot{Name: "trace", Bytes: p.height}
	places := make([][]Place, len(p.best))
	for i, x := range t.stays {
		item := x.unit
		if free {
			item = i
		}
		if places[item] == nil {
			places[item] = make([]Place, len(t.bytes[x.unit]))
			for b, n := range t.bytes[x.unit] {
				places[item][b] = Place{Offset: p.best[item][b], Bytes: n}
				if p.best[item][b]+n == p.height {
					end.Decides.Unit, end.Decides.Bucket = x.unit, b
				}
			}
		}
		l.places[i] = places[item]
	}
	l.slots, l.bytes = []Slot{end}, p.height
	return l
}
