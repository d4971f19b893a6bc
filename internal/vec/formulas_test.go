// This file tests every loop against its formula, and what slices it takes.

package vec

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// formulas are what the calls compute, one element at a time: the first result, or the element that a sum adds.
var formulas = map[string]func(out, in []float64, s, t float64) float64{
	"Add":        func(_, x []float64, _, _ float64) float64 { return x[0] + x[1] },
	"Mul":        func(_, x []float64, _, _ float64) float64 { return x[0] * x[1] },
	"Scale":      func(_, x []float64, s, _ float64) float64 { return x[0] * s },
	"Axpy":       func(o, x []float64, s, _ float64) float64 { return o[0] + s*x[0] },
	"AddMul":     func(o, x []float64, s, _ float64) float64 { return o[0] + s*x[0]*x[1] },
	"MulScale":   func(_, x []float64, s, _ float64) float64 { return x[0] * s * x[1] },
	"NormGrad":   func(_, x []float64, s, t float64) float64 { return x[0]*x[1]*s - x[2]*t },
	"Rotate":     func(o, x []float64, _, _ float64) float64 { return o[0]*x[0] - o[1]*x[1] },
	"Dot":        func(_, x []float64, _, _ float64) float64 { return x[0] * x[1] },
	"Dot3":       func(_, x []float64, _, _ float64) float64 { return x[0] * x[1] * x[2] },
	"Sum":        func(_, x []float64, _, _ float64) float64 { return x[0] },
	"SumSquares": func(_, x []float64, _, _ float64) float64 { return x[0] * x[0] },
	"Exp":        func(_, x []float64, s, _ float64) float64 { return math.Exp(x[0] - s) },
	"ExpSum":     func(_, x []float64, s, _ float64) float64 { return math.Exp(x[0] - s) },
	"Sigmoid":    func(_, x []float64, _, _ float64) float64 { return logistic(x[0]) },
	"SiLU":       func(_, x []float64, _, _ float64) float64 { return x[0] * logistic(x[0]) },
	"SwiGLU":     func(_, x []float64, s, _ float64) float64 { return x[0] * logistic(x[0]) * x[1] * s },
	"Narrow and Widen": func(_, x []float64, _, _ float64) float64 {
		return x[0] // to 8 bits
	},
}

func logistic(x float64) float64 { return 1 / (1 + math.Exp(-x)) }

// Each call computes its formula, with any form. SwiGLUGrad, SiLUGrad and AdamW are in TestFormulas.
func TestEachCallIsItsFormula(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for _, c := range calls {
		formula := formulas[c.name]
		if formula == nil {
			continue
		}
		const n = 77
		var in, out [][]float32
		for range c.ins {
			in = append(in, draw(rng, n, false))
		}
		for range c.outs {
			out = append(out, draw(rng, n, false))
		}
		s, u := float32(rng.NormFloat64()), float32(rng.NormFloat64())
		forEachLevel(func(l level) {
			o := make([][]float32, c.outs)
			for k := range o {
				o[k] = slices.Clone(out[k])
			}
			got := c.do(o, in, s, u)
			sum, size := 0.0, 0.0
			for i := range n {
				var x, y []float64
				for k := range in {
					x = append(x, float64(in[k][i]))
				}
				for k := range out {
					y = append(y, float64(out[k][i]))
				}
				want := formula(y, x, float64(s), float64(u))
				sum += want
				size += math.Abs(want)
				most := 1e-5 * (1 + math.Abs(want))
				if c.name == "Narrow and Widen" {
					most = math.Abs(want) / 256
				}
				if c.outs > 0 && !(math.Abs(float64(o[0][i])-want) <= most) {
					t.Fatalf("%s, form %d: element %d is %v, want %v", c.name, l, i, o[0][i], want)
				}
				if c.name == "Rotate" {
					if want := y[1]*x[0] + y[0]*x[1]; !(math.Abs(float64(o[1][i])-want) <= 1e-5*(1+math.Abs(want))) {
						t.Fatalf("Rotate, form %d: the second element %d is %v, want %v", l, i, o[1][i], want)
					}
				}
			}
			if (c.outs == 0 || c.name == "ExpSum") && !(math.Abs(float64(got)-sum) <= 1e-5*size) {
				t.Errorf("%s, form %d: the sum is %v, want %v", c.name, l, got, sum)
			}
		})
	}
}

// Max is the largest number wherever it is, also where all are below zero and others are none, and minus infinity of nothing.
func TestMaxFindsTheLargestAnywhere(t *testing.T) {
	forEachLevel(func(l level) {
		for _, n := range []int{0, 1, 15, 16, 17, 64, 100, 160} {
			x := make([]float32, n)
			for at := range n {
				for i := range x {
					x[i] = -2 - float32(i)
					if i%3 == 1 {
						x[i] = float32(math.NaN())
					}
				}
				x[at] = -1
				if got := Max(x); got != -1 {
					t.Fatalf("form %d: the largest of %d numbers is %v, want number %d", l, n, got, at)
				}
			}
			if n == 0 && Max(x) != float32(math.Inf(-1)) {
				t.Errorf("form %d: the largest of nothing is %v", l, Max(x))
			}
		}
	})
}

// A call panics if a slice is shorter than the first one, whichever form handles it, and before it writes.
func TestShorterSlicesPanic(t *testing.T) {
	type wide struct {
		name string
		n    int
		do   func(f [][]float32, h [][]uint16)
	}
	all := []wide{
		{"Widen", 1, func(f [][]float32, h [][]uint16) { Widen(f[0], h[1]) }},
		{"Narrow", 1, func(f [][]float32, h [][]uint16) { Narrow(h[0], f[1]) }},
	}
	for _, c := range calls {
		if c.name != "Narrow and Widen" {
			all = append(all, wide{c.name, c.outs + c.ins - 1, func(f [][]float32, _ [][]uint16) { c.do(f[:c.outs], f[c.outs:], 1, 1) }})
		}
	}
	for _, c := range all {
		for _, n := range []int{1, 16, 35} {
			for short := range c.n + 1 { // slice 0 is the first one, which may be shorter
				forEachLevel(func(l level) {
					var f [][]float32
					var h [][]uint16
					for k := range c.n + 1 {
						m := n
						if k == short {
							m--
						}
						f, h = append(f, make([]float32, m)), append(h, make([]uint16, m))
						for i := range m {
							f[k][i] = 3
						}
					}
					said := func() (said any) {
						defer func() { said = recover() }()
						c.do(f, h)
						return nil
					}()
					if (said == nil) != (short == 0) {
						t.Errorf("%s of %d, form %d, slice %d is shorter: %v", c.name, n, l, short, said)
					}
					for i, v := range f[0] {
						if short > 0 && c.name != "Narrow" && v != 3 {
							t.Errorf("%s of %d, form %d, slice %d is shorter: element %d is written", c.name, n, l, short, i)
							break
						}
					}
				})
			}
		}
	}
}

// The form that calls take is the best of the processor.
func TestBestForm(t *testing.T) {
	if want := detect(); best != want {
		t.Errorf("calls take form %d, and the processor has %d", best, want)
	}
}
