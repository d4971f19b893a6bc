// This file owns the dynamic, rotary and fixed pools, and what all pools with slots
// have in common. A pool places units outside its slots if it has no slot for them.

package bucket

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/memory"
)

// layout is a pool under construction.
type layout struct {
	slots    []Slot
	places   [][]Place    // by stay and bucket
	bytes    memory.Bytes // of the allocation
	dynamic  memory.Bytes
	fallback []int
}

func (t *timeline) newLayout() *layout { return &layout{places: make([][]Place, len(t.stays))} }

// add appends a slot behind the last one and returns its index.
func (l *layout) add(s Slot) (index int) {
	s.Offset = l.bytes
	l.bytes += s.Bytes
	l.slots = append(l.slots, s)
	return len(l.slots) - 1
}

func newSlot(unit, bucket int, bytes memory.Bytes) (s Slot) {
	s.Bytes, s.Decides.Unit, s.Decides.Bucket = bytes, unit, bucket
	return s
}

// addBlock adds a slot that holds whole units. The given unit is the largest of them.
func (t *timeline) addBlock(l *layout, name string, unit int) int {
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

// inBlock places a unit's buckets one behind the other in a slot.
func (t *timeline) inBlock(l *layout, slot, unit int) []Place {
	places := make([]Place, len(t.bytes[unit]))
	at := l.slots[slot].Offset
	for i, n := range t.bytes[unit] {
		places[i] = Place{Slot: slot, Offset: at, Bytes: n}
		at += n
	}
	return places
}

// placeOutside places the chosen units outside the slots, as the fallback says.
func (t *timeline) placeOutside(l *layout, how Fallback, which func(unit int) bool) {
	places := map[int][]Place{}
	for i, x := range t.stays {
		if !which(x.unit) {
			continue
		}
		if places[x.unit] == nil {
			l.fallback = append(l.fallback, x.unit)
			if how == DynamicMemory {
				places[x.unit] = t.dynamicPlaces(x.unit)
			} else {
				places[x.unit] = t.inBlock(l, t.addBlock(l, t.spec.Units[x.unit].Name, x.unit), x.unit)
			}
		}
		l.places[i] = places[x.unit]
	}
	slices.Sort(l.fallback)
	if how == DynamicMemory {
		l.dynamic = t.cachedBytes(which)
	}
}

// dynamicPlaces returns places for a unit whose memory is allocated for each use.
func (t *timeline) dynamicPlaces(unit int) []Place {
	places := make([]Place, len(t.bytes[unit]))
	for i, n := range t.bytes[unit] {
		places[i] = Place{Bytes: n, Dynamic: true}
	}
	return places
}

// cachedBytes returns the bytes held by an allocator that keeps each freed block for
// requests of the same size: for each size, as many blocks as are ever live at once.
// The figure is the same in the first step and in the hundredth. An allocator that also
// splits blocks holds less as long as it finds pieces that fit.
func (t *timeline) cachedBytes(which func(unit int) bool) (bytes memory.Bytes) {
	ends := identity(len(t.stays))
	slices.SortFunc(ends, func(a, b int) int { return t.stays[a].to - t.stays[b].to })
	class := make([][]int, len(t.bytes)) // by unit and bucket: an index for its size
	index := map[memory.Bytes]int{}
	var sizes []memory.Bytes
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
	live, peak := make([]int, len(sizes)), make([]int, len(sizes))
	add := func(unit, by int) {
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
		bytes += n * memory.Bytes(peak[c])
	}
	return bytes
}

func (t *timeline) planDynamic() *layout {
	l := t.newLayout()
	t.placeOutside(l, DynamicMemory, func(int) bool { return true })
	l.fallback = nil // the pool has no slots, so nothing lies outside of them
	return l
}

func (t *timeline) planRotary(o Options) *layout {
	l := t.newLayout()
	until := make([]int, t.live) // one beyond the end of the stay in each block
	for n := range until {
		t.addBlock(l, fmt.Sprintf("block %d", n), t.largest())
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
	t.placeOutside(l, o.Fallback, t.loose)
	return l
}

func (t *timeline) loose(unit int) bool { return t.spec.Units[unit].Loose }

// units returns the units in use, without loose ones.
func (t *timeline) units() []int {
	units := slices.DeleteFunc(t.used(), t.loose)
	slices.Sort(units)
	return units
}

// largest returns the largest unit that is not loose.
func (t *timeline) largest() int {
	return slices.MaxFunc(t.units(), func(a, b int) int { return cmp.Compare(t.size[a], t.size[b]) })
}

func (t *timeline) planFixed(o Options) *layout {
	l := t.newLayout()
	mode := t.mostCommonShape()
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
	t.placeOutside(l, o.Fallback, func(unit int) bool { return !in[unit] })
	return l
}

// inSlots places each of a unit's buckets in a slot of its own.
func (t *timeline) inSlots(l *layout, unit int, slot func(bucket int) int) []Place {
	places := make([]Place, len(t.bytes[unit]))
	for i, n := range t.bytes[unit] {
		s := slot(i)
		places[i] = Place{Slot: s, Offset: l.slots[s].Offset, Bytes: n}
	}
	return places
}

// mostCommonShape returns the units of the most common shape. If two shapes are equally
// common, it returns the one that comes first in the model.
func (t *timeline) mostCommonShape() []int {
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

// assign gives each stay of the chosen units one of Live sets. Stays that overlap get
// different sets. assign gives a unit the same set in all its stays if Live sets suffice
// for that. If they do not, it gives sets to single stays, and prefers the set that the
// unit had before.
func (t *timeline) assign(which func(unit int) bool) []int {
	sets := make([]int, len(t.stays))
	had, n := t.firstFreeBlocks(slices.DeleteFunc(t.used(), func(unit int) bool { return !which(unit) }))
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

// firstFreeBlocks gives each unit, in the given order, the first block that no unit
// live together with it has. It returns the blocks by unit, counted from one, with zero
// for units that are not in the order, and the number of blocks.
func (t *timeline) firstFreeBlocks(order []int) (had []int, n int) {
	had = make([]int, len(t.size))
	var taken []bool
	for _, unit := range order {
		clear(taken)
		for _, near := range t.liveTogether().neighbours(unit) {
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
