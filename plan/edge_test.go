// This file owns the tests of setups that no measured run has: what is refused, what must
// not overflow, and figures computed by hand.

package plan

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

func preset(t *testing.T, name string) *model.Model {
	t.Helper()
	m, err := model.Preset(name)
	if err != nil {
		t.Fatal(err)
	}
	c := *m
	return &c
}

func predictEdge(t *testing.T, s *Setup) *Forecast {
	t.Helper()
	p, err := Predict(s)
	if err != nil {
		t.Fatal(err)
	}
	checkBooks(t, p)
	return p
}

// checkBooks checks that items add up to the peak and groups to the activations, and that
// no point of the step is above the peak.
func checkBooks(t *testing.T, p *Forecast) {
	t.Helper()
	for i := range p.Ranks {
		r := &p.Ranks[i]
		var items, groups memory.Bytes
		for _, it := range r.Items {
			items += it.Bytes
			if it.Bytes < 0 && it.Cause != CauseTransient {
				t.Errorf("rank %d: %s has %d bytes", i, it.Name, it.Bytes)
			}
		}
		for _, g := range r.Groups {
			groups += g.Total
		}
		if items != r.Peak.Expected {
			t.Errorf("rank %d: items add up to %d, the peak is %d", i, items, r.Peak.Expected)
		}
		if groups != r.Sum(CauseActivations) {
			t.Errorf("rank %d: groups add up to %d, activations to %d", i, groups, r.Sum(CauseActivations))
		}
		for _, q := range r.Timeline() {
			if q.Bytes() > r.Peak.Expected {
				t.Errorf("rank %d: %s has %d, above the peak %d", i, q.What, q.Bytes(), r.Peak.Expected)
			}
		}
	}
}

func TestMorePipelineRanksThanLayers(t *testing.T) {
	m := preset(t, "llama-3-8b")
	m.Layers = m.Layers[:2]
	p := predictEdge(t, &Setup{Model: m, Layout: Layout{PP: 8}, Batch: Batch{Seq: 1024}})
	if len(p.Ranks) != 8 {
		t.Errorf("%d ranks", len(p.Ranks))
	}
	predictEdge(t, &Setup{Model: m, Layout: Layout{PP: 4, VPP: 2}, Batch: Batch{Seq: 1024}, Graph: Graph{Scopes: []string{"attn"}}})
}

// Each of these settings is refused with a sentence that names the field.
func TestSettingsThatCannotBe(t *testing.T) {
	moe := preset(t, "mixtral-8x7b")
	for _, c := range []struct {
		want string
		set  func(*Setup)
	}{
		{"imbalance", func(s *Setup) { s.Routing.Imbalance = 0.5 }},
		{"imbalance", func(s *Setup) { s.Routing.Imbalance = math.NaN() }},
		{"imbalance", func(s *Setup) { s.Routing.Imbalance = math.Inf(1) }},
		{"--moe-expert-capacity-factor is", func(s *Setup) { s.Kernels.CapacityFactor = -1 }},
		{"--moe-expert-rank-capacity-factor is", func(s *Setup) { s.Stash.RankCapacity = math.NaN() }},
		{"--moe-expert-rank-capacity-factor 1e+12 makes", func(s *Setup) { s.Stash.RankCapacity = 1e12 }},
		{"--moe-expert-capacity-factor 1e+12 makes", func(s *Setup) { s.Kernels.CapacityFactor = 1e12 }},
		{"imbalance 1e+12 makes", func(s *Setup) { s.Routing.Imbalance, s.Stash.RankCapacity = 1e12, 1e11 }},
		{"micro-batch-size", func(s *Setup) { s.Batch, s.Stash.RankCapacity = Batch{Micro: 1 << 20, Seq: 1 << 26}, 1e12 }},
		{"page", func(s *Setup) { s.Stash.Modules, s.Stash.PageBytes = []string{"moe_act"}, -1 }},
		{"stash module", func(s *Setup) { s.Stash.Modules = []string{"core_attn"} }},
		{"offload fraction", func(s *Setup) { s.Offload.Fraction = math.NaN() }},
		{"optimizer offload fraction", func(s *Setup) { s.Optimizer.OffloadFraction = math.NaN() }},
		{"recompute method", func(s *Setup) { s.Recompute = Recompute{Full: true, Method: "some"} }},
		{"recompute layers", func(s *Setup) { s.Recompute = Recompute{Full: true, Layers: -1} }},
		{"optimizer", func(s *Setup) { s.Optimizer.Kind = "adma" }},
		{"delta", func(s *Setup) { s.Offload.Delta = -1 }},
		{"pp", func(s *Setup) { s.Layout.TP, s.Layout.PP = 1<<32, 1<<32 }},
		{"tp x pp x cp", func(s *Setup) { s.Layout.TP, s.Layout.CP, s.Layout.PP = 1<<26, 1<<26, 1<<12 }},
		{"etp x ep x pp", func(s *Setup) { s.Layout.ETP, s.Layout.EP, s.Layout.PP = 1<<26, 1<<26, 1<<12 }},
		{"seq-length", func(s *Setup) { s.Batch = Batch{Micro: 1 << 20, Seq: 1 << 26} }},
		{"group size", func(s *Setup) { s.Layout.GroupSize = 1 << 20 }},
		{"fsdp", func(s *Setup) {
			s.Layout.World, s.Layout.FSDP.Shard, s.Layout.FSDP.Outer = 8, ShardParameters, 3
		}},
		{"instances", func(s *Setup) { s.Layout.World, s.Optimizer.Distributed, s.Optimizer.Instances = 8, true, 3 }},
		{"key/value", func(s *Setup) { s.Layout.TP = 16 }},
	} {
		s := &Setup{Model: moe, Batch: Batch{Seq: 1024}}
		if c.want == "key/value" {
			m := *moe
			m.Layers = slices.Clone(moe.Layers)
			a := *m.Layers[0].Attention
			a.KVHeads = 6
			m.Layers[0].Attention = &a
			a.Heads = 48
			s.Model = &m
		}
		c.set(s)
		if err := s.Check(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v", c.want, err)
		}
	}
}

// A model with heads for further tokens must have a stage for them. Otherwise they would be
// left out silently.
func TestStagesWithoutHeads(t *testing.T) {
	m := preset(t, "deepseek-v3")
	stages := DefaultStages(m, 2, 1)
	for i := range stages {
		stages[i].MTP = false
	}
	s := &Setup{Model: m, Layout: Layout{PP: 2, Stages: stages}, Batch: Batch{Seq: 1024}}
	if err := s.Check(); err == nil || !strings.Contains(err.Error(), "further tokens") {
		t.Errorf("error %v", err)
	}
}

// A unit of n layers is computed again as one: when its last layer's backward
// pass begins, all n are there.
func TestUniformUnitsComeBackWhole(t *testing.T) {
	m := preset(t, "llama-3-8b")
	m.Layers = m.Layers[:8]
	m.Vocab = 128
	s := &Setup{Model: m, Layout: Layout{}, Batch: Batch{Seq: 8192}, Kernels: Kernels{GradFusion: true, NoAttentionMask: true}}
	s.Recompute = Recompute{Full: true, Method: "uniform", Layers: 1}
	one := predictEdge(t, s).Peak.Expected
	s.Recompute.Layers = 4
	four := predictEdge(t, s).Peak.Expected
	n, err := s.Normalise()
	if err != nil {
		t.Fatal(err)
	}
	var layer, input memory.Bytes
	for i, g := range Activations(n, m.Layers[0]) {
		layer += g.Bytes
		if i == 0 {
			input = g.Bytes
		}
	}
	// Units of one: 8 inputs and one layer without its input. Units of four: 2
	// inputs and four layers without one input: six inputs less, and three whole
	// layers more.
	if want := one - 6*input + 3*layer; four != want {
		t.Errorf("units of four: %d, want %d; units of one: %d", four, want, one)
	}
}

// Latent attention is recognised even if queries and values are equally wide.
func TestUpProjectionOfEqualWidths(t *testing.T) {
	m := preset(t, "deepseek-v3")
	a := *m.Layers[3].MLA
	a.Nope, a.Rope, a.V = 64, 64, 128
	l := m.Layers[3]
	l.MLA = &a
	n, err := (&Setup{Model: m, Batch: Batch{Seq: 4096}}).Normalise()
	if err != nil {
		t.Fatal(err)
	}
	freed := slices.ContainsFunc(Activations(n, l), func(g SavedTensor) bool {
		return g.Tensor == "queries" && slices.Contains(g.Recompute, "mla_up_proj")
	})
	if !freed {
		t.Error("mla_up_proj does not free the queries")
	}
}

// The optimiser holds its whole state on the device and the host together, also under
// groups of sharding.
func TestOptimizerStateIsConserved(t *testing.T) {
	m := preset(t, "mixtral-8x7b")
	for _, f := range []FSDP{{}, {Shard: ShardParameters}, {Shard: ShardParameters, Outer: 2}, {Shard: ShardParameters, Outer: 2, OuterOptimizer: true}} {
		s := &Setup{Model: m, Layout: Layout{World: 8, EP: 8, FSDP: f}, Batch: Batch{Seq: 1024}, Optimizer: Optimizer{Distributed: true}}
		all := predictEdge(t, s).Ranks[0]
		s.Optimizer.OffloadFraction = 0.75
		part := predictEdge(t, s).Ranks[0]
		if got, want := part.Sum(CauseOptimizer)+part.Host, all.Sum(CauseOptimizer); got != want {
			t.Errorf("%+v: %d on device and host, %d without offloading", f, got, want)
		}
		// Every expert is on one rank alone: nothing divides its state.
		var dense, expert int64
		for _, l := range m.Layers {
			for _, p := range m.LayerParams(l) {
				n := int64(p.Rows) * int64(p.Cols) * int64(p.Count)
				if p.Split == model.Expert {
					expert += n / 8
				} else {
					dense += n
				}
			}
		}
		if least := 12 * memory.Bytes(expert); all.Sum(CauseOptimizer) < least {
			t.Errorf("%+v: state %d is less than its experts' %d", f, all.Sum(CauseOptimizer), least)
		}
	}
}

// The figures of DeepSeek-V3 on 1024 GPUs with TP 2, PP 16 and EP 64 agree with those
// computed by hand. Rank 1 holds four MoE layers.
func TestDeepSeekByHand(t *testing.T) {
	s := &Setup{
		Model: preset(t, "deepseek-v3"), Layout: Layout{World: 1024, TP: 2, PP: 16, EP: 64, ETP: 1, SequenceParallel: true},
		Batch: Batch{Seq: 4096}, Optimizer: Optimizer{Distributed: true},
	}
	r := predictEdge(t, s).Ranks[1]
	// Both TP ranks hold narrow projections and the router whole. Of 256 experts, four are
	// on this rank, and whole. Norms have 2 h + ranks elements.
	whole := 7168*(1536+512+64) + 7168*256 + 2*7168 + 1536 + 512 + 256
	divided := 128 * (1536*192 + 512*256 + 128*7168) / 2
	shared, expert := 3*7168*2048/2, 3*7168*2048
	dense, experts := memory.Bytes(4*(whole+divided+shared)), memory.Bytes(4*4*expert)
	near := func(what string, got, want memory.Bytes) {
		if diff := got - want; diff > want/1000 || -diff > want/1000 {
			t.Errorf("%s %d, want %d", what, got, want)
		}
	}
	near("weights", r.Sum(CauseWeights), 2*(dense+experts))
	near("gradients", r.Sum(CauseGradients), 4*(dense+experts))
	near("optimiser", r.Sum(CauseOptimizer), 12*(dense/32+experts))
}

// Llama 3.1 405B, TP 8, PP 8, CP 2: rank 0 has eight microbatches of 16 layers.
func TestLlamaByHand(t *testing.T) {
	s := &Setup{
		Model: preset(t, "llama-3.1-405b"), Layout: Layout{World: 1024, TP: 8, PP: 8, CP: 2, SequenceParallel: true},
		Batch: Batch{Seq: 8192}, Kernels: Kernels{GradFusion: true, Loss: "te", NoAttentionMask: true},
	}
	const tokens, h = 4096, 16384
	// Four residual tensors of the rank's eighth of the sequence, q, k, v and
	// output of an eighth of the heads, log-sum-exp, three eighths of the width.
	layer := 4*2*tokens/8*h + 2*tokens*(128+16)*128/8 + 2*tokens*h/8 + 4*tokens*16 + 2*tokens*3*53248/8 + 2*4*tokens/8
	got := func() memory.Bytes { return predictEdge(t, s).Ranks[0].Sum(CauseActivations) }
	plain := got()
	if want := memory.Bytes(8*16*layer + 8*8*tokens); plain != want {
		t.Errorf("activations %d, want %d", plain, want)
	}
	s.Kernels.CPComm = "a2a"
	if more, want := got()-plain, memory.Bytes(8*16*2*tokens*h/8); more != want {
		t.Errorf("all-to-all: %d more, want %d", more, want)
	}
	s.Kernels.CPComm, s.Kernels.Dropout = "", 0.1
	if more, want := got()-plain, memory.Bytes((8*16*2+8)*tokens/8*h); more != want {
		t.Errorf("dropout: %d more, want %d", more, want)
	}
}

// Heads that predict further tokens are recomputed as a whole from both inputs, but not by
// the method block.
func TestHeadsAreComputedAgain(t *testing.T) {
	s := &Setup{Model: preset(t, "deepseek-v3"), Layout: Layout{PP: 16, EP: 64, ETP: 1}, Batch: Batch{Seq: 4096}, Recompute: Recompute{Full: true}}
	kept := func(group string) memory.Bytes {
		for _, g := range predictEdge(t, s).Ranks[15].Groups {
			if g.Name == group {
				return g.Total
			}
		}
		return 0
	}
	if got, want := kept("mtp"), memory.Bytes(2*2*4096*7168); got != want {
		t.Errorf("a head keeps %d, want %d", got, want)
	}
	if got := kept("moe_act"); got != 0 {
		t.Errorf("experts of the last stage keep %d", got)
	}
	s.Recompute = Recompute{Full: true, Method: "block", Layers: 9}
	if got := kept("moe_act"); got == 0 {
		t.Error("under blocks the head keeps nothing")
	}
}

// ZeRO-2 holds a share of the gradients.
func TestShardedGradients(t *testing.T) {
	m := preset(t, "llama-3-8b")
	s := &Setup{Model: m, Layout: Layout{World: 8, FSDP: FSDP{Shard: ShardGradients}}, Batch: Batch{Seq: 1024}}
	r := predictEdge(t, s).Ranks[0]
	if w, g := r.Sum(CauseWeights), r.Sum(CauseGradients); g < w/4 || g > w/4+1024 {
		t.Errorf("weights %d, gradients %d: want 4 bytes / 8 for each 2", w, g)
	}
}

// Host memory holds what is offloaded, without the last group, which stays.
func TestHostIsWhatIsAway(t *testing.T) {
	m := preset(t, "llama-3-8b")
	s := &Setup{Model: m, Batch: Batch{Seq: 8192}, Offload: Offload{Modules: []string{"core_attn"}}}
	r := predictEdge(t, s).Ranks[0]
	// q, k, v of 31 layers: 2 bytes x 8192 tokens x (32 + 16) heads of 128.
	if want := memory.Bytes(31 * 2 * 8192 * 48 * 128); r.Host != want {
		t.Errorf("host %d, want %d", r.Host, want)
	}
}

// Rows that are padded to a capacity, or dropped beyond it, are stashed as they are.
// Imbalance does not matter.
func TestStashOfCappedRows(t *testing.T) {
	m := preset(t, "mixtral-8x7b")
	pages := func(k Kernels, imbalance float64) memory.Bytes {
		s := &Setup{Model: m, Layout: Layout{EP: 8}, Batch: Batch{Seq: 4096}, Kernels: k, Routing: Routing{Imbalance: imbalance},
			Stash: Stash{Modules: []string{"expert_fc1", "moe_act"}}}
		for _, it := range predictEdge(t, s).Ranks[0].Items {
			if it.Name == "stash pages" {
				return it.Bytes
			}
		}
		return 0
	}
	padded := Kernels{CapacityFactor: 2, PadToCapacity: true}
	plain := pages(Kernels{}, 1)
	for _, imbalance := range []float64{1, 1.5} {
		if got := pages(padded, imbalance); got != 2*plain {
			t.Errorf("padded to twice, imbalance %g: %d, want %d", imbalance, got, 2*plain)
		}
		if got := pages(Kernels{CapacityFactor: 1.25}, imbalance); math.Abs(float64(got-plain)) > float64(plain)/100 {
			t.Errorf("dropped beyond 1.25, imbalance %g: %d, want %d", imbalance, got, plain)
		}
	}
}
