// This file owns the stash kernels' side of the host: what a store looks like in
// device memory, and the launches. stashtwin.go says in Go what the kernels do.
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
	"unsafe"

	"github.com/stowage-dev/stowage/device"
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
	Seq         uint64            // 232: launches since the reset, which says which State is in force
	_           [2]uint64         //
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
	OverBudget    uint64 // tensors with more rows than their buffer holds
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
	// StashNoPage stands in a table for a page that could not be had.
	StashNoPage  = 1<<32 - 1
	stashHostBit = 1 << 31
	stashClaim   = 1 << 17
	// stashHead is where the tensors of a set begin at the earliest: the row
	// counts have a line of 32 words.
	stashHead device.Bytes = 8 * StashMaxTensors
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
// the page whose number is entry First + i/page of the record's table. If there
// were too few pages, all entries are StashNoPage, and the producer must write
// nothing: the step will be run again.
func ClaimLaunch(m *StashMemory, record, need, set device.Range, seq, shape uint64) device.Launch {
	l := StashLaunch(m, record, need, set.Slice(0, stashHead), seq, shape|stashClaim)
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
