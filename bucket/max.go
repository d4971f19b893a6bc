// This file owns the max-pool: slots in which every unit finds room, whatever
// its shape, and as many sets of them as units may be live at once.

package bucket

import (
	"cmp"
	"fmt"
	"slices"
)

// shelf are the slots of one data type, from the largest to the smallest, each
// with the bucket that decides its size.
type shelf struct {
	typ   Type
	slots []Slot
	first int // index of the first of them within a set
}

// maxima goes over all units. The buckets of a unit are taken by data type and
// size and held against the pool's slots of that type, largest against largest.
// Where the pool has fewer slots than the unit has buckets, empty ones are added
// at the small end; a slot that is too small is enlarged. So the k-th slot is
// the largest k-th bucket of any unit, and the slots stay sorted. The second
// result says, by unit and bucket, which shelf and slot that was.
func (t *timeline) maxima() ([]shelf, [][][2]int) {
	var shelves []shelf
	slots := make([][][2]int, len(t.bytes))
	var order []int
	for _, unit := range t.units() {
		buckets, sizes := t.spec.Units[unit].Buckets, t.bytes[unit]
		order = order[:0]
		for b := range sizes {
			order = append(order, b)
		}
		slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(sizes[b], sizes[a]) })
		slots[unit] = make([][2]int, len(sizes))
		used := make([]int, len(shelves), len(shelves)+len(sizes)) // slots by shelf
		for _, b := range order {
			n := slices.IndexFunc(shelves, func(s shelf) bool { return s.typ == buckets[b].Type })
			if n < 0 {
				n = len(shelves)
				shelves, used = append(shelves, shelf{typ: buckets[b].Type}), append(used, 0)
			}
			k, s := used[n], &shelves[n]
			used[n]++
			slots[unit][b] = [2]int{n, k}
			if k == len(s.slots) {
				s.slots = append(s.slots, newSlot(unit, b, sizes[b]))
			} else if sizes[b] > s.slots[k].Bytes {
				s.slots[k] = newSlot(unit, b, sizes[b])
			}
		}
	}
	for n := 1; n < len(shelves); n++ {
		shelves[n].first = shelves[n-1].first + len(shelves[n-1].slots)
	}
	return shelves, slots
}

func (t *timeline) planMax(o Options) *layout {
	l := t.newLayout()
	shelves, slots := t.maxima()
	set := 0 // slots of a set
	for n := range t.live {
		for _, s := range shelves {
			for k, slot := range s.slots {
				slot.Name, slot.Type = fmt.Sprintf("set %d, %s %d", n, s.typ.Name, k), s.typ
				l.add(slot)
			}
		}
		if n == 0 {
			set = len(l.slots)
		}
	}
	for i, n := range t.assign(func(unit int) bool { return !t.loose(unit) }) {
		if x := t.stays[i]; !t.loose(x.unit) {
			l.places[i] = t.inSlots(l, x.unit, func(b int) int { return n*set + shelves[slots[x.unit][b][0]].first + slots[x.unit][b][1] })
		}
	}
	t.outside(l, o.Fallback, t.loose)
	return l
}
