// This file owns the tests of latent attention.

package layer

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

func latentModel(change func(*model.MLA)) *model.Model {
	a := model.MLA{Heads: 3, QRank: 10, KVRank: 9, Nope: 6, Rope: 4, V: 5, LatentNorm: true}
	if change != nil {
		change(&a)
	}
	return tiny("latent attention", model.Layer{MLA: &a})
}

func TestGradientsOfLatentAttention(t *testing.T) {
	for name, change := range map[string]func(*model.MLA){
		"narrow queries":                func(*model.MLA) {},
		"queries at once":               func(a *model.MLA) { a.QRank = 0 },
		"narrow queries, without norms": func(a *model.MLA) { a.LatentNorm = false },
		"neither":                       func(a *model.MLA) { a.QRank, a.LatentNorm = 0, false },
		"wide values":                   func(a *model.MLA) { a.V, a.Nope, a.Rope = 12, 3, 8 },
	} {
		t.Run(name, func(t *testing.T) { checkGradients(t, latentModel(change), rigOptions{}) })
	}
}

// results returns the loss and all gradients of some steps.
func (r *rig) results(steps int) (all []float32) {
	for range steps {
		all = append(all, float32(r.step()))
		for _, u := range r.chunk.Units {
			for i := range u.Params {
				all = append(all, r.get(u, i, 1)...)
			}
		}
	}
	return all
}

// Gradients have the same bits whichever groups are kept, recomputed or offloaded.
func TestLatentAttentionUnderEveryChoice(t *testing.T) { // SPEC S5.2
	groups := []string{"qkv_linear", "mla_up_proj", "core_attn", "attn_proj"}
	choices := []memory.Choice{memory.Keep, memory.Recompute, memory.Offload}
	for _, queries := range []int{0, 10} {
		m := latentModel(func(a *model.MLA) { a.QRank = queries })
		want := newRig(t, m, rigOptions{}).results(2)
		for set := range 3 * 3 * 3 * 3 {
			p := memory.Policy{}
			for i, rest := 0, set; i < len(groups); i, rest = i+1, rest/3 {
				p[memory.Unit{Name: groups[i]}] = choices[rest%3]
			}
			t.Run(fmt.Sprintf("%d/%d", queries, set), func(t *testing.T) {
				r := newRig(t, m, rigOptions{recompute: p})
				if !slices.Equal(r.results(2), want) {
					t.Errorf("%v differs", p)
				}
				for _, g := range r.rt.Summary(memory.Key{Microbatches: 1}).Groups {
					c, chosen := p[memory.Unit{Name: g.Name}]
					if chosen && (g.Units[c] != 1 || (c == memory.Offload) != (g.Moved > 0)) {
						t.Errorf("%s was not treated by choice %v", g.Name, c)
					}
				}
			})
		}
	}
}

// The loss in bf16 equals that in fp32 up to rounding.
func TestLatentAttentionOfBF16(t *testing.T) {
	want := newRig(t, latentModel(nil), rigOptions{}).step()
	got := newRig(t, latentModel(nil), rigOptions{number: kernels.BF16}).step()
	if got == want || math.Abs(got-want) > 0.01 {
		t.Errorf("the loss is %g in bf16 and %g in fp32", got, want)
	}
}
