package nn

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

func TestHyperEncode(t *testing.T) {
	b := Hyper{LR: 1, Clip: -2}.Encode()
	if len(b) != int(HyperBytes) || b[2] != 0x80 || b[3] != 0x3f || b[31] != 0xc0 {
		t.Errorf("encoded as %x", b)
	}
}

// An update follows the definition, with and without clipping and decay, and stores the
// weights in the parameters' type.
func TestAdamW(t *testing.T) {
	y := newYard(t, 1<<18)
	rapid.Check(t, func(t *rapid.T) {
		begin(t, y)
		n := rapid.IntRange(1, 200).Draw(t, "n")
		gt, pt := drawType(t, "g"), drawType(t, "parameter")
		w, m, v, g := drawn(y, kernels.F32, n), drawn(y, kernels.F32, n), drawn(y, kernels.F32, n), drawn(y, gt, n)
		for i := range v {
			v[i] = 0.01 + math.Abs(v[i])
		}
		h := Hyper{LR: 1e-2, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-6, Decay: 0.1, Correct1: 1.5, Correct2: 1.25, Clip: rapid.SampledFrom([]float32{0, 0.5, 1e6}).Draw(t, "clip")}
		run := func(x []float64) Matrix { return solid(y, kernels.F32, n, x) }
		mw, mm, mv := run(w), run(m), run(v)
		a := Adam{W: mw.Range, M: mm.Range, V: mv.Range, G: solid(y, gt, n, g).Range, GType: gt, Hyper: place[float32](y, 8), NoDecay: rapid.Bool().Draw(t, "no decay")}
		copy(numbersAt[byte](a.Hyper), h.Encode())
		factor, decay := 1.0, float64(h.Decay)
		if a.NoDecay {
			decay = 0
		}
		if rapid.Bool().Draw(t, "norm") {
			norm := inner(g, g)
			a.Norm = put(y, []float32{float32(norm)})
			if h.Clip != 0 {
				factor = min(1, float64(h.Clip)/math.Sqrt(norm))
			}
		}
		param := y.matrix(pt, 1, n)
		if rapid.Bool().Draw(t, "with parameters") {
			a.Param, a.ParamType = param.Range, pt
		}
		AdamW(y, a)
		for i := range w {
			d := g[i] * factor
			m[i] = 0.9*m[i] + 0.1*d
			v[i] = 0.95*v[i] + 0.05*d*d
			w[i] -= 1e-2 * (m[i]*1.5/(math.Sqrt(v[i]*1.25)+1e-6) + decay*w[i])
		}
		nearSized(t, "w", mw, w, 1)
		nearSized(t, "m", mm, m, 1)
		nearSized(t, "v", mv, v, 1)
		for i := range n {
			if got, want := param.get(0, i), stored(pt, mw.get(0, i)); a.Param.Buf != nil && got != want {
				t.Fatalf("parameter %d is %v, want %v", i, got, want)
			}
		}
	})
}

func TestAddSquares(t *testing.T) {
	y := newYard(t, 1<<20)
	rapid.Check(t, func(t *rapid.T) {
		begin(t, y)
		n, kind := rapid.OneOf(rapid.IntRange(1, 300), rapid.SampledFrom([]int{squaresRun, squaresRun + 1, 3*squaresRun - 5})).Draw(t, "n"), drawType(t, "type")
		y.strict = y.strict && n < 1000
		x, sum := drawn(y, kind, n), put(y, []float32{2})
		AddSquares(y, Squares{Sum: sum, X: solid(y, kind, n, x).Range.Slice(0, kind.Size()*memory.Bytes(n)), Type: kind, Scratch: place[float32](y, int(SquaresScratch(n)/4))})
		if got, want := float64(numbersAt[float32](sum)[0]), 2+inner(x, x); !within(got, want, 1e-6*want) {
			t.Fatalf("the sum of squares is %v, want %v", got, want)
		}
	})
}

func TestUpdatesRefuse(t *testing.T) {
	y := newYard(t, 1<<14)
	good := Adam{W: place[float32](y, 4), M: place[float32](y, 4), V: place[float32](y, 4), G: place[float32](y, 4), Hyper: place[float32](y, 8)}
	AdamW(y, good)
	for name, change := range map[string]func(a *Adam){
		"no weights":       func(a *Adam) { a.W.Len = 0 },
		"part of a weight": func(a *Adam) { a.W.Len = 15 },
		"too few moments":  func(a *Adam) { a.V.Len = 12 },
		"too few settings": func(a *Adam) { a.Hyper.Len = 28 },
	} {
		bad := good
		change(&bad)
		wantPanic(t, name, func() { AdamW(y, bad) })
	}
}
