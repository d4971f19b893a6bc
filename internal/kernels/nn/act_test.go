package nn

import (
	"bytes"
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// swiglu64 computes one row by the definition. x has twice as many numbers as the result.
func swiglu64(x []float64, weight float64) []float64 {
	n := len(x) / 2
	y := make([]float64, n)
	for i := range y {
		y[i] = x[i] / (1 + math.Exp(-x[i])) * x[n+i] * weight
	}
	return y
}

// drawSegments draws segments of rows, some of them empty, with gaps between them. It
// also returns which rows are live.
func drawSegments(t *rapid.T, y *yard, rows int) (Segments, []bool) {
	live := make([]bool, rows)
	if !rapid.Bool().Draw(t, "segments") {
		for i := range live {
			live[i] = true
		}
		return Segments{}, live
	}
	var pairs []uint32
	for at := 0; at <= rows; {
		n := rapid.IntRange(0, rows-at).Draw(t, "segment")
		pairs = append(pairs, uint32(at), uint32(n))
		for i := range n {
			live[at+i] = true
		}
		at += n + rapid.IntRange(1, 3).Draw(t, "gap")
	}
	return Segments{Range: put(y, pairs), Experts: len(pairs) / 2}, live
}

// nearLive compares live rows like near. All other rows must be unchanged.
func nearLive(t *rapid.T, what string, m, was Matrix, want []float64, live []bool, tolerance float64) {
	t.Helper()
	for i, l := range live {
		if l {
			near(t, what, m.Part(i, 1), want[i*m.Cols:(i+1)*m.Cols], tolerance)
			continue
		}
		for j := range m.Cols {
			if math.Float32bits(m.get(i, j)) != math.Float32bits(was.get(i, j)) {
				t.Fatalf("%s: row %d, which is in no segment, was written", what, i)
			}
		}
	}
}

// twinOf returns a copy of a matrix at another place.
func twinOf(y *yard, m Matrix) Matrix {
	c := m
	c.Range = place[uint64](y, int(m.Range.Len+7)/8).Slice(0, m.Range.Len)
	copy(numbersAt[byte](c.Range), numbersAt[byte](m.Range))
	return c
}

// weightsOf draws a weight for each row, or none at all.
func weightsOf(t *rapid.T, y *yard, rows int) ([]float64, device.Range) {
	w := make([]float64, rows)
	if !rapid.Bool().Draw(t, "weights") {
		for i := range w {
			w[i] = 1
		}
		return w, device.Range{}
	}
	w = drawn(y, kernels.F32, rows)
	return w, solid(y, kernels.F32, rows, w).Range
}

func TestSwiGLU(t *testing.T) {
	y := newYard(t, 1<<18)
	rapid.Check(t, func(t *rapid.T) {
		begin(t, y)
		rows, cols, tx := rapid.IntRange(1, 9).Draw(t, "rows"), rapid.IntRange(1, 70).Draw(t, "columns"), drawType(t, "x")
		x := drawn(y, tx, rows*2*cols)
		g := Gate{X: placeMatrix(y, tx, 2*cols, x), Y: y.matrix(drawType(t, "y"), rows, cols)}
		var live []bool
		var weight, want []float64
		g.Seg, live = drawSegments(t, y, rows)
		weight, g.Weight = weightsOf(t, y, rows)
		for i, w := range weight {
			want = append(want, swiglu64(x[2*i*cols:2*(i+1)*cols], w)...)
		}
		was := twinOf(y, g.Y)
		SwiGLU(y, g)
		nearLive(t, "y", g.Y, was, want, live, 1e-6)
	})
}

func TestSwiGLUGrad(t *testing.T) {
	y := newYard(t, 1<<18)
	rapid.Check(t, func(t *rapid.T) {
		begin(t, y)
		rows, cols, tx, ty := rapid.IntRange(1, 9).Draw(t, "rows"), rapid.IntRange(1, 40).Draw(t, "columns"), drawType(t, "x"), drawType(t, "dy")
		x, dy := drawn(y, tx, rows*2*cols), drawn(y, ty, rows*cols)
		g := GateGrad{X: placeMatrix(y, tx, 2*cols, x), DY: placeMatrix(y, ty, cols, dy), DX: y.matrix(drawType(t, "dx"), rows, 2*cols)}
		var live []bool
		var weight, wantX, wantY, wantW []float64
		g.Seg, live = drawSegments(t, y, rows)
		weight, g.Weight = weightsOf(t, y, rows)
		for i := range rows {
			row, d := x[2*i*cols:2*(i+1)*cols], dy[i*cols:(i+1)*cols]
			loss := func() float64 { return inner(d, swiglu64(row, weight[i])) }
			wantX, wantY = append(wantX, slopes(row, loss)...), append(wantY, swiglu64(row, weight[i])...)
			wantW = append(wantW, slopes(weight[i:i+1], loss)...)
		}
		var dw Matrix
		if rapid.Bool().Draw(t, "dweight") {
			dw = NewMatrix(place[float32](y, rows), kernels.F32, rows, 1)
			g.DWeight = dw.Range
		}
		if rapid.Bool().Draw(t, "y") {
			g.Y = y.matrix(drawType(t, "y type"), rows, cols)
			if rapid.Bool().Draw(t, "y is dy") {
				g.Y = g.DY
			}
		}
		if rapid.Bool().Draw(t, "dx is x") {
			g.DX = g.X
		}
		wasX := twinOf(y, g.DX)
		wasDY := bytes.Clone(numbersAt[byte](g.DY.Range))
		SwiGLUGrad(y, g)
		nearLive(t, "dx", g.DX, wasX, wantX, live, 2e-6)
		for i, l := range live {
			if l && g.Y.Buf != nil {
				near(t, "y", g.Y.Part(i, 1), wantY[i*cols:(i+1)*cols], 1e-6)
			}
			if l && dw.Buf != nil && !within(float64(dw.get(i, 0)), wantW[i], 1e-5*(1+math.Abs(wantW[i]))) {
				t.Fatalf("dweight[%d] is %v, want %v", i, dw.get(i, 0), wantW[i])
			}
		}
		if g.Y.Range != g.DY.Range && !bytes.Equal(wasDY, numbersAt[byte](g.DY.Range)) {
			t.Fatalf("the gradient that is read was written")
		}
	})
}

func TestAdd(t *testing.T) {
	y := newYard(t, 1<<18)
	rapid.Check(t, func(t *rapid.T) {
		begin(t, y)
		rows, cols, ta, tb := rapid.IntRange(1, 9).Draw(t, "rows"), rapid.IntRange(1, 70).Draw(t, "columns"), drawType(t, "a"), drawType(t, "b")
		a, b := drawn(y, ta, rows*cols), drawn(y, tb, rows*cols)
		s := Sum{Y: y.matrix(drawType(t, "y"), rows, cols), A: placeMatrix(y, ta, cols, a), B: placeMatrix(y, tb, cols, b)}
		switch rapid.IntRange(0, 2).Draw(t, "in place") {
		case 1:
			s.Y = s.A
		case 2:
			s.Y = s.B
		}
		Add(y, s)
		for i := range a {
			if got, want := s.Y.get(i/cols, i%cols), stored(s.Y.Type, float32(a[i])+float32(b[i])); got != want {
				t.Fatalf("%v + %v is %v, want %v", a[i], b[i], got, want)
			}
		}
	})
}

func TestGateRows(t *testing.T) {
	y := newYard(t, 1<<18)
	rapid.Check(t, func(t *rapid.T) {
		begin(t, y)
		rows, cols, tx, ty := rapid.IntRange(1, 9).Draw(t, "rows"), rapid.IntRange(1, 70).Draw(t, "columns"), drawType(t, "x"), drawType(t, "dy")
		x, dy, logit := drawn(y, tx, rows*cols), drawn(y, ty, rows*cols), drawn(y, kernels.F32, rows)
		gate64 := func(i int) []float64 {
			out := make([]float64, cols)
			for j := range out {
				out[j] = x[i*cols+j] / (1 + math.Exp(-logit[i]))
			}
			return out
		}
		var want, wantX, wantL []float64
		for i := range rows {
			loss := func() float64 { return inner(dy[i*cols:(i+1)*cols], gate64(i)) }
			want = append(want, gate64(i)...)
			wantX, wantL = append(wantX, slopes(x[i*cols:(i+1)*cols], loss)...), append(wantL, slopes(logit[i:i+1], loss)...)
		}
		g := RowGate{Y: y.matrix(drawType(t, "y"), rows, cols), X: placeMatrix(y, tx, cols, x), Logit: placeMatrix(y, kernels.F32, 1, logit)}
		b := RowGateGrad{DX: y.matrix(drawType(t, "dx"), rows, cols), DLogit: y.matrix(kernels.F32, rows, 1), DY: placeMatrix(y, ty, cols, dy), X: g.X, Logit: g.Logit}
		if rapid.Bool().Draw(t, "in place") {
			b.DX = b.DY
		}
		GateRowsGrad(y, b)
		near(t, "dx", b.DX, wantX, 1e-6)
		nearSized(t, "dlogit", b.DLogit, wantL, float64(cols))
		if rapid.Bool().Draw(t, "y is x") {
			g.Y = g.X
		}
		GateRows(y, g)
		near(t, "y", g.Y, want, 1e-6)
	})
}

func TestActivationsRefuse(t *testing.T) {
	y := newYard(t, 1<<14)
	m := func(rows, cols int) Matrix { return y.matrix(kernels.F32, rows, cols) }
	for name, f := range map[string]func(){
		"halves that do not fit": func() { SwiGLU(y, Gate{Y: m(2, 8), X: m(2, 15)}) },
		"too few weights":        func() { SwiGLU(y, Gate{Y: m(2, 8), X: m(2, 16), Weight: place[float32](y, 1)}) },
		"a sum of two shapes":    func() { Add(y, Sum{Y: m(2, 8), A: m(2, 8), B: m(1, 8)}) },
		"logits of two columns":  func() { GateRows(y, RowGate{Y: m(2, 8), X: m(2, 8), Logit: m(2, 2)}) },
		"logits of bf16":         func() { GateRows(y, RowGate{Y: m(2, 8), X: m(2, 8), Logit: y.matrix(kernels.BF16, 2, 1)}) },
		"a segment beyond the end": func() {
			SwiGLU(y, Gate{Y: m(4, 8), X: m(4, 16), Seg: Segments{Range: put(y, []uint32{1, 4}), Experts: 1}})
		},
	} {
		wantPanic(t, name, f)
	}
}
