package nn

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// range32 draws fp32 numbers, one a row.
func (d gemmDraw) range32(n int) device.Range { return d.even(kernels.F32, 1, n).Range }

// onBuffer returns the range at the same place of another buffer.
func onBuffer(r device.Range, b *device.Buffer) device.Range {
	if r.Buf != nil {
		r = b.Slice(r.Off, r.Len)
	}
	return r
}

// lonely sets the rows of a matrix that belong to no expert to NaN.
func (d gemmDraw) lonely(seg Segments, m Matrix) {
	if seg.live() {
		d.orphan(seg, m)
	}
}

// quiet divides the numbers of a matrix of bf16 by 16: sums of rows would cancel to less than
// one of their terms is rounded by.
func (d gemmDraw) quiet(m Matrix) {
	for i := int(m.Off); i < int(m.Off+m.Len); i += 2 {
		if v := binary.LittleEndian.Uint16(d.bytes[i:]); v>>7&0xff > 4 {
			binary.LittleEndian.PutUint16(d.bytes[i:], v-4<<7)
		}
	}
}

// swigluCase returns a product that ends with SwiGLU, or with its gradient.
// Rows that belong to nobody are NaN.
func swigluCase(t testing.TB, i, most, wide int) *tensorCase {
	d := newGemmDraw(t, i, 64<<20)
	seg, rows := d.segments(1+d.IntN(8)*(1+i%2*4), 0, most)
	n, k := 8*(1+d.IntN(wide/8)), 64*(1+d.IntN(wide/64))
	experts := seg.Experts
	if d.IntN(3) == 0 {
		seg, experts = Segments{}, 1
	}
	var weight device.Range
	if d.IntN(3) > 0 {
		weight = d.range32(rows)
	}
	c := &tensorCase{memory: d.tensorMemory, tolerance: 1.0 / 32}
	if i%2 == 0 {
		if d.IntN(2) == 0 {
			k = 1 + d.IntN(wide)
		}
		p := GatedProduct{A: d.even(kernels.BF16, rows, k), B: d.even(kernels.BF16, experts*2*n, k), C: d.even(kernels.BF16, rows, 2*n), Y: d.even(kernels.BF16, rows, n), Weight: weight, Seg: seg, Expect: 1 + i/2%2*gatedFew*experts}
		if d.IntN(4) == 0 {
			p.Y = Matrix{}
		}
		d.lonely(seg, p.A)
		c.results = []Matrix{p.C, p.Y}[:1+min(1, p.Y.Rows)]
		c.launches = func(b *device.Buffer) []device.Launch {
			q := p
			q.A, q.B, q.C, q.Y, q.Seg, q.Weight = p.A.inBuffer(b), p.B.inBuffer(b), p.C.inBuffer(b), p.Y.inBuffer(b), Segments{onBuffer(seg.Range, b), seg.Experts}, onBuffer(weight, b)
			return gatedLaunches(q)
		}
	} else {
		p := GatedProductGrad{A: d.even(kernels.BF16, rows, k), B: d.even(kernels.BF16, experts*k, n), X: d.even(kernels.BF16, rows, 2*n), Y: d.even(kernels.BF16, rows, n), Seg: seg, Weight: weight}
		d.quiet(p.B)
		p.DX = p.X
		if d.IntN(2) == 0 {
			p.DX = d.even(kernels.BF16, rows, 2*n)
		}
		c.results = []Matrix{p.DX, p.Y}
		if weight.Buf != nil {
			dw, sums := d.even(kernels.F32, 1, rows), d.even(kernels.F32, 1, TileSums(rows, n))
			p.DWeight, p.Sums = dw.Range, sums.Range
			c.results, c.scratch = append(c.results, dw), []Matrix{sums}
		}
		d.lonely(seg, p.A)
		c.launches = func(b *device.Buffer) []device.Launch {
			q := p
			q.A, q.B, q.DX, q.X, q.Y, q.Seg = p.A.inBuffer(b), p.B.inBuffer(b), p.DX.inBuffer(b), p.X.inBuffer(b), p.Y.inBuffer(b), Segments{onBuffer(seg.Range, b), seg.Experts}
			q.Weight, q.DWeight, q.Sums = onBuffer(weight, b), onBuffer(p.DWeight, b), onBuffer(p.Sums, b)
			return gatedGradLaunches(q)
		}
	}
	c.name = fmt.Sprintf("product %d with SwiGLU over %d experts, %d rows, %d x %d", i, experts, rows, n, k)
	return c
}

// Products that end with SwiGLU, compiled for the host, compute what the twins compute. SPEC S6.3
func TestSwigluGemmSourceOnTheHost(t *testing.T) {
	program := newTensorProgram(t, "gemmswiglu.cu", gemmSwigluPTX)
	for i := range 24 {
		if c := swigluCase(t, i, 140, 300); !c.tunedOnHost(t, program) {
			t.Errorf("%s has no kernel for Hopper", c.name)
		}
	}
}

// sameOnGPU fails unless launches leave the bits of their steps in the results of bf16.
func (c *tensorCase) sameOnGPU(t testing.TB, g *tensorGPU) {
	t.Helper()
	c.memory.trim()
	b := g.alloc(t, memory.Bytes(len(c.memory.bytes)))
	defer g.Free(b)
	var got [2][]byte
	for i := range got {
		got[i] = make([]byte, len(c.memory.bytes))
		g.Upload(b.All(), c.memory.bytes)
		for _, l := range c.launches(b) {
			if i == 0 {
				g.Launch(l)
				continue
			}
			for _, step := range l.Steps {
				g.Launch(step)
			}
		}
		if err := g.Download(got[i], b.All()); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
	}
	for k, x := range c.results {
		for row := range x.Rows {
			from := int(x.Off) + row*x.pitch()*int(x.Type.Size())
			if to := from + x.Cols*int(x.Type.Size()); x.Type == kernels.BF16 && !bytes.Equal(got[0][from:to], got[1][from:to]) {
				t.Fatalf("%s: row %d of matrix %d differs from that of separate kernels", c.name, row, k)
			}
		}
	}
}
