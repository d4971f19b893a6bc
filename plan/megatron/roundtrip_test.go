// This file owns the property that what is written can be read: random setups through
// flags, and the presets.

package megatron

import (
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
	"pgregory.net/rapid"
)

// drawModel returns a model that flags can describe: attention, MLA or a hybrid; dense,
// experts or both.
func drawModel(t *rapid.T, tp, ep, etp int) *model.Model {
	n := func(name string, least, most int) int { return rapid.IntRange(least, most).Draw(t, name) }
	yes := func(name string) bool { return rapid.Bool().Draw(t, name) }
	heads := tp * n("heads", 1, 4)
	m := &model.Model{
		Hidden: 64 * n("hidden", 1, 4), Vocab: n("vocab", 1, 1000), MaxPositions: 4096,
		Tied: yes("tied"), Bias: yes("bias"), Norm: model.Norm(n("norm", 0, 1)),
	}
	gated := yes("gated")
	attention := &model.Attention{
		Heads: heads, KVHeads: divisor(heads, n("groups", 1, heads)), HeadDim: 8 * n("head", 1, 4),
		QKNorm: yes("qknorm"), QKVBias: yes("qkvbias") && !m.Bias, Gate: yes("gate"), Sinks: yes("sinks"), Rotary: yes("rotary"),
	}
	m.LearnedPositions = !attention.Rotary && yes("learned")
	dense := &model.Dense{Width: tp * n("width", 1, 9), Gated: gated}
	moe := &model.MoE{
		Experts: ep * n("experts", 1, 4), Width: etp * n("ewidth", 1, 9), Gated: gated, TopK: 1,
		SharedWidth: tp * n("shared", 0, 3), SharedGate: yes("sharedgate"), Latent: n("latent", 0, 2), Bias: yes("ebias"), Sigmoid: yes("sigmoid"),
	}
	mixer := model.Layer{Attention: attention}
	family := rapid.SampledFrom([]string{"gqa", "mla", "window", "delta", "hybrid"}).Draw(t, "family")
	if family == "mla" {
		mixer = model.Layer{MLA: &model.MLA{
			Heads: heads, QRank: n("qrank", 0, 2) * 8, KVRank: 8 * n("kvrank", 1, 3),
			Nope: 8, Rope: n("rope", 0, 2) * 8, V: 8 * n("v", 1, 2), LatentNorm: yes("latentnorm"),
		}}
		m.LearnedPositions = false
	}
	for i := range n("layers", 1, 9) {
		l := mixer
		switch {
		case family == "window" && (i == 0 || yes("windowed")):
			w := *attention
			w.Window = 128
			l.Attention = &w
		case family == "delta" && yes("linear"):
			l = model.Layer{DeltaNet: &model.DeltaNet{KeyHeads: tp, ValueHeads: 2 * tp, KeyDim: 8, ValueDim: 16, Conv: 4}}
		}
		if ep > 1 && i == 0 || yes("moe") {
			l.MoE = moe
		} else {
			l.Dense = dense
		}
		if family == "hybrid" {
			l = drawHybrid(t, l, tp, i == 0)
		}
		m.Layers = append(m.Layers, l)
	}
	if family == "delta" && !slices.ContainsFunc(m.Layers, func(l model.Layer) bool { return l.Attention != nil }) {
		m.Layers[0] = model.Layer{Attention: attention, Dense: m.Layers[0].Dense, MoE: m.Layers[0].MoE}
	}
	if yes("mtp") {
		m.MTP = &model.MTP{Depth: n("depth", 1, 2), Layers: m.Layers[len(m.Layers)-1:], Repeated: yes("repeated")}
	}
	return m
}

// drawHybrid keeps one part of a layer, or replaces it by Mamba.
func drawHybrid(t *rapid.T, l model.Layer, tp int, first bool) model.Layer {
	switch kind := rapid.IntRange(0, 2).Draw(t, "kind"); {
	case l.MoE != nil && first:
		return model.Layer{MoE: l.MoE}
	case kind == 0:
		return model.Layer{Mamba: &model.Mamba{Version: 2, Heads: 2 * tp, Inner: 2 * tp * 64, Groups: tp, State: 16, Conv: 4}}
	case kind == 1:
		return model.Layer{Attention: l.Attention}
	}
	return model.Layer{Dense: l.Dense, MoE: l.MoE}
}

// drawSetup returns a setup in the form that reading flags gives, in which defaults are
// written as such.
func drawSetup(t *rapid.T) *plan.Setup {
	n := func(name string, least, most int) int { return rapid.IntRange(least, most).Draw(t, name) }
	yes := func(name string) bool { return rapid.Bool().Draw(t, name) }
	tp, pp, cp, ep, etp := n("tp", 1, 2), n("pp", 1, 4), n("cp", 1, 2), n("ep", 1, 3), n("etp", 1, 2)
	s := &plan.Setup{Model: drawModel(t, tp, ep, etp)}
	l := &s.Layout
	*l = plan.Layout{TP: tp, PP: pp, CP: cp, EP: ep, ETP: etp, VPP: 1, SequenceParallel: tp > 1 && yes("sp"), VocabMultiple: n("multiple", 1, 3) * 64}
	l.World = lcm(tp*pp*cp, etp*ep*pp) * n("replicas", 1, 2)
	if pp > 1 {
		l.VPP = n("vpp", 1, 3)
		if g := n("group", 0, 2); l.VPP > 1 && g > 0 {
			l.GroupSize = pp + g
		}
	}
	pieces := make([]piece, pp*l.VPP)
	for range s.Model.Layers {
		pieces[n("stage", 0, len(pieces)-1)].Layers++
	}
	if yes("even") {
		for i := range pieces {
			pieces[i].Layers = 0
		}
		for i := range s.Model.Layers {
			pieces[i*len(pieces)/len(s.Model.Layers)].Layers++
		}
	}
	depth := 0
	if s.Model.MTP != nil {
		depth = s.Model.MTP.Depth
	}
	l.Stages = stagesOf(addEnds(pieces, depth))
	s.Batch = plan.Batch{Micro: n("mbs", 1, 3), Seq: 64 * n("seq", 1, 4)}
	s.Batch.Global = s.Batch.Micro * l.DP() * n("microbatches", 1, 5)
	drawPrecision(t, s)
	drawOptimizer(t, s)
	drawKernels(t, s)
	drawMemory(t, s)
	return s
}

func drawPrecision(t *rapid.T, s *plan.Setup) {
	p := &s.Precision
	p.Params = rapid.SampledFrom([]plan.Format{plan.BF16, plan.FP16, plan.FP32}).Draw(t, "params")
	p.Compute = rapid.SampledFrom([]plan.Format{p.Params, plan.FP8, plan.MXFP8, plan.NVFP4}).Draw(t, "compute")
	p.MainGrads = plan.FP32
	switch {
	case p.Params == plan.FP16 && rapid.Bool().Draw(t, "fp16grads"):
		p.MainGrads = plan.FP16
	case p.Params == plan.BF16 && rapid.Bool().Draw(t, "bf16grads"):
		p.MainGrads, p.GradsInBF16 = plan.BF16, true
	}
	if p.Compute != p.Params {
		p.ParamGather = rapid.Bool().Draw(t, "gather")
		p.Blockwise = p.Compute == plan.FP8 && rapid.Bool().Draw(t, "blockwise")
		p.PlainFirst, p.PlainLast = rapid.IntRange(0, 2).Draw(t, "first"), rapid.IntRange(0, 2).Draw(t, "last")
	}
}

func drawOptimizer(t *rapid.T, s *plan.Setup) {
	o, f, l := &s.Optimizer, &s.Layout.FSDP, s.Layout
	yes := func(name string) bool { return rapid.Bool().Draw(t, name) }
	*o = plan.Optimizer{Kind: rapid.SampledFrom([]string{"adam", "sgd", "muon"}).Draw(t, "optimizer"), Distributed: yes("distributed"), MainParams: plan.FP32, MainGrads: plan.FP32, Moment1: plan.FP32, Moment2: plan.FP32}
	if o.Kind == "muon" {
		o.LayerwiseSharding = o.Distributed || yes("layerwise")
	}
	if o.Distributed && yes("aware") {
		o.PrecisionAware = true
		o.Moment1 = rapid.SampledFrom([]plan.Format{plan.FP32, plan.BF16, plan.FP8}).Draw(t, "m1")
		o.Moment2 = rapid.SampledFrom([]plan.Format{plan.FP32, plan.FP16}).Draw(t, "m2")
		if s.Precision.GradsInBF16 && yes("maingrads") {
			o.MainGrads = plan.BF16
		}
		o.OffloadFraction = rapid.SampledFrom([]float64{0, 0.25, 1}).Draw(t, "offloadfraction")
	}
	instances := 0
	if (l.DP()*l.CP)%2 == 0 && yes("instances") {
		instances = 2
	}
	if o.Kind != "muon" && yes("fsdp") {
		f.Shard = plan.ShardLevel(rapid.IntRange(1, 3).Draw(t, "shard"))
		o.Distributed = true
		f.Outer, f.OuterOptimizer = instances, instances > 1 && yes("outer")
		f.Pool = rapid.SampledFrom([]string{"", "fixed", "max"}).Draw(t, "pool")
		f.DoubleBuffer = f.Pool != ""
		f.EarlyGather = f.Shard == plan.ShardParameters && yes("early")
		return
	}
	o.Instances = instances
}

func drawKernels(t *rapid.T, s *plan.Setup) {
	yes := func(name string) bool { return rapid.Bool().Draw(t, name) }
	s.Kernels = plan.Kernels{
		Local:     yes("local"),
		Attention: rapid.SampledFrom([]string{"", "flash", "fused", "unfused"}).Draw(t, "attention"),
		Dropout:   rapid.SampledFrom([]float64{0, 0.1, 0.25}).Draw(t, "dropout"), AttentionDropout: rapid.SampledFrom([]float64{0, 0.1}).Draw(t, "adropout"),
		GradFusion: yes("gradfusion"), Loss: rapid.SampledFrom([]string{"", "native-fused", "te"}).Draw(t, "loss"),
		GroupedGEMM: yes("gg"), PermuteFusion: yes("pf"), OpFuser: yes("of"), RouterFP32: yes("rf"),
		UnfusedActivation: yes("ua"), WeightedSquaredReLU: yes("wsr"), RouterFusion: yes("rof"), NoAttentionMask: yes("nam"),
		TPCommOverlap:       s.Layout.SequenceParallel && yes("tpo"),
		SharedExpertOverlap: yes("seo"), DeferEmbeddingWgrad: yes("dew"), Deterministic: yes("det"),
		CPComm: rapid.SampledFrom([]string{"", "a2a", "allgather"}).Draw(t, "cpcomm"),
	}
	if hasExperts(s.Model) {
		dispatchers := []string{"allgather", "alltoall", "deepep", "hybridep"}
		if s.Layout.EP*s.Layout.ETP == 1 {
			dispatchers = dispatchers[:2] // of the others there is a warning
		}
		s.Kernels.Dispatcher = rapid.SampledFrom(dispatchers).Draw(t, "dispatcher")
		s.Layout.OverlapEP = yes("overlap")
	}
	if yes("capacity") {
		s.Kernels.CapacityFactor = 1.5
		s.Kernels.PadToCapacity = yes("pad")
	}
}

func drawMemory(t *rapid.T, s *plan.Setup) {
	yes := func(name string) bool { return rapid.Bool().Draw(t, name) }
	some := func(name string, of ...string) []string {
		return slices.DeleteFunc(slices.Clone(of), func(string) bool { return !yes(name) })
	}
	switch rapid.IntRange(0, 2).Draw(t, "recompute") {
	case 0:
		if !s.Layout.OverlapEP {
			s.Recompute = plan.Recompute{Full: true, Method: rapid.SampledFrom([]string{"uniform", "block"}).Draw(t, "method"), Layers: rapid.IntRange(1, 3).Draw(t, "units")}
		}
	case 1:
		if modules := some("module", "core_attn", "layernorm", "mlp"); len(modules) > 0 {
			s.Recompute.Modules = modules
		}
	}
	if modules := some("away", "attn_norm", "qkv_linear", "core_attn", "mlp_norm"); len(modules) > 0 && !s.Kernels.Local && s.Recompute.Method != "uniform" {
		s.Offload = plan.Offload{
			Modules: modules, Fraction: rapid.SampledFrom([]float64{0, 0.5}).Draw(t, "fraction"),
			MinElements: int64(rapid.IntRange(0, 2).Draw(t, "least")), Delta: memory.Bytes(rapid.IntRange(0, 2).Draw(t, "delta")) << 30,
			MaxInflight: rapid.IntRange(0, 3).Draw(t, "inflight"),
		}
	}
	if s.Kernels.Dispatcher == "hybridep" && yes("budgeted") {
		s.Stash.RankCapacity = 1.5
		if yes("stash") {
			s.Stash.Modules = slices.Clone(memory.MegatronModules(memory.Stash))
			s.Stash.Factor = rapid.SampledFrom([]float64{0, 1.1, 1.25}).Draw(t, "factor")
			s.Stash.HostFactor = rapid.SampledFrom([]float64{0, 0.5}).Draw(t, "host")
		}
	}
	if yes("graph") {
		s.Graph.Scopes = rapid.SampledFrom([][]string{{"attn"}, {"attn", "moe_router"}, {"full_iteration"}}).Draw(t, "scopes")
		if s.Graph.Scopes[0] == "attn" { // norms on the border of a graph are not offloaded
			s.Offload.Modules = slices.DeleteFunc(s.Offload.Modules, func(m string) bool { return strings.HasSuffix(m, "_norm") })
		}
		if len(s.Offload.Modules) == 0 {
			s.Offload = plan.Offload{}
		}
		if s.Graph.Local = s.Graph.Scopes[0] == "attn" && len(s.Offload.Modules) == 0 && yes("local"); !s.Graph.Local {
			s.Graph.Warmup = rapid.SampledFrom([]int{0, -1, 1, 2}).Draw(t, "warmup")
		}
	}
}

// SPEC S6.1: the flags of a plan ask for that plan.
func TestSetupRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSetup(t)
		line := CommandLine(Flags(s))
		args, err := parseCommand(line, ParseOptions{})
		if err != nil {
			t.Fatalf("%s\n%v", line, err)
		}
		again, warnings, err := FromArgs(args, Options{GPUs: s.Layout.World})
		if err != nil {
			t.Fatalf("%s\n%v", line, err)
		}
		if len(warnings) > 0 {
			t.Fatalf("%s\n%v", line, warnings)
		}
		compareSetups(t, s, again)
	})
}

// Every preset that Megatron-LM can describe is the same after a round trip through its
// flags.
func TestPresetsRoundTrip(t *testing.T) {
	for _, name := range model.Presets() {
		t.Run(name, func(t *testing.T) {
			m, err := model.Preset(name)
			if err != nil {
				t.Fatal(err)
			}
			args := map[string]any{"bf16": true, "micro-batch-size": 1, "seq-length": 4096}
			s, _, err := FromArgs(args, Options{Model: m, GPUs: 8})
			if err != nil {
				t.Fatal(err)
			}
			if lost := Unsaid(s); len(lost) > 0 {
				t.Logf("not said: %v", lost)
				return
			}
			again, warnings, err := FromArgs(asArgs(t, s), Options{GPUs: 8, Name: m.Name})
			if err != nil {
				t.Fatal(err)
			}
			for _, w := range warnings {
				t.Errorf("warning: %s", w)
			}
			for _, l := range m.Layers {
				if len(letters(l)) > 1 && isHybrid(m) {
					return // a hybrid's layers come back in halves
				}
			}
			sameSetup(t, s, again)
		})
	}
}
