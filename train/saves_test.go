// This file owns the comparison of what layers save with what the planner says that
// Megatron's do: the differences are known one by one.

package train

import (
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// unsaved are the planner's tensors that our layers do not save.
var unsaved = []string{
	"statistics of the norm", "statistics of the q, k norms", // backward passes sum squares again
	"fc2 input",                           // activations' outputs come from their inputs on the way back
	"normed latents",                      // and so do norms of latents,
	"input of the gated norm",             // convolutions, gates and
	"output projection input",             // gated norms of scans
	"probabilities", "map", "row numbers", // a router keeps choices and weights; rows are in the tables of the dispatch
}

func TestLayersSaveWhatThePlannerSays(t *testing.T) {
	const tokens, hidden = 128, 64
	moe := &model.MoE{Experts: 8, TopK: 2, Width: 48, Gated: true, SharedWidth: 32}
	for _, x := range []struct {
		name string
		l    model.Layer
		more memory.Bytes // what our layers save besides
	}{
		{"attention, dense", model.Layer{Attention: attn(), Dense: &model.Dense{Width: 96, Gated: true}}, 0},
		// Before their norms, queries and keys lie in one piece with the values.
		{"norms of heads", model.Layer{Attention: &model.Attention{Heads: 4, KVHeads: 2, HeadDim: 16, Rotary: true, QKNorm: true}}, 2 * tokens * 2 * 16},
		{"latent attention", model.Layer{MLA: &model.MLA{Heads: 4, QRank: 32, KVRank: 24, Nope: 16, Rope: 8, V: 16, LatentNorm: true}}, 0},
		// Choices and their weights; segments of experts, and rows there and back.
		{"experts", model.Layer{MoE: moe}, 2*4*tokens*2 + 4*(2*8+2*tokens*2)},
		{"scan", model.Layer{Mamba: &model.Mamba{Version: 2, Inner: 128, Heads: 4, Groups: 1, State: 16, Conv: 4}}, 0},
	} {
		t.Run(x.name, func(t *testing.T) {
			m := &model.Model{Name: "one layer", Hidden: hidden, Vocab: 256, Layers: []model.Layer{x.l}}
			c := testConfig(t, m)
			c.Number, c.Layout, c.Batch, c.Imbalance = kernels.BF16, Layout{1, 1, 1, 1}, Batch{Micro: 1, Seq: tokens, Microbatches: 1}, 1
			tr, err := rehearse(c)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := tr.Close(); err != nil {
					t.Error(err)
				}
			}()
			if _, err := tr.Step(); err != nil {
				t.Fatal(err)
			}
			var got memory.Bytes
			for _, g := range tr.Summaries()[0].Groups {
				if g.Name != "output_layer" {
					got += g.Bytes
				}
			}
			s, err := (&plan.Setup{
				Model: m, Layout: plan.Layout{World: 1, TP: 1}, Batch: plan.Batch{Micro: 1, Seq: tokens, Global: 1},
				Kernels: plan.Kernels{PermuteFusion: true, Dispatcher: "alltoall", Attention: "fused"},
			}).Normalise()
			if err != nil {
				t.Fatal(err)
			}
			want := x.more
			for _, g := range plan.Activations(s, x.l) {
				if !slices.Contains(unsaved, g.Tensor) {
					want += g.Bytes
				}
			}
			if got != want {
				t.Errorf("%d bytes are saved, and the planner, less what is not saved here, says %d: %+v", got, want, tr.Summaries()[0].Groups)
			}
		})
	}
}
