// This file owns addresses. They are made up: the viewer wants each block in a segment,
// and no two blocks that are alive at one place.

package export

import (
	"slices"

	"github.com/stowage-dev/stowage/trace"
)

const (
	align   = 512     // of segments, as PyTorch's allocator has it
	largest = 1 << 42 // of a pool, and of a base: 4 TiB
	highest = 1 << 52 // the viewer has 53 bits
	crowd   = 1 << 16 // blocks of a pool for which overlaps are looked for
)

// places is the memory of one tier of a rank: the pool, in which storages have their
// places, and above it segments with one block each, for the memory of owners and for
// storages without a place.
type places struct {
	tier   trace.Tier
	base   int64
	pool   int64      // the pool's size, or zero
	blocks []*holding // in the pool, by address
	next   int64
	free   map[int64][]int64 // segments that were given back, by size
}

// newPlaces looks through a trace for the size of its pool: what its owner had of the
// device at most, or where storages ended.
func newPlaces(base int64, t *trace.Trace, tier trace.Tier) *places {
	m := &places{tier: tier, base: base, free: map[int64][]int64{}}
	var owned, most int64
	for i := range t.Events {
		e := &t.Events[i]
		switch {
		case e.Tier != tier || e.Bytes <= 0 || e.Bytes > largest:
		case e.What == trace.Alloc && e.Storage != 0 && placed(e):
			m.pool = max(m.pool, e.Offset+e.Bytes)
		case e.What == trace.Alloc && m.ofPool(e):
			owned = min(owned+e.Bytes, largest)
			most = max(most, owned)
		case e.What == trace.Free && m.ofPool(e):
			owned = max(owned-e.Bytes, 0)
		}
	}
	if m.pool > 0 {
		m.pool = rounded(max(m.pool, most))
	}
	m.next = m.base + m.pool
	return m
}

func rounded(n int64) int64 { return (n + align - 1) / align * align }

// placed tells whether a storage has a place.
func placed(e *trace.Event) bool {
	return e.Offset >= 0 && e.Offset <= largest && e.Bytes <= largest
}

// ofPool tells whether memory is the pool's own: it is shown as the pool, not as a block.
func (m *places) ofPool(e *trace.Event) bool {
	return e.Storage == 0 && e.Name == m.tier.Pool()
}

// take finds a place, in the pool or in a segment of its own. Memory beyond all
// addresses gets none.
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

// give gives a place back.
func (m *places) give(h *holding) {
	if h.own {
		size := rounded(h.Bytes)
		m.free[size] = append(m.free[size], h.addr)
	} else if h.addr != 0 {
		i := m.find(h.addr)
		m.blocks = slices.Delete(m.blocks, i, i+1)
	}
}

// find gives the first block of the pool that does not begin before an address.
func (m *places) find(addr int64) int {
	i, _ := slices.BinarySearchFunc(m.blocks, addr, func(h *holding, addr int64) int {
		if h.addr < addr {
			return -1
		}
		return 1
	})
	return i
}
