// This file owns the handles for memory: kinds, sizes, buffers and the ranges
// that operations declare.

package device

import (
	"fmt"
	"strconv"
	"sync/atomic"
	"unsafe"
)

// Kind says where memory lives.
type Kind uint8

const (
	// Accel is the accelerator's own memory. The host cannot look into it, on
	// the CPU device neither.
	Accel Kind = iota
	// Host is pinned memory that the accelerator reaches over its link.
	Host
	// Kinds is the number of kinds.
	Kinds = 2
)

func (k Kind) String() string {
	switch k {
	case Accel:
		return "device"
	case Host:
		return "host"
	}
	return "Kind(" + strconv.Itoa(int(k)) + ")"
}

// Bytes is a size or an offset.
type Bytes int64

// Units of memory.
const (
	KiB Bytes = 1 << 10
	MiB Bytes = 1 << 20
	GiB Bytes = 1 << 30
)

// String gives three significant digits at least, and exact bytes below a KiB.
func (b Bytes) String() string {
	switch m := max(b, -b); {
	case m >= GiB:
		return fmt.Sprintf("%.2f GiB", float64(b)/float64(GiB))
	case m >= MiB:
		return fmt.Sprintf("%.2f MiB", float64(b)/float64(MiB))
	case m >= KiB:
		return fmt.Sprintf("%.2f KiB", float64(b)/float64(KiB))
	}
	return fmt.Sprintf("%d B", int64(b))
}

// Align is the alignment, in bytes, of every buffer's address. Kernels may use
// 16-byte accesses and bulk copies on whatever starts at a multiple of it.
const Align Bytes = 256

// Buffer is a handle to memory of one kind. Its life cycle:
//
//  1. live: returned by Alloc, Reserve or Import; ranges of it may be used.
//  2. pending: Stream.Free was called. The handle is dead, and using it
//     panics; the memory still counts as used, because work issued earlier may
//     be touching it.
//  3. free: the stream passed the free; the memory may be handed out again.
//
// A buffer's address never changes. Its size changes only by Device.Grow.
type Buffer struct {
	kind  Kind
	addr  uintptr
	max   Bytes
	owner string
	size  atomic.Int64
	dead  atomic.Bool
	// Mem is the device's own record of the memory; only the device that made
	// the buffer touches it.
	Mem any
}

// NewBuffer makes a handle; devices call it. Size may grow to max.
func NewBuffer(kind Kind, addr uintptr, size, max Bytes, owner string) *Buffer {
	b := &Buffer{kind: kind, addr: addr, max: max, owner: owner}
	b.size.Store(int64(size))
	return b
}

func (b *Buffer) Kind() Kind    { return b.kind }
func (b *Buffer) Addr() uintptr { return b.addr }
func (b *Buffer) Owner() string { return b.owner }
func (b *Buffer) Size() Bytes   { return Bytes(b.size.Load()) }

// Max is the size up to which the buffer can grow; for one that came from
// Alloc or Import, its size.
func (b *Buffer) Max() Bytes { return b.max }

// Live tells whether the handle may be used.
func (b *Buffer) Live() bool { return !b.dead.Load() }

// SetSize is for the device that grows the buffer.
func (b *Buffer) SetSize(size Bytes) { b.size.Store(int64(size)) }

// Retire ends the handle; devices call it when the buffer is freed. A second
// free of the same buffer is a programmer's error.
func (b *Buffer) Retire() {
	if b.dead.Swap(true) {
		panic("device: double free of " + b.String())
	}
}

func (b *Buffer) String() string {
	return fmt.Sprintf("%s buffer %q (%d bytes at %#x)", b.kind, b.owner, b.Size(), b.addr)
}

// All is the whole buffer at its present size.
func (b *Buffer) All() Range { return Range{b, 0, b.Size()} }

// Slice is n bytes from off. A range outside of the buffer panics.
func (b *Buffer) Slice(off, n Bytes) Range {
	r := Range{b, off, n}
	r.check()
	return r
}

// Range is a run of bytes inside one buffer. The zero Range is no memory.
type Range struct {
	Buf *Buffer
	Off Bytes
	Len Bytes
}

// Addr is the address of the first byte, as kernels see it.
func (r Range) Addr() uintptr { return r.Buf.addr + uintptr(r.Off) }

// Slice is n bytes from off inside the range.
func (r Range) Slice(off, n Bytes) Range {
	if off < 0 || n < 0 || off > r.Len-n {
		panic(fmt.Sprintf("device: bytes [%d,%d) lie outside of a range of %d bytes", off, off+n, r.Len))
	}
	return Range{r.Buf, r.Off + off, n}
}

func (r Range) String() string {
	if r.Buf == nil {
		return "no memory"
	}
	return fmt.Sprintf("bytes [%d,%d) of %s buffer %q", r.Off, r.Off+r.Len, r.Buf.kind, r.Buf.owner)
}

// check panics unless the range may be used now.
func (r Range) check() {
	switch {
	case r.Buf == nil:
		panic("device: a range without a buffer")
	case r.Buf.dead.Load():
		panic("device: use after free of " + r.Buf.String())
	case r.Off < 0 || r.Len < 0 || r.Off > r.Buf.Size()-r.Len:
		panic(fmt.Sprintf("device: bytes [%d,%d) lie outside of %s", r.Off, r.Off+r.Len, r.Buf))
	}
}

// Rect is Rows runs of Len bytes each, Pitch bytes apart, the first at Off.
type Rect struct {
	Range
	Pitch Bytes
	Rows  int
}

// Row is one run of the rectangle.
func (r Rect) Row(i int) Range { return Range{r.Buf, r.Off + Bytes(i)*r.Pitch, r.Len} }

// Extent is the smallest range that holds all rows.
func (r Rect) Extent() Range {
	if r.Rows == 0 {
		return Range{r.Buf, r.Off, 0}
	}
	return Range{r.Buf, r.Off, Bytes(r.Rows-1)*r.Pitch + r.Len}
}

func (r Rect) check() {
	// Divided, not multiplied: the extent of an absurd rectangle would wrap round.
	if r.Rows < 0 || r.Len < 0 || r.Pitch < r.Len || r.Rows > 1 && r.Pitch > (1<<62)/Bytes(r.Rows) {
		panic(fmt.Sprintf("device: a rectangle of %d rows of %d bytes cannot have a pitch of %d", r.Rows, r.Len, r.Pitch))
	}
	r.Extent().check()
}

// Slice gives kernels written in Go the n elements at an address of the CPU
// device. The memory is not the garbage collector's, so a plain number may
// stand for it.
func Slice[T any](addr uint64, n int) []T {
	if n == 0 {
		return nil
	}
	return unsafe.Slice(*(**T)(unsafe.Pointer(&addr)), n)
}
