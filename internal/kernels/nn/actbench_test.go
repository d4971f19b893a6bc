// This file owns the benchmark of norms, activations, the loss and the optimiser, beside
// straightforward loops in the same run.

package nn

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// actBench is a kernel, the bytes that it moves for each number of X, and the same work
// in plain Go.
type actBench struct {
	name  string
	moved int
	issue func()
	plain func() // only for fp32
}

const benchRows, benchCols = 1024, 1024

func actBenches(y *yard, kind kernels.Number) []actBench {
	size := int(kind.Size())
	m := func(rows, cols int) Matrix {
		c := NewMatrix(place[float32](y, rows*cols), kind, rows, cols)
		y.fill(c, func() float32 { return float32(y.rng.NormFloat64()) })
		return c
	}
	f := func(n int) device.Range { return NewMatrix(place[float32](y, n), kernels.F32, 1, n).Range }
	x, w, out, wide, dwide := m(benchRows, benchCols), m(1, benchCols), m(benchRows, benchCols), m(benchRows, 2*benchCols), m(benchRows, 2*benchCols)
	n := benchRows * benchCols
	hyper := place[float32](y, 8)
	copy(numbersAt[byte](hyper), Hyper{LR: 1e-3, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, Correct1: 1, Correct2: 1}.Encode())
	a := Adam{W: f(n), M: f(n), V: f(n), G: x.Range, GType: kind, Hyper: hyper}
	for _, r := range []device.Range{a.W, a.M, a.V} {
		clear(numbersAt[byte](r))
	}
	grad := NormGrad{DX: out, DW: m(1, benchCols), X: x, W: w, DY: m(benchRows, benchCols), Scratch: f(int(NormScratch(benchRows, benchCols) / 4))}
	ids := make([]uint32, benchRows)
	for i := range ids {
		ids[i] = uint32(y.rng.IntN(256))
	}
	fp := func(m Matrix) []float32 { return numbersAt[float32](m.Range) }
	table := m(256, benchCols)
	list := put(y, ids)
	return []actBench{
		{"norm", 2 * size, func() { RMSNorm(y, Norm{Y: out, X: x, W: w}) }, func() { plainNormLoop(fp(out), fp(x), fp(w)) }},
		{"norm grad", 3 * size, func() { RMSNormGrad(y, grad) }, nil},
		{"swiglu", 3 * size, func() { SwiGLU(y, Gate{Y: out, X: wide}) }, func() { plainGateLoop(fp(out), fp(wide)) }},
		{"swiglu grad", 6 * size, func() { SwiGLUGrad(y, GateGrad{DX: dwide, X: wide, DY: out, Y: x}) }, nil},
		{"add", 3 * size, func() { Add(y, Sum{Y: out, A: x, B: grad.DY}) }, nil},
		{"loss", size, func() {
			CrossEntropy(y, Loss{Logits: out, Targets: list, Losses: firstFloats(a.W, benchRows), Scale: 1})
		}, func() { plainLossLoop(numbersAt[float32](a.W), fp(out)) }},
		{"embed grad", size, func() {
			EmbedGrad(y, LookupGrad{DTable: table, DY: x, IDs: list, Scratch: firstFloats(a.M, benchRows+257)})
		}, nil},
		{"adamw", 24 + size, func() { AdamW(y, a) }, func() {
			plainAdamLoop(numbersAt[float32](a.W), numbersAt[float32](a.M), numbersAt[float32](a.V), fp(x))
		}},
		{"squares", size, func() {
			AddSquares(y, Squares{Sum: firstFloats(a.V, 1), X: x.Range, Type: kind, Scratch: firstFloats(a.W, 64)})
		}, nil},
	}
}

// firstFloats returns the first n numbers of a range.
func firstFloats(r device.Range, n int) device.Range { return r.Slice(0, memory.Bytes(4*n)) }

func plainNormLoop(y, x, w []float32) {
	for len(x) > 0 {
		var sum float32
		for _, v := range x[:len(w)] {
			sum += v * v
		}
		r := 1 / float32(math.Sqrt(float64(sum/float32(len(w)))))
		for j, v := range w {
			y[j] = x[j] * r * v
		}
		y, x = y[len(w):], x[len(w):]
	}
}

func plainGateLoop(y, x []float32) {
	for len(y) > 0 {
		for j, a := range x[:benchCols] {
			y[j] = a / (1 + float32(math.Exp(float64(-a)))) * x[j+benchCols]
		}
		y, x = y[benchCols:], x[2*benchCols:]
	}
}

func plainLossLoop(losses, x []float32) {
	for i := range benchRows {
		var sum float64
		for _, v := range x[i*benchCols:][:benchCols] {
			sum += math.Exp(float64(v))
		}
		losses[i] = float32(math.Log(sum))
	}
}

func plainAdamLoop(w, m, v, g []float32) {
	for i, d := range g {
		m[i] = 0.9*m[i] + 0.1*d
		v[i] = 0.95*v[i] + 0.05*d*d
		w[i] -= 1e-3 * m[i] / (float32(math.Sqrt(float64(v[i]))) + 1e-8)
	}
}

func BenchmarkActivations(b *testing.B) {
	y := newYard(b, 96<<20)
	y.strict = false
	for _, kind := range numbers {
		y.reset(b)
		for _, c := range actBenches(y, kind) {
			b.Run(fmt.Sprintf("%s/%d bytes", c.name, kind.Size()), func(b *testing.B) {
				best, plain := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
				alone := c.plain != nil && kind == kernels.F32
				for b.Loop() {
					began := time.Now()
					c.issue()
					best = min(best, time.Since(began))
					if alone {
						began = time.Now()
						c.plain()
						plain = min(plain, time.Since(began))
					}
				}
				const n = benchRows * benchCols
				b.ReportMetric(float64(best)/n, "ns/number")
				b.ReportMetric(float64(c.moved)*n/float64(best), "GB/s")
				b.ReportMetric(0, "ns/op")
				if alone {
					b.ReportMetric(float64(plain)/float64(best), "x_plain")
				}
			})
		}
	}
}
