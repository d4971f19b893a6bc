// This file owns the max-pool: sets of slots that fit every unit, whatever its shape,
// and as many sets as units are live at once.

package bucket

import (
	"cmp"
	"fmt"
	"slices"
)

// typeSlots holds the slots of one data type, from the largest to the smallest. Each
// names the bucket that decides its size.
type typeSlots struct {
	typ   Type
	slots []Slot
	first int // the index of the first of them within a set
}

// maximalSlots computes the slots of one set. It compares the buckets of each unit,
// sorted by size within each data type, with the slots of that type, largest with
// largest. It enlarges a slot that is too small and adds slots at the small end if the
// unit has more buckets. So the k-th slot of a type is as large as the largest k-th
// bucket of any unit, and the slots stay sorted. The second result gives, by unit and
// bucket, the index of the type and the index of the slot within it.
func (t *timeline) maximalSlots() ([]typeSlots, [][][2]int) {
	var byType []typeSlots
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
		used := make([]int, len(byType), len(byType)+len(sizes)) // slots by type
		for _, b := range order {
			n := slices.IndexFunc(byType, func(s typeSlots) bool { return s.typ == buckets[b].Type })
			if n < 0 {
				n = len(byType)
				byType, used = append(byType, typeSlots{typ: buckets[b].Type}), append(used, 0)
			}
			k, s := used[n], &byType[n]
			used[n]++
			slots[unit][b] = [2]int{n, k}
			if k == len(s.slots) {
				s.slots = append(s.slots, newSlot(unit, b, sizes[b]))
			} else if sizes[b] > s.slots[k].Bytes {
				s.slots[k] = newSlot(unit, b, sizes[b])
			}
		}
	}
	for n := 1; n < len(byType); n++ {
		byType[n].first = byType[n-1].first + len(byType[n-1].slots)
	}
	return byType, slots
}

func (t *timeline) planMax(o Options) *layout {
	l := t.newLayout()
	byType, slots := t.maximalSlots()
	set := 0 // the number of slots in a set
	for n := range t.live {
		for _, s := range byType {
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
			l.places[i] = t.inSlots(l, x.unit, func(b int) int { return n*set + byType[slots[x.unit][b][0]].first + slots[x.unit][b][1] })
		}
	}
	t.placeOutside(l, o.Fallback, t.loose)
	return l
}
