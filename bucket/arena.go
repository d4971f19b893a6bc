// This file owns the arena: blocks that hold one unit at a time, whatever the
// number and the data types of its buckets. A block is the maximum of sums,
// where a set of the max-pool is the sum of maxima.

package bucket

import (
	"cmp"
	"fmt"
	"slices"
)

// blocks says which block each stay's unit lies in, and what the blocks take.
type blocks struct {
	of    []int // by stay
	size  []int64
	most  []int // the unit that decides the size
	total int64
}

// shares are two ways of sharing blocks in which a unit has one block at all
// times, the smaller first. While two units are live at once, there and back, the
// order of time needs no more than two blocks.
func (t *timeline) shares() []blocks {
	a, b := t.share(t.used()), t.share(t.bySize())
	if b.total < a.total {
		a, b = b, a
	}
	return []blocks{a, b}
}

// planArena gives each unit one block, unless the order is such that this takes
// more than Live blocks of the largest unit, which the max-pool never takes less
// than. Then those serve, and units move.
func (t *timeline) planArena() *layout {
	b := t.shares()[0]
	if b.total > t.largestSets() {
		b = t.inSets()
	}
	l := t.newLayout()
	for n, unit := range b.most {
		t.block(l, fmt.Sprintf("block %d", n), unit)
	}
	for i, x := range t.stays {
		l.places[i] = t.inBlock(l, b.of[i], x.unit)
	}
	return l
}

// largestSets is Live times the largest unit, with loose modules beside that.
func (t *timeline) largestSets() (bytes int64) {
	for _, unit := range t.used() {
		if t.loose(unit) {
			bytes += t.size[unit]
		}
	}
	if t.live > 0 {
		bytes += int64(t.live) * t.size[t.largest()]
	}
	return bytes
}

func (t *timeline) bySize() []int {
	order := t.used()
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(t.size[b], t.size[a]) })
	return order
}

// share makes a block of the units that have the same one.
func (t *timeline) share(order []int) (b blocks) {
	had, _ := t.first(order)
	for _, unit := range order {
		b.put(had[unit]-1, unit, t.size[unit])
	}
	for _, x := range t.stays {
		b.of = append(b.of, had[x.unit]-1)
	}
	return b
}

// put makes room for a unit in a block.
func (b *blocks) put(at, unit int, size int64) {
	if at == len(b.size) {
		b.size, b.most = append(b.size, 0), append(b.most, unit)
	}
	if grow := size - b.size[at]; grow > 0 {
		b.size[at], b.most[at] = size, unit
		b.total += grow
	}
}

// inSets puts units into the sets of the max-pool, and each loose module into a
// block of its own.
func (t *timeline) inSets() blocks {
	var b blocks
	b.of = t.assign(func(unit int) bool { return !t.loose(unit) })
	// The first free set is taken, so that they come up in order.
	for i, x := range t.stays {
		if !t.loose(x.unit) {
			b.put(b.of[i], x.unit, t.size[x.unit])
		}
	}
	own := map[int]int{}
	for i, x := range t.stays {
		if !t.loose(x.unit) {
			continue
		}
		at, ok := own[x.unit]
		if !ok {
			at = len(b.size)
			own[x.unit] = at
			b.put(at, x.unit, t.size[x.unit])
		}
		b.of[i] = at
	}
	return b
}
