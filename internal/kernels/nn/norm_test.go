package nn

import (
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/kernels"
)

// begin empties the yard for one draw of a property. The numbers depend on the draw
// alone. Some draws check that every launch uses only bytes that it declares.
func begin(t *rapid.T, y *yard) {
	y.reset(t)
	y.rng = rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
	y.strict = rapid.IntRange(0, 4).Draw(t, "strict") == 0
}

// nearSized is near for sums whose terms are larger than the sums. size is the size of
// the terms.
func nearSized(t failing, what string, m Matrix, want []float64, size float64) {
	t.Helper()
	for i, w := range want {
		part := 2e-6 * (size + math.Abs(w))
		if m.Type == kernels.BF16 {
			part += math.Abs(w) / 256
		}
		if got := float64(m.get(i/m.Cols, i%m.Cols)); !within(got, w, part) {
			t.Fatalf("%s[%d] is %g, want %g; terms are of size %g", what, i, got, w, size)
		}
	}
}

// largest returns the largest absolute value.
func largest(x []float64) (most float64) {
	for _, v := range x {
		most = max(most, math.Abs(v))
	}
	return most
}

// slopes returns the central differences of a function with respect to each number.
func slopes(x []float64, f func() float64) []float64 {
	d := make([]float64, len(x))
	for i, was := range x {
		const h = 1e-6
		x[i] = was + h
		up := f()
		x[i] = was - h
		d[i] = (up - f()) / (2 * h)
		x[i] = was
	}
	return d
}

// inner returns the inner product.
func inner(a, b []float64) (sum float64) {
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}

// drawn returns n numbers that a type can represent.
func drawn(y *yard, kind kernels.Number, n int) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = float64(stored(kind, float32(y.rng.NormFloat64())))
	}
	return x
}

func drawType(t *rapid.T, what string) kernels.Number {
	return rapid.SampledFrom(numbers).Draw(t, what)
}

// norm64 computes a norm by the definition.
func norm64(x, w []float64, epsilon float64) []float64 {
	y, n := make([]float64, len(x)), len(w)
	for at := 0; at < len(x); at += n {
		mean := inner(x[at:at+n], x[at:at+n]) / float64(n)
		for i := range n {
			y[at+i] = x[at+i] / math.Sqrt(mean+epsilon) * w[i]
		}
	}
	return y
}

func TestRMSNorm(t *testing.T) {
	y := newYard(t, 1<<18)
	rapid.Check(t, func(t *rapid.T) {
		begin(t, y)
		rows, width, heads := rapid.IntRange(1, 7).Draw(t, "rows"), rapid.IntRange(1, 90).Draw(t, "width"), rapid.IntRange(1, 3).Draw(t, "heads")
		tx, tw := drawType(t, "x"), drawType(t, "w")
		x, w := drawn(y, tx, rows*width*heads), drawn(y, tw, width)
		n := Norm{X: placeMatrix(y, tx, width*heads, x), W: placeMatrix(y, tw, width, w), Epsilon: 1e-3}
		n.Y = y.matrix(drawType(t, "y"), rows, width*heads)
		if rapid.Bool().Draw(t, "in place") {
			n.Y = n.X
		}
		RMSNorm(y, n)
		near(t, "y", n.Y, norm64(x, w, 1e-3), 1e-6)
	})
}

// The gradient is the slope of the definition, whatever it is added to and wherever it is
// stored.
func TestRMSNormGrad(t *testing.T) {
	y := newYard(t, 1<<18)
	rapid.Check(t, func(t *rapid.T) {
		begin(t, y)
		rows, width, heads := rapid.IntRange(1, 5).Draw(t, "rows"), rapid.IntRange(1, 20).Draw(t, "width"), rapid.IntRange(1, 3).Draw(t, "heads")
		if rapid.IntRange(0, 9).Draw(t, "many rows") == 0 {
			rows, width, heads = rapid.IntRange(100, 400).Draw(t, "many"), rapid.IntRange(1, 2).Draw(t, "few"), 1
		}
		normGradCase(t, y, rows, width, width*heads)
	})
}

func normGradCase(t *rapid.T, y *yard, rows, width, cols int) {
	const epsilon = 0.02
	tx, tw, ty := drawType(t, "x"), drawType(t, "w"), drawType(t, "dy")
	x, w, dy := drawn(y, tx, rows*cols), drawn(y, tw, width), drawn(y, ty, rows*cols)
	n := NormGrad{X: placeMatrix(y, tx, cols, x), W: placeMatrix(y, tw, width, w), DY: placeMatrix(y, ty, cols, dy), Epsilon: epsilon}
	n.DX = y.matrix(drawType(t, "dx"), rows, cols)
	n.Scratch = place[float32](y, int(NormScratch(rows, width)/4))
	wantX := make([]float64, len(x))
	// The loss is computed one row at a time, because other rows do not depend on its
	// numbers.
	for at := 0; at < len(x); at += cols {
		row := x[at : at+cols]
		copy(wantX[at:], slopes(row, func() float64 { return inner(dy[at:at+cols], norm64(row, w, epsilon)) }))
	}
	wantW := slopes(w, func() float64 { return inner(dy, norm64(x, w, epsilon)) })
	tdw := drawType(t, "dw")
	was := drawn(y, tdw, width)
	n.DW = placeMatrix(y, tdw, width, was)
	for i, v := range was {
		wantW[i] += v
	}
	if rapid.Bool().Draw(t, "plus") {
		tp := drawType(t, "plus type")
		plus := drawn(y, tp, rows*cols)
		n.Plus = placeMatrix(y, tp, cols, plus)
		for i, v := range plus {
			wantX[i] += v
		}
	}
	switch rapid.IntRange(0, 2).Draw(t, "in place") {
	case 1:
		n.DX = n.DY
	case 2:
		if n.Plus.Buf != nil {
			n.DX = n.Plus
		}
	}
	RMSNormGrad(y, n)
	// The terms of dx are dy w r, and r is below 1/sqrt(epsilon). Those of dw are dy x r,
	// where x r is below the root of the width, and their errors add up at random.
	nearSized(t, "dx", n.DX, wantX, largest(dy)*largest(w)/math.Sqrt(epsilon))
	nearSized(t, "dw", n.DW, wantW, largest(dy)*math.Sqrt(float64(rows*cols)))
}

func TestNormRefuses(t *testing.T) {
	y := newYard(t, 1<<14)
	m := func(rows, cols int) Matrix { return y.matrix(kernels.F32, rows, cols) }
	for name, f := range map[string]func(){
		"a weight of two rows":    func() { RMSNorm(y, Norm{Y: m(2, 8), X: m(2, 8), W: m(2, 8)}) },
		"a weight that is uneven": func() { RMSNorm(y, Norm{Y: m(2, 8), X: m(2, 8), W: m(1, 3)}) },
		"a result of other shape": func() { RMSNorm(y, Norm{Y: m(2, 7), X: m(2, 8), W: m(1, 8)}) },
		"too little scratch": func() {
			RMSNormGrad(y, NormGrad{DX: m(2, 8), X: m(2, 8), W: m(1, 8), DW: m(1, 8), DY: m(2, 8), Scratch: place[float32](y, 7)})
		},
	} {
		wantPanic(t, name, f)
	}
}

func wantPanic(t *testing.T, name string, f func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if recover() == nil {
			t.Errorf("%s: no panic", name)
		}
	}()
	f()
}
