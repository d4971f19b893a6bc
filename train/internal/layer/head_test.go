// This file owns tests of the output layer.

package layer

import (
	"fmt"
	"math"
	"testing"

	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// Losses and gradients are the same however many rows of logits, and of their gradients,
// exist at once; but gradients of weights are sums in another order.
func TestLogitsInParts(t *testing.T) {
	for i, number := range []kernels.Number{kernels.F32, kernels.BF16, kernels.F32, kernels.BF16} {
		fresh := func() *rig {
			m := tiny("attention", model.Layer{Attention: attentionLayer()})
			m.Vocab += i / 2 * 5
			return newRig(t, m, rigOptions{number: number, seq: 150})
		}
		want := fresh().results(1)
		row := number.Size() * memory.Bytes(fresh().chunk.last.vocab)
		for _, room := range [][2]memory.Bytes{{1, 1}, {1, 128 * row}, {1, 192 * row}, {1, 1 << 30}, {1 << 30, 1}} {
			t.Run(fmt.Sprint(number, i/2, room), func(t *testing.T) {
				r := fresh()
				r.chunk.last.logitsRoom, r.chunk.last.gradientsRoom = room[0], room[1]
				got := r.results(1)
				if got[0] != want[0] {
					t.Errorf("the loss is %g, and in one part %g", got[0], want[0])
				}
				for i := range want {
					if d := math.Abs(float64(got[i] - want[i])); d > 1e-4*(1+math.Abs(float64(want[i]))) {
						t.Fatalf("number %d of the gradients is %g, and in one part %g", i, got[i], want[i])
					}
				}
			})
		}
	}
}

// Products of any vocabulary are those of the fast kernels, but that of columns which are no whole vector.
func TestProductsOfOddVocabulary(t *testing.T) {
	const rows = 64
	for _, vocab := range []int{32, 37, 41, 5} {
		m := tiny("odd", model.Layer{Attention: attentionLayer()})
		m.Vocab = vocab
		r := newRig(t, m, rigOptions{number: kernels.BF16})
		o := r.chunk.last
		r.set(o.logits.u, o.logits.i, make([]float32, vocab*m.Hidden))
		if got, want := r.results(1)[0], math.Log(float64(vocab)); math.Abs(float64(got)-want) > 1e-5 {
			t.Errorf("vocabulary %d: the loss of equal logits is %g; want %g", vocab, got, want)
		}
		logits := nn.NewMatrix(r.alloc(rows*o.cols()), kernels.F32, rows, o.cols())
		xn := nn.NewMatrix(r.alloc(rows*m.Hidden).Slice(0, 2*memory.Bytes(rows*m.Hidden)), kernels.BF16, rows, m.Hidden)
		dy := logits.Half().Columns(0, vocab)
		products := []nn.Product{{A: dy, B: xn, C: o.logits.dw(), TransA: true}, {A: dy, B: o.logits.w(), C: xn}}
		seen := 0
		for _, p := range append(o.products(logits, xn), products...) {
			if p.TransB {
				seen += p.C.Cols
			}
			if fast := nn.GemmLaunch(p).Tuned.Kernel != nil; fast != (p.C.Cols >= 8) {
				t.Errorf("vocabulary %d: a product of %d x %d x %d has a fast kernel: %v", vocab, p.C.Rows, p.C.Cols, p.A.Cols, fast)
			}
		}
		if seen != vocab {
			t.Errorf("products of a vocabulary of %d compute %d logits", vocab, seen)
		}
	}
}
