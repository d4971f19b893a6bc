package megatron

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
	"pgregory.net/rapid"
)

// small returns a valid job with experts.
func small(changes ...any) map[string]any {
	args := map[string]any{
		"num-layers": 8, "hidden-size": 64, "num-attention-heads": 8, "vocab-size": 1000, "max-position-embeddings": 64,
		"seq-length": 64, "micro-batch-size": 1, "global-batch-size": 16, "bf16": true, "num-experts": 8,
		"moe-grouped-gemm": true, "use-distributed-optimizer": true,
	}
	for i := 0; i < len(changes); i += 2 {
		name := changes[i].(string)
		if changes[i+1] == nil {
			delete(args, name)
			continue
		}
		args[name] = changes[i+1]
	}
	return args
}

// Bad arguments are refused with one sentence that names the flag and a valid value.
func TestRefused(t *testing.T) {
	for _, c := range []struct {
		want    string
		changes []any
	}{
		{"--hidden-size is missing", []any{"hidden-size", nil}},
		{"--num-layers is missing", []any{"num-layers", nil}},
		{"--num-attention-heads is missing", []any{"num-attention-heads", nil}},
		{"--micro-batch-size is missing", []any{"micro-batch-size", nil}},
		{"--seq-length is missing", []any{"seq-length", nil}},
		{"size of the vocabulary is not in the arguments", []any{"vocab-size", nil, "tokenizer-type", "HuggingFaceTokenizer"}},
		{"--hidden-size -5: the number must be at least 1", []any{"hidden-size", -5}},
		{"--hidden-size 0: the number must be at least 1", []any{"hidden-size", 0}},
		{"--hidden-size 12.5: a whole number is expected", []any{"hidden-size", 12.5}},
		{"--hidden-size many: a whole number is expected", []any{"hidden-size", "many"}},
		{"--hidden-size takes one value, but 2 are given", []any{"hidden-size", "1 2"}},
		{"--bf16 takes no value, but \"maybe\" is given", []any{"bf16", "maybe"}},
		{"--num-attention-heads 7 does not divide --hidden-size 64; give --kv-channels", []any{"num-attention-heads", 7}},
		{"--num-query-groups 3 does not divide --num-attention-heads 8; the nearest that does is 2", []any{"group-query-attention", true, "num-query-groups", 3}},
		{"--num-attention-heads 8 does not divide by --tensor-model-parallel-size 3; the nearest that does is 2", []any{"tensor-model-parallel-size", 3, "GPUs", 48, "global-batch-size", 16}},
		{"--num-experts 8 does not divide by --expert-model-parallel-size 3; the nearest that does is 2", []any{"expert-model-parallel-size", 3, "GPUs", 3, "global-batch-size", 3}},
		{"16 GPUs do not divide by --expert-tensor-parallel-size x --expert-model-parallel-size x --pipeline-model-parallel-size = 3; the nearest number that does is 15", []any{"expert-model-parallel-size", 3}},
		{"16 GPUs do not divide by --tensor-model-parallel-size x --pipeline-model-parallel-size x --context-parallel-size = 5; the nearest number that does is 15", []any{"pipeline-model-parallel-size", 5}},
		{"--pipeline-model-parallel-size 7 does not divide 8 layers; use 8, or keep it with --pipeline-model-parallel-layout \"Et|tt|(t|)*4tL\"", []any{"pipeline-model-parallel-size", 7, "GPUs", 14, "global-batch-size", 2}},
		{"--num-layers-per-virtual-pipeline-stage 3 does not divide the 4 layers of a pipeline rank; the nearest that does is 2", []any{"pipeline-model-parallel-size", 2, "num-layers-per-virtual-pipeline-stage", 3}},
		{"3 virtual stages do not divide the 4 layers of pipeline rank 0; the nearest number that does is 2, or use --pipeline-model-parallel-layout", []any{"pipeline-model-parallel-size", 2, "num-virtual-stages-per-pipeline-rank", 3}},
		{"2 virtual stages a rank need --pipeline-model-parallel-size of at least 2", []any{"num-virtual-stages-per-pipeline-rank", 2}},
		{"exclude each other; keep one", []any{"pipeline-model-parallel-size", 2, "num-virtual-stages-per-pipeline-rank", 2, "pipeline-model-parallel-layout", "Et*4|t*4L"}},
		{"holds 7 layers, but the model has 8; try \"Et*4|t*4L\"", []any{"pipeline-model-parallel-size", 2, "pipeline-model-parallel-layout", "Et*4|t*3L"}},
		{"has 1 m, but --mtp-num-layers is 0", []any{"pipeline-model-parallel-size", 2, "pipeline-model-parallel-layout", "Et*4|t*4mL"}},
		{"has 3 stages, which do not divide by --pipeline-model-parallel-size 2; try", []any{"pipeline-model-parallel-size", 2, "pipeline-model-parallel-layout", "Et*4|t*4|L"}},
		{"leave a number of the 8 layers that does not divide", []any{"pipeline-model-parallel-size", 4, "decoder-first-pipeline-num-layers", 3}},
		{"--global-batch-size 10 does not divide by --micro-batch-size 1 x 16 data-parallel replicas; the nearest that does is 16", []any{"global-batch-size", 10}},
		{"--seq-length 64 does not divide by 2 x --context-parallel-size 48", []any{"context-parallel-size", 48, "GPUs", 48}},
		{"--max-position-embeddings 32 is less than --seq-length 64", []any{"max-position-embeddings", 32}},
		{"--expert-model-parallel-size 2 needs experts", []any{"num-experts", nil, "expert-model-parallel-size", 2}},
		{"--moe-router-topk 9 is more than --num-experts 8", []any{"moe-router-topk", 9}},
		{"--bf16 and --fp16 exclude each other", []any{"fp16", true}},
		{"--fp8-param-gather needs --fp8-format", []any{"fp8-param-gather", true}},
		{"--fp8-output-proj needs --fp8-format and --fp8-recipe mxfp8", []any{"fp8-output-proj", true}},
		{"--fp8-output-proj needs --untie-embeddings-and-output-weights", []any{"fp8-output-proj", true, "fp8-format", "e4m3", "fp8-recipe", "mxfp8"}},
		{"--fp8-format e5m2 is unknown; choose from e4m3, hybrid", []any{"fp8-format", "e5m2"}},
		{"--recompute-modules moe_atc is unknown; did you mean moe_act?", []any{"recompute-granularity", "selective", "recompute-modules", "moe_atc"}},
		{"--offload-modules moe_ac is unknown; did you mean moe_act?", []any{"fine-grained-activation-offloading", true, "offload-modules", "[moe_ac]"}},
		{"--offload-modules shared_experts is not one of Megatron-LM's offload modules; choose from attn_norm", []any{"fine-grained-activation-offloading", true, "offload-modules", "shared_experts"}},
		{"--recompute-modules router is not one of Megatron-LM's recompute modules; choose from core_attn", []any{"recompute-granularity", "selective", "recompute-modules", "router"}},
		{"--offload-modules needs --fine-grained-activation-offloading", []any{"offload-modules", "[moe_act]"}},
		{"attn_proj requires core_attn; add core_attn", []any{"fine-grained-activation-offloading", true, "offload-modules", "attn_proj"}},
		{"--recompute-modules moe_act needs --moe-grouped-gemm", []any{"moe-grouped-gemm", nil, "recompute-granularity", "selective", "recompute-modules", "moe_act"}},
		{"mla_up_proj needs --multi-latent-attention", []any{"recompute-granularity", "selective", "recompute-modules", "mla_up_proj"}},
		{"exclude --fp8-recipe delayed", []any{"fp8-format", "hybrid", "recompute-granularity", "selective", "recompute-modules", "moe_act"}},
		{"moe excludes --overlap-moe-expert-parallel-comm", []any{"overlap-moe-expert-parallel-comm", true, "recompute-granularity", "selective", "recompute-modules", "moe"}},
		{"recomputes what --offload-modules expert_fc1 would move", []any{"recompute-granularity", "selective", "recompute-modules", "moe", "fine-grained-activation-offloading", true, "offload-modules", "expert_fc1"}},
		{"--offload-modules core_attn excludes --cuda-graph-impl local", []any{"fine-grained-activation-offloading", true, "offload-modules", "core_attn", "cuda-graph-impl", "local", "cuda-graph-modules", "attn"}},
		{"--offload-modules moe_act excludes --cuda-graph-modules moe", []any{"fine-grained-activation-offloading", true, "offload-modules", "moe_act", "cuda-graph-impl", "transformer_engine", "cuda-graph-modules", "attn moe"}},
		{"--tp-comm-overlap needs --sequence-parallel", []any{"tp-comm-overlap", true}},
		{"--recompute-granularity full needs --recompute-method", []any{"recompute-granularity", "full"}},
		{"--moe-paged-stash needs --moe-expert-rank-capacity-factor", []any{"moe-paged-stash", true}},
		{"--moe-expert-rank-capacity-factor needs --moe-token-dispatcher-type flex", []any{"moe-expert-rank-capacity-factor", 1.5}},
		{"--activation-offload-fraction 1.5: the share must lie between 0 and 1", []any{"activation-offload-fraction", 1.5}},
		{"--optimizer-cpu-offload needs --use-precision-aware-optimizer", []any{"optimizer-cpu-offload", true}},
		{"need --use-precision-aware-optimizer", []any{"exp-avg-dtype", "bf16"}},
		{"--optimizer lion cannot be predicted yet", []any{"optimizer", "lion"}},
		{"--fsdp-double-buffer and --megatron-fsdp-max-pool-double-buffer need --use-megatron-fsdp", []any{"megatron-fsdp-max-pool-double-buffer", true}},
		{"--num-distributed-optimizer-instances 3 does not divide the 16 data-parallel ranks; the nearest that does is 2", []any{"num-distributed-optimizer-instances", 3}},
		{"--hiden-size is not a flag of Megatron-LM; did you mean --hidden-size?", []any{"hiden-size", 64}},
		{"--recompute-module is not a flag of Megatron-LM; did you mean --recompute-modules?", []any{"recompute-module", "moe_act"}},
		{"12 GPUs (6 processes on each of 2 nodes, as the launcher says) do not divide by --tensor-model-parallel-size x --pipeline-model-parallel-size x --context-parallel-size = 8; the nearest number that does is 16, and so does every multiple of 8", []any{"tensor-model-parallel-size", 8, "nnodes", 2, "nproc-per-node", 6, "GPUs", 0}},
		{"given twice under different spellings", []any{"hidden_size", 64}},
		{"--hidden-size ${H}: the variable is not set in the text", []any{"hidden-size", "${H}"}},
		{"--hidden-size $((64/0)): the value cannot be computed: a variable in it is not set in the text, or it divides by zero", []any{"hidden-size", "$((64/0))"}},
		{"--cuda-graph-modules full_iteration captures everything; drop the other modules", []any{"cuda-graph-impl", "local", "cuda-graph-modules", []any{"full_iteration", "attn"}}},
		{"--hybrid-layer-pattern \"MX\": \"X\" is no layer", []any{"hybrid-layer-pattern", "MX"}},
		{"the depths \"M\" and \"*\" differ", []any{"hybrid-layer-pattern", "MM/M/*"}},
		{"has 3 stages, which do not divide by --pipeline-model-parallel-size 2", []any{"hybrid-layer-pattern", "M|M|*", "pipeline-model-parallel-size", 2}},
		{"so no other flag may divide the layers", []any{"hybrid-layer-pattern", "M|*", "pipeline-model-parallel-size", 2, "num-virtual-stages-per-pipeline-rank", 1}},
		{"a value must be a number, a word or a list", []any{"lr", map[string]any{}}},
	} {
		args := small(c.changes...)
		gpus := 16
		if n, ok := args["GPUs"]; ok {
			gpus = n.(int)
			delete(args, "GPUs")
		}
		_, _, err := FromArgs(args, Options{GPUs: gpus})
		switch {
		case err == nil:
			t.Errorf("%v was accepted, want %q", c.changes, c.want)
		case !strings.Contains(err.Error(), c.want):
			t.Errorf("%v: %v\nwant %q", c.changes, err, c.want)
		case strings.Contains(err.Error(), "\n"):
			t.Errorf("%v: more than a sentence: %v", c.changes, err)
		}
	}
}

// There is a warning about everything that is left out or assumed and that matters.
func TestWarnings(t *testing.T) {
	for _, c := range []struct {
		want    string
		changes []any
	}{
		{"", nil},
		{"", []any{"lr", 1e-4, "data-path", "${DATA}/x", "tensorboard-dir", "x", "moe-aux-loss-coeff", "1e-2"}},
		{"", []any{"position-embedding-type", "rope", "no-position-embedding", true}},
		{"", []any{"fp32-residual-connection", false}},
		{"--distribute-saved-activations: is not part of the forecast: what full recomputation keeps", []any{"distribute-saved-activations", true}},
		{"--brand-new-flag: is not known, and was left out", []any{"brand-new-flag", 1}},
		{"--zz16: is not known, and was left out", []any{"zz16", 1}}, // half of its letters are not those of --bf16
		{"nearest flag that matters here is --moe-router-topk", []any{"moe-router-topscore", 1}},
		{"--activation-offload-fraction: a fraction of 0 offloads nothing", []any{"fine-grained-activation-offloading", true, "offload-modules", "moe_act", "activation-offload-fraction", 0}},
		{"--moe-expert-rank-capacity-factor: 0.5 leaves room for fewer rows than balanced routing sends", []any{"moe-paged-stash", true, "moe-expert-rank-capacity-factor", 0.5, "moe-token-dispatcher-type", "flex", "moe-flex-dispatcher-backend", "hybridep", "num-experts", 8}},
		{"--cp-comm-type: it differs by layer; a2a is assumed for all", []any{"cp-comm-type", "[a2a p2p]"}},
		{"--offload-modules: all layers are recomputed", []any{"fine-grained-activation-offloading", true, "offload-modules", "moe_act", "recompute-granularity", "full", "recompute-method", "uniform", "recompute-num-layers", 1}},
		{"--offload-modules: Megatron-LM does not move attn_norm and mlp_norm where --cuda-graph-modules attn moe_router captures", []any{"fine-grained-activation-offloading", true, "offload-modules", "attn_norm mlp_norm", "cuda-graph-impl", "transformer_engine", "cuda-graph-modules", "attn moe_router"}},
		{"", []any{"fine-grained-activation-offloading", true, "offload-modules", "attn_norm mlp_norm", "cuda-graph-impl", "transformer_engine"}},
		{"--cuda-graph-modules: nothing is captured", []any{"cuda-graph-modules", "attn"}},
		{"--num-layers: the pattern has 3 layers, which replaces 8", []any{"hybrid-layer-pattern", "M*E"}},
	} {
		_, warnings, err := FromArgs(small(c.changes...), Options{GPUs: 16})
		if err != nil {
			t.Errorf("%v: %v", c.changes, err)
			continue
		}
		text := ""
		for _, w := range warnings {
			text += w.String() + "\n"
		}
		if (c.want == "") != (text == "") || !strings.Contains(text, c.want) {
			t.Errorf("%v: warnings %q, want %q", c.changes, text, c.want)
		}
	}
	for instances, gpus := range map[int]int{2: 8, 8: 16} {
		s, warnings, err := FromArgs(small("tensor-model-parallel-size", 2, "expert-model-parallel-size", 4, "num-distributed-optimizer-instances", instances), Options{})
		if err != nil || s.Layout.World != gpus || len(warnings) != 1 || !strings.Contains(warnings[0].Text, fmt.Sprintf("%d, the fewest with this layout", gpus)) {
			t.Errorf("%d instances: %v, %v", instances, warnings, err)
		}
	}
}

// Each flag is read, or known not to matter, or known not to be predicted.
func TestTablesAreDisjoint(t *testing.T) {
	r, err := newReader(small())
	if err != nil {
		t.Fatal(err)
	}
	s := &plan.Setup{}
	for _, step := range []func(*reader, *plan.Setup, Options) error{readModel, readLayout, readBatch, readPrecision, readOptimizer, readKernels, readMemory, check} {
		if err := step(r, s, Options{GPUs: 16}); err != nil {
			t.Fatal(err)
		}
	}
	ignored, unmodelled := ignoredFlags(), unmodelledFlags()
	for name := range r.known {
		if ignored[name] || unmodelled[name] != "" || refusedOptions[name] != "" {
			t.Errorf("--%s is read, yet it is in a table", name)
		}
	}
	for name := range unmodelled {
		if ignored[name] {
			t.Errorf("--%s is in both tables", name)
		}
	}
	if len(r.known) < 140 || len(ignored) < 600 {
		t.Errorf("only %d flags are read and %d ignored", len(r.known), len(ignored))
	}
	// Which flags are read must not depend on what is given.
	empty, err := newReader(small("num-experts", nil, "hybrid-layer-pattern", "M*-"))
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []func(*reader, *plan.Setup, Options) error{readModel, readLayout, readBatch, readPrecision, readOptimizer, readKernels, readMemory, check} {
		if err := step(empty, s, Options{GPUs: 16}); err != nil {
			t.Fatal(err)
		}
	}
	if !maps.Equal(r.known, empty.known) {
		t.Errorf("flags that are read differ from job to job: %v", difference(r.known, empty.known))
	}
}

func difference(a, b map[string]bool) (out []string) {
	for name := range a {
		if !b[name] {
			out = append(out, name)
		}
	}
	for name := range b {
		if !a[name] {
			out = append(out, name)
		}
	}
	return slices.Sorted(slices.Values(out))
}

// The rules of the split agree with examples by hand.
func TestSplits(t *testing.T) {
	for _, c := range []struct {
		want    string
		changes []any
	}{
		{"Et*4|t*4L", []any{"pipeline-model-parallel-size", 2}},
		{"Ett|tt|tt|ttL", []any{"pipeline-model-parallel-size", 2, "num-layers-per-virtual-pipeline-stage", 2}},
		{"Et|t|t|t|t|t|t|tL", []any{"pipeline-model-parallel-size", 2, "num-virtual-stages-per-pipeline-rank", 4}},
		{"Ett|t*3|t*3L", []any{"pipeline-model-parallel-size", 3, "decoder-first-pipeline-num-layers", 2}},
		{"Et|t*3|t*3|tL", []any{"pipeline-model-parallel-size", 4, "decoder-first-pipeline-num-layers", 1, "decoder-last-pipeline-num-layers", 1}},
		{"Et*6|ttL", []any{"pipeline-model-parallel-size", 2, "decoder-last-pipeline-num-layers", 2}},
		{"Et|tt|tt|tt|tL", []any{"pipeline-model-parallel-size", 5, "account-for-embedding-in-pipeline-split", true, "account-for-loss-in-pipeline-split", true}},
		{"Et*4|t*4mmL", []any{"pipeline-model-parallel-size", 2, "mtp-num-layers", 2, "position-embedding-type", "rope"}},
		{"Et*4|t*4|m|L", []any{"pipeline-model-parallel-size", 2, "mtp-num-layers", 1, "pipeline-model-parallel-layout", "Et*4|t*4|m|L"}},
	} {
		s, _, err := FromArgs(small(append(c.changes, "global-batch-size", nil)...), Options{GPUs: 120})
		if err != nil {
			t.Errorf("%v: %v", c.changes, err)
			continue
		}
		depth := 0
		if s.Model.MTP != nil {
			depth = s.Model.MTP.Depth
		}
		want, err := parseLayout(c.want)
		if err != nil {
			t.Fatal(err)
		}
		if got := piecesOf(s.Layout.Stages, depth); !slices.Equal(got, want) {
			t.Errorf("%v: %s, want %s", c.changes, formatLayout(got), c.want)
		}
	}
}

// A model that is given in addition to the arguments can be shortened, but not replaced.
func TestGivenModel(t *testing.T) {
	m, err := model.Preset("deepseek-v3")
	if err != nil {
		t.Fatal(err)
	}
	args := map[string]any{"bf16": true, "micro-batch-size": 1, "seq-length": 4096, "num-layers": 14, "num-experts": 64, "mtp-num-layers": 0, "vocab-size": 256000}
	s, warnings, err := FromArgs(args, Options{Model: m, GPUs: 8})
	if err != nil || len(warnings) > 0 {
		t.Fatal(warnings, err)
	}
	if len(s.Model.Layers) != 14 || s.Model.Layers[2].Dense == nil || s.Model.Layers[3].MoE.Experts != 64 || s.Model.MTP != nil || s.Model.Vocab != 256000 {
		t.Errorf("cut down to %+v", s.Model)
	}
	if m.Layers[3].MoE.Experts != 256 || len(m.Layers) != 61 || m.MTP == nil {
		t.Error("the caller's model has changed")
	}
	for _, c := range []struct {
		flag string
		v    any
		want string
	}{
		{"hidden-size", 64, "--hidden-size describes a model, but deepseek-v3 is given already"},
		{"swiglu", true, "--swiglu describes a model"},
		{"num-layers", 70000, "--num-layers 70000 is more than 65536"},
	} {
		bad := maps.Clone(args)
		bad[c.flag] = c.v
		if _, _, err := FromArgs(bad, Options{Model: m, GPUs: 8}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", c.flag, err, c.want)
		}
	}
}

// A dense model gets no experts.
func TestExpertsOfADenseModel(t *testing.T) {
	m, err := model.Preset("llama-3-8b")
	if err != nil {
		t.Fatal(err)
	}
	args := map[string]any{"bf16": true, "micro-batch-size": 1, "seq-length": 4096, "num-experts": 8}
	const want = "--num-experts 8 changes nothing, because llama-3-8b has no experts; leave it out"
	if _, _, err := FromArgs(args, Options{Model: m, GPUs: 8}); err == nil || err.Error() != want {
		t.Errorf("error %v, want %q", err, want)
	}
}

// More layers than a preset has go on in its pattern.
func TestMoreLayers(t *testing.T) {
	for _, c := range []struct {
		name         string
		from, repeat int // layer i from there on is like layer i-repeat
	}{
		{"llama-3-8b", 1, 1}, {"deepseek-v3", 4, 1}, {"jamba-1.5-large", 8, 8}, {"qwen3-next-80b-a3b", 4, 4}, {"nemotron-h-8b", 52, 52},
	} {
		m, err := model.Preset(c.name)
		if err != nil {
			t.Fatal(err)
		}
		n := 2*len(m.Layers) + 3
		s, warnings, err := FromArgs(map[string]any{"num-layers": n, "micro-batch-size": 1, "global-batch-size": 8, "seq-length": 4096, "bf16": true}, Options{Model: m, GPUs: 8})
		if err != nil || len(s.Model.Layers) != n || len(warnings) == 0 || !strings.Contains(warnings[0].String(), "more repeat the last ones") {
			t.Fatalf("%s: %v, %v", c.name, warnings, err)
		}
		for i := max(c.from, c.repeat); i < n; i++ {
			if model.KindOf(s.Model.Layers[i]) != model.KindOf(s.Model.Layers[i-c.repeat]) {
				t.Errorf("%s: layer %d is unlike layer %d", c.name, i, i-c.repeat)
				break
			}
		}
	}
}

// Muon has three ways to be sharded.
func TestMuon(t *testing.T) {
	for _, c := range []struct {
		changes                []any
		layerwise, distributed bool
	}{
		{[]any{"optimizer", "muon", "use-distributed-optimizer", nil}, false, false},
		{[]any{"optimizer", "muon"}, true, true},
		{[]any{"optimizer", "dist_muon", "use-distributed-optimizer", nil}, true, true},
		{[]any{"optimizer", "muon", "no-use-layer-wise-param-layout", true}, true, false},
	} {
		s, _, err := FromArgs(small(c.changes...), Options{GPUs: 16})
		if err != nil {
			t.Fatal(err)
		}
		if o := s.Optimizer; o.Kind != "muon" || o.LayerwiseSharding != c.layerwise || o.Distributed != c.distributed {
			t.Errorf("%v: %+v", c.changes, o)
		}
	}
}

// Unsaid lists what no flag can express, and Environment what the environment needs.
func TestUnsaid(t *testing.T) {
	s, _, err := FromArgs(small("tensor-model-parallel-size", 2, "cross-entropy-loss-fusion", true, "cross-entropy-fusion-impl", "te",
		"fine-grained-activation-offloading", true, "offload-modules", "moe_act", "activation-offload-fraction", 0.5), Options{GPUs: 16})
	if err != nil {
		t.Fatal(err)
	}
	if got := Unsaid(s); len(got) != 1 || !strings.Contains(got[0], "cross entropy") {
		t.Errorf("unsaid: %q", got)
	}
	s.Offload.ByBytes = true
	s.Layout.FSDP = plan.FSDP{Shard: plan.ShardParameters, Pool: "arena", Prefetch: 2}
	s.Model.PostNorms = true
	if got := Unsaid(s); len(got) != 5 {
		t.Errorf("unsaid: %q", got)
	}
	s.Layout.FSDP = plan.FSDP{}
	if got := strings.Join(Environment(s), " "); got != "CUDA_DEVICE_MAX_CONNECTIONS=1 NVTE_CPU_OFFLOAD_V1=1" {
		t.Errorf("environment: %s", got)
	}
	if s.Hardware, err = hardware.ByName("b200"); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(Environment(s), " "); got != "NVTE_CPU_OFFLOAD_V1=1" {
		t.Errorf("environment on Blackwell: %s", got)
	}
}

// divisor and multiple find the nearest.
func TestNearest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, want := rapid.IntRange(1, 300).Draw(t, "n"), rapid.IntRange(1, 300).Draw(t, "want")
		d := divisor(n, want)
		if n%d != 0 {
			t.Fatalf("%d does not divide %d", d, n)
		}
		for other := 1; other <= n; other++ {
			if n%other == 0 && abs(other-want) < abs(d-want) {
				t.Fatalf("%d is nearer to %d than %d", other, want, d)
			}
		}
		if m := multiple(n, want); m%want != 0 || m < want || (n >= want && abs(m-n)*2 > want) {
			t.Fatalf("multiple of %d near %d: %d", want, n, m)
		}
	})
	for word, want := range map[string]string{"moe_atc": "did you mean moe_act? ", "zzz": ""} {
		if got := meant(word, memory.MegatronModules(memory.Recompute)); got != want {
			t.Errorf("%s: %q, want %q", word, got, want)
		}
	}
}
