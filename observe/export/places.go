// This file owns the addresses of the memory snapshot. They are made up: the viewer wants
// each block in a segment, and no two live blocks at one address.

package export

import (
	"slices"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

const (
	align   = 512     // alignment of segments in PyTorch's allocator
	largest = 1 << 42 // size of the largest heap, and distance of bases: 4 TiB
	highest = 1 << 52 // highest address; the viewer has 53 bits
	crowd   = 1 << 16 // most blocks of a heap that are checked for overlaps
)

// places holds the addresses of one tier of a rank: the heap, in which storages lie, and
// above it segments of one block each, for owners and for storages outside of the heap.
type places struct {
	tier   memory.Kind
	base   int64
	pool   int64      // the size of the heap, or zero
	blocks []*holding // in the heap, by address
	next   int64
	free   map[int64][]int64 // released segments by size
}

// newPlaces finds the size of the heap in a trace: the most that its owner held, or the
// highest end of a storage.
func newPlaces(base int64, t *trace.Trace, tier memory.Kind) *places {
	m := &places{tier: tier, base: base, free: map[int64][]int64{}}
	var owned, most int64
	for e := range t.All() {
		switch {
		case e.Tier != tier || e.Bytes <= 0 || e.Bytes > largest:
		case e.Kind == trace.Alloc && e.Storage != 0 && placed(e):
			m.pool = max(m.pool, e.Offset+e.Bytes)
		case e.Kind == trace.Alloc && m.ofPool(e):
			owned = min(owned+e.Bytes, largest)
			most = max(most, owned)
		case e.Kind == trace.Free && m.ofPool(e):
			owned = max(owned-e.Bytes, 0)
		}
	}
	if m.pool > 0 {
		m.pool = rounded(max(m.pool, most))
	}
	m.next = m.base + m.pool
	return m
}

// rounded rounds a size up to the alignment of segments.
func rounded(n int64) int64 { return (n + align - 1) / align * align }

// placed reports whether a storage has a place in the heap.
func placed(e *trace.Event) bool {
	return e.Offset >= 0 && e.Offset <= largest && e.Bytes <= largest
}

// ofPool reports whether an event is about the heap itself, which is shown as a segment.
func (m *places) ofPool(e *trace.Event) bool {
	return e.Storage == 0 && e.Name == trace.HeapOwner(m.tier)
}

// take gives a holding an address, in the heap or in a segment of its own. A holding that
// is too large for all addresses gets none.
func (m *places) take(h *holding) {
	if h.Storage != 0 && placed(&h.Event) && len(m.blocks) < crowd {
		addr := m.base + h.Offset
		i := m.find(addr)
		after := i == 0 || m.blocks[i-1].addr+m.blocks[i-1].Bytes <= addr
		before := i == len(m.blocks) || addr+h.Bytes <= m.blocks[i].addr
		if after && before {
			h.addr = addr
			m.blocks = slices.Insert(m.blocks, i, h)
			return
		}
	}
	if h.Bytes > largest {
		return
	}
	size := rounded(h.Bytes)
	if free := m.free[size]; len(free) > 0 {
		h.addr, m.free[size] = free[len(free)-1], free[:len(free)-1]
	} else if m.next+size <= highest {
		h.addr = m.next
		m.next += size
	}
	h.own = h.addr != 0
}

// give releases the address of a holding.
func (m *places) give(h *holding) {
	if h.own {
		size := rounded(h.Bytes)
		m.free[size] = append(m.free[size], h.addr)
	} else if h.addr != 0 {
		i := m.find(h.addr)
		m.blocks = slices.Delete(m.blocks, i, i+1)
	}
}

// find returns the index of the first block of the heap at or behind an address.
func (m *places) find(addr int64) int {
	i, _ := slices.BinarySearchFunc(m.blocks, addr, func(h *holding, addr int64) int {
		if h.addr < addr {
			return -1
		}
		return 1
	})
	return i
}
