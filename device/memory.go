// This file owns the handles for memory: buffers, ranges and rectangles.

package device

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/stowage-dev/stowage/memory"
)

// Align is the alignment of every buffer's address. Kernels may use 16-byte accesses
// and bulk copies on ranges that start at a multiple of it.
const Align memory.Bytes = 256

// Buffer is a handle to memory of one kind. Its life cycle:
//
//  1. live: [Device.Alloc], [Device.Reserve] or [Device.Borrow] returned it; its
//     ranges may be used.
//  2. pending: [Stream.Free] was called. The handle is dead, and using it panics.
//     The memory still counts as used, because work that was issued before the free
//     may be using it.
//  3. free: the stream has passed the free; the memory may be handed out again.
//
// The address of a buffer never changes. Its size changes only by [Device.Grow].
type Buffer struct {
	kind  memory.Kind
	addr  uintptr
	max   memory.Bytes
	owner string
	size  atomic.Int64
	dead  atomic.Bool
	// Mem is the record that the buffer's device keeps of the memory. Only that
	// device uses it.
	Mem any
}

// NewBuffer returns a live handle to memory at an address. Devices call it; programs
// call [Device.Alloc], [Device.Reserve] or [Device.Borrow].
func NewBuffer(kind memory.Kind, addr uintptr, size, max memory.Bytes, owner string) *Buffer {
	b := &Buffer{kind: kind, addr: addr, max: max, owner: owner}
	b.size.Store(int64(size))
	return b
}

// Kind returns the kind of memory.
func (b *Buffer) Kind() memory.Kind { return b.kind }

// Addr returns the address of the first byte, as kernels see it.
func (b *Buffer) Addr() uintptr { return b.addr }

// Owner returns the name under which the ledger counts the buffer.
func (b *Buffer) Owner() string { return b.owner }

// Size returns the present size.
func (b *Buffer) Size() memory.Bytes { return memory.Bytes(b.size.Load()) }

// Max returns the size up to which the buffer can grow. It is the size of a buffer that
// was not reserved.
func (b *Buffer) Max() memory.Bytes { return b.max }

// Live reports whether the handle may be used. It is false after [Stream.Free].
func (b *Buffer) Live() bool { return !b.dead.Load() }

// SetSize changes the size. Only the buffer's device calls it, when it grows the buffer.
func (b *Buffer) SetSize(size memory.Bytes) { b.size.Store(int64(size)) }

// Retire ends the handle. Only the buffer's device calls it, when the buffer is freed.
// It panics if the buffer was freed before.
func (b *Buffer) Retire() {
	if b.dead.Swap(true) {
		panic("device: double free of " + b.String())
	}
}

// String describes the buffer for messages.
func (b *Buffer) String() string {
	return fmt.Sprintf("%s buffer %q (%d bytes at %#x)", b.kind, b.owner, b.Size(), b.addr)
}

// All returns the whole buffer at its present size.
func (b *Buffer) All() Range { return Range{b, 0, b.Size()} }

// Slice returns the n bytes from off. It panics if they lie outside of the buffer.
func (b *Buffer) Slice(off, n memory.Bytes) Range {
	r := Range{b, off, n}
	r.check()
	return r
}

// Range is a run of bytes inside of one buffer. The zero Range is no memory, and no
// operation takes it.
type Range struct {
	Buf *Buffer
	Off memory.Bytes // from the beginning of the buffer
	Len memory.Bytes
}

// Addr returns the address of the first byte, as kernels see it.
func (r Range) Addr() uintptr { return r.Buf.addr + uintptr(r.Off) }

// Slice returns the n bytes from off, counted from the beginning of the range. It
// panics if they lie outside of the range.
func (r Range) Slice(off, n memory.Bytes) Range {
	if off < 0 || n < 0 || off > r.Len-n {
		panic(fmt.Sprintf("device: bytes [%d,%d) lie outside of a range of %d bytes", off, off+n, r.Len))
	}
	return Range{r.Buf, r.Off + off, n}
}

// String describes the range for messages.
func (r Range) String() string {
	if r.Buf == nil {
		return "no memory"
	}
	return fmt.Sprintf("bytes [%d,%d) of %s buffer %q", r.Off, r.Off+r.Len, r.Buf.kind, r.Buf.owner)
}

// check panics if the range may not be used now.
func (r Range) check() {
	switch {
	case r.Buf == nil:
		panic("device: a range without a buffer; take one from Buffer.All or Buffer.Slice")
	case r.Buf.dead.Load():
		panic("device: use after free of " + r.Buf.String())
	case r.Off < 0 || r.Len < 0 || r.Off > r.Buf.Size()-r.Len:
		panic(fmt.Sprintf("device: bytes [%d,%d) lie outside of %s", r.Off, r.Off+r.Len, r.Buf))
	}
}

// Rect is a rectangle of bytes: Rows rows of Len bytes each. The first row begins at
// Off, and each further one Pitch bytes after the one before.
type Rect struct {
	Range
	Pitch memory.Bytes
	Rows  int
}

// Row returns row i.
func (r Rect) Row(i int) Range { return Range{r.Buf, r.Off + memory.Bytes(i)*r.Pitch, r.Len} }

// Extent returns the smallest range that holds all rows.
func (r Rect) Extent() Range {
	if r.Rows == 0 {
		return Range{r.Buf, r.Off, 0}
	}
	return Range{r.Buf, r.Off, memory.Bytes(r.Rows-1)*r.Pitch + r.Len}
}

func (r Rect) check() {
	// The bound is divided, not multiplied, because a product could overflow.
	if r.Rows < 0 || r.Len < 0 || r.Pitch < r.Len || r.Rows > 1 && r.Pitch > (1<<62)/memory.Bytes(r.Rows) {
		panic(fmt.Sprintf("device: a rectangle of %d rows of %d bytes cannot have a pitch of %d; the pitch is at least the length of a row", r.Rows, r.Len, r.Pitch))
	}
	r.Extent().check()
}

// Slice returns the n elements of type T at an address of the CPU device. Kernels
// that are written in Go use it to reach the memory behind their arguments. The memory
// is not the garbage collector's, so a number may hold its address.
func Slice[T any](addr uint64, n int) []T {
	if n == 0 {
		return nil
	}
	return unsafe.Slice(*(**T)(unsafe.Pointer(&addr)), n)
}
