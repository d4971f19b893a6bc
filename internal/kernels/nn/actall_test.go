// This file owns the tests that norms, rotations, activations, the embedding, the loss
// and the optimiser share: results do not depend on threads, and launches declare no more
// bytes than they use.

package nn

import (
	"bytes"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// actHouse allocates the memory of issueAll: floating-point numbers, and a few integers.
type actHouse struct {
	floats func(n int) device.Range
	whole  func(v ...uint32) device.Range
}

// issueAll issues every kernel once, on matrices that are columns of a wider one.
func (h actHouse) issueAll(s device.Stream, kind kernels.Number, rows, cols int) {
	wide := func(n int) Matrix { return NewMatrix(h.floats(rows*(n+32)), kind, rows, n+32).Columns(16, n) }
	vector := func() Matrix { return NewMatrix(h.floats(cols), kind, 1, cols) }
	x, dy, two := wide(cols), wide(cols), wide(2*cols)
	logit := NewMatrix(h.floats(rows), kernels.F32, rows, 1)
	ids := make([]uint32, rows)
	for i := range ids {
		ids[i] = uint32(i * i % 7)
	}
	RMSNorm(s, Norm{Y: wide(cols), X: x, W: vector(), Epsilon: 1e-5})
	RMSNormGrad(s, NormGrad{DX: wide(cols), DW: vector(), X: x, W: vector(), DY: dy, Plus: wide(cols), Epsilon: 1e-5, Scratch: h.floats(int(NormScratch(rows, cols) / 4))})
	Rope(s, Rotation{X: x, Heads: 2, Head: cols / 2, Width: cols / 2, Seq: rows, Table: h.floats(rows * cols / 2)})
	seg := Segments{Range: h.whole(0, uint32(rows/3), uint32(rows/2), uint32(rows/3)), Experts: 2}
	SwiGLU(s, Gate{Y: wide(cols), X: two, Weight: h.floats(rows), Seg: seg})
	SwiGLUGrad(s, GateGrad{DX: wide(2 * cols), X: two, DY: dy, Y: wide(cols), Weight: h.floats(rows), DWeight: h.floats(rows), Seg: seg})
	Add(s, Sum{Y: wide(cols), A: x, B: dy})
	GateRows(s, RowGate{Y: wide(cols), X: x, Logit: logit})
	GateRowsGrad(s, RowGateGrad{DX: wide(cols), DLogit: NewMatrix(h.floats(rows), kernels.F32, rows, 1), DY: dy, X: x, Logit: logit})
	table := NewMatrix(h.floats(7*cols), kind, 7, cols)
	Embed(s, Lookup{Y: wide(cols), Table: table, IDs: h.whole(ids...)})
	EmbedGrad(s, LookupGrad{DTable: table, DY: dy, IDs: h.whole(ids...), Scratch: h.floats(rows + 8)})
	losses := h.floats(rows)
	logits := wide(cols)
	CrossEntropy(s, Loss{Logits: logits, Targets: h.whole(ids...), Losses: losses, Grad: logits, Scale: 0.1})
	AddUp(s, Total{Sum: h.floats(1), X: losses, Factor: 0.1})
	n, sum := rows*cols, h.floats(1)
	g := NewMatrix(h.floats(n), kind, rows, cols).Range
	AddSquares(s, Squares{Sum: sum, X: g, Type: kind, Scratch: h.floats(int(SquaresScratch(n) / 4))})
	AdamW(s, Adam{W: h.floats(n), M: h.floats(n), V: h.floats(n), G: g, GType: kind, Param: h.floats(n), ParamType: kind, Hyper: h.floats(8), Norm: sum})
}

// Results have the same bits with one, two and four threads.
func TestActivationsDoNotDependOnThreads(t *testing.T) {
	y := newYard(t, 12<<20)
	y.strict = false
	house := actHouse{
		floats: func(n int) device.Range {
			r := place[float32](y, n)
			// Both halves are the same, so the word is valid as two bf16 and as one fp32.
			x := numbersAt[uint32](r)
			for i := range x {
				half := math.Float32bits(float32(y.rng.NormFloat64())) >> 16
				x[i] = half | half<<16
			}
			return r
		},
		whole: func(v ...uint32) device.Range { return put(y, v) },
	}
	for _, kind := range numbers {
		threads(t, func() []byte {
			y.reset(t)
			y.rng = rand.New(rand.NewPCG(3, 3))
			house.issueAll(y, kind, 97, 496)
			return bytes.Clone(y.memory[:y.end])
		})
	}
}

// Two streams work on columns of the same matrices at once, because launches declare no
// bytes between the columns. SPEC S6.2
func TestActivationsUnderCheck(t *testing.T) {
	d, s := checked(t)
	other, err := d.NewStream("other")
	if err != nil {
		t.Fatal(err)
	}
	var all []*device.Buffer
	alloc := func(n memory.Bytes) device.Range {
		b, err := d.Alloc(memory.Device, n, "test")
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, b)
		s.Fill(b.All(), 0)
		return b.All()
	}
	house := actHouse{
		floats: func(n int) device.Range { return alloc(memory.Bytes(4 * n)) },
		whole:  func(v ...uint32) device.Range { return alloc(memory.Bytes(4 * len(v))) },
	}
	house.issueAll(s, kernels.BF16, 6, 32)
	m := NewMatrix(alloc(4*64*5), kernels.F32, 5, 64)
	w := NewMatrix(alloc(4*64), kernels.F32, 1, 32)
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	for i, stream := range []device.Stream{s, other} {
		half := m.Columns(32*i, 32)
		RMSNorm(stream, Norm{Y: half, X: half, W: w, Epsilon: 1})
		Add(stream, Sum{Y: half, A: half, B: half})
	}
	for _, stream := range []device.Stream{s, other} {
		if err := stream.Sync(); err != nil {
			t.Fatal(err)
		}
	}
	for _, b := range all {
		s.Free(b)
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}
