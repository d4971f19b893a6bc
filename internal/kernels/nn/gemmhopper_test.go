package nn

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// hopperSizes are sizes along m, n and k. Those along n are multiples of eight.
type hopperSizes struct{ m, n, k []int }

var (
	hopperOnHost = hopperSizes{[]int{1, 60, 128, 130, 300}, []int{8, 72, 256, 264, 520}, []int{1, 8, 64, 72, 200, 330, 900}}
	hopperOnGPU  = hopperSizes{[]int{1, 100, 256, 1000, 2048}, []int{8, 256, 520, 1024, 2000}, []int{1, 64, 200, 1000, 2048}}
)

// even draws a matrix whose rows begin at multiples of 16 bytes.
func (d gemmDraw) even(kind kernels.Number, rows, cols int) Matrix {
	x := d.matrix(kind, rows, cols, d.IntN(2)*d.IntN(20), true)
	d.fill(d.Rand, x)
	return x
}

// hopperCase returns a dense product that the kernels for Hopper compute, in one of their forms.
func hopperCase(t testing.TB, i int, sizes hopperSizes) *tensorCase {
	return hopperInForms(t, i, sizes)(i / 3)
}

// hopperInForms returns a product in all forms that there are for it.
func hopperInForms(t testing.TB, i int, sizes hopperSizes) func(form int) *tensorCase {
	d := newGemmDraw(t, i, 64<<20)
	one := func(of []int) int { return of[d.IntN(len(of))] }
	m, n, k := one(sizes.m), one(sizes.n), one(sizes.k)
	p := Product{TransA: i%3 == 2, TransB: i%3 == 1}
	rows, cols := turned(p.TransA, m, k)
	p.A = d.even(kernels.BF16, rows, cols)
	rows, cols = turned(p.TransB, k, n)
	p.B, p.C = d.even(kernels.BF16, rows, cols), d.even(d.kind(), m, n)
	switch d.IntN(3) {
	case 0:
		p.Plus = p.C
	case 1:
		p.Plus = d.even(p.C.Type, m, n)
	}
	return func(form int) *tensorCase {
		return &tensorCase{
			name:   fmt.Sprintf("product %d of %d x %d x %d", i, m, n, k),
			memory: d.tensorMemory, results: []Matrix{p.C}, tolerance: gemmTolerance(p.C),
			launches: func(b *device.Buffer) []device.Launch {
				q := p
				q.A, q.B, q.C, q.Plus = p.A.inBuffer(b), p.B.inBuffer(b), p.C.inBuffer(b), p.Plus.inBuffer(b)
				return []device.Launch{q.inForm(form)}
			},
		}
	}
}

// inForm returns the launch of a product in one of the forms that there are for it, whatever
// form its size asks for.
func (p Product) inForm(i int) device.Launch {
	l, kernels, forms := GemmLaunch(p), gemmHopper, []hopperForm{hopperShared, hopperSquare, hopperMiddle, hopperTurns, hopperSlim}
	if p.TransB {
		forms = append(forms, hopperBroad, hopperNarrow, hopperLean)
	}
	if p.TransA {
		kernels, forms = gemmTurnedHopper, []hopperForm{hopperShared, hopperSquare, hopperMiddle, hopper160, hopper224, hopperLow, hopperHalf}
	}
	f := forms[i%len(forms)]
	f.tune(&l, kernels, p.TransB, p.A, p.B, f.tiles(p.C.Rows, p.C.Cols))
	return l
}

// orphan sets the rows of matrices that belong to no expert to NaN.
func (d gemmDraw) orphan(seg Segments, ms ...Matrix) {
	for _, m := range ms {
		for row := range m.Rows {
			owned := false
			for e := range seg.Experts {
				at := d.bytes[int(seg.Off)+8*e:]
				first, n := int(binary.LittleEndian.Uint32(at)), int(binary.LittleEndian.Uint32(at[4:]))
				owned = owned || row >= first && row < first+n
			}
			if !owned {
				at := int(m.Off) + row*m.pitch()*2
				copy(d.bytes[at:at+2*m.Cols], bytes.Repeat([]byte{0xff}, 2*m.Cols))
			}
		}
	}
}

// hopperGroupedCase returns a product over experts or its gradient. Rows that belong to
// nobody are NaN.
func hopperGroupedCase(t testing.TB, i, most, wide int) *tensorCase {
	d := newGemmDraw(t, i, 64<<20)
	experts, least, n, k := 1+d.IntN(8)*(1+i%2*4), 0, 8*(1+d.IntN(wide/8)), 64*(1+d.IntN(wide/64))
	switch first := i%6 == 2; {
	case first && i%4 == 2: // long sums
		experts, least = 2+d.IntN(3), 1024
	case first && i%8 == 0: // so many tiles beside each other that they go down many rows
		experts, most, n, k = 1+d.IntN(2), 24, 2048+8*(1+d.IntN(40)), 64*(30+d.IntN(10))
	case first:
		experts, most = 6+d.IntN(6), max(most, 300)
	}
	seg, rows := d.segments(experts, least, most)
	if i%6 == 2 { // one of several has no rows
		copy(d.bytes[int(seg.Off)+8*(experts-1)+4:], make([]byte, min(4, 4*(experts-1))))
	}
	c := &tensorCase{memory: d.tensorMemory}
	if i%3 < 2 {
		p := Experts{TransB: i%3 == 1, Seg: seg}
		if p.TransB {
			k = 1 + d.IntN(wide)
			p.B = d.even(kernels.BF16, seg.Experts*n, k)
		} else {
			p.B = d.even(kernels.BF16, seg.Experts*k, n)
		}
		p.A, p.C = d.even(kernels.BF16, rows, k), d.even(d.kind(), rows, n)
		d.orphan(seg, p.A)
		c.results, c.tolerance = []Matrix{p.C}, gemmTolerance(p.C)
		c.launches = func(b *device.Buffer) []device.Launch {
			return []device.Launch{GroupedGemmLaunch(Experts{A: p.A.inBuffer(b), B: p.B.inBuffer(b), C: p.C.inBuffer(b), TransB: p.TransB, Seg: seg.inBuffer(b)})}
		}
	} else {
		p := ExpertsGrad{A: d.even(kernels.BF16, rows, k), B: d.even(kernels.BF16, rows, n), C: d.even(d.kind(), seg.Experts*k, n), Seg: seg, First: i%2 == 0}
		if p.First && i%24 != 14 {
			p.C = d.even(kernels.F32, seg.Experts*k, n)
		}
		d.orphan(seg, p.A, p.B)
		d.gradient(c, p)
	}
	c.name = fmt.Sprintf("product %d over %d experts, %d rows, %d x %d", i, seg.Experts, rows, n, k)
	return c
}

// The source for Hopper, compiled for the host, computes what the twin computes. SPEC S6.3
func TestHopperGemmSourceOnTheHost(t *testing.T) {
	program := newTensorProgram(t, "gemmhopper.cu", gemmHopperPTX)
	for i := range 24 {
		for _, c := range []*tensorCase{hopperCase(t, i, hopperOnHost), hopperGroupedCase(t, i, 140*(1+i%2*5), 300)} {
			if !c.tunedOnHost(t, program) {
				t.Errorf("%s has no kernel for Hopper", c.name)
			}
		}
	}
}

func TestHopperGemmOnGPU(t *testing.T) {
	g := newTensorGPU(t)
	for i := range 30 {
		hopperCase(t, i, hopperOnHost).onGPU(t, g)
		hopperGroupedCase(t, i, 300, 600).onGPU(t, g)
		hopperCase(t, i, hopperOnGPU).onGPU(t, g)
	}
	for i := range 12 {
		forms := hopperInForms(t, i, hopperOnGPU)
		want := forms(0).onceOnGPU(t, g)
		// The last forms of gradients add up in another order, and others have five forms or more.
		for f := 1; f < 8 && (f < 5 || i%3 != 2); f++ {
			if c := forms(f); !bytes.Equal(c.onceOnGPU(t, g), want) {
				t.Errorf("%s: form %d differs from the first", c.name, f)
			}
		}
		swigluCase(t, i, 300, 600).onGPU(t, g)
		swigluCase(t, i, 300, 600).sameOnGPU(t, g)
	}
}

// Products over experts have large tiles, or those that keep more of a GPU busy.
func TestHopperFormOfExperts(t *testing.T) {
	for _, c := range []struct {
		experts, rows, n int
		want             hopperForm
	}{
		{8, 16384, 4096, hopperShared}, // 132 x 16 tiles in 16 rounds, or 32 of half the size
		{16, 4096, 2816, hopperTurns},  // 40 x 11 tiles in 4 rounds, or 7 of half the size
		{64, 2048, 1024, hopperTurns},  // 48 x 4 tiles in 2 rounds, or 3
		{8, 8192, 4096, hopperShared},  // 68 x 16 tiles in 9 rounds, or 17
		{8, 16384, 1152, hopperTurns},  // half of the last column would be empty
		{1, 1, 8, hopperTurns},
	} {
		if got := hopperGroupedForm(c.experts, c.rows, c.n); got != c.want {
			t.Errorf("%+v: form %q", c, got.suffix)
		}
	}
}

// Gradients of experts' weights that are stored in fp32 have a kernel of their own.
func TestHopperFormOfExpertsGradients(t *testing.T) {
	for _, c := range []struct {
		first bool
		kind  kernels.Number
		want  hopperForm
	}{{true, kernels.F32, hopperFirst}, {true, kernels.BF16, hopperLow}, {false, kernels.F32, hopperLow}} {
		if got := hopperGradForm(ExpertsGrad{C: Matrix{Type: c.kind}, First: c.first}); got != c.want {
			t.Errorf("%+v: form %q", c, got.suffix)
		}
	}
}

// Gradients of weights have the form that keeps most of a GPU busy, whatever the number of rows.
func TestHopperFormOfGradients(t *testing.T) {
	for _, c := range []struct {
		m, n int
		want hopperForm
	}{
		{1024, 1024, hopperHalf}, // 64 tiles, two blocks each
		{64, 2048, hopperHalf},
		{4096, 4096, hopperShared}, // 512 tiles in 4 rounds, or 1024 in 8
		{2048, 2048, hopperShared},
		{7168, 2048, hopperSquare}, // 448 tiles in 4 rounds, or 896 in 7
		{512, 4096, hopperSquare},  // 64 tiles, or 128
		{2304, 4096, hopperMiddle}, // 396 tiles in 3 rounds
		{1536, 1536, hopper160},    // 120 tiles, or 96 of hopperMiddle
		{768, 3072, hopper160},
		{1024, 3584, hopper224}, // 128 tiles, or 112 of hopperShared
		{1024, 2560, hopper160},
		{576, 7168, hopperLow}, // half of the last row of larger tiles would be empty
		{320, 5120, hopperLow},
	} {
		if got := hopperTurnedForm(c.m, c.n); got != c.want {
			t.Errorf("%d x %d weights have form %q, want %q", c.m, c.n, got.suffix, c.want.suffix)
		}
	}
}

// Other products have tiles that fit their columns and fill the GPU.
func TestHopperFormOfProducts(t *testing.T) {
	for _, c := range []struct {
		m, n, k int
		transB  bool
		want    hopperForm
	}{
		{8192, 576, 7168, true, hopperBroad}, // 128 tiles in one round
		{4096, 576, 2048, true, hopperNarrow},
		{4096, 576, 2048, false, hopperMiddle}, // only a transposed B has narrow tiles
		{8192, 256, 4096, true, hopperSquare},
		{8192, 144, 4096, true, hopperLean}, // twice as many tiles as with hopperNarrow
		{4096, 288, 4096, true, hopperLean},
		{8192, 64, 2048, true, hopperSquare}, // more than half of each tile of 144 would be empty
		{8192, 512, 4096, true, hopperShared},
		{8192, 384, 2048, true, hopperMiddle},
		{2048, 1024, 4096, false, hopperSquare},
		{8192, 4096, 4096, true, hopperShared},
		{8192, 7168, 576, false, hopperSlim}, // sums are short
		{8192, 4096, 256, false, hopperSlim},
		{8192, 4096, 1024, false, hopperSlim},
	} {
		if got := hopperDenseForm(c.m, c.n, c.k, c.transB); got != c.want {
			t.Errorf("%d x %d x %d has form %q, want %q", c.m, c.n, c.k, got.suffix, c.want.suffix)
		}
	}
}
