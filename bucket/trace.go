// This file owns the trace pool: offsets from the recorded lifetimes. The least
// memory is hard to find in general (dynamic storage allocation is NP-hard). But
// where two blocks hold all units, placing those of one after those of the other
// is exact; otherwise units are placed in several orders, and what stuck out is
// placed earlier the next time.

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

// packing puts units one after the other into the pool, each at the lowest offset
// where none of the units ever live together with it is. The buckets of a unit come
// and go together, so they lie one behind the other.
type packing struct {
	t    *timeline
	g    *graph
	left int        // of the bound on work
	at   []int64    // by unit, of the present attempt; -1 until it is placed
	busy []interval // scratch

	best   []int64
	height int64 // of the best
}

func (t *timeline) newPacking() *packing {
	return &packing{t: t, g: t.together(), left: work, at: make([]int64, len(t.size)), best: make([]int64, len(t.size)), height: math.MaxInt64}
}

// attempt places units in an order, and keeps the result if it is the best.
func (p *packing) attempt(order []int) {
	for _, unit := range order {
		p.at[unit] = -1
	}
	var height int64
	for _, unit := range order {
		p.at[unit] = p.lowest(unit)
		height = max(height, p.at[unit]+p.t.size[unit])
	}
	if height < p.height {
		p.height = height
		copy(p.best, p.at)
	}
}

// promote puts what reached above the lower bound in front.
func (p *packing) promote(order []int) []int {
	below := func(unit int) bool { return p.at[unit]+p.t.size[unit] <= p.t.lower }
	above := func(unit int) bool { return !below(unit) }
	return append(slices.DeleteFunc(slices.Clone(order), below), slices.DeleteFunc(order, above)...)
}

// lowest is the first offset at which the placed neighbours of a unit leave room.
func (p *packing) lowest(unit int) (at int64) {
	p.busy = p.busy[:0]
	for _, near := range p.g.near(unit) {
		if lo := p.at[near]; lo >= 0 {
			p.busy = append(p.busy, interval{lo, lo + p.t.size[near]})
		}
	}
	p.left -= len(p.busy) + 1
	slices.SortFunc(p.busy, func(a, b interval) int { return cmp.Compare(a.lo, b.lo) })
	for _, x := range p.busy {
		if x.lo-at >= p.t.size[unit] {
			break
		}
		at = max(at, x.hi)
	}
	return at
}

// byBlock puts the units of one block after those of another. Units of a block are
// never live together, so each lies no higher than the blocks before it and its
// own: placing them in this order takes no more than the blocks do. Of two blocks
// it takes no more than the lower bound: the units of the first lie at the bottom,
// those of the second on their largest neighbours.
func (t *timeline) byBlock(b blocks) []int {
	block := make([]int, len(t.size))
	for i, x := range t.stays {
		block[x.unit] = b.of[i]
	}
	order := t.used()
	slices.SortStableFunc(order, func(x, y int) int { return block[x] - block[y] })
	return order
}

// apart is the same time with each stay a unit of its own, which may lie in
// another place than before.
func (t *timeline) apart() *timeline {
	u := &timeline{lower: t.lower, stays: slices.Clone(t.stays)}
	for i := range u.stays {
		unit := t.stays[i].unit
		u.stays[i].unit = i
		u.size = append(u.size, t.size[unit])
	}
	return u
}

// search tries orders until the lower bound is met or the work is done: those of
// the given blocks, of which it takes no more than the first, and that of time.
// Over the built-in and random models others added nothing, nor did the smallest
// gap instead of the lowest, or buckets apart.
func (p *packing) search(given ...blocks) {
	var orders [][]int
	for _, b := range given {
		orders = append(orders, p.t.byBlock(b))
	}
	orders = append(orders, p.t.used())
	for range 13 {
		for i, order := range orders {
			p.attempt(order)
			if p.height <= p.t.lower || p.left <= 0 {
				return
			}
			orders[i] = p.promote(order)
		}
	}
}

// planTrace takes the best that the search found with one place for each unit,
// if that is close to the lower bound and the arena needs no moves either; else
// the better of that and one in which units may move.
func (t *timeline) planTrace() *layout {
	p, free, shares := t.newPacking(), false, t.shares()
	p.search(shares...)
	if float64(p.height) > strictCost*float64(t.lower) || shares[0].total > t.largestSets() {
		q := t.apart().newPacking()
		if q.search(append([]blocks{t.inSets()}, q.t.shares()...)...); q.height < p.height {
			p, free = q, true
		}
	}
	l := t.newLayout()
	end := newSlot(0, 0, p.height)
	end.Name = "trace"
	l.add(end)
	for i, x := range t.stays {
		item := x.unit
		if free {
			item = i
		}
		l.places[i] = t.inBlock(l, 0, x.unit)
		for b := range l.places[i] {
			l.places[i][b].Offset += p.best[item]
		}
		if p.best[item]+t.size[x.unit] == p.height {
			l.slots[0].Decides.Unit, l.slots[0].Decides.Bucket = x.unit, max(0, len(l.places[i])-1)
		}
	}
	return l
}
