// This file owns trials: random launches in a memory of their own. The tests of device
// code run them in several ways and compare the results.

package nn

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// trial is a memory with the operands of launches. Nobody may write the bytes between the
// ranges.
type trial struct {
	*rand.Rand
	buf   *device.Buffer
	data  []byte
	marks []mark
	large bool // sizes that many blocks of a GPU share
	whole bool // matrices are bf16 in whole vectors, if their columns allow it
	// loose is the factor by which results may be less exact than others: sums of sums in
	// which much cancels.
	loose float64
}

// meaning says how two results of a range are compared.
type meaning uint8

const (
	exact meaning = iota // to the bit, like all bytes without a mark
	fp32
	bf16
	scratch // not at all
)

type mark struct {
	meaning
	from, to int
}

// kind draws a trial of some device code and returns the function that issues it.
type kind func(x *trial) func(s device.Stream)

// atMost draws a number from one to small, or to large in a large trial.
func (x *trial) atMost(small, large int) int {
	if x.large {
		small = large
	}
	return 1 + x.IntN(small)
}

func (x *trial) maybe() bool { return x.IntN(2) == 0 }

func (x *trial) number() kernels.Number {
	if t := kernels.Number(x.IntN(2)); !x.whole {
		return t
	}
	return kernels.BF16
}

// place puts bytes at a multiple of align plus skew.
func (x *trial) place(b []byte, m meaning, align, skew int) device.Range {
	at := (len(x.data)+15)/16*16 + x.IntN(skew+1)*align
	for len(x.data) < at {
		x.data = append(x.data, byte(x.Uint32()))
	}
	x.data = append(x.data, b...)
	x.marks = append(x.marks, mark{m, at, at + len(b)})
	if memory.Bytes(len(x.data)) > x.buf.Size() {
		panic(fmt.Sprintf("a trial of more than %d bytes", x.buf.Size()))
	}
	return x.buf.Slice(memory.Bytes(at), memory.Bytes(len(b)))
}

// numbers places n normally distributed numbers times a factor.
func (x *trial) numbers(t kernels.Number, n int, factor float64) device.Range {
	return x.values(t, n, func() float64 { return factor * x.NormFloat64() })
}

// values places n values of a function.
func (x *trial) values(t kernels.Number, n int, f func() float64) device.Range {
	b := make([]byte, 0, n*int(t.Size()))
	for range n {
		v := math.Float32bits(float32(f()))
		if t == kernels.F32 {
			b = binary.LittleEndian.AppendUint32(b, v)
		} else {
			b = binary.LittleEndian.AppendUint16(b, uint16(v>>16))
		}
	}
	m := fp32
	if t == kernels.BF16 {
		m = bf16
	}
	skew := 0
	if x.IntN(3) == 0 && !x.whole {
		skew = 7
	}
	return x.place(b, m, int(t.Size()), skew)
}

// matrix places a matrix of random numbers without gaps, with rows at multiples of 16
// bytes, or with any pitch.
func (x *trial) matrix(t kernels.Number, rows, cols int) Matrix {
	pitch := cols
	switch n := x.IntN(3); {
	case n == 1:
		pitch = (cols + 15) / 8 * 8
	case n == 2 && !x.whole:
		pitch += x.IntN(9)
	}
	r := x.numbers(t, (rows-1)*pitch+cols, 1)
	return Matrix{Range: r, Type: t, Rows: rows, Cols: cols, Pitch: pitch}
}

func (x *trial) any(rows, cols int) Matrix { return x.matrix(x.number(), rows, cols) }

// inPlace returns a second matrix at the same place if the types allow it, or else a
// matrix of its own.
func (x *trial) inPlace(m Matrix, t kernels.Number) Matrix {
	if t == m.Type && x.maybe() {
		return m
	}
	return x.matrix(t, m.Rows, m.Cols)
}

func (x *trial) floats(n int) device.Range { return x.numbers(kernels.F32, n, 1) }

// positive clears the sign of fp32 numbers.
func (x *trial) positive(r device.Range) {
	for at := int(r.Off); at < int(r.Off+r.Len); at += 4 {
		x.data[at+3] &= 0x7f
	}
}

// words places the values of a function as uint32.
func (x *trial) words(n int, f func(i int) uint32) device.Range {
	b := make([]byte, 0, 4*n)
	for i := range n {
		b = binary.LittleEndian.AppendUint32(b, f(i))
	}
	return x.place(b, exact, 4, 3)
}

// waste returns memory that is written. Its bytes are compared only if m is exact.
func (x *trial) waste(n memory.Bytes, m meaning) device.Range {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(x.Uint32())
	}
	return x.place(b, m, 8, 0)
}

// segments divides rows into segments of experts, with gaps.
func (x *trial) segments(rows int) Segments {
	experts := 1 + x.IntN(40)
	at := 0
	r := x.words(2*experts, func(i int) uint32 {
		if i%2 == 0 {
			at += x.IntN(rows - at + 1)
			return uint32(at)
		}
		n := x.IntN(min(rows-at, 1+2*rows/experts) + 1)
		at += n
		return uint32(n)
	})
	return Segments{Range: r, Experts: experts}
}

// tape is a stream that records its work.
type tape struct {
	device.Stream
	ops []tapeOp
}

type tapeOp struct {
	device.Launch
	fill  device.Range // if there is no kernel
	value byte
}

func (t *tape) Launch(l device.Launch) {
	l.Check()
	t.ops = append(t.ops, tapeOp{Launch: l})
}

func (t *tape) Fill(r device.Range, value byte) {
	t.ops = append(t.ops, tapeOp{fill: r, value: value})
}

// trialSize is the most memory of a trial.
const trialSize = 128 << 20

// trialMemory returns memory at a high address, which cannot be mistaken for packed
// numbers.
func trialMemory(t testing.TB) (mem []byte, b *device.Buffer) {
	mem, err := syscall.Mmap(-1, 0, trialSize, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Munmap(mem) })
	return mem, device.NewBuffer(memory.Device, uintptr(unsafe.Pointer(unsafe.SliceData(mem))), trialSize, trialSize, "trial")
}

// draw returns a trial in a buffer and the function that issues it. The same seed gives
// the same trial.
func draw(k kind, seed uint64, large bool, b *device.Buffer) (x *trial, issue func(s device.Stream)) {
	x = &trial{Rand: rand.New(rand.NewPCG(seed, 1)), buf: b, large: large}
	issue = k(x)
	x.data = append(x.data, make([]byte, 64)...)
	return x, issue
}

// twin draws a trial in memory. It returns the launches and the memory after their twins.
func twin(k kind, seed uint64, large bool, memory []byte, b *device.Buffer) (x *trial, ops []tapeOp, want []byte) {
	x, issue := draw(k, seed, large, b)
	want = memory[:len(x.data)]
	copy(want, x.data)
	var s tape
	issue(&s)
	for _, op := range s.ops {
		if op.Kernel != nil {
			op.Kernel.Go(&op.Launch)
			continue
		}
		for i := range op.fill.Len {
			want[op.fill.Off+i] = op.value
		}
	}
	return x, s.ops, want
}

// compare returns an error if two results differ by more than another order of sums can
// explain.
func (x *trial) compare(got, want []byte) error {
	at := 0
	for _, m := range append(x.marks, mark{exact, len(want), len(want)}) {
		for ; at < m.from; at++ {
			if got[at] != want[at] {
				return fmt.Errorf("byte %d, which is nobody's, became %#x", at, got[at])
			}
		}
		at = m.to
		if err := m.compare(got[m.from:m.to], want[m.from:m.to], max(x.loose, 1)); err != nil {
			return fmt.Errorf("range %d to %d: %w", m.from, m.to, err)
		}
	}
	return nil
}

func (m meaning) compare(got, want []byte, loose float64) error {
	switch m {
	case exact:
		for i := range want {
			if got[i] != want[i] {
				return fmt.Errorf("byte %d is %#x, want %#x", i, got[i], want[i])
			}
		}
	case fp32, bf16:
		// A bf16 may be rounded to the other neighbour.
		t, rel := kernels.F32, 2e-5*loose
		if m == bf16 {
			t, rel = kernels.BF16, 1./128
		}
		n, most := len(want)/int(t.Size()), 0.
		for i := range n {
			most = max(most, math.Abs(numberAt(want, t, i)))
		}
		for i := range n {
			g, w := numberAt(got, t, i), numberAt(want, t, i)
			if d := math.Abs(g - w); !(d <= rel*math.Abs(w)+loose*1e-5*most) && !(math.IsNaN(g) && math.IsNaN(w)) {
				return fmt.Errorf("number %d is %g, want %g", i, g, w)
			}
		}
	}
	return nil
}

func numberAt(b []byte, t kernels.Number, i int) float64 {
	if t == kernels.F32 {
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:])))
	}
	return float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(b[2*i:])) << 16))
}
