// This file owns the recorded pool, which computes offsets from the recorded lifetimes.
// The smallest pool is hard to find in general: dynamic storage allocation is NP-hard.
// If two blocks hold all units, placing the units of one block after those of the other
// gives the smallest pool. Otherwise the search places units in several orders. It
// places the units that reached above the lower bound earlier the next time.

package bucket

import (
	"cmp"
	"math"
	"slices"

	"github.com/stowage-dev/stowage/memory"
)

// searchLimit bounds the search by the number of neighbours it looks at. It is a count
// and not a time, so that every machine computes the same plan.
const searchLimit = 40_000

// strictCost limits the size of a pool in which no unit moves, relative to the lower
// bound. Units may move if such a pool is larger.
const strictCost = 1.02

// interval is the part of a pool from lo to hi, without hi.
type interval struct{ lo, hi memory.Bytes }

// packing places units one after the other in the pool, each at the lowest offset that
// is free of all units ever live together with it. The buckets of a unit are gathered
// and released together, so they lie one behind the other.
type packing struct {
	t    *timeline
	g    *graph
	left int            // of searchLimit
	at   []memory.Bytes // by unit: its offset in this attempt, or -1 before it is placed
	busy []interval     // scratch

	best   []memory.Bytes
	height memory.Bytes // of the best attempt
}

func (t *timeline) newPacking() *packing {
	return &packing{t: t, g: t.liveTogether(), left: searchLimit, at: make([]memory.Bytes, len(t.size)), best: make([]memory.Bytes, len(t.size)), height: math.MaxInt64}
}

// attempt places units in the given order and keeps the result if it is the best.
func (p *packing) attempt(order []int) {
	for _, unit := range order {
		p.at[unit] = -1
	}
	var height memory.Bytes
	for _, unit := range order {
		p.at[unit] = p.lowestOffset(unit)
		height = max(height, p.at[unit]+p.t.size[unit])
	}
	if height < p.height {
		p.height = height
		copy(p.best, p.at)
	}
}

// promote returns the order with the units that reached above the lower bound in front.
func (p *packing) promote(order []int) []int {
	below := func(unit int) bool { return p.at[unit]+p.t.size[unit] <= p.t.lower }
	above := func(unit int) bool { return !below(unit) }
	return append(slices.DeleteFunc(slices.Clone(order), below), slices.DeleteFunc(order, above)...)
}

// lowestOffset returns the first offset at which a unit overlaps none of its placed
// neighbours.
func (p *packing) lowestOffset(unit int) (at memory.Bytes) {
	p.busy = p.busy[:0]
	for _, near := range p.g.neighbours(unit) {
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

// byBlock returns the units sorted by their block. Units of one block are never live
// together, so none reaches higher than the blocks up to its own: placing units in this
// order takes no more than the blocks do. With two blocks it takes no more than the
// lower bound: the units of the first lie at the bottom, and those of the second
// directly above their largest neighbours.
func (t *timeline) byBlock(b blocks) []int {
	block := make([]int, len(t.size))
	for i, x := range t.stays {
		block[x.unit] = b.of[i]
	}
	order := t.used()
	slices.SortStableFunc(order, func(x, y int) int { return block[x] - block[y] })
	return order
}

// splitStays returns a timeline in which each stay is a unit of its own, so that a unit
// may lie in different places in different stays.
func (t *timeline) splitStays() *timeline {
	u := &timeline{lower: t.lower, stays: slices.Clone(t.stays)}
	for i := range u.stays {
		unit := t.stays[i].unit
		u.stays[i].unit = i
		u.size = append(u.size, t.size[unit])
	}
	return u
}

// search tries orders until it meets the lower bound or reaches searchLimit: the orders
// of the given blocks, and the order of first use. The result takes no more than the
// first of the given blocks. Other orders did not help on the built-in and on random
// models, nor did choosing the smallest gap instead of the lowest, or placing buckets
// separately.
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

// planRecorded searches for a pool in which each unit has one place. If that pool is
// not close to the lower bound, or the arena moves units too, it also searches for a
// pool in which units may move and takes the smaller.
func (t *timeline) planRecorded() *layout {
	p, free, shares := t.newPacking(), false, t.sharedBlocks()
	p.search(shares...)
	if float64(p.height) > strictCost*float64(t.lower) || shares[0].total > t.largestSets() {
		q := t.splitStays().newPacking()
		if q.search(append([]blocks{t.inSets()}, q.t.sharedBlocks()...)...); q.height < p.height {
			p, free = q, true
		}
	}
	l := t.newLayout()
	end := newSlot(0, 0, p.height)
	end.Name = "recorded"
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
