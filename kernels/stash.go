// This file owns the stash kernels: what a store looks like in device memory
// and, as Go functions, exactly what the kernels of stash.cu do with it.
//
// A store hands out pages of two tiers, device first, then host. The free pages
// of a tier are a ring of page numbers: stash takes from the head, restore
// appends at the tail, and both only grow. At every point where the streams are
// quiet, for each tier,
//
//	tail - head + live = capacity
//
// One launch stashes all tensors of a group, one restores them. Launches of
// stash follow each other, and so do launches of restore; a stash and a restore
// may run at the same time. That is why a stash never changes what its own
// blocks read: launch seq reads State[seq%2] and one block writes the other one
// for the launch after it, so that no block waits for another. Only when the
// tail as it was seen by the launch before does not suffice do the blocks agree
// on a fresh one, by a compare-and-swap on Decision[seq%2].

package kernels

import (
	_ "embed"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/memcopy"
)

//go:embed stash_sm80.ptx
var stashPTX string

var (
	stashImage    = image("stash.cu", stashPTX)
	stashKernel   = device.Kernel{Name: "stowage_stash", Image: stashImage, Go: stashGo}
	noteKernel    = device.Kernel{Name: "stowage_stash_note", Image: stashImage, Go: noteGo}
	restoreKernel = device.Kernel{Name: "stowage_restore", Image: stashImage, Go: restoreGo}
	resetKernel   = device.Kernel{Name: "stowage_stash_reset", Image: stashImage, Go: resetGo}
)

// Tiers of a store.
const (
	StashDevice = iota
	StashHost
	StashTiers
)

// StashTier is one tier's pages. In a bump store there is no ring: page numbers
// are the offset of the stack's top, which is the head.
type StashTier struct {
	Tail     uint64 // pages ever given back, the initial ones included
	Capacity uint64
	Low      uint64 // the fewest free pages since the reset
	Pool     uint64 // address of page 0
	Ring     uint64 // address of the ring's uint32 entries
	Mask     uint64 // length of the ring, a power of two, less one
	Grown    uint64 // the capacity from the next reset on
	_        uint64
}

// StashState is what one stash launch leaves to the next.
type StashState struct {
	Head [StashTiers]uint64 // pages ever taken
	Tail [StashTiers]uint64 // the tails as they were seen
}

// StashControl is the head of a store. Everything a replayed graph needs is
// here: a graph holds its address and nothing that changes. Words that blocks
// count on lie on lines of their own.
type StashControl struct {
	Tier     [StashTiers]StashTier //   0
	State    [2]StashState         // 128
	Decision [2]uint64             // 192: what a launch's blocks agreed on
	Page     uint64                // 208: bytes of a page, a power of two of at least 4096
	Bump     uint64                // 216: not zero in a bump store
	// Generation says which arrangement of buffers is valid: a reset that was
	// captured under another one marks the step as stale.
	Generation  uint64            // 224
	_           [3]uint64         //
	StashReport                   // 256
	Ticket      [2][16][16]uint64 //  384: chunks that a stash's warps have taken
	Back        [16][16]uint64    // 4480: chunks that a restore's warps have taken
}

// StashReport is what the host reads at the end of a step. The first overflow
// and the first over-budget are described; later ones are counted.
type StashReport struct {
	Overflows     uint64 // groups that found too few pages in all tiers
	OverflowID    uint64 // the first one's record
	OverflowAsked uint64 // its pages
	OverflowFree  uint64 // what was free for it, in all tiers
	OverBudget    uint64 // groups with more rows than their buffer holds
	OverID        uint64 // the first one's record
	OverRows      uint64 // the rows it found
	OverLimit     uint64 // the rows that its buffer holds
	Stale         uint64 // the step was captured under another generation
	Spilled       uint64 // pages that went to the host tier
	Stashed       uint64 // pages that were stashed in all
	_             [5]uint64
}

// StashRecord is where one group of a step remembers its pages. Its tensors and
// then its page numbers (uint32, the highest bit set for the host tier) follow
// in memory.
type StashRecord struct {
	ID       uint64
	Tensors  uint64
	MaxPages uint64
	Need     uint64             // address of the uint64 for the pages that all rows found would take
	Pages    [StashTiers]uint64 // pages held; written by stash
	Missed   uint64             // not zero if it overflowed; written by stash
	Arrived  uint64             // blocks of a restore that have finished
}

// StashTensor is one tensor of a group, inside of the set of buffers that the
// launch is given.
type StashTensor struct {
	Offset   uint64 // of the first row, in the set
	RowBytes uint64
	MaxRows  uint64
	RowsAt   uint64 // offset of the uint64 row count, in the set
	Rows     uint64 // rows stashed; written by stash
	First    uint64 // place of its first page among the group's; written by stash
	Asked    uint64 // rows found, which may be more than MaxRows; written by stash
	_        uint64
}

// Sizes of the structs in memory, and the mark of the host tier.
const (
	StashControlBytes = device.Bytes(unsafe.Sizeof(StashControl{}))
	StashRecordBytes  = device.Bytes(unsafe.Sizeof(StashRecord{}))
	StashTensorBytes  = device.Bytes(unsafe.Sizeof(StashTensor{}))
	stashHostBit      = 1 << 31
	stashClaim        = 1 << 17
)

// StashRecordSize is the memory that a record takes.
func StashRecordSize(tensors int, maxPages uint64) device.Bytes {
	return StashRecordBytes + device.Bytes(tensors)*StashTensorBytes + 4*device.Bytes(maxPages)
}

// StashMemory is a store as its launches declare it. Pages and rings are
// ordered by the kernels themselves; the record is not, and so the race checker
// sees whether a restore waits for its stash.
type StashMemory struct {
	Control device.Range
	Rings   device.Range
	Pool    [StashTiers]device.Range
	// Units is the number of multiprocessors (device.Info): the grid fills the
	// machine, whatever the size of the buffers.
	Units int
}

// The warps of a block take chunks of stashChunk bytes; stashResident blocks fit a
// multiprocessor.
const (
	stashThreads  = 256
	stashChunk    = 4 * device.KiB
	stashResident = 2
)

// StashMaxTensors is the most tensors of a group: one for each lane of a warp.
const StashMaxTensors = 32

func (m *StashMemory) blocks(set device.Range) int {
	return min(blocksFor(set.Len, stashThreads/32*stashChunk), stashResident*max(m.Units, 1))
}

func (m *StashMemory) declare(l *device.Launch) {
	l.Declare(device.Atomics(m.Rings))
	for _, p := range m.Pool {
		if p.Len > 0 {
			l.Declare(device.Atomics(p))
		}
	}
}

// StashShape packs what the host knows of a launch, so that no block has to fetch
// it: the tensors of the group, the size of a page, whether the store is a stack.
func StashShape(tensors int, page device.Bytes, bump bool) uint64 {
	v := uint64(tensors) | uint64(bits.TrailingZeros64(uint64(page)))<<8
	if bump {
		v |= 1 << 16
	}
	return v
}

// StashLaunch copies the live rows of a group's tensors out of a set of buffers
// into pages, and writes how many pages they need. Seq counts the stashes since
// the reset (in a bump store, stashes and restores together).
func StashLaunch(m *StashMemory, record, need, set device.Range, seq, shape uint64) device.Launch {
	l := device.NewLaunch(&stashKernel, m.blocks(set), stashThreads)
	l.Atomic(m.Control)
	l.Write(record)
	l.Read(set)
	l.Arg(seq)
	l.Arg(shape)
	l.Declare(device.Writes(need))
	m.declare(&l)
	return l
}

// ClaimLaunch is StashLaunch without the copy: the record gets its pages, and a
// producer writes its rows straight into them. Byte i of a tensor belongs into
// the page whose number is entry First + i/page of the record's table.
func ClaimLaunch(m *StashMemory, record, need, set device.Range, seq, shape uint64) device.Launch {
	l := StashLaunch(m, record, need, set, seq, shape|stashClaim)
	l.Grid[0] = 1
	return l
}

// NoteLaunch writes down how many rows a set has, and whether they are too many,
// without stashing it.
func NoteLaunch(m *StashMemory, record, set device.Range, shape uint64) device.Launch {
	l := device.NewLaunch(&noteKernel, 1, 32)
	l.Atomic(m.Control)
	l.Write(record)
	l.Read(set)
	l.Arg(shape)
	return l
}

// RestoreLaunch copies them back into a set of the same layout, row counts
// included, and gives the pages back.
func RestoreLaunch(m *StashMemory, record, set device.Range, seq, shape uint64) device.Launch {
	l := device.NewLaunch(&restoreKernel, m.blocks(set), stashThreads)
	l.Atomic(m.Control)
	l.Write(record)
	l.Write(set)
	l.Arg(seq)
	l.Arg(shape)
	m.declare(&l)
	return l
}

// ResetLaunch makes all pages free again, sets whether the store is a stack from
// now on, and clears the report; records keep what they hold, which no longer
// means anything, and the needs that follow the control block become zero.
func ResetLaunch(m *StashMemory, needs device.Range, bump bool, generation uint64) device.Launch {
	l := device.NewLaunch(&resetKernel, 64, stashThreads)
	l.Write(m.Control)
	l.Write(needs)
	l.Arg(uint64(needs.Len / 8))
	l.Arg(generation)
	if bump {
		l.Arg(1)
	} else {
		l.Arg(0)
	}
	l.Declare(device.Writes(m.Rings))
	return l
}

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

// bytes is the memory of place j among the group's pages, as part of tensor t.
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

// pagesOf is the number of pages of a tensor.
func (x *stashArgs) pagesOf(t *StashTensor) uint64 {
	return (t.Rows*t.RowBytes + x.control.Page - 1) / x.control.Page
}

func noteGo(l *device.Launch) {
	x := stashArgsOf(l)
	for i := range x.tensors {
		x.note(&x.tensors[i])
	}
}

// note reads a tensor's rows.
func (x *stashArgs) note(t *StashTensor) {
	t.Asked = *x.rows(t)
	t.Rows = min(t.Asked, t.MaxRows)
	if t.Asked > t.MaxRows {
		x.control.overBudget(x.record.ID, t.Asked, t.MaxRows)
	}
}

func stashGo(l *device.Launch) {
	x := stashArgsOf(l)
	x.seq = l.Args()[3]
	c, r := x.control, x.record
	var need, wanted uint64
	for i := range x.tensors {
		t := &x.tensors[i]
		x.note(t)
		t.First = need
		need += x.pagesOf(t)
		wanted += (t.Asked*t.RowBytes + c.Page - 1) / c.Page
	}
	device.Slice[uint64](r.Need, 1)[0] = wanted
	take := x.decide(need)
	from := c.State[x.seq%2].Head
	for j := range take[StashDevice] + take[StashHost] {
		x.pages[j] = x.page(from, take, j)
	}
	if l.Args()[4]&stashClaim == 0 {
		x.copy(func(inSet, inPage []byte) ([]byte, []byte) { return inPage, inSet })
	}
}

// copy copies all pages of the group as one copy; order says which way.
func (x *stashArgs) copy(order func(inSet, inPage []byte) (dst, src []byte)) {
	if x.record.Missed != 0 {
		return
	}
	var pages, bytes uint64
	for i := range x.tensors {
		pages += x.pagesOf(&x.tensors[i])
		bytes += x.tensors[i].Rows * x.tensors[i].RowBytes
	}
	memcopy.Pieces(int(pages), int(bytes), 0, func(i int) ([]byte, []byte) {
		k := len(x.tensors) - 1
		for x.tensors[k].First > uint64(i) {
			k--
		}
		return order(x.bytes(&x.tensors[k], uint64(i)))
	})
}

// page is the page number for place j.
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

// free is the number of free pages of a tier for a head and a tail.
func (c *StashControl) free(tier int, head, tail uint64) uint64 {
	if c.Bump != 0 {
		return c.Tier[tier].Capacity - head
	}
	return tail - head
}

// decide takes pages from the tiers, all that are needed or none, and leaves
// the next launch its state.
func (x *stashArgs) decide(need uint64) [StashTiers]uint64 {
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
	c.State[(x.seq+1)%2] = state
	return take
}

func (c *StashControl) overflow(id, asked, free uint64) {
	if c.Overflows++; c.Overflows == 1 {
		c.OverflowID, c.OverflowAsked, c.OverflowFree = id, asked, free
	}
}

// overBudget is atomic, because a note may run beside a stash.
func (c *StashControl) overBudget(id, rows, limit uint64) {
	if atomic.AddUint64(&c.OverBudget, 1) == 1 {
		c.OverID, c.OverRows, c.OverLimit = id, rows, limit
	}
}

func restoreGo(l *device.Launch) {
	x := stashArgsOf(l)
	x.seq = l.Args()[3]
	c, r := x.control, x.record
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
		c.State[(x.seq+1)%2] = state
	} else {
		x.giveBack()
	}
	r.Pages = [StashTiers]uint64{}
}

// giveBack appends the group's pages to the rings. The tails move last, because
// a stash on another stream may take the pages as soon as they do.
func (x *stashArgs) giveBack() {
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
	c.Bump = a[4]
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
