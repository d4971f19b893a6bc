// This file owns what norms, activations, the embedding and the optimiser share:
// how matrices are passed to kernels, and how their twins read and write rows.

package nn

import (
	"fmt"
	"sync"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/vec"
	"github.com/stowage-dev/stowage/memory"
)

// rowThreads is the number of threads of a block. A block computes one row at a time, or a
// few.
const rowThreads = 256

// aligned reports whether rows divide into vectors of n numbers that lie at multiples of
// their size.
func (m Matrix) aligned(n int) bool {
	return m.Cols%n == 0 && m.pitch()%n == 0 && m.Addr()%(uintptr(n)*uintptr(m.Type.Size())) == 0
}

// ways are two kernels that compute the same: one for all formats, and a faster one for
// vectors of eight bf16.
type ways struct{ any, wide device.Kernel }

func newWays(name string, image *device.Image, twin func(*device.Launch)) *ways {
	return &ways{device.Kernel{Name: name, Image: image, Go: twin}, device.Kernel{Name: name + "_wide", Image: image, Go: twin}}
}

// of returns the kernel for some matrices, of which some may be missing.
func (w *ways) of(ms ...Matrix) *device.Kernel {
	for _, m := range ms {
		if m.Buf != nil && (m.Type != kernels.BF16 || !m.aligned(8)) {
			return &w.any
		}
	}
	return &w.wide
}

// passMatrix adds a matrix as a pointer. It declares only the rows of the matrix, so
// several streams may use columns of one matrix at once.
func passMatrix(l *device.Launch, what string, m Matrix, mode device.Mode) {
	size := m.Type.Size()
	first := m.used(what).Slice(0, size*memory.Bytes(m.Cols))
	l.Arg(uint64(first.Addr()))
	l.Declare(device.Access{Rect: device.Rect{Range: first, Pitch: size * memory.Bytes(m.pitch()), Rows: m.Rows}, Mode: mode})
}

// passMaybe is passMatrix, or adds zero if there is no matrix.
func passMaybe(l *device.Launch, what string, m Matrix, mode device.Mode) {
	if m.Buf == nil {
		l.Arg(0)
		return
	}
	passMatrix(l, what, m, mode)
}

// passRun adds a run of n elements as a pointer, or zero if it may be missing and is.
func passRun(l *device.Launch, what string, r device.Range, n int, size memory.Bytes, mode device.Mode, maybe bool) {
	if maybe && r.Buf == nil {
		l.Arg(0)
		return
	}
	if r.Len < size*memory.Bytes(n) || r.Addr()%uintptr(size) != 0 {
		panic(fmt.Sprintf("nn: %s: expected %d aligned elements of %d bytes, got %s", what, n, size, r))
	}
	r = r.Slice(0, size*memory.Bytes(n))
	l.Arg(uint64(r.Addr()))
	l.Declare(device.Access{Rect: device.Rect{Range: r, Pitch: r.Len, Rows: 1}, Mode: mode})
}

// packPair packs two numbers below 2^32 into an argument, the first into the low half.
func packPair(low, high int) uint64 {
	if low < 0 || high < 0 || low > None || high > None {
		panic(fmt.Sprintf("nn: expected sizes below 2^32, got %d and %d", low, high))
	}
	return uint64(low) | uint64(high)<<32
}

// unpackPair is the inverse of packPair.
func unpackPair(a uint64) (low, high int) { return int(uint32(a)), int(a >> 32) }

// typeBits returns a bit for each matrix, set for bf16. A missing matrix counts as fp32.
func typeBits(ms ...Matrix) (b uint64) {
	for i, m := range ms {
		b |= uint64(m.Type) << i
	}
	return b
}

// strip is a matrix as a twin sees it.
type strip struct {
	addr  uint64
	pitch int
	typ   kernels.Number
}

// stripOf returns matrix i of typeBits.
func stripOf(addr uint64, pitch int, types uint64, i int) strip {
	return strip{addr, pitch, kernels.Number(types >> i & 1)}
}

func (s strip) bf16(row, col, n int) []uint16 {
	return device.Slice[uint16](s.addr+2*uint64(row*s.pitch+col), n)
}

// bytes returns the bytes of the first n numbers of a row.
func (s strip) bytes(row, n int) []byte {
	size := int(s.typ.Size())
	return device.Slice[byte](s.addr+uint64(size*row*s.pitch), size*n)
}

// into returns where to write n numbers of a row: the matrix itself, or the room for bf16.
// put writes them afterwards.
func (s strip) into(row, col, n int, room []float32) []float32 {
	if s.typ == kernels.BF16 {
		return room[:n:n]
	}
	return device.Slice[float32](s.addr+4*uint64(row*s.pitch+col), n)
}

// get returns n numbers of a row: the matrix itself, or the room for bf16.
func (s strip) get(row, col, n int, room []float32) []float32 {
	x := s.into(row, col, n, room)
	if s.typ == kernels.BF16 {
		vec.Widen(x, s.bf16(row, col, n))
	}
	return x
}

// put writes the numbers for which into returned the room.
func (s strip) put(row, col int, x []float32) {
	if s.typ == kernels.BF16 {
		vec.Narrow(s.bf16(row, col, len(x)), x)
	}
}

// runRows returns how many rows of n numbers a thread computes at a time: about 16,000
// numbers, which take a few microseconds.
func runRows(n int) int { return max(1, 1<<14/n) }

// actRooms has memory for fp32 numbers of rows that are stored as bf16.
var actRooms = sync.Pool{New: func() any { return new([]float32) }}

// withRoom calls f with room for n numbers.
func withRoom(n int, f func(room []float32)) {
	p := actRooms.Get().(*[]float32)
	if len(*p) < n {
		*p = make([]float32, n)
	}
	f((*p)[:n])
	actRooms.Put(p)
}
