// This file owns tests of the output layer.

package layer

import (
	"fmt"
	"math"
	"testing"

	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// Losses and gradients are the same however many rows of logits, and of their gradients,
// exist at once; but gradients of weights are sums in another order.
func TestLogitsInParts(t *testing.T) {
	for _, number := range []kernels.Number{kernels.F32, kernels.BF16} {
		fresh := func() *rig {
			return newRig(t, tiny("attention", model.Layer{Attention: attentionLayer()}), rigOptions{number: number, seq: 150})
		}
		want := fresh().results(1)
		row := number.Size() * memory.Bytes(fresh().chunk.last.vocab)
		for _, room := range [][2]memory.Bytes{{1, 1}, {1, 128 * row}, {1, 192 * row}, {1, 1 << 30}, {1 << 30, 1}} {
			t.Run(fmt.Sprint(number, room), func(t *testing.T) {
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
