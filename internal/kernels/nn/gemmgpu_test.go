package nn

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// gemmTolerance returns the tolerance for sums of up to a few thousand products of normal
// numbers in another order. Sums that are stored as bf16 may be rounded to the other
// neighbour.
func gemmTolerance(c Matrix) float64 {
	if c.Type == kernels.BF16 {
		return 1.0 / 128
	}
	return 2e-4
}

var (
	hostSizes = []int{1, 7, 8, 40, 64, 127, 128, 130, 200}
	gpuSizes  = []int{1, 8, 100, 128, 256, 513, 1000, 1024, 2048}
)

// gemmDraw draws numbers and places of matrices.
type gemmDraw struct {
	*rand.Rand
	*tensorMemory
}

func newGemmDraw(t testing.TB, seed, room int) gemmDraw {
	return gemmDraw{rand.New(rand.NewPCG(uint64(seed), 11)), newTensorMemory(t, room)}
}

func (d gemmDraw) kind() kernels.Number { return kernels.Number(d.IntN(2)) }

func (d gemmDraw) draw(kind kernels.Number, rows, cols int) Matrix {
	x := d.matrix(kind, rows, cols, d.IntN(2)*d.IntN(9), d.IntN(3) > 0)
	d.fill(d.Rand, x)
	return x
}

// gemmCase returns a product. The cases cover all mixes of types, whole and partial
// tiles, rows at multiples of 16 bytes and others, with and without an addend.
func gemmCase(t testing.TB, i int, sizes []int) *tensorCase {
	d := newGemmDraw(t, i, 400+16*sizes[len(sizes)-1]*(sizes[len(sizes)-1]+32))
	size := func() int { return sizes[d.IntN(len(sizes))] }
	rows, cols, k := size(), size(), size()
	p := Product{TransA: i&1 != 0, TransB: i&2 != 0}
	turned := func(kind kernels.Number, rows, cols int, trans bool) Matrix {
		if trans {
			rows, cols = cols, rows
		}
		return d.draw(kind, rows, cols)
	}
	a, b := kernels.BF16, kernels.BF16
	if i&4 != 0 {
		a, b = d.kind(), kernels.F32
	}
	p.A, p.B, p.C = turned(a, rows, k, p.TransA), turned(b, k, cols, p.TransB), d.draw(d.kind(), rows, cols)
	switch d.IntN(3) {
	case 0:
		p.Plus = p.C
	case 1:
		p.Plus = d.draw(d.kind(), rows, cols)
	}
	return &tensorCase{
		name:   fmt.Sprintf("product %d of %d x %d x %d", i, rows, cols, k),
		memory: d.tensorMemory, results: []Matrix{p.C}, tolerance: gemmTolerance(p.C),
		launches: func(b *device.Buffer) []device.Launch {
			q := p
			q.A, q.B, q.C, q.Plus = p.A.inBuffer(b), p.B.inBuffer(b), p.C.inBuffer(b), p.Plus.inBuffer(b)
			return []device.Launch{GemmLaunch(q)}
		},
	}
}

// thinCase returns the gradient of a router: A is fp32 and B bf16. Half of the cases have
// whole vectors at multiples of 16 bytes.
func thinCase(t testing.TB, i int) *tensorCase {
	d := newGemmDraw(t, i, 4<<20)
	rows, cols, k := []int{8, 64, 7}[i%3], []int{64, 200}[i/3%2], []int{1, 64, 300, 1000}[d.IntN(4)]
	even := i/6%2 == 0
	operand := func(kind kernels.Number, rows, cols int) Matrix {
		x := d.matrix(kind, rows, cols, 0, even)
		if !even {
			x = d.matrix(kind, rows, cols, d.IntN(9), false)
		}
		d.fill(d.Rand, x)
		return x
	}
	p := Product{A: operand(kernels.F32, k, rows), B: operand(kernels.BF16, k, cols), C: operand(kernels.F32, rows, cols), TransA: true}
	p.Plus = p.C
	return &tensorCase{
		name:   fmt.Sprintf("thin product %d of %d x %d x %d", i, rows, cols, k),
		memory: d.tensorMemory, results: []Matrix{p.C}, tolerance: gemmTolerance(p.C),
		launches: func(b *device.Buffer) []device.Launch {
			c := p.C.inBuffer(b)
			l := GemmLaunch(Product{A: p.A.inBuffer(b), B: p.B.inBuffer(b), C: c, TransA: true, Plus: c})
			if l.Kernel != &thinKernel {
				panic("a product with few columns of A is not thin")
			}
			return []device.Launch{l}
		},
	}
}

// segments draws experts with few, many and no rows, in any order, and rows between them
// that belong to nobody. An expert has no rows or more than least.
func (d gemmDraw) segments(experts, least, most int) (seg Segments, rows int) {
	seg = Segments{Experts: experts, Range: d.matrix(kernels.F32, 1, 2*experts, 0, false).Range}
	for _, e := range d.Perm(experts) {
		n := d.IntN(3) * d.IntN(most+1) / 2
		if n > 0 {
			n += least
		}
		rows += d.IntN(2) * d.IntN(5)
		at := d.bytes[int(seg.Off)+8*e:]
		binary.LittleEndian.PutUint32(at, uint32(rows))
		binary.LittleEndian.PutUint32(at[4:], uint32(n))
		rows += n
	}
	return seg, rows + 1
}

// groupedCase returns a product over experts, or its gradient.
func groupedCase(t testing.TB, i, most, wide, room int) *tensorCase {
	d := newGemmDraw(t, i, room)
	seg, rows := d.segments(1+d.IntN(70), 0, most)
	a, b := kernels.BF16, kernels.BF16
	if i&2 != 0 {
		a = kernels.F32
	}
	cols, k := 1+d.IntN(wide), 1+d.IntN(wide)
	c := &tensorCase{name: fmt.Sprintf("product %d over %d experts, %d rows, %d x %d", i, seg.Experts, rows, cols, k), memory: d.tensorMemory}
	if i&1 == 0 {
		p := Experts{A: d.draw(a, rows, k), C: d.draw(d.kind(), rows, cols), TransB: i&4 != 0, Seg: seg}
		if p.TransB {
			p.B = d.draw(b, seg.Experts*cols, k)
		} else {
			p.B = d.draw(b, seg.Experts*k, cols)
		}
		c.results, c.tolerance = []Matrix{p.C}, gemmTolerance(p.C)
		c.launches = func(b *device.Buffer) []device.Launch {
			return []device.Launch{GroupedGemmLaunch(Experts{A: p.A.inBuffer(b), B: p.B.inBuffer(b), C: p.C.inBuffer(b), TransB: p.TransB, Seg: seg.inBuffer(b)})}
		}
		return c
	}
	d.gradient(c, ExpertsGrad{A: d.draw(a, rows, k), B: d.draw(b, rows, cols), C: d.draw(d.kind(), seg.Experts*k, cols), Seg: seg, First: i&4 != 0})
	return c
}

// gradient makes a case that of a gradient. What a first one is stored over is not a number.
func (d gemmDraw) gradient(c *tensorCase, p ExpertsGrad) {
	if p.First {
		for row := range p.C.Rows {
			at, n := int(p.C.Off)+row*p.C.pitch()*int(p.C.Type.Size()), p.C.Cols*int(p.C.Type.Size())
			copy(d.bytes[at:at+n], bytes.Repeat([]byte{0xff}, n))
		}
	}
	c.results, c.tolerance = []Matrix{p.C}, gemmTolerance(p.C)
	c.launches = func(b *device.Buffer) []device.Launch {
		return []device.Launch{GroupedGradLaunch(ExpertsGrad{A: p.A.inBuffer(b), B: p.B.inBuffer(b), C: p.C.inBuffer(b), Seg: p.Seg.inBuffer(b), First: p.First, Expect: p.Expect})}
	}
}

// The GPU source, compiled for the host, computes what the twin computes.
func TestGemmSourceOnTheHost(t *testing.T) {
	program := newTensorProgram(t, "gemm.cu", gemmPTX)
	for i := range 24 {
		// Flat products have a source of their own.
		if c := gemmCase(t, i, hostSizes); c.launches(c.memory.buf)[0].Kernel != &flatKernel {
			c.onHost(t, program)
		}
	}
	for i := range 12 {
		thinCase(t, i).onHost(t, program)
	}
	for i := range 16 {
		groupedCase(t, i, 20+i/8*200, 50, 4<<20).onHost(t, program)
	}
}

func TestGemmOnGPU(t *testing.T) {
	g := newTensorGPU(t)
	for i := range 32 {
		gemmCase(t, i, hostSizes).plain().onGPU(t, g)
		gemmCase(t, i, gpuSizes).plain().onGPU(t, g)
		groupedCase(t, i, 20+i%2*400, 300, 64<<20).plain().onGPU(t, g)
	}
}
