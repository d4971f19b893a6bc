// This file owns the tests of addresses in a snapshot.

package export

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Segments that are alive never overlap, whatever their sizes, and those that were given back
// are used again: there are never more addresses than those of each size that were alive at
// once.
func TestSegmentsAreUsedAgain(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		m := newPlaces(1<<20, &trace.Trace{}, 0)
		var alive []*holding
		now, most := map[int64]int64{}, map[int64]int64{}
		for range 400 {
			if n := len(alive); n > 0 && r.IntN(2) == 0 {
				i := r.IntN(n)
				m.give(alive[i])
				now[rounded(alive[i].Bytes)]--
				alive = slices.Delete(alive, i, i+1)
				continue
			}
			h := &holding{Event: trace.Event{Kind: trace.Alloc, Bytes: 1 + r.Int64N(5*align)}}
			m.take(h)
			size := rounded(h.Bytes)
			now[size]++
			most[size] = max(most[size], now[size])
			for _, o := range alive {
				if h.addr < o.addr+rounded(o.Bytes) && o.addr < h.addr+size {
					t.Fatalf("%d bytes at %d and %d at %d overlap", h.Bytes, h.addr, o.Bytes, o.addr)
				}
			}
			alive = append(alive, h)
		}
		want := m.base
		for size, n := range most {
			want += size * n
		}
		if m.next != want {
			t.Errorf("addresses end at %d, want %d", m.next, want)
		}
	}
}

// No block ends beyond the highest address.
func TestHighestAddress(t *testing.T) {
	for size, want := range map[int64]bool{1: true, 512: true, 513: false, 1024: false} {
		m := &places{next: highest - 512, free: map[int64][]int64{}}
		h := &holding{Event: trace.Event{Bytes: size}}
		if m.take(h); (h.addr != 0) != want || h.own != want {
			t.Errorf("%d bytes are at %d", size, h.addr)
		}
	}
}

// Slices nest as deeply as the viewer shows, and no deeper.
func TestDepth(t *testing.T) {
	for n, want := range map[int]bool{0: true, 1: true, depth - 1: true, depth: false} {
		l := &lane{}
		for range n {
			l.ends = append(l.ends, 10)
		}
		if l.fits(1, 9) != want {
			t.Errorf("inside of %d slices: %v", n, !want)
		}
	}
}

// The heap is as large as the most that its owner held at once, or as the highest end of a
// storage in it. Other tiers, other owners and impossible sizes do not matter.
func TestSizeOfTheHeap(t *testing.T) {
	for _, tier := range []memory.Kind{memory.Device, memory.Host} {
		heap := func(kind trace.Kind, n int64) trace.Event {
			return trace.Event{Kind: kind, Tier: tier, Name: trace.HeapOwner(tier), Bytes: n}
		}
		storage := func(off, n int64) trace.Event {
			return trace.Event{Kind: trace.Alloc, Tier: tier, Storage: 7, Offset: off, Bytes: n}
		}
		other := memory.Host - tier
		for i, x := range []struct {
			want   int64
			events []trace.Event
		}{
			{0, nil},
			{0, []trace.Event{heap(trace.Alloc, 5000)}}, // nothing lies in it
			{1024, []trace.Event{storage(513, 1)}},
			{1536, []trace.Event{storage(512, 1024), storage(0, 512)}},
			{5120, []trace.Event{heap(trace.Alloc, 5000), storage(0, 1)}},
			{5120, []trace.Event{heap(trace.Alloc, 5000), heap(trace.Free, 5000), heap(trace.Alloc, 5000), storage(0, 1)}},
			{5120, []trace.Event{heap(trace.Alloc, 3000), heap(trace.Free, 1000), heap(trace.Alloc, 3000), storage(0, 1)}},
			{5120, []trace.Event{heap(trace.Free, 3000), heap(trace.Alloc, 5000), storage(0, 1)}}, // it began before the trace
			{5120, []trace.Event{heap(trace.Alloc, 5000), {Kind: trace.Alloc, Tier: tier, Name: "weights", Bytes: 5000}, {Kind: trace.Free, Tier: tier, Name: "weights", Bytes: 5000}, storage(0, 1)}},
			{5120, []trace.Event{heap(trace.Alloc, 5000), {Kind: trace.Alloc, Tier: other, Name: trace.HeapOwner(other), Bytes: 9000}, storage(0, 1)}},
			{512, []trace.Event{storage(0, 1), {Kind: trace.Alloc, Tier: other, Storage: 7, Bytes: 9000}}},
			{512, []trace.Event{storage(0, 1), storage(-1, 9000), storage(largest+1, 1), storage(0, largest+1), storage(0, -1), {Kind: trace.Free, Tier: tier, Storage: 7, Bytes: 9000}}},
			{512, []trace.Event{storage(0, 1), heap(trace.Alloc, largest+1), heap(trace.Alloc, -5)}},
			{2 * largest, []trace.Event{storage(largest, largest)}},
			{largest, []trace.Event{storage(0, 1), heap(trace.Alloc, largest), heap(trace.Alloc, largest)}},
		} {
			m := newPlaces(1<<20, &trace.Trace{Events: x.events}, tier)
			if m.pool != x.want || m.next != 1<<20+x.want {
				t.Errorf("%v, case %d: the heap has %d bytes, want %d; segments begin at %d", tier, i, m.pool, x.want, m.next)
			}
		}
	}
}

// A storage has its own place in the heap unless another lies there, and then a segment above
// it. What was given back can be had again.
func TestPlacesInTheHeap(t *testing.T) {
	rng := rand.New(rand.NewPCG(71, 74))
	for range 30 {
		const base, heap = 1 << 20, 20
		m := newPlaces(base, &trace.Trace{Events: []trace.Event{{Kind: trace.Alloc, Storage: 1, Bytes: heap}}}, memory.Device)
		var alive []*holding
		for range 200 {
			if n := len(alive); n > 0 && rng.IntN(2) == 0 {
				i := rng.IntN(n)
				m.give(alive[i])
				alive = slices.Delete(alive, i, i+1)
				continue
			}
			h := &holding{Event: trace.Event{Kind: trace.Alloc, Storage: 1 + rng.IntN(9), Offset: rng.Int64N(heap) - 1}}
			h.Bytes = 1 + rng.Int64N(heap-max(h.Offset, 0))
			free := h.Offset >= 0
			for _, o := range alive {
				free = free && (o.own || o.Offset+o.Bytes <= h.Offset || h.Offset+h.Bytes <= o.Offset)
			}
			m.take(h)
			if h.own == free || free && h.addr != base+h.Offset || !free && h.addr < base+rounded(heap) {
				t.Fatalf("%d bytes at %d of the heap are at %d, in a segment: %v", h.Bytes, h.Offset, h.addr, h.own)
			}
			alive = append(alive, h)
		}
	}
}
