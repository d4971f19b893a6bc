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

// rowThreads are the threads of a block, which takes a row at a time on a GPU.
const rowThreads = 256

// passMatrix adds a matrix as a pointer and declares its rows alone, so that columns of
// one matrix may be used by several streams at once.
func passMatrix(l *device.Launch, what string, m Matrix, mode device.Mode) {
	size := m.Type.Size()
	first := m.used(what).Slice(0, size*memory.Bytes(m.Cols))
	l.Arg(uint64(first.Addr()))
	l.Declare(device.Access{Rect: device.Rect{Range: first, Pitch: size * memory.Bytes(m.pitch()), Rows: m.Rows}, Mode: mode})
}

// passMaybe is passMatrix, or zero for no matrix.
func passMaybe(l *device.Launch, what string, m Matrix, mode device.Mode) {
	if m.Buf == nil {
		l.Arg(0)
		return
	}
	passMatrix(l, what, m, mode)
}

// passRun adds a run of n elements as a pointer, or zero where it may be missing and
// is.
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

// two packs two numbers below 2^32.
func two(low, high int) uint64 {
	if low < 0 || high < 0 || low > None || high > None {
		panic(fmt.Sprintf("nn: expected sizes below 2^32, got %d and %d", low, high))
	}
	return uint64(low) | uint64(high)<<32
}

// untwo is its inverse.
func untwo(a uint64) (low, high int) { return int(uint32(a)), int(a >> 32) }

// typeBits has a bit for each matrix, set for bf16. Matrices that are none count as
// fp32.
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

// stripOf is the i-th matrix of typeBits.
func stripOf(addr uint64, pitch int, types uint64, i int) strip {
	return strip{addr, pitch, kernels.Number(types >> i & 1)}
}

func (s strip) bf16(row, col, n int) []uint16 {
	return device.Slice[uint16](s.addr+2*uint64(row*s.pitch+col), n)
}

// into is where n numbers of a row are to be put: into the matrix itself or, with
// bf16, into the room; then put writes them.
func (s strip) into(row, col, n int, room []float32) []float32 {
	if s.typ == kernels.BF16 {
		return room[:n:n]
	}
	return device.Slice[float32](s.addr+4*uint64(row*s.pitch+col), n)
}

// get is n numbers of a row: the matrix itself or, of bf16, the room.
func (s strip) get(row, col, n int, room []float32) []float32 {
	x := s.into(row, col, n, room)
	if s.typ == kernels.BF16 {
		vec.Widen(x, s.bf16(row, col, n))
	}
	return x
}

// put writes what into gave room for.
func (s strip) put(row, col int, x []float32) {
	if s.typ == kernels.BF16 {
		vec.Narrow(s.bf16(row, col, len(x)), x)
	}
}

// runRows is how many rows of n numbers a thread takes at a time: about 16,000
// numbers, some microseconds of work.
func runRows(n int) int { return max(1, 1<<14/n) }

// actRooms keeps rooms of fp32 numbers that rows of bf16 pass through.
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
