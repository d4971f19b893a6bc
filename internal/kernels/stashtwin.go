// This file owns the twins of the kernels of stash.cu. The CPU device runs them, and every
// test takes them as the truth.

package kernels

import (
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/memcopy"
	"github.com/stowage-dev/stowage/memory"
)

type stashArgs struct {
	control *StashControl
	record  *StashRecord
	tensors []StashTensor
	pages   []uint32
	set     uint64
	seq     uint64
}

func stashArgsOf(l *device.Launch) stashArgs {
	a := l.Args()
	x := stashArgs{control: &device.Slice[StashControl](a[0], 1)[0], record: &device.Slice[StashRecord](a[1], 1)[0], set: a[2]}
	x.tensors = device.Slice[StashTensor](a[1]+uint64(StashRecordBytes), int(x.record.Tensors))
	x.pages = device.Slice[uint32](a[1]+uint64(StashRecordBytes)+x.record.Tensors*uint64(StashTensorBytes), int(x.record.MaxPages))
	return x
}

// hostPages returns the bytes that a group holds in host pages, to the page.
func hostPages(l *device.Launch) memory.Bytes {
	x := stashArgsOf(l)
	if x.control.Stale != 0 {
		return 0
	}
	return memory.Bytes(x.record.Pages[StashHost] * x.control.Page)
}

// bytes returns the memory of page j of the group, which holds a part of tensor t: in
// the set and in the page.
func (x *stashArgs) bytes(t *StashTensor, j uint64) (inSet, inPage []byte) {
	c := x.control
	from := (j - t.First) * c.Page
	n := int(min(c.Page, t.Rows*t.RowBytes-from))
	page := x.pages[j]
	tier := &c.Tier[StashDevice]
	if page&stashHostBit != 0 {
		tier = &c.Tier[StashHost]
	}
	return device.Slice[byte](x.set+t.Offset+from, n),
		device.Slice[byte](tier.Pool+uint64(page&^stashHostBit)*c.Page, n)
}

func (x *stashArgs) rows(t *StashTensor) *uint64 { return &device.Slice[uint64](x.set+t.RowsAt, 1)[0] }

// pagesOf returns the number of pages that the rows of a tensor need.
func (x *stashArgs) pagesOf(t *StashTensor) uint64 {
	return (t.Rows*t.RowBytes + x.control.Page - 1) / x.control.Page
}

func noteGo(l *device.Launch) {
	x := stashArgsOf(l)
	if x.control.Stale != 0 {
		return
	}
	for i := range x.tensors {
		x.note(&x.tensors[i])
	}
}

// note records the row count of a tensor.
func (x *stashArgs) note(t *StashTensor) {
	t.Asked = *x.rows(t)
	t.Rows = min(t.Asked, t.MaxRows)
	if t.Asked > t.MaxRows {
		x.control.overCapacity(x.record.ID, t.Asked, t.MaxRows)
	}
}

func stashGo(l *device.Launch) {
	x := stashArgsOf(l)
	x.seq = l.Args()[3]
	c, r := x.control, x.record
	if c.Stale != 0 {
		return
	}
	var need, wanted uint64
	for i := range x.tensors {
		t := &x.tensors[i]
		x.note(t)
		t.First = need
		need += x.pagesOf(t)
		wanted += (t.Asked*t.RowBytes + c.Page - 1) / c.Page
	}
	device.Slice[uint64](r.Need, 1)[0] = wanted
	take := x.takePages(need)
	from := c.State[x.seq%2].Head
	for j := range take[StashDevice] + take[StashHost] {
		x.pages[j] = x.page(from, take, j)
	}
	x.copy(func(inSet, inPage []byte) ([]byte, []byte) { return inPage, inSet })
}

// copy copies all pages of the group as one copy. order says in which direction.
func (x *stashArgs) copy(order func(inSet, inPage []byte) (dst, src []byte)) {
	var pages, bytes uint64
	for i := range x.tensors {
		pages += x.pagesOf(&x.tensors[i])
		bytes += x.tensors[i].Rows * x.tensors[i].RowBytes
	}
	// A group without pages has nothing to copy: it overflowed, or was restored before.
	if pages != x.record.Pages[StashDevice]+x.record.Pages[StashHost] {
		return
	}
	memcopy.Pieces(int(pages), int(bytes), 0, func(i int) ([]byte, []byte) {
		k := len(x.tensors) - 1
		for x.tensors[k].First > uint64(i) {
			k--
		}
		return order(x.bytes(&x.tensors[k], uint64(i)))
	})
}

// page returns the number of page j of the group.
func (x *stashArgs) page(from, take [StashTiers]uint64, j uint64) uint32 {
	tier, mark := StashDevice, uint32(0)
	if j >= take[StashDevice] {
		tier, mark, j = StashHost, stashHostBit, j-take[StashDevice]
	}
	if x.control.Bump != 0 {
		return uint32(from[tier]+j) | mark
	}
	t := &x.control.Tier[tier]
	return device.Slice[uint32](t.Ring, int(t.Mask)+1)[(from[tier]+j)&t.Mask] | mark
}

// free returns the number of free pages of a tier with the given head and tail.
func (c *StashControl) free(tier int, head, tail uint64) uint64 {
	if c.Bump != 0 {
		return c.Tier[tier].Capacity - head
	}
	return tail - head
}

// takePages takes all pages that are needed from the tiers, or none, and writes the state
// for the next launch.
func (x *stashArgs) takePages(need uint64) [StashTiers]uint64 {
	c, r := x.control, x.record
	state := c.State[x.seq%2]
	for t := range c.Tier {
		state.Tail[t] = atomic.LoadUint64(&c.Tier[t].Tail)
	}
	var take [StashTiers]uint64
	var free uint64
	for t := range c.Tier {
		f := c.free(t, state.Head[t], state.Tail[t])
		take[t] = min(need-take[StashDevice], f)
		free += f
	}
	r.Missed = 0
	if take[StashDevice]+take[StashHost] < need {
		c.overflow(r.ID, need, free)
		r.Missed, take = 1, [StashTiers]uint64{}
	}
	r.Pages = take
	c.Stashed += take[StashDevice] + take[StashHost]
	c.Spilled += take[StashHost]
	for t := range c.Tier {
		state.Head[t] += take[t]
		c.Tier[t].Low = min(c.Tier[t].Low, c.free(t, state.Head[t], state.Tail[t]))
	}
	c.State[(x.seq+1)%2], c.Seq = state, x.seq+1
	return take
}

func (c *StashControl) overflow(id, asked, free uint64) {
	if c.Overflows++; c.Overflows == 1 {
		c.OverflowID, c.OverflowAsked, c.OverflowFree = id, asked, free
	}
}

// overCapacity counts atomically, because a note may run at the same time as a stash.
func (c *StashControl) overCapacity(id, rows, limit uint64) {
	if atomic.AddUint64(&c.OverCapacity, 1) == 1 {
		c.OverID, c.OverRows, c.OverLimit = id, rows, limit
	}
}

func restoreGo(l *device.Launch) {
	x := stashArgsOf(l)
	x.seq = l.Args()[3]
	c, r := x.control, x.record
	if c.Stale != 0 {
		return
	}
	for i := range x.tensors {
		t := &x.tensors[i]
		*x.rows(t) = t.Rows
	}
	x.copy(func(inSet, inPage []byte) ([]byte, []byte) { return inSet, inPage })
	if c.Bump != 0 {
		state := c.State[x.seq%2]
		for t := range c.Tier {
			state.Head[t] -= r.Pages[t]
		}
		c.State[(x.seq+1)%2], c.Seq = state, x.seq+1
	} else {
		x.freePages()
	}
	r.Pages = [StashTiers]uint64{}
}

// freePages appends the group's pages to the rings. It moves the tails last, because a
// stash on another stream may take the pages as soon as the tails have moved.
func (x *stashArgs) freePages() {
	place := uint64(0)
	for i := range x.control.Tier {
		t := &x.control.Tier[i]
		ring := device.Slice[uint32](t.Ring, int(t.Mask)+1)
		for j := range x.record.Pages[i] {
			ring[(t.Tail+j)&t.Mask] = x.pages[place] &^ stashHostBit
			place++
		}
		atomic.StoreUint64(&t.Tail, t.Tail+x.record.Pages[i])
	}
}

func resetGo(l *device.Launch) {
	a := l.Args() // control, needs, how many, generation, bump
	c := &device.Slice[StashControl](a[0], 1)[0]
	c.Bump, c.Seq = a[4], 0
	clear(device.Slice[uint64](a[1], int(a[2])))
	c.State, c.Decision, c.StashReport = [2]StashState{}, [2]uint64{}, StashReport{}
	for i := range c.Tier {
		t := &c.Tier[i]
		t.Capacity, t.Tail, t.Low = t.Grown, t.Grown, t.Grown
		if c.Bump == 0 {
			ring := device.Slice[uint32](t.Ring, int(t.Mask)+1)
			for j := range t.Capacity {
				ring[j] = uint32(j)
			}
		}
		for s := range c.State {
			c.State[s].Tail[i] = t.Capacity
		}
	}
	if a[3] != c.Generation {
		c.Stale = 1
	}
}
