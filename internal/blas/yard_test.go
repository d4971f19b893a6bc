//go:build linux

// This file owns the equipment of product tests: variants of products, and memory for
// their matrices.

package blas

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
)

// mix has the types of a product: those of both operands, and those of C and Plus.
type mix struct{ in, out kernels.Number }

var mixes = []mix{{kernels.BF16, kernels.BF16}, {kernels.BF16, kernels.F32}, {kernels.F32, kernels.F32}}

// variant is everything about a product except its shape.
type variant struct {
	mix            mix
	transA, transB bool
	plus           plus
	spare          int // numbers between rows, times 8
	off, shift     int // bytes before A; multiples of 256 before it
	odd            bool
}

// caseOf numbers the variants.
func caseOf(i int) variant {
	return variant{
		transA: i&1 != 0, transB: i&2 != 0, spare: i >> 2 & 1,
		mix: mixes[i/8%len(mixes)], plus: plus(i / (8 * len(mixes)) % 3), shift: i % 3,
	}
}

// yard is memory for matrices, on the CPU device or on a GPU. The same products lie at
// the same places in both.
type yard struct {
	buf   *device.Buffer
	first []byte // what is in it when a case begins
	end   memory.Bytes
}

func newYard(t testing.TB, size memory.Bytes) *yard {
	t.Helper()
	d, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.NewStream("test")
	if err != nil {
		t.Fatal(err)
	}
	b, err := d.Alloc(memory.Device, size, "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Free(b)
		if err := errors.Join(s.Close(), d.Close()); err != nil {
			t.Error(err)
		}
	})
	return &yard{buf: b, first: smallNumbers(int(b.Size()))}
}

// smallNumbers returns bytes that are numbers from a half to two, of either sign, as fp32
// and as bf16.
func smallNumbers(n int) []byte {
	rng := rand.New(rand.NewPCG(1, 2))
	b := make([]byte, n)
	for i := 0; i+1 < n; i += 2 {
		v := rng.Uint32()
		b[i], b[i+1] = byte(v), 0x3f|byte(v>>8&0x80)
	}
	return b
}

func (y *yard) memory() []byte { return device.Slice[byte](uint64(y.buf.Addr()), int(y.buf.Size())) }
func (y *yard) bytes() []byte  { return bytes.Clone(y.memory()) }
func (y *yard) restore()       { copy(y.memory(), y.first) }

// matrix returns room for a matrix, behind the one before or, if the yard is full, at
// its beginning.
func (y *yard) matrix(kind kernels.Number, rows, cols, pitch int) nn.Matrix {
	size := kind.Size() * memory.Bytes((rows-1)*pitch+cols)
	if y.end+size > y.buf.Size() {
		y.end = 0
	}
	x := nn.Matrix{Range: y.buf.Slice(y.end, size), Type: kind, Rows: rows, Cols: cols, Pitch: pitch}
	y.end = (y.end + size + device.Align - 1) / device.Align * device.Align
	return x
}

// testCase is a launch of a product, and its result.
type testCase struct {
	name   string
	launch device.Launch
	nn.Product
}

// product places a product in the yard.
func (y *yard) product(t testing.TB, v variant, m, n, k int) *testCase {
	t.Helper()
	y.end = memory.Bytes(v.shift)*device.Align + memory.Bytes(v.off)
	matrix := func(kind kernels.Number, rows, cols int, trans bool, gap int) nn.Matrix {
		if trans {
			rows, cols = cols, rows
		}
		pitch := cols + gap*8*v.spare
		if v.odd {
			pitch++
		}
		return y.matrix(kind, rows, cols, pitch)
	}
	p := nn.Product{
		A: matrix(v.mix.in, m, k, v.transA, 1), B: matrix(v.mix.in, k, n, v.transB, 2), C: matrix(v.mix.out, m, n, false, 3),
		TransA: v.transA, TransB: v.transB,
	}
	switch v.plus {
	case itself:
		p.Plus = p.C
	case another:
		p.Plus = matrix(v.mix.out, m, n, false, 4)
	}
	return &testCase{fmt.Sprintf("%d x %d x %d %+v", m, n, k, v), nn.GemmLaunch(p), p}
}

// compare fails unless two memories agree: up to rounding in C, and exactly elsewhere.
func (c *testCase) compare(t testing.TB, got, want []byte) {
	t.Helper()
	tolerance := 1e-3 // for fp32; TF32 would need thirty times as much
	if c.C.Type == kernels.BF16 {
		tolerance = 1.0 / 128
	}
	size := int(c.C.Type.Size())
	for i := range c.C.Rows * c.C.Cols {
		off := int(c.C.Off) + (i/c.C.Cols*c.C.Pitch+i%c.C.Cols)*size
		a, b := number(got[off:], size), number(want[off:], size)
		if d := a - b; !(max(d, -d) <= tolerance*(1+max(b, -b))) {
			t.Fatalf("%s: C has %g at (%d, %d), want %g", c.name, a, i/c.C.Cols, i%c.C.Cols, b)
		}
		copy(got[off:off+size], want[off:])
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("%s: bytes outside of C were written", c.name)
	}
}

func number(b []byte, size int) float64 {
	bits := uint32(b[0]) | uint32(b[1])<<8
	if size == 2 {
		return float64(math.Float32frombits(bits << 16))
	}
	return float64(math.Float32frombits(bits | uint32(b[2])<<16 | uint32(b[3])<<24))
}
