// This file owns the flags of everything but the model.

package megatron

import (
	"slices"
	"strconv"

	"github.com/stowage-dev/stowage/plan"
)

func (e *emitter) layout(s *plan.Setup) {
	l := s.Layout
	e.unless(1, "tensor-model-parallel-size", l.TP)
	e.unless(1, "pipeline-model-parallel-size", l.PP)
	e.unless(1, "context-parallel-size", l.CP)
	e.unless(1, "expert-model-parallel-size", l.EP)
	e.unless(l.TP, "expert-tensor-parallel-size", l.ETP)
	e.setIf(l.SequenceParallel, "sequence-parallel")
	e.setIf(l.OverlapEP, "overlap-moe-expert-parallel-comm")
	if !isHybrid(s.Model) {
		e.stages(s)
	}
	if l.GroupSize != 0 && l.GroupSize != l.PP && l.VPP > 1 {
		e.count("microbatch-group-size-per-virtual-pipeline-stage", l.GroupSize)
	}
	if l.VocabMultiple != 0 {
		e.unless(128, "make-vocab-size-divisible-by", l.VocabMultiple)
	}
	e.count("micro-batch-size", s.Batch.Micro)
	e.count("global-batch-size", s.Batch.Global)
	e.count("seq-length", s.Batch.Seq)
}

// stages writes the division of layers in the shortest way.
func (e *emitter) stages(s *plan.Setup) {
	l, depth := s.Layout, 0
	if s.Model.MTP != nil {
		depth = s.Model.MTP.Depth
	}
	pieces := piecesOf(l.Stages, depth)
	if len(pieces) <= 1 {
		return
	}
	even := splitFlags{perRank: l.VPP}
	if counts, err := even.split(len(s.Model.Layers), l.PP, depth); err == nil {
		equal := make([]piece, len(counts))
		for i, n := range counts {
			equal[i].Layers = n
		}
		if slices.Equal(addEnds(equal, depth), pieces) {
			e.unless(1, "num-virtual-stages-per-pipeline-rank", l.VPP)
			return
		}
	}
	e.set("pipeline-model-parallel-layout", formatLayout(pieces))
}

// formatNames are the names of formats in flags.
var formatNames = map[plan.Format]string{plan.FP32: "fp32", plan.BF16: "bf16", plan.FP16: "fp16", plan.FP8: "fp8"}

func (e *emitter) precision(s *plan.Setup) {
	p := s.Precision
	switch p.Params {
	case plan.BF16:
		e.set("bf16")
	case plan.FP16:
		e.set("fp16")
		e.setIf(p.MainGrads == plan.FP32, "accumulate-allreduce-grads-in-fp32")
	}
	switch p.Compute {
	case plan.FP8:
		recipe := "tensorwise"
		if p.Blockwise {
			recipe = "blockwise"
		}
		e.set("fp8-format", "e4m3")
		e.set("fp8-recipe", recipe)
		e.setIf(p.ParamGather, "fp8-param-gather")
	case plan.MXFP8:
		e.set("fp8-format", "e4m3")
		e.set("fp8-recipe", "mxfp8")
		e.setIf(p.ParamGather, "fp8-param-gather")
		e.setIf(p.OutputLayer, "fp8-output-proj")
	case plan.NVFP4:
		e.set("fp4-format", "e2m1")
		e.set("fp4-recipe", "nvfp4")
		e.setIf(p.ParamGather, "fp4-param-gather")
	}
	if p.PlainFirst > 0 || p.PlainLast > 0 {
		e.set("first-last-layers-bf16")
		e.unless(1, "num-layers-at-start-in-bf16", p.PlainFirst)
		e.unless(1, "num-layers-at-end-in-bf16", p.PlainLast)
	}
	e.setIf(p.GradsInBF16 && p.Params == plan.BF16, "grad-reduce-in-bf16")
}

func (e *emitter) optimizer(s *plan.Setup) {
	o, f := s.Optimizer, s.Layout.FSDP
	muon := o.Kind == "muon" || o.Kind == "dist_muon"
	e.setIf(muon, "optimizer", "muon")
	e.setIf(!muon && o.Kind != "adam" && o.Kind != "", "optimizer", o.Kind)
	e.setIf(o.Distributed || o.LayerwiseSharding, "use-distributed-optimizer")
	e.setIf(o.LayerwiseSharding && !o.Distributed, "no-use-layer-wise-param-layout")
	if o.PrecisionAware {
		e.set("use-precision-aware-optimizer")
		for _, d := range []struct {
			flag   string
			format plan.Format
		}{
			{"main-params-dtype", o.MainParams}, {"main-grads-dtype", o.MainGrads},
			{"exp-avg-dtype", o.Moment1}, {"exp-avg-sq-dtype", o.Moment2},
		} {
			e.setIf(d.format != plan.FP32, d.flag, formatNames[d.format])
		}
	}
	if o.OffloadFraction > 0 {
		e.set("optimizer-cpu-offload")
		e.number("optimizer-offload-fraction", o.OffloadFraction)
	}
	if n := max(o.Instances, f.Outer); n > 1 {
		e.count("num-distributed-optimizer-instances", n)
	}
	if f.Shard == plan.NoShard {
		return
	}
	e.set("use-megatron-fsdp")
	e.set("data-parallel-sharding-strategy", map[plan.ShardLevel]string{
		plan.ShardOptimizer: "optim", plan.ShardGradients: "optim_grads", plan.ShardParameters: "optim_grads_params",
	}[f.Shard])
	e.setIf(f.OuterOptimizer, "outer-dp-sharding-strategy", "optim")
	if f.EarlyGather {
		e.set("overlap-grad-reduce") // which the other one asks for
		e.set("overlap-param-gather")
	}
	if f.DoubleBuffer || f.Pool != "" {
		e.set("fsdp-double-buffer")
		e.setIf(f.Pool != "" && f.Pool != "fixed", "megatron-fsdp-max-pool-double-buffer")
	}
	// Megatron-LM starts FSDP only with this format of checkpoints.
	e.set("ckpt-format", "fsdp_dtensor")
}

func (e *emitter) kernels(s *plan.Setup) {
	k := s.Kernels
	e.setIf(k.Local, "transformer-impl", "local")
	e.setIf(k.Attention != "", "attention-backend", k.Attention)
	e.number("hidden-dropout", k.Dropout)
	e.number("attention-dropout", k.AttentionDropout)
	e.setIf(!k.GradFusion, "no-gradient-accumulation-fusion")
	switch k.Loss {
	case "native-fused":
		e.set("cross-entropy-loss-fusion")
		e.set("cross-entropy-fusion-impl", "native")
	case "te":
		e.set("cross-entropy-loss-fusion")
		e.set("cross-entropy-fusion-impl", "te")
	}
	e.setIf(k.GroupedGEMM, "moe-grouped-gemm")
	e.setIf(k.PermuteFusion, "moe-permute-fusion")
	e.setIf(k.OpFuser, "use-transformer-engine-op-fuser")
	e.setIf(k.RouterFP32, "moe-router-dtype", "fp32")
	switch k.Dispatcher {
	case "alltoall":
		e.set("moe-token-dispatcher-type", "alltoall")
	case "deepep", "hybridep":
		e.set("moe-token-dispatcher-type", "flex")
		e.set("moe-flex-dispatcher-backend", k.Dispatcher)
	}
	if k.CapacityFactor > 0 {
		e.number("moe-expert-capacity-factor", k.CapacityFactor)
	}
	e.setIf(k.PadToCapacity, "moe-pad-expert-input-to-capacity")
	e.setIf(k.SharedExpertOverlap, "moe-shared-expert-overlap")
	e.setIf(k.UnfusedActivation && gatedModel(s.Model), "no-bias-swiglu-fusion")
	e.setIf(k.UnfusedActivation && !gatedModel(s.Model), "no-bias-gelu-fusion")
	e.setIf(k.WeightedSquaredReLU, "use-fused-weighted-squared-relu")
	e.setIf(k.RouterFusion, "moe-router-fusion")
	e.setIf(k.TPCommOverlap, "tp-comm-overlap")
	e.setIf(k.NoAttentionMask, "no-create-attention-mask-in-dataloader")
	e.setIf(k.DeferEmbeddingWgrad, "defer-embedding-wgrad-compute")
	if k.WgradDeferral > 0 {
		e.count("wgrad-deferral-limit", k.WgradDeferral)
	}
	e.setIf(k.Deterministic, "deterministic-mode")
	e.setIf(k.CPComm != "" && k.CPComm != "p2p", "cp-comm-type", k.CPComm)
}

func (e *emitter) memory(s *plan.Setup) {
	switch r := s.Recompute; {
	case r.Full:
		e.set("recompute-granularity", "full")
		e.set("recompute-method", r.Method)
		e.count("recompute-num-layers", r.Layers)
	case len(r.Modules) > 0:
		e.set("recompute-granularity", "selective")
		e.set("recompute-modules", r.Modules...)
	}
	if o := s.Offload; len(o.Modules) > 0 {
		e.set("fine-grained-activation-offloading")
		e.set("offload-modules", o.Modules...)
		if o.Fraction != 0 && o.Fraction != 1 {
			e.number("activation-offload-fraction", o.Fraction)
		}
		if o.MinElements != 0 && o.MinElements != defaultElements {
			e.set("min-offloaded-tensor-size", strconv.FormatInt(o.MinElements, 10))
		}
		if o.Delta != 0 {
			e.set("delta-offload-bytes-across-pp-ranks", strconv.FormatInt(int64(o.Delta), 10))
		}
		e.unless(0, "fine-grained-offloading-max-inflight-offloads", o.MaxInflight)
	}
	e.unless(0, "cpu-offloading-num-layers", s.Offload.Layers)
	if s.Stash.RankCapacity > 0 {
		e.number("moe-expert-rank-capacity-factor", s.Stash.RankCapacity)
	}
	if len(s.Stash.Modules) > 0 {
		e.set("moe-paged-stash")
		factor := s.Stash.Factor
		if factor == 0 {
			factor = -defaultFactor // from what steps were seen to need
		}
		if factor != defaultFactor {
			e.number("moe-paged-stash-buffer-size-factor-cuda", factor)
		}
		if s.Stash.HostFactor != 0 {
			e.number("moe-paged-stash-buffer-size-factor-cpu", s.Stash.HostFactor)
		}
	}
	switch scopes := s.Graph.Scopes; {
	case slices.Contains(scopes, "full_iteration"):
		e.set("cuda-graph-impl", "full_iteration")
		e.set("no-check-for-nan-in-loss-and-grad") // the check would read the device in the graph
	case len(scopes) > 0:
		impl := "transformer_engine"
		if s.Graph.Local {
			impl = "local"
		}
		e.set("cuda-graph-impl", impl)
		e.set("cuda-graph-modules", scopes...)
	}
	if n := s.Graph.Warmup; n != 0 {
		e.set("cuda-graph-warmup-steps", strconv.Itoa(max(n, 0)))
	}
}
