// This file owns the arena: blocks that each hold one whole unit at a time, whatever
// the number and the data types of its buckets. The size of a block is the maximum of
// sums; the size of a set of the max-pool is the sum of maxima.

package bucket

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/memory"
)

// blocks says which block each stay's unit lies in, and how large the blocks are.
type blocks struct {
	of    []int // by stay: the index of its block
	size  []memory.Bytes
	most  []int // by block: the unit that decides its size
	total memory.Bytes
}

// sharedBlocks returns two ways of sharing blocks among units, the smaller first. In
// both, a unit has the same block in all its stays. One gives blocks in order of first
// use: that needs only two blocks if the step goes through the units and back, with two
// live at once. The other gives blocks from the largest unit to the smallest.
func (t *timeline) sharedBlocks() []blocks {
	a, b := t.share(t.used()), t.share(t.bySize())
	if b.total < a.total {
		a, b = b, a
	}
	return []blocks{a, b}
}

// planArena gives each unit one block for the whole step. If that takes more than Live
// blocks of the largest unit, it uses those blocks instead, and units move between
// them. The max-pool never takes less than Live blocks of the largest unit.
func (t *timeline) planArena() *layout {
	b := t.sharedBlocks()[0]
	if b.total > t.largestSets() {
		b = t.inSets()
	}
	l := t.newLayout()
	for n, unit := range b.most {
		t.addBlock(l, fmt.Sprintf("block %d", n), unit)
	}
	for i, x := range t.stays {
		l.places[i] = t.inBlock(l, b.of[i], x.unit)
	}
	return l
}

// largestSets returns Live times the size of the largest unit, plus the loose units.
func (t *timeline) largestSets() (bytes memory.Bytes) {
	for _, unit := range t.used() {
		if t.loose(unit) {
			bytes += t.size[unit]
		}
	}
	if t.live > 0 {
		bytes += memory.Bytes(t.live) * t.size[t.largest()]
	}
	return bytes
}

// bySize returns the units in use from the largest to the smallest.
func (t *timeline) bySize() []int {
	order := t.used()
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(t.size[b], t.size[a]) })
	return order
}

// share gives each unit the first block that no unit live together with it has, in the
// given order.
func (t *timeline) share(order []int) (b blocks) {
	had, _ := t.firstFreeBlocks(order)
	for _, unit := range order {
		b.enlarge(had[unit]-1, unit, t.size[unit])
	}
	for _, x := range t.stays {
		b.of = append(b.of, had[x.unit]-1)
	}
	return b
}

// enlarge enlarges a block so that a unit fits into it, or adds the block.
func (b *blocks) enlarge(at, unit int, size memory.Bytes) {
	if at == len(b.size) {
		b.size, b.most = append(b.size, 0), append(b.most, unit)
	}
	if grow := size - b.size[at]; grow > 0 {
		b.size[at], b.most[at] = size, unit
		b.total += grow
	}
}

// inSets puts units into Live blocks, and each loose unit into a block of its own.
func (t *timeline) inSets() blocks {
	var b blocks
	b.of = t.assign(func(unit int) bool { return !t.loose(unit) })
	// assign takes the first free block, so blocks appear in order.
	for i, x := range t.stays {
		if !t.loose(x.unit) {
			b.enlarge(b.of[i], x.unit, t.size[x.unit])
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
			b.enlarge(at, x.unit, t.size[x.unit])
		}
		b.of[i] = at
	}
	return b
}
