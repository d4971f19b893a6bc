// This file owns the pools that were there before: dynamic, rotary and fixed.
// All but the first have sets or blocks of slots, and serve outside of them what
// they have no slot for.

package bucket

import (
	"cmp"
	"fmt"
	"slices"
)

// layout is a pool under construction: where each stay's buckets lie.
type layout struct {
	slots    []Slot
	places   [][]Place // by stay and bucket
	bytes    int64     // of the allocation
	dynamic  int64
	fallback []int
}

func (t *timeline) newLayout() *layout { return &layout{places: make([][]Place, len(t.stays))} }

// add adds a slot behind the last one.
func (l *layout) add(s Slot) (index int) {
	s.Offset = l.bytes
	l.bytes += s.Bytes
	l.slots = append(l.slots, s)
	return len(l.slots) - 1
}

func newSlot(unit, bucket int, bytes int64) (s Slot) {
	s.Bytes, s.Decides.Unit, s.Decides.Bucket = bytes, unit, bucket
	return s
}

// block adds a slot that holds whole units, of which this is the largest.
func (t *timeline) block(l *layout, name string, unit int) int {
	largest := 0
	for i, n := range t.bytes[unit] {
		if n > t.bytes[unit][largest] {
			largest = i
		}
	}
	s := newSlot(unit, largest, t.size[unit])
	s.Name = name
	return l.add(s)
}

// inBlock are the places of a unit's buckets one behind the other in a slot.
func (t *timeline) inBlock(l *layout, slot, unit int) []Place {
	places := make([]Place, len(t.bytes[unit]))
	at := l.slots[slot].Offset
	for i, n := range t.bytes[unit] {
		places[i] = Place{Slot: slot, Offset: at, Bytes: n}
		at += n
	}
	return places
}

// outside serves some units without slots.
func (t *timeline) outside(l *layout, how Fallback, which func(unit int) bool) {
	places := map[int][]Place{}
	for i, x := range t.stays {
		if !which(x.unit) {
			continue
		}
		if places[x.unit] == nil {
			l.fallback = append(l.fallback, x.unit)
			if how == DynamicMemory {
				places[x.unit] = t.anywhere(x.unit)
			} else {
				places[x.unit] = t.inBlock(l, t.block(l, t.spec.Units[x.unit].Name, x.unit), x.unit)
			}
		}
		l.places[i] = places[x.unit]
	}
	slices.Sort(l.fallback)
	if how == DynamicMemory {
		l.dynamic = t.cached(which)
	}
}

func (t *timeline) anywhere(unit int) []Place {
	places := make([]Place, len(t.bytes[unit]))
	for i, n := range t.bytes[unit] {
		places[i] = Place{Bytes: n, Dynamic: true}
	}
	return places
}

// cached is what an allocator holds that keeps each freed block for requests of
// the same size: for each size, as many blocks as were ever live at once. That
// is the same in the first step and in the hundredth. One that also splits blocks
// takes less while it finds pieces that fit.
func (t *timeline) cached(which func(unit int) bool) (bytes int64) {
	ends := identity(len(t.stays))
	slices.SortFunc(ends, func(a, b int) int { return t.stays[a].to - t.stays[b].to })
	class := make([][]int, len(t.bytes)) // by unit and bucket, an index for each size
	index := map[int64]int{}
	var sizes []int64
	for unit, bytes := range t.bytes {
		class[unit] = make([]int, len(bytes))
		for b, n := range bytes {
			c, ok := index[n]
			if !ok {
				c = len(sizes)
				index[n], sizes = c, append(sizes, n)
			}
			class[unit][b] = c
		}
	}
	live, peak := make([]int64, len(sizes)), make([]int64, len(sizes))
	add := func(unit int, by int64) {
		if which(unit) {
			for _, c := range class[unit] {
				live[c] += by
				peak[c] = max(peak[c], live[c])
			}
		}
	}
	for _, x := range t.stays {
		for t.stays[ends[0]].to < x.from {
			add(t.stays[ends[0]].unit, -1)
			ends = ends[1:]
		}
		add(x.unit, +1)
	}
	for c, n := range sizes {
		bytes += n * peak[c]
	}
	return bytes
}

func (t *timeline) planDynamic() *layout {
	l := t.newLayout()
	t.outside(l, DynamicMemory, func(int) bool { return true })
	l.fallback = nil // there are no slots that anything could be outside of
	return l
}

func (t *timeline) planRotary(o Options) *layout {
	l := t.newLayout()
	until := make([]int, t.live) // one beyond the end of the stay in each block
	for n := range until {
		t.block(l, fmt.Sprintf("block %d", n), t.largest())
	}
	next := 0
	for i, x := range t.stays {
		if t.loose(x.unit) {
			continue
		}
		for until[next] > x.from {
			next = (next + 1) % t.live
		}
		until[next] = x.to + 1
		l.places[i] = t.inBlock(l, next, x.unit)
		next = (next + 1) % t.live
	}
	t.outside(l, o.Fallback, t.loose)
	return l
}

func (t *timeline) loose(unit int) bool { return t.spec.Units[unit].Loose }

// units are those in use, without loose modules.
func (t *timeline) units() []int {
	units := slices.DeleteFunc(t.used(), t.loose)
	slices.Sort(units)
	return units
}

// largest is the unit that takes most.
func (t *timeline) largest() int {
	return slices.MaxFunc(t.units(), func(a, b int) int { return cmp.Compare(t.size[a], t.size[b]) })
}

func (t *timeline) planFixed(o Options) *layout {
	l := t.newLayout()
	mode := t.mode()
	in := make([]bool, len(t.spec.Units))
	for _, unit := range mode {
		in[unit] = true
	}
	if len(mode) > 0 {
		shape := t.spec.Units[mode[0]].Buckets
		for n := range t.live {
			for j, b := range shape {
				s := newSlot(mode[0], j, t.bytes[mode[0]][j])
				s.Name, s.Type = fmt.Sprintf("set %d, %s", n, b.Name), b.Type
				l.add(s)
			}
		}
		for i, set := range t.assign(func(unit int) bool { return in[unit] }) {
			if x := t.stays[i]; in[x.unit] {
				l.places[i] = t.inSlots(l, x.unit, func(bucket int) int { return set*len(shape) + bucket })
			}
		}
	}
	t.outside(l, o.Fallback, func(unit int) bool { return !in[unit] })
	return l
}

// inSlots are the places of a unit's buckets in a slot each.
func (t *timeline) inSlots(l *layout, unit int, slot func(bucket int) int) []Place {
	places := make([]Place, len(t.bytes[unit]))
	for i, n := range t.bytes[unit] {
		s := slot(i)
		places[i] = Place{Slot: s, Offset: l.slots[s].Offset, Bytes: n}
	}
	return places
}

// mode are the units of the most common shape, the one that comes first where
// two are as common.
func (t *timeline) mode() []int {
	units := t.units()
	slices.SortStableFunc(units, t.compareShapes)
	var best []int
	for len(units) > 0 {
		n := 1
		for n < len(units) && t.compareShapes(units[0], units[n]) == 0 {
			n++
		}
		if n > len(best) || n == len(best) && units[0] < best[0] {
			best = units[:n]
		}
		units = units[n:]
	}
	return best
}

// compareShapes orders units by the data types and sizes of their buckets.
func (t *timeline) compareShapes(a, b int) int {
	if c := slices.Compare(t.bytes[a], t.bytes[b]); c != 0 {
		return c
	}
	return slices.CompareFunc(t.spec.Units[a].Buckets, t.spec.Units[b].Buckets, func(x, y Bucket) int {
		return cmp.Or(cmp.Compare(x.Type.Name, y.Type.Name), cmp.Compare(x.Type.Size, y.Type.Size))
	})
}

// assign gives each stay of some units one of Live sets, such that stays that
// overlap have different ones. A unit has the same set at all times if possible:
// sets are given to units in order of use, and only where those run out are they
// given to stays, which then prefer what the unit had.
func (t *timeline) assign(which func(unit int) bool) []int {
	sets := make([]int, len(t.stays))
	had, n := t.first(slices.DeleteFunc(t.used(), func(unit int) bool { return !which(unit) }))
	if n <= t.live {
		for i, x := range t.stays {
			sets[i] = max(0, had[x.unit]-1)
		}
		return sets
	}
	clear(had)
	until := make([]int, t.live) // one beyond the end of the stay in each set
	for i, x := range t.stays {
		if !which(x.unit) {
			continue
		}
		if sets[i] = had[x.unit] - 1; had[x.unit] == 0 || until[sets[i]] > x.from {
			sets[i] = slices.IndexFunc(until, func(to int) bool { return to <= x.from })
		}
		had[x.unit], until[sets[i]] = sets[i]+1, x.to+1
	}
	return sets
}

// first gives each unit, in the given order, the first of n blocks that none of
// the units ever live together with it has: one more than its index, 0 for others.
func (t *timeline) first(order []int) (had []int, n int) {
	had = make([]int, len(t.size))
	var taken []bool
	for _, unit := range order {
		clear(taken)
		for _, near := range t.together().near(unit) {
			if had[near] != 0 {
				taken[had[near]-1] = true
			}
		}
		at := slices.Index(taken, false)
		if at < 0 {
			at, taken = len(taken), append(taken, false)
		}
		had[unit] = at + 1
	}
	return had, len(taken)
}
