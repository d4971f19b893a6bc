// This file owns the check of a store's pages, which every test uses.

package stash

import (
	"fmt"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// Check waits for s and returns an error unless, in each tier, tail - head + live =
// capacity and every page is either free or held by exactly one of the given records. No
// work may be in flight. Check reads device memory, so do not call it inside a step.
func (st *Store) Check(s device.Stream, live ...*Record) error {
	var c kernels.StashControl
	if err := s.Download(asBytes(&c), st.meta.Slice(0, kernels.StashControlBytes)); err != nil {
		return err
	}
	holder := [Tiers]map[uint32]string{{}, {}}
	for _, r := range live {
		if err := st.held(s, r, &holder); err != nil {
			return err
		}
	}
	for t := range c.Tier {
		if err := st.checkTier(s, &c, t, holder[t]); err != nil {
			return err
		}
	}
	return nil
}

// held adds the pages that a record holds to holder.
func (st *Store) held(s device.Stream, r *Record, holder *[Tiers]map[uint32]string) error {
	var head kernels.StashRecord
	if err := s.Download(asBytes(&head), r.mem.Slice(0, kernels.StashRecordBytes)); err != nil {
		return err
	}
	at := kernels.StashRecordSize(len(r.layout.Tensors), 0)
	pages, err := words(s, r.mem.Slice(at, memory.Bytes(4*(head.Pages[Device]+head.Pages[Host]))))
	if err != nil {
		return err
	}
	for i, page := range pages {
		tier := Device
		if uint64(i) >= head.Pages[Device] {
			tier, page = Host, page&^(1<<31)
		}
		if by, taken := holder[tier][page]; taken {
			return fmt.Errorf("stash: page %d of the %s tier is held by %s and by record %d", page, kinds[tier], by, r.id)
		}
		holder[tier][page] = fmt.Sprintf("record %d", r.id)
	}
	return nil
}

func (st *Store) checkTier(s device.Stream, c *kernels.StashControl, tier int, holder map[uint32]string) error {
	t := c.Tier[tier]
	head := c.State[c.Seq%2].Head[tier]
	live := uint64(len(holder))
	if c.Bump != 0 {
		if head != live {
			return fmt.Errorf("stash: the stack of the %s tier is %d pages high, and %d pages are live", kinds[tier], head, live)
		}
		return nil
	}
	if t.Tail-head+live != t.Capacity {
		return fmt.Errorf("stash: %s tier: tail %d - head %d + live %d != capacity %d", kinds[tier], t.Tail, head, live, t.Capacity)
	}
	ring, err := words(s, st.ring.Slice(st.rings[tier], memory.Bytes(4*(t.Mask+1))))
	if err != nil {
		return err
	}
	for i := head; i < t.Tail; i++ {
		page := ring[i&t.Mask]
		if by, taken := holder[page]; taken || uint64(page) >= t.Capacity {
			return fmt.Errorf("stash: page %d of the %s tier is free and also held by %q, or beyond %d", page, kinds[tier], by, t.Capacity)
		}
		holder[page] = "the free list"
	}
	return nil
}

// words downloads a range of page numbers.
func words(s device.Stream, r device.Range) ([]uint32, error) {
	w := make([]uint32, r.Len/4)
	if len(w) == 0 {
		return nil, nil
	}
	return w, s.Download(unsafe.Slice((*byte)(unsafe.Pointer(&w[0])), r.Len), r)
}
