// This file owns the meanings of single flags, including old spellings.

package megatron

import (
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

func TestReadings(t *testing.T) {
	for _, c := range []struct {
		args string
		ok   func(*plan.Setup) bool
	}{
		{"--recompute-activations", func(s *plan.Setup) bool { return slices.Equal(s.Recompute.Modules, []string{"core_attn"}) }},
		{"--recompute-granularity selective", func(s *plan.Setup) bool { return slices.Equal(s.Recompute.Modules, []string{"core_attn"}) }},
		{"--moe-layer-recompute", func(s *plan.Setup) bool { return slices.Equal(s.Recompute.Modules, []string{"moe"}) }},
		{"--recompute-granularity full --recompute-method block --recompute-num-layers 3", func(s *plan.Setup) bool {
			return s.Recompute.Full && s.Recompute.Method == "block" && s.Recompute.Layers == 3
		}},
		{"--cpu-offloading-num-layers 3 --cpu-offloading-weights", func(s *plan.Setup) bool { return s.Offload.Layers == 3 && len(s.Offload.Modules) == 0 }},
		{"--fine-grained-activation-offloading --offload-modules moe_act --min-offloaded-tensor-size 0 --delta-offload-bytes-across-pp-ranks 1e9", func(s *plan.Setup) bool {
			return s.Offload.MinElements == 1 && s.Offload.Delta == 1e9 && s.Offload.Fraction == 0
		}},
		{"--fine-grained-activation-offloading --offload-modules attn_norm moe_act --cuda-graph-impl transformer_engine --cuda-graph-modules attn", func(s *plan.Setup) bool {
			return slices.Equal(s.Offload.Modules, []string{"moe_act"})
		}},
		{"--enable-cuda-graph", func(s *plan.Setup) bool { return slices.Equal(s.Graph.Scopes, []string{"attn", "moe"}) }},
		{"--cuda-graph-impl local --cuda-graph-scope attn", func(s *plan.Setup) bool { return slices.Equal(s.Graph.Scopes, []string{"attn"}) }},
		{"--cuda-graph-impl local --cuda-graph-modules full", func(s *plan.Setup) bool { return slices.Equal(s.Graph.Scopes, []string{"attn", "moe"}) }},
		{"--cuda-graph-impl local --cuda-graph-scope full_iteration", func(s *plan.Setup) bool { return slices.Equal(s.Graph.Scopes, []string{"full_iteration"}) }},
		{"--cuda-graph-impl local --cuda-graph-scope full_iteration_inference", func(s *plan.Setup) bool { return len(s.Graph.Scopes) == 0 }},
		{"--cuda-graph-impl local --cuda-graph-warmup-steps 0", func(s *plan.Setup) bool { return s.Graph.Local && s.Graph.Warmup == 0 }},
		{"--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1", func(s *plan.Setup) bool { return !s.Graph.Local && s.Graph.Warmup == 1 }},
		{"--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 3", func(s *plan.Setup) bool { return s.Graph.Warmup == 0 }},
		{"--external-cuda-graph", func(s *plan.Setup) bool { return s.Graph.Warmup == -1 }}, // captured before the first step
		{"--enable-cuda-graph --cuda-graph-modules attn", func(s *plan.Setup) bool { return s.Graph.Local }},
		{"--step-batch-size-schedule 0:384 200B:768 400B:1152", func(s *plan.Setup) bool { return s.Batch.Global == 384 }},
		{"--step-batch-size-schedule '0:384 200B:768'", func(s *plan.Setup) bool { return s.Batch.Global == 384 }},
		{"--fp8-format e4m3 --fp8-recipe mxfp8 --first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 3", func(s *plan.Setup) bool {
			return s.Precision.PlainFirst == 0 && s.Precision.PlainLast == 3
		}},
		{"--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-output-proj --untie-embeddings-and-output-weights", func(s *plan.Setup) bool { return s.Precision.OutputLayer }},
		{"--moe-token-dispatcher-type flex", func(s *plan.Setup) bool { return s.Kernels.Dispatcher == "deepep" }},
		{"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep", func(s *plan.Setup) bool { return s.Kernels.Dispatcher == "hybridep" }},
		{"--moe-token-dispatcher-type alltoall_seq", func(s *plan.Setup) bool { return s.Kernels.Dispatcher == "alltoall" }},
		{"--moe-expert-capacity-factor -1", func(s *plan.Setup) bool { return s.Kernels.CapacityFactor == 0 }},
		{"--attention-backend auto", func(s *plan.Setup) bool { return s.Kernels.Attention == "" }},
		{"--use-torch-fsdp2", func(s *plan.Setup) bool { return s.Layout.FSDP.Shard == plan.ShardParameters }},
		{"--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", func(s *plan.Setup) bool { return s.Layout.FSDP.Shard == plan.ShardGradients }},
		{"--use-custom-fsdp --data-parallel-sharding-strategy optim", func(s *plan.Setup) bool { return s.Layout.FSDP.Shard == plan.ShardOptimizer }},
		{"--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", func(s *plan.Setup) bool {
			return s.Layout.FSDP.Shard == plan.NoShard && !s.Optimizer.Distributed
		}},
		{"--use-megatron-fsdp --use-nccl-ub", func(s *plan.Setup) bool { return s.Layout.FSDP.DoubleBuffer && s.Layout.FSDP.Pool == "fixed" }},
		{"--use-megatron-fsdp --megatron-fsdp-main-grads-dtype bf16", func(s *plan.Setup) bool { return s.Precision.GradsInBF16 }},
		{"--use-precision-aware-optimizer --main-grads-dtype bf16", func(s *plan.Setup) bool {
			return s.Precision.MainGrads == plan.BF16 && s.Optimizer.MainGrads == plan.BF16
		}},
		{"--fp8-format hybrid --fp8-recipe blockwise", func(s *plan.Setup) bool { return s.Precision.Compute == plan.FP8 && s.Precision.Blockwise }},
		{"--fp4-format e2m1 --fp4-param-gather", func(s *plan.Setup) bool { return s.Precision.Compute == plan.NVFP4 && s.Precision.ParamGather }},
		{"--bf16 false", func(s *plan.Setup) bool { return s.Precision.Params == plan.FP32 && s.Precision.MainGrads == plan.FP32 }},
		{"--bf16 false --fp16", func(s *plan.Setup) bool { return s.Precision.Params == plan.FP16 && s.Precision.MainGrads == plan.FP16 }},
		{"--padded-vocab-size 1024", func(s *plan.Setup) bool { return s.Model.Vocab == 1024 && s.Layout.VocabMultiple == 1 }},
		{"--vocab-extra-ids 24", func(s *plan.Setup) bool { return s.Model.Vocab == 1024 }},
		{"--no-position-embedding", func(s *plan.Setup) bool { return !s.Model.LearnedPositions }},
		{"--use-rotary-position-embeddings", func(s *plan.Setup) bool { return !s.Model.LearnedPositions && s.Model.Layers[0].Attention.Rotary }},
		{"--swiglu", func(s *plan.Setup) bool { return s.Model.Layers[0].MoE.Width == 128 && s.Model.Layers[0].MoE.Gated }}, // 8/3 x 64 = 170, of which 128 is a multiple of 64
		{"--quick-geglu", func(s *plan.Setup) bool { return s.Model.Layers[0].MoE.Width == 256 && s.Model.Layers[0].MoE.Gated }},
		{"--moe-layer-freq 2", func(s *plan.Setup) bool { return s.Model.Layers[0].MoE != nil && s.Model.Layers[1].MoE == nil }},
		{"--moe-layer-freq [0,1,1,1,1,1,1,1]", func(s *plan.Setup) bool { return s.Model.Layers[0].MoE == nil && s.Model.Layers[1].MoE != nil }},
		{"--window-size (127,0) --window-attn-skip-freq 4", func(s *plan.Setup) bool {
			return s.Model.Layers[0].Attention.Window == 128 && s.Model.Layers[3].Attention.Window == 0
		}},
		{"--window-size -1,0", func(s *plan.Setup) bool { return s.Model.Layers[0].Attention.Window == 0 }},
		{"--experimental-attention-variant gdn --linear-attention-freq 4", func(s *plan.Setup) bool {
			return s.Model.Layers[2].DeltaNet.ValueHeads == 32 && s.Model.Layers[3].Attention != nil
		}},
		{"--hybrid-override-pattern=M*-E+G --mtp-hybrid-override-pattern M* --mtp-num-layers 2", func(s *plan.Setup) bool {
			m := s.Model
			return len(m.Layers) == 6 && m.Layers[4].MLA != nil && m.Layers[5].DeltaNet != nil && m.MTP.Depth == 2 && len(m.MTP.Layers) == 2
		}},
		{"--hybrid-layer-pattern MM --mamba-head-dim 32", func(s *plan.Setup) bool {
			return *s.Model.Layers[0].Mamba == model.Mamba{Version: 2, Inner: 128, Heads: 4, Groups: 8, State: 128, Conv: 4} // twice 64 wide
		}},
		{"--nnodes 2 --nproc-per-node 8", func(s *plan.Setup) bool { return s.Layout.World == 16 }},
		{"--microbatch-group-size-per-virtual-pipeline-stage 1 --pipeline-model-parallel-size 2", func(s *plan.Setup) bool { return s.Layout.GroupSize == 0 }}, // nothing is interleaved
		{"--microbatch-group-size-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", func(s *plan.Setup) bool { return s.Layout.GroupSize == 3 }},
		{"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-paged-stash --moe-expert-rank-capacity-factor 1.5 --moe-paged-stash-buffer-size-factor-cuda -1.2", func(s *plan.Setup) bool {
			return s.Stash.Factor == 0 && slices.Equal(s.Stash.Modules, memory.MegatronModules(memory.Stash))
		}},
		{"--tensor-model-parallel-size 2 --cp-comm-type all_gather", func(s *plan.Setup) bool { return s.Kernels.CPComm == "allgather" && s.Layout.ETP == 2 }},
		{"--swiglu --no-bias-gelu-fusion", func(s *plan.Setup) bool { return !s.Kernels.UnfusedActivation }},
		{"--no-bias-gelu-fusion", func(s *plan.Setup) bool { return s.Kernels.UnfusedActivation }},
	} {
		given, err := Parse("job.sh", []byte(c.args), ParseOptions{})
		if err != nil {
			t.Fatal(err)
		}
		args := small("global-batch-size", nil)
		if strings.Contains(c.args, "pattern") {
			delete(args, "num-layers")
		}
		for name, v := range given {
			args[name] = v
		}
		s, _, err := FromArgs(args, Options{})
		if err != nil {
			t.Errorf("%s: %v", c.args, err)
		} else if !c.ok(s) {
			t.Errorf("%s: %+v", c.args, s)
		}
	}
}

func TestTokenizers(t *testing.T) {
	for _, c := range []struct {
		kind, model string
		given       int
		want        int
		note        string
	}{
		{"GPT2BPETokenizer", "", 0, 50257, "GPT2BPETokenizer has 50257 words"},
		{"", "", 0, 50257, "GPT2BPETokenizer, which Megatron-LM takes without --tokenizer-type, has 50257 words"},
		{"Llama2Tokenizer", "", 0, 32000, "Llama2Tokenizer has 32000 words"},
		{"Llama2Tokenizer", "${PATH}", 0, 32000, "Llama2Tokenizer has 32000 words"},
		{"Llama2Tokenizer", "", 40000, 40000, ""},
		{"TikTokenizer", "${DIR}/multiMixV8.gpt4o_nc_sd.500000.128k.vocab.json", 0, 131072, "TikTokenizer has 131072 words"},
		{"GPTSentencePieceTokenizer", "a_32k.model", 0, 32000, "a_32k.model has 32000 words"},
		{"GPTSentencePieceTokenizer", "a_64k.model", 0, 64000, "a_64k.model has 64000 words"},
		{"GPTSentencePieceTokenizer", "a_128k.model", 0, 131072, "a_128k.model has 131072 words"},
		{"GPTSentencePieceTokenizer", "${DIR}/nemotron_2_256k.model", 0, 256000, "GPTSentencePieceTokenizer of nemotron_2_256k.model has 256000 words"},
		{"GPTSentencePieceTokenizer", "", 0, 256000, "as Megatron-LM's own jobs use it"},
		{"HuggingFaceTokenizer", "meta-llama/Llama-3.1-8B-Instruct", 0, 128256, "HuggingFaceTokenizer of Llama-3.1-8B-Instruct has 128256 words"},
		{"HuggingFaceTokenizer", "deepseek-ai/DeepSeek-V3", 0, 128815, "DeepSeek-V3"},
		{"HuggingFaceTokenizer", "microsoft/Phi-3-mini-128k-instruct", 99, 99, ""},
		{"HuggingFaceTokenizer", "x", 128256, 128256, ""},
		{"${TOKENIZER}", "", 99, 99, ""},
		{"${TOKENIZER}", "mixtral-8x7b", 0, 32000, "mixtral-8x7b has 32000 words"},
	} {
		args := small("vocab-size", nil, "tokenizer-type", c.kind, "tokenizer-model", c.model)
		s, notes, err := FromArgs(args, Options{GPUs: 16, Vocab: c.given})
		if err != nil {
			t.Errorf("%+v: %v", c, err)
			continue
		}
		text := ""
		for _, n := range notes {
			text += n.String()
		}
		if s.Model.Vocab != c.want || (c.note == "") != (text == "") || !strings.Contains(text, c.note) {
			t.Errorf("%+v: %d words, notes %q", c, s.Model.Vocab, text)
		}
	}
	for given, want := range map[int]int{0: 50257 + 24, 1000: 1024} {
		s, _, err := FromArgs(small("vocab-size", nil, "vocab-extra-ids", 24), Options{GPUs: 16, Vocab: given})
		if err != nil || s.Model.Vocab != want {
			t.Errorf("%d words are given: %v, %v; want %d with the extra ones", given, s, err, want)
		}
	}
	for _, c := range []struct{ kind, model, want string }{
		{"HuggingFaceTokenizer", "", "HuggingFaceTokenizer names no model; give it as --vocab-size"},
		{"HuggingFaceTokenizer", "microsoft/Phi-3-mini-128k-instruct", "the tokenizer Phi-3-mini-128k-instruct is not known"},
		{"${TOKENIZER}", "", "the tokenizer (${TOKENIZER}) is not known"},
		{"NullTokenizer", "", "NullTokenizer names no model"},
	} {
		_, _, err := FromArgs(small("vocab-size", nil, "tokenizer-type", c.kind, "tokenizer-model", c.model), Options{GPUs: 16})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
