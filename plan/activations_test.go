package plan

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// saving returns what a module frees of a layer, in decimal megabytes.
func saving(s *Setup, l model.Layer, is func(SavedTensor) bool) float64 {
	var n memory.Bytes
	for _, g := range Activations(s, l) {
		if is(g) {
			n += g.Bytes
		}
	}
	return float64(n) / 1e6
}

func all(SavedTensor) bool { return true }

func within(t *testing.T, what string, got, want, share float64) {
	t.Helper()
	if got < want*(1-share) || got > want*(1+share) {
		t.Errorf("%s: %.1f, want %.1f within %.1f %%", what, got, want, 100*share)
	}
}

// The sizes of DeepSeek-V3 with 4096 tokens and one TP rank agree with the known ones, in
// MB.
func TestDeepSeekLayer(t *testing.T) {
	s := mustNormalise(t, deepSeek(t))
	dense, moe := s.Model.Layers[0], s.Model.Layers[10]
	tensor := func(name string) func(SavedTensor) bool { return func(g SavedTensor) bool { return g.Tensor == name } }
	group := func(name string) func(SavedTensor) bool { return func(g SavedTensor) bool { return g.Group == name } }
	within(t, "MoE layer", saving(s, moe, all), 1880, 0.01)
	within(t, "dense layer", saving(s, dense, all), 1400, 0.01)
	within(t, "queries, keys, values", saving(s, moe, func(g SavedTensor) bool { return slices.Contains([]string{"queries", "keys", "values"}, g.Tensor) }), 537, 0.002)
	within(t, "rows", saving(s, moe, tensor("rows")), 470, 0.002)
	within(t, "experts' fc1 output", saving(s, moe, func(g SavedTensor) bool { return g.Group == "moe_act" && g.Tensor == "fc1 output" }), 268, 0.002)
	within(t, "attention output", saving(s, moe, tensor("attention output")), 134, 0.002)
	within(t, "experts' fc2 input", saving(s, moe, group("experts")), 134, 0.002)
	within(t, "norms and residuals", saving(s, moe, func(g SavedTensor) bool {
		return g.Group == "attn_norm" || g.Group == "mlp_norm" || g.Tensor == "output of the norm"
	}), 235, 0.002)
}

// Each module of recompute and offload frees what the table of docs/PLANNER.md says. Sizes
// are in elements of T x h, for T tokens of width h.
func TestModules(t *testing.T) {
	const tokens, h = 1024, 512
	base := Setup{
		Model:   &model.Model{Hidden: h, Vocab: 1000},
		Layout:  Layout{World: 1, TP: 1},
		Batch:   Batch{Micro: 1, Seq: tokens, Global: 1},
		Kernels: Kernels{PermuteFusion: true, Dispatcher: "alltoall", Attention: "fused"},
	}
	gqa := model.Layer{Attention: &model.Attention{Heads: 8, KVHeads: 2, HeadDim: 64}, Dense: &model.Dense{Width: 4 * h, Gated: true}}
	mla := model.Layer{MLA: &model.MLA{Heads: 8, QRank: 128, KVRank: 64, Nope: 64, Rope: 32, V: 64, LatentNorm: true}, MoE: &model.MoE{Experts: 8, TopK: 2, Width: h, Gated: true, SharedWidth: h}}
	unit := float64(2 * tokens * h)
	for _, c := range []struct {
		name   string
		layer  model.Layer
		module string
		free   float64 // by recomputation, in units of 2*T*h
		move   float64 // by offloading
	}{
		// "layernorm" does not free fused norms, and "mlp" includes its norm.
		{"dense layernorm", gqa, "layernorm", 0, 0},
		{"dense mlp", gqa, "mlp", 1 + 8 + 4, 0},
		{"dense core_attn", gqa, "core_attn", 0, 1 + 2*0.25},
		{"dense attn_proj", gqa, "attn_proj", 0, 1},
		{"dense qkv_linear", gqa, "qkv_linear", 0, 1},
		{"dense attn_norm", gqa, "attn_norm", 0, 1},
		{"dense mlp_norm", gqa, "mlp_norm", 0, 1},
		{"MLA layernorm", mla, "layernorm", 2, 0},
		{"MLA mla_up_proj", mla, "mla_up_proj", 2*1.5 + 1, 0},
		{"MoE moe_act", mla, "moe_act", 2, 4},
		{"MoE expert_fc1", mla, "expert_fc1", 0, 2},
		{"MoE shared_experts", mla, "shared_experts", 2 + 1, 0},
	} {
		s := base
		s.Model.Layers = []model.Layer{c.layer}
		n := mustNormalise(t, &s)
		free := saving(n, c.layer, func(g SavedTensor) bool { return slices.Contains(g.Recompute, c.module) }) * 1e6 / unit
		move := saving(n, c.layer, func(g SavedTensor) bool { return g.Offload == c.module && g.Elements > 4096 }) * 1e6 / unit
		// Statistics and log-sum-exp are a few thousandths.
		if diff := free - c.free; diff < -0.001 || diff > 0.05 {
			t.Errorf("%s: recomputation frees %.3f, want %.3f", c.name, free, c.free)
		}
		if diff := move - c.move; diff < -0.001 || diff > 0.001 {
			t.Errorf("%s: offloading moves %.3f, want %.3f", c.name, move, c.move)
		}
	}
}

// The backward pass of a dense layer is highest at the activation function. In addition to
// what is saved there are the gradients of fc1's output and of the residual stream.
func TestDenseBackward(t *testing.T) {
	for _, tp := range []int{1, 2} {
		t.Run(fmt.Sprint("tp ", tp), func(t *testing.T) {
			s := mustNormalise(t, &Setup{
				Model: &model.Model{Hidden: 8192, Vocab: 1000, Layers: []model.Layer{{
					Attention: &model.Attention{Heads: 64, KVHeads: 8, HeadDim: 128}, Dense: &model.Dense{Width: 28672, Gated: true},
				}}},
				Layout: Layout{World: tp, TP: tp, SequenceParallel: tp > 1},
				Batch:  Batch{Micro: 1, Global: 1, Seq: 4096}, Kernels: Kernels{GradFusion: true, Attention: "fused"},
			})
			c := newDims(s).layer(s.Model.Layers[0]).cost()
			want := memory.Bytes(2*4096*2*28672/tp + 2*4096/tp*8192)
			if c.backward != want || c.backwardAt != "activation" {
				t.Errorf("%d at %s, want %d at the activation", c.backward, c.backwardAt, want)
			}
		})
	}
}

// The loss of a head has the expected sizes in bytes for each token and word: what it
// saves, and the highest point of its forward pass.
func TestLoss(t *testing.T) {
	for _, c := range []struct {
		loss        string
		saved, most memory.Bytes
	}{{"te", 2, 2}, {"", 4, 6}, {"native", 4, 6}, {"native-fused", 4, 10}} {
		s := mustNormalise(t, &Setup{
			Model:  &model.Model{Hidden: 128, Vocab: 1 << 17, Layers: []model.Layer{{Dense: &model.Dense{Width: 128}}}},
			Layout: Layout{World: 1}, Batch: Batch{Micro: 1, Global: 1, Seq: 4096}, Kernels: Kernels{Loss: c.loss},
		})
		cost := newDims(s).loss().cost()
		words := memory.Bytes(4096 << 17)
		if saved := cost.kept / words; saved != c.saved {
			t.Errorf("loss %q saves %d bytes, want %d", c.loss, saved, c.saved)
		}
		if most := cost.forward / words; most != c.most {
			t.Errorf("loss %q needs %d bytes, want %d", c.loss, most, c.most)
		}
	}
}

// Attention without a fused kernel saves probabilities. Dropout adds a mask and the dropped
// probabilities: 2, then 2 + 1 + 2 bytes for each pair of positions.
func TestUnfusedAttention(t *testing.T) {
	for _, dropout := range []float64{0, 0.1} {
		s := mustNormalise(t, &Setup{
			Model:  &model.Model{Hidden: 512, Vocab: 1000, Layers: []model.Layer{{Attention: &model.Attention{Heads: 8, KVHeads: 2, HeadDim: 64}}}},
			Layout: Layout{World: 1}, Batch: Batch{Micro: 2, Global: 2, Seq: 1024}, Kernels: Kernels{Attention: "unfused", AttentionDropout: dropout},
		})
		pairs := float64(2 * 8 * 1024 * 1024)
		got := saving(s, s.Model.Layers[0], func(g SavedTensor) bool { return slices.Contains(g.Recompute, "core_attn") }) * 1e6 / pairs
		want := 2.0
		if dropout > 0 {
			want = 5
		}
		within(t, "bytes a pair", got, want, 0.001)
		// Keys and values are repeated to as many heads as there are queries.
		within(t, "keys", saving(s, s.Model.Layers[0], func(g SavedTensor) bool { return g.Tensor == "keys" })*1e6, 2*2048*512, 0.001)
	}
}

// A tensor that a module offloads has elements, or no least size would let it move.
func TestOffloadedTensorsHaveElements(t *testing.T) {
	for _, name := range model.Presets() {
		m, err := model.Preset(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, attention := range []string{"fused", "unfused"} {
			s := mustNormalise(t, &Setup{
				Model: m, Layout: Layout{World: 1, TP: 1}, Batch: Batch{Micro: 1, Seq: 1024, Global: 1},
				Kernels: Kernels{PermuteFusion: true, Dispatcher: "alltoall", Attention: attention},
			})
			said := map[string]bool{}
			for _, l := range m.Layers {
				for _, x := range Activations(s, l) {
					if x.Offload != "" && x.Elements == 0 && !said[x.Tensor] {
						t.Errorf("%s, %s attention: the %s of %s have no Elements; set them where the tensor is saved", name, attention, x.Tensor, x.Offload)
						said[x.Tensor] = true
					}
				}
			}
		}
	}
}

// The planner tells names that only Megatron-LM lacks from names that nobody knows.
func TestModulesThatMegatronLacks(t *testing.T) {
	for module, want := range map[string]string{
		"shared_experts": "shared_experts is not one of Megatron-LM's offload modules; choose from attn_norm",
		"sharedexperts":  `unknown offload module "sharedexperts"; choose from attn_norm`,
	} {
		s := deepSeek(t)
		s.Offload.Modules = []string{module}
		if _, err := s.Normalise(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", module, err, want)
		}
	}
}
