package vec

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// call is one function of the package on operands of length n. The function writes the
// first outs operands. A scalar result comes last.
type call struct {
	name string
	outs int
	ins  int
	do   func(out, in [][]float32, s, t float32) float32
}

var adam = Adam{Factor: 0.7, Beta1: 0.9, Keep1: 1 - float32(0.9), Beta2: 0.95, Keep2: 1 - float32(0.95), Correct1: 1.7, Correct2: 1.3, Epsilon: 1e-8, Decay: 0.1, LR: 3e-3}

var calls = []call{
	{"Add", 1, 2, func(o, i [][]float32, _, _ float32) float32 { Add(o[0], i[0], i[1]); return 0 }},
	{"Mul", 1, 2, func(o, i [][]float32, _, _ float32) float32 { Mul(o[0], i[0], i[1]); return 0 }},
	{"Scale", 1, 1, func(o, i [][]float32, s, _ float32) float32 { Scale(o[0], i[0], s); return 0 }},
	{"Axpy", 1, 1, func(o, i [][]float32, s, _ float32) float32 { Axpy(o[0], s, i[0]); return 0 }},
	{"AddMul", 1, 2, func(o, i [][]float32, s, _ float32) float32 { AddMul(o[0], i[0], i[1], s); return 0 }},
	{"MulScale", 1, 2, func(o, i [][]float32, s, _ float32) float32 { MulScale(o[0], i[0], i[1], s); return 0 }},
	{"NormGrad", 1, 3, func(o, i [][]float32, s, t float32) float32 { NormGrad(o[0], i[0], i[1], i[2], s, t); return 0 }},
	{"Rotate", 2, 2, func(o, i [][]float32, _, _ float32) float32 { Rotate(o[0], o[1], i[0], i[1]); return 0 }},
	{"Dot", 0, 2, func(_, i [][]float32, _, _ float32) float32 { return Dot(i[0], i[1]) }},
	{"Dot3", 0, 3, func(_, i [][]float32, _, _ float32) float32 { return Dot3(i[0], i[1], i[2]) }},
	{"Sum", 0, 1, func(_, i [][]float32, _, _ float32) float32 { return Sum(i[0]) }},
	{"SumSquares", 0, 1, func(_, i [][]float32, _, _ float32) float32 { return SumSquares(i[0]) }},
	{"Max", 0, 1, func(_, i [][]float32, _, _ float32) float32 { return Max(i[0]) }},
	{"Exp", 1, 1, func(o, i [][]float32, s, _ float32) float32 { Exp(o[0], i[0], s); return 0 }},
	{"ExpSum", 1, 1, func(o, i [][]float32, s, _ float32) float32 { return ExpSum(o[0], i[0], s) }},
	{"Sigmoid", 1, 1, func(o, i [][]float32, _, _ float32) float32 { Sigmoid(o[0], i[0]); return 0 }},
	{"SiLU", 1, 1, func(o, i [][]float32, _, _ float32) float32 { SiLU(o[0], i[0]); return 0 }},
	{"SiLUGrad", 1, 2, func(o, i [][]float32, _, _ float32) float32 { SiLUGrad(o[0], i[0], i[1]); return 0 }},
	{"SwiGLU", 1, 2, func(o, i [][]float32, s, _ float32) float32 { SwiGLU(o[0], i[0], i[1], s); return 0 }},
	{"SwiGLUGrad", 3, 3, func(o, i [][]float32, s, _ float32) float32 {
		return SwiGLUGrad(o[0], o[1], o[2], i[0], i[1], i[2], s)
	}},
	{"AdamW", 3, 1, func(o, i [][]float32, _, _ float32) float32 { AdamW(o[0], o[1], o[2], i[0], &adam); return 0 }},
	{"Narrow and Widen", 1, 1, func(o, i [][]float32, _, _ float32) float32 {
		half := make([]uint16, len(i[0]))
		Narrow(half, i[0])
		Widen(o[0], half)
		return 0
	}},
}

var special = []uint32{
	0x7fc00000, 0xffc00000, 0x7f800001, 0x7f800000, 0xff800000, 0, 0x80000000, 1, 0x80000001,
	0x3f808000, 0x3f818000, 0x7f7fffff, 0xff7fffff, 0x00800000, 0x42b17218, 0xc2aea8f6, 0xc2aeac50,
}

// draw returns n numbers. If rough is set, a few of them are special.
func draw(rng *rand.Rand, n int, rough bool) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rng.NormFloat64() * 4)
		if rough && rng.IntN(20) == 0 {
			x[i] = math.Float32frombits(special[rng.IntN(len(special))])
		}
	}
	return x
}

// bits returns the bits of numbers. All NaNs are equal, because the processor chooses
// which one results.
func bits(x ...float32) (b []uint32) {
	for _, v := range x {
		if v != v {
			v = float32(math.NaN())
		}
		b = append(b, math.Float32bits(v))
	}
	return b
}

// forEachLevel runs f in each form that the processor supports.
func forEachLevel(f func(l level)) {
	had := best
	defer func() { best = had }()
	for l := plain; l <= had; l++ {
		best = l
		f(l)
	}
}

// All forms give the same bits, also in place, and touch nothing beyond the end.
func TestFormsAgree(t *testing.T) {
	for _, c := range calls {
		t.Run(c.name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
				n := rapid.IntRange(0, 300).Draw(t, "n")
				rough, inPlace := rapid.Bool().Draw(t, "rough"), rapid.Bool().Draw(t, "in place")
				var out, in [][]float32
				for range c.outs {
					out = append(out, draw(rng, n+3, false))
				}
				for range c.ins {
					in = append(in, draw(rng, n, rough))
				}
				s, u := float32(rng.NormFloat64()), float32(rng.NormFloat64())
				var want []uint32
				forEachLevel(func(l level) {
					var o, i [][]float32
					for _, x := range in {
						i = append(i, slices.Clone(x))
					}
					for k, x := range out {
						o = append(o, slices.Clone(x))
						if inPlace && k < len(in) && c.name != "Rotate" && c.name != "AdamW" {
							copy(o[k], in[k])
							i[k] = o[k][:n]
						}
					}
					got := bits(c.do(shorten(o, n), i, s, u))
					for _, x := range o {
						got = append(got, bits(x...)...)
					}
					if l == plain {
						want = got
					} else if !slices.Equal(got, want) {
						t.Fatalf("n %d: form %d gives other bits than Go", n, l)
					}
					for k, x := range o {
						if !slices.Equal(x[n:], out[k][n:]) {
							t.Fatalf("n %d: form %d writes beyond the end", n, l)
						}
					}
				})
			})
		})
	}
}

func shorten(x [][]float32, n int) (y [][]float32) {
	for _, v := range x {
		y = append(y, v[:n])
	}
	return y
}

// Sums follow the order in the package's comment.
func TestOrderOfSums(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for n := range 300 {
		x, whole := draw(rng, n, false), n/16*16
		want := func(lanes int) float32 {
			l := make([]float32, lanes)
			for i := range whole {
				l[i%lanes] += x[i]
			}
			for ; lanes > 1; lanes /= 2 {
				for i := range lanes / 2 {
					l[i] += l[i+lanes/2]
				}
			}
			sum := l[0]
			for _, v := range x[whole:] {
				sum += v
			}
			return sum
		}
		forEachLevel(func(l level) {
			if got := Sum(x); got != want(64) {
				t.Fatalf("form %d: the sum of %d numbers is %v, want %v", l, n, got, want(64))
			}
		})
		log := slices.Clone(x)
		for i := range log {
			log[i] = -float32(math.Abs(float64(log[i])))
		}
		e := make([]float32, n)
		got := ExpSum(e, log, 0)
		x = e
		if got != want(16) {
			t.Fatalf("the sum of %d exponentials is %v, want %v", n, got, want(16))
		}
	}
}

func TestExpIsNear(t *testing.T) {
	x, e := make([]float32, 1<<12), make([]float32, 1<<12)
	worst, at := 0.0, float32(0)
	// Every 512th float32 between the bounds is tried, with the sign in the lowest bit.
	for b := uint32(0); b < math.Float32bits(88.8); {
		for i := range x {
			x[i] = math.Float32frombits(b | uint32(i)<<31)
			b += 512 * uint32(i&1)
		}
		Exp(e, x, 0)
		for i, v := range x {
			want := math.Exp(float64(v))
			switch {
			case v < expLeast:
				if e[i] != 0 {
					t.Fatalf("e^%v is %v, want 0", v, e[i])
				}
			case v > expMost:
				if !math.IsInf(float64(e[i]), 1) {
					t.Fatalf("e^%v is %v, want infinity", v, e[i])
				}
			default:
				if d := math.Abs(float64(e[i])/want - 1); !(d <= worst) {
					worst, at = d, v
				}
			}
		}
	}
	t.Logf("largest error %.3g at %v", worst, at)
	if !(worst < 1.2e-7) {
		t.Errorf("e^%v is off by %.3g, more than 1.2e-7", at, worst)
	}
	edge := []float32{float32(math.Inf(-1)), float32(math.Inf(1)), -1e30, 1e30, 0, -1000, 88.7228317, float32(math.NaN())}
	Exp(edge, edge, 0)
	if got := fmt.Sprint(edge); got != "[0 +Inf 0 +Inf 1 0 3.4027985e+38 NaN]" {
		t.Errorf("at the edges: %s", got)
	}
}

// Each fused loop follows its formula in float64.
func TestFormulas(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	const n = 77
	near := func(what string, got float32, want float64) {
		t.Helper()
		if math.Abs(float64(got)-want) > 2e-6*(1+math.Abs(want)) {
			t.Errorf("%s is %v, want %v", what, got, want)
		}
	}
	a, b, dy := draw(rng, n, false), draw(rng, n, false), draw(rng, n, false)
	da, db, y := make([]float32, n), make([]float32, n), make([]float32, n)
	const w = 0.75
	value := func(a, b float64) float64 { return a / (1 + math.Exp(-a)) * b }
	dw, wantDW := SwiGLUGrad(da, db, y, a, b, dy, w), 0.0
	for i := range a {
		A, B, G := float64(a[i]), float64(b[i]), float64(dy[i])
		const h = 1e-5
		near("y", y[i], w*value(A, B))
		near("da", da[i], G*w*(value(A+h, B)-value(A-h, B))/(2*h))
		near("db", db[i], G*w*(value(A, B+h)-value(A, B-h))/(2*h))
		wantDW += G * value(A, B)
	}
	near("dw", dw, wantDW)
	SiLUGrad(da, a, dy)
	for i := range a {
		const h = 1e-5
		near("SiLU's slope", da[i], float64(dy[i])*(value(float64(a[i])+h, 1)-value(float64(a[i])-h, 1))/(2*h))
	}
	x, m, v := draw(rng, n, false), draw(rng, n, false), draw(rng, n, false)
	for i := range v {
		v[i] *= v[i]
	}
	was, m0, v0 := slices.Clone(x), slices.Clone(m), slices.Clone(v)
	AdamW(x, m, v, dy, &adam)
	for i := range x {
		g := float64(dy[i]) * 0.7
		M, V := 0.9*float64(m0[i])+0.1*g, 0.95*float64(v0[i])+0.05*g*g
		near("m", m[i], M)
		near("v", v[i], V)
		near("w", x[i], float64(was[i])-3e-3*(M*1.7/(math.Sqrt(V*1.3)+1e-8)+0.1*float64(was[i])))
	}
}
