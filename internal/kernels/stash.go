// This file owns the host side of the stash kernels: the layout of a store in device
// memory, and the launches. stashtwin.go has the twins.
//
// A store has pages in two tiers and takes device pages before host pages. The free
// pages of a tier are a ring of page numbers: a stash takes from the head, a restore
// appends at the tail, and both counters only grow. Whenever the streams are idle, each
// tier satisfies
//
//	tail - head + live = capacity
//
// One launch stashes all tensors of a group, and one restores them. Stashes run one
// after the other, and so do restores, but a stash and a restore may run at the same
// time. A stash therefore never changes what its own blocks read: launch seq reads
// State[seq%2], and one block writes the other State for the next launch, so no block
// waits for another. If the tail that the launch before saw does not suffice, the blocks
// agree on a fresh one by a compare-and-swap on Decision[seq%2].

package kernels

import (
	_ "embed"
	"math/bits"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

//go:embed stash_sm80.ptx
var stashPTX string

var (
	stashImage    = image("stash.cu", stashPTX)
	stashKernel   = device.Kernel{Name: "stowage_stash", Image: stashImage, Go: stashGo, HostWrites: hostPages}
	noteKernel    = device.Kernel{Name: "stowage_stash_note", Image: stashImage, Go: noteGo}
	restoreKernel = device.Kernel{Name: "stowage_restore", Image: stashImage, Go: restoreGo, HostReads: hostPages}
	resetKernel   = device.Kernel{Name: "stowage_stash_reset", Image: stashImage, Go: resetGo}
)

// The tiers of a store.
const (
	StashDevice = iota
	StashHost
	StashTiers
)

// StashTier describes the pages of one tier. A bump store has no ring: it is a stack, and
// the head is its top.
type StashTier struct {
	Tail     uint64 // pages ever freed, the initial ones included
	Capacity uint64
	Low      uint64 // the fewest free pages since the reset
	Pool     uint64 // address of page 0
	Ring     uint64 // address of the ring's uint32 entries
	Mask     uint64 // length of the ring, a power of two, less one
	Grown    uint64 // the capacity from the next reset on
	_        uint64
}

// StashState is what one stash launch hands to the next.
type StashState struct {
	Head [StashTiers]uint64 // pages ever taken
	Tail [StashTiers]uint64 // the tails that the launch saw
}

// StashControl is the head of a store. It holds everything that a replayed graph needs: a
// graph contains its address and nothing that changes. Words that blocks count in lie on
// cache lines of their own.
type StashControl struct {
	Tier     [StashTiers]StashTier //   0
	State    [2]StashState         // 128
	Decision [2]uint64             // 192: what a launch's blocks agreed on
	Page     uint64                // 208: bytes of a page, a power of two of at least 4096
	Bump     uint64                // 216: not zero in a bump store
	// Generation says which arrangement of buffers is valid. A reset that was captured
	// under another generation marks the step as stale.
	Generation  uint64            // 224
	Seq         uint64            // 232: launches since the reset; Seq%2 says which State is valid
	_           [2]uint64         //
	StashReport                   // 256
	Ticket      [2][16][16]uint64 //  384: chunks that a stash's warps have taken
	Back        [16][16]uint64    // 4480: chunks that a restore's warps have taken
}

// StashReport is what the host reads at the end of a step. It describes the first
// overflow and the first tensor with too many rows, and counts the later ones.
type StashReport struct {
	Overflows     uint64 // groups that found too few pages in all tiers
	OverflowID    uint64 // the first one's record
	OverflowAsked uint64 // the pages it needed
	OverflowFree  uint64 // the pages that were free in all tiers
	OverCapacity  uint64 // tensors with more rows than their buffer holds
	OverID        uint64 // the first one's record
	OverRows      uint64 // the rows it found
	OverLimit     uint64 // the rows that its buffer holds
	Stale         uint64 // the step was captured under another generation
	Spilled       uint64 // pages that went to the host tier
	Stashed       uint64 // pages that were stashed in total
	_             [5]uint64
}

// StashRecord holds the pages of one group of a step. Its tensors and then its page
// numbers follow in memory. A page number is a uint32 with the highest bit set for the
// host tier.
type StashRecord struct {
	ID       uint64
	Tensors  uint64
	MaxPages uint64
	Need     uint64             // address of a uint64: the pages that all rows found would take
	Pages    [StashTiers]uint64 // pages held; written by stash
	Missed   uint64             // not zero if it overflowed; written by stash
	Arrived  uint64             // blocks of a restore that have finished
}

// StashTensor is one tensor of a group. It lies in the set of buffers that is passed to
// the launch.
type StashTensor struct {
	Offset   uint64 // of the first row, in the set
	RowBytes uint64
	MaxRows  uint64
	RowsAt   uint64 // offset of the uint64 row count, in the set
	Rows     uint64 // rows stashed; written by stash
	First    uint64 // index of its first page in the group; written by stash
	Asked    uint64 // rows found, which may be more than MaxRows; written by stash
	_        uint64
}

// Sizes of the structs in memory, and the bit that marks pages of the host tier.
const (
	StashControlBytes = memory.Bytes(unsafe.Sizeof(StashControl{}))
	StashRecordBytes  = memory.Bytes(unsafe.Sizeof(StashRecord{}))
	StashTensorBytes  = memory.Bytes(unsafe.Sizeof(StashTensor{}))
	stashHostBit      = 1 << 31
)

// StashRecordSize returns the size of a record with its tensors and page numbers.
func StashRecordSize(tensors int, maxPages uint64) memory.Bytes {
	return StashRecordBytes + memory.Bytes(tensors)*StashTensorBytes + 4*memory.Bytes(maxPages)
}

// StashMemory is the memory of a store as its launches declare it. The kernels themselves
// order accesses to pages and rings. They do not order accesses to records, so the race
// checker sees whether a restore waits for its stash.
type StashMemory struct {
	Control device.Range
	Rings   device.Range
	Pool    [StashTiers]device.Range
	// Units is the number of multiprocessors of the device (device.Info). The grid
	// fills them, whatever the size of the buffers, unless all pages are in host memory.
	Units int
}

// The warps of a block take chunks of stashChunk bytes; stashResident blocks fit a
// multiprocessor.
const (
	stashThreads  = 256
	stashChunk    = 4 * memory.KiB
	stashResident = 2

	// stashLinkBlocks blocks copy the pages in host memory. They keep as many bytes under
	// way as linkBlocks blocks of the copy kernel, which saturate the link. They occupy 8
	// multiprocessors. A full grid would move nothing faster, and would keep compute's
	// blocks from every multiprocessor until the link has carried all rows.
	stashLinkBlocks = int(linkBlocks * moveChunk / (stashThreads / 32 * stashChunk))
)

// StashMaxTensors is the most tensors of a group: one for each lane of a warp.
const StashMaxTensors = 32

// blocks returns the size of the grid. Rows of a store without device pages all cross the
// link.
func (m *StashMemory) blocks(set device.Range) int {
	if m.Pool[StashDevice].Len == 0 {
		return min(blocksFor(set.Len, stashThreads/32*stashChunk), stashLinkBlocks)
	}
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

// StashShape packs what the host knows of a launch, so that no block has to read it from
// memory: the number of tensors, the size of a page, whether the store is a bump store, and
// how many blocks copy pages in host memory.
func StashShape(tensors int, page memory.Bytes, bump bool) uint64 {
	v := uint64(tensors) | uint64(bits.TrailingZeros64(uint64(page)))<<8 | uint64(stashLinkBlocks)<<24
	if bump {
		v |= 1 << 16
	}
	return v
}

// StashLaunch returns a launch that copies the live rows of a group's tensors from a set
// of buffers into pages, and writes how many pages they need. Seq is the number of
// stashes since the reset, or of stashes and restores in a bump store.
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

// NoteLaunch returns a launch that records how many rows a set has, and whether they are
// too many, without stashing the set.
func NoteLaunch(m *StashMemory, record, set device.Range, shape uint64) device.Launch {
	l := device.NewLaunch(&noteKernel, 1, 32)
	l.Atomic(m.Control)
	l.Write(record)
	l.Read(set)
	l.Arg(shape)
	return l
}

// RestoreLaunch returns a launch that copies the rows of a group back into a set of the
// same layout, row counts included, and frees the pages.
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

// ResetLaunch returns a launch that frees all pages, sets whether the store is a bump
// store from now on, clears the report, and sets the needs behind the control block to
// zero. What records hold is not valid afterwards.
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
