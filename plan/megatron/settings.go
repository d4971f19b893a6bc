// This file owns the settings other than model and layout: batch, precision, optimiser and
// its sharding, kernels.

package megatron

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/plan"
)

func readBatch(r *reader, s *plan.Setup, _ Options) error {
	b, l := &s.Batch, s.Layout
	b.Micro = r.positive("micro-batch-size", 0)
	b.Seq = max(r.positive("seq-length", 0), r.positive("encoder-seq-length", 0))
	for _, f := range []struct {
		flag  string
		value int
	}{{"micro-batch-size", b.Micro}, {"seq-length", b.Seq}} {
		if f.value == 0 {
			return fmt.Errorf("--%s is missing: activations cannot be sized without it", f.flag)
		}
	}
	step := b.Micro * l.DP()
	b.Global = r.positive("global-batch-size", r.scheduled(step))
	if b.Global%step != 0 {
		return fmt.Errorf("--global-batch-size %d does not divide by --micro-batch-size %d x %d data-parallel replicas; the nearest that does is %d", b.Global, b.Micro, l.DP(), multiple(b.Global, step))
	}
	if l.CP > 1 && b.Seq%(2*l.CP) != 0 {
		return fmt.Errorf("--seq-length %d does not divide by 2 x --context-parallel-size %d; the nearest that does is %d", b.Seq, l.CP, multiple(b.Seq, 2*l.CP))
	}
	if s.Model.MaxPositions < b.Seq {
		return fmt.Errorf("--max-position-embeddings %d is less than --seq-length %d; raise it", s.Model.MaxPositions, b.Seq)
	}
	return nil
}

// scheduled returns the first size of a schedule of batch sizes such as "0:384 200B:768",
// which has sizes by the tokens trained on so far. Each fills the pipeline, so all of them
// need the same memory.
func (r *reader) scheduled(otherwise int) int {
	const name = "step-batch-size-schedule"
	words, _ := r.get(name)
	steps := strings.Fields(strings.Join(words, " "))
	if len(steps) == 0 {
		return otherwise
	}
	_, size, _ := strings.Cut(strings.Trim(steps[0], `"'`), ":")
	n, err := strconv.Atoi(strings.Trim(size, `"'`))
	if err != nil || n < 1 || n > mostCount {
		r.fail("--%s %s: a size at each threshold is expected; for instance 0:384 200B:768", name, strings.Join(words, " "))
		return otherwise
	}
	return n
}

func readPrecision(r *reader, s *plan.Setup, _ Options) error {
	p := &s.Precision
	bf16, fp16 := r.flag("bf16"), r.flag("fp16")
	switch {
	case bf16 && fp16:
		return fmt.Errorf("--bf16 and --fp16 exclude each other; keep one")
	case bf16:
		p.Params = plan.BF16
	case fp16:
		p.Params = plan.FP16
	default:
		p.Params = plan.FP32
	}
	p.Compute = p.Params
	fp8, recipe := r.word("fp8-format", "", "e4m3", "hybrid"), r.word("fp8-recipe", "delayed", "tensorwise", "delayed", "mxfp8", "blockwise", "custom")
	fp4 := r.word("fp4-format", "", "e2m1")
	r.word("fp4-recipe", "nvfp4", "nvfp4", "custom")
	gather8, gather4 := r.flag("fp8-param-gather"), r.flag("fp4-param-gather")
	switch {
	case fp8 != "" && fp4 != "":
		return fmt.Errorf("--fp8-format and --fp4-format exclude each other; keep one")
	case gather8 && fp8 == "":
		return fmt.Errorf("--fp8-param-gather needs --fp8-format")
	case gather4 && fp4 == "":
		return fmt.Errorf("--fp4-param-gather needs --fp4-format")
	case fp4 != "":
		p.Compute, p.ParamGather = plan.NVFP4, gather4
	case fp8 != "" && recipe == "mxfp8":
		p.Compute, p.ParamGather = plan.MXFP8, gather8
	case fp8 != "":
		p.Compute, p.ParamGather, p.Blockwise = plan.FP8, gather8, recipe == "blockwise"
	}
	if p.OutputLayer = r.flag("fp8-output-proj"); p.OutputLayer && (fp8 == "" || recipe != "mxfp8") {
		return fmt.Errorf("--fp8-output-proj needs --fp8-format and --fp8-recipe mxfp8")
	}
	if p.OutputLayer && isHybrid(s.Model) {
		p.OutputLayer = false
		r.warn("fp8-output-proj", "hybrid models do not use it")
	}
	if recipe == "custom" && fp8 != "" {
		return refused(option, "--fp8-recipe custom, which is not modelled; give --fp8-recipe tensorwise or another one to plan the job with it")
	}
	readEndLayers(r, p)
	p.ActivationInputFP8 = r.flag("activation-func-fp8-input-store")
	p.MainGrads = plan.FP32
	if r.flag("grad-reduce-in-bf16") && bf16 {
		p.MainGrads, p.GradsInBF16 = plan.BF16, true
	}
	accumulate := r.flag("accumulate-allreduce-grads-in-fp32")
	if fp16 && !accumulate {
		// Only bf16 accumulates in fp32 by default.
		p.MainGrads = plan.FP16
	}
	return nil
}

func readEndLayers(r *reader, p *plan.Precision) {
	on := r.flag("first-last-layers-bf16")
	start, end := r.count("num-layers-at-start-in-bf16", 1), r.count("num-layers-at-end-in-bf16", 1)
	if !on || p.Compute == p.Params {
		return
	}
	p.PlainFirst, p.PlainLast = start, end
}

var formats = map[string]plan.Format{"fp32": plan.FP32, "bf16": plan.BF16, "fp16": plan.FP16, "fp8": plan.FP8}

func (r *reader) format(name string, otherwise plan.Format, allowed ...string) plan.Format {
	w := r.word(name, "", allowed...)
	if f, ok := formats[w]; ok {
		return f
	}
	return otherwise // not given, or "auto"
}

func readOptimizer(r *reader, s *plan.Setup, _ Options) error {
	o := &s.Optimizer
	o.Kind = r.word("optimizer", "adam", "adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon")
	sharded := r.flag("use-distributed-optimizer")
	byLayer := !r.flag("no-use-layer-wise-param-layout")
	if scalar := r.word("muon-scalar-optimizer", "adam", "adam", "lion"); scalar != "adam" {
		return refused(option, "--muon-scalar-optimizer %s, which is not modelled; give --muon-scalar-optimizer adam to plan the job with it", scalar)
	}
	switch o.Kind {
	case "adam", "sgd":
		o.Distributed = sharded
	case "muon", "dist_muon":
		// Ranks hold whole matrices. With the layout that is the default, parameters that
		// Muon does not update are sharded as by the distributed optimiser.
		o.LayerwiseSharding = sharded || o.Kind == "dist_muon"
		o.Distributed = o.LayerwiseSharding && byLayer
		o.Kind = "muon"
	default:
		return refused(option, "--optimizer %s cannot be predicted yet; adam, sgd and muon can", o.Kind)
	}
	o.PrecisionAware = r.flag("use-precision-aware-optimizer")
	o.MainParams = r.format("main-params-dtype", plan.FP32, "fp32", "fp16")
	o.MainGrads = r.format("main-grads-dtype", plan.FP32, "fp32", "bf16")
	o.Moment1 = r.format("exp-avg-dtype", plan.FP32, "fp32", "fp16", "bf16", "fp8")
	o.Moment2 = r.format("exp-avg-sq-dtype", plan.FP32, "fp32", "fp16", "bf16", "fp8")
	lower := o.MainParams != plan.FP32 || o.MainGrads != plan.FP32 || o.Moment1 != plan.FP32 || o.Moment2 != plan.FP32
	switch {
	case lower && !o.PrecisionAware:
		return fmt.Errorf("--main-params-dtype, --main-grads-dtype, --exp-avg-dtype and --exp-avg-sq-dtype other than fp32 need --use-precision-aware-optimizer")
	case o.PrecisionAware && !o.Distributed:
		return fmt.Errorf("--use-precision-aware-optimizer needs --use-distributed-optimizer with adam")
	case o.MainGrads == plan.BF16:
		s.Precision.MainGrads, s.Precision.GradsInBF16 = plan.BF16, true
	}
	share := r.share("optimizer-offload-fraction", 1)
	if r.flag("optimizer-cpu-offload") {
		if !o.PrecisionAware {
			return fmt.Errorf("--optimizer-cpu-offload needs --use-precision-aware-optimizer beside it")
		}
		o.OffloadFraction = share
	}
	if n := r.positive("num-distributed-optimizer-instances", 1); n > 1 {
		if s.Layout.DP()*s.Layout.CP%n != 0 {
			return fmt.Errorf("--num-distributed-optimizer-instances %d does not divide the %d data-parallel ranks; the nearest that does is %d", n, s.Layout.DP()*s.Layout.CP, divisor(s.Layout.DP()*s.Layout.CP, n))
		}
		o.Instances = n
	}
	return readFSDP(r, s)
}

// readFSDP must run after the optimiser is read, because its instances are the outer groups
// of hybrid sharding.
func readFSDP(r *reader, s *plan.Setup) error {
	f, o := &s.Layout.FSDP, &s.Optimizer
	ours, torch := r.flag("use-megatron-fsdp"), r.flag("use-torch-fsdp2")
	ours = r.flag("use-custom-fsdp") || ours
	strategy := r.word("data-parallel-sharding-strategy", "optim_grads_params", "no_shard", "optim", "optim_grads", "optim_grads_params")
	outer := r.word("outer-dp-sharding-strategy", "no_shard", "no_shard", "optim") == "optim"
	outer = r.flag("enable-full-sharding-in-hsdp") || outer
	double, pool := r.flag("fsdp-double-buffer"), r.flag("megatron-fsdp-max-pool-double-buffer")
	double = r.flag("use-nccl-ub") || pool || double
	grads := r.format("megatron-fsdp-main-grads-dtype", s.Precision.MainGrads, "fp32", "bf16", "fp16", "auto")
	params := r.format("megatron-fsdp-main-params-dtype", plan.FP32, "fp32", "bf16", "fp16", "auto")
	wire := r.format("megatron-fsdp-grad-comm-dtype", grads, "fp32", "bf16", "fp16", "auto")
	keep, early := r.flag("torch-fsdp2-no-reshard-after-forward"), r.flag("overlap-param-gather")
	switch {
	case ours && torch:
		return fmt.Errorf("--use-megatron-fsdp and --use-torch-fsdp2 exclude each other; keep one")
	case !ours && !torch:
		if double {
			return fmt.Errorf("--fsdp-double-buffer and --megatron-fsdp-max-pool-double-buffer need --use-megatron-fsdp")
		}
		return nil
	case torch && s.Layout.PP > 1:
		return fmt.Errorf("--use-torch-fsdp2 excludes --pipeline-model-parallel-size %d; use --use-megatron-fsdp", s.Layout.PP)
	case torch && keep:
		strategy = "optim_grads"
	case torch:
		strategy = "optim_grads_params"
	case o.Kind != "adam" && o.Kind != "sgd":
		return fmt.Errorf("--use-megatron-fsdp excludes --optimizer %s; use adam or sgd", o.Kind)
	}
	f.Shard = map[string]plan.ShardLevel{
		"no_shard": plan.NoShard, "optim": plan.ShardOptimizer,
		"optim_grads": plan.ShardGradients, "optim_grads_params": plan.ShardParameters,
	}[strategy]
	o.Distributed = f.Shard != plan.NoShard
	f.DoubleBuffer = double
	f.EarlyGather = early && f.Shard == plan.ShardParameters
	switch {
	case pool:
		f.Pool = "max"
	case double:
		f.Pool = "fixed"
	}
	f.Outer, f.OuterOptimizer = o.Instances, outer && o.Instances > 1
	o.Instances = 0
	if grads != s.Precision.MainGrads {
		s.Precision.MainGrads, s.Precision.GradsInBF16 = grads, grads == plan.BF16
	}
	if params != plan.FP32 {
		r.warn("megatron-fsdp-main-params-dtype", "main parameters are counted as fp32")
	}
	if wire != grads {
		r.warn("megatron-fsdp-grad-comm-dtype", "gradients are counted as sent in the format they are kept in")
	}
	return nil
}

func readKernels(r *reader, s *plan.Setup, _ Options) error {
	k := &s.Kernels
	k.Local = r.word("transformer-impl", "transformer_engine", "local", "transformer_engine", "inference_optimized") == "local"
	k.Attention = r.word("attention-backend", "", "auto", "flash", "fused", "unfused", "local")
	switch k.Attention {
	case "auto":
		k.Attention = ""
	case "local":
		k.Attention = "unfused"
	}
	k.Dropout = r.share("hidden-dropout", 0.1)
	k.AttentionDropout = r.share("attention-dropout", 0.1)
	k.GradFusion = !r.flag("no-gradient-accumulation-fusion")
	impl := r.word("cross-entropy-fusion-impl", "native", "native", "te")
	if r.flag("cross-entropy-loss-fusion") {
		k.Loss = map[string]string{"native": "native-fused", "te": "te"}[impl]
	}
	k.GroupedGEMM = r.flag("moe-grouped-gemm")
	k.PermuteFusion = r.flag("moe-permute-fusion")
	k.OpFuser = r.flag("use-transformer-engine-op-fuser")
	k.RouterFP32 = r.word("moe-router-dtype", "", "fp32", "fp64") != ""
	k.CapacityFactor = max(r.number("moe-expert-capacity-factor", 0), 0)
	k.PadToCapacity = r.flag("moe-pad-expert-input-to-capacity")
	if k.PadToCapacity && k.CapacityFactor == 0 {
		return fmt.Errorf("--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor")
	}
	k.SharedExpertOverlap = r.flag("moe-shared-expert-overlap")
	// Each flag concerns one activation function and does nothing for the other.
	gelu, swiglu := r.flag("no-bias-gelu-fusion"), r.flag("no-bias-swiglu-fusion")
	if k.UnfusedActivation = gelu; r.flag("swiglu") || gatedModel(s.Model) {
		k.UnfusedActivation = swiglu
	}
	k.WeightedSquaredReLU = r.flag("use-fused-weighted-squared-relu")
	k.RouterFusion = r.flag("moe-router-fusion")
	k.TPCommOverlap = r.flag("tp-comm-overlap")
	k.NoAttentionMask = r.flag("no-create-attention-mask-in-dataloader")
	if k.TPCommOverlap && !s.Layout.SequenceParallel {
		return fmt.Errorf("--tp-comm-overlap needs --sequence-parallel and --tensor-model-parallel-size of at least 2")
	}
	k.DeferEmbeddingWgrad = r.flag("defer-embedding-wgrad-compute")
	if n := r.count("wgrad-deferral-limit", 0); k.DeferEmbeddingWgrad {
		k.WgradDeferral = n
	}
	k.Deterministic = r.flag("deterministic-mode")
	readDispatcher(r, s)
	types := r.list("cp-comm-type", "p2p", "a2a", "allgather", "a2a+p2p", "all_gather")
	if len(types) > 0 && types[0] != "p2p" {
		k.CPComm = strings.ReplaceAll(types[0], "_", "")
	}
	if len(types) > 1 {
		r.warn("cp-comm-type", "it differs by layer; "+types[0]+" is assumed for all")
	}
	return nil
}

func readDispatcher(r *reader, s *plan.Setup) {
	kind := r.word("moe-token-dispatcher-type", "allgather", "allgather", "alltoall", "alltoall_seq", "flex")
	backend := r.word("moe-flex-dispatcher-backend", "deepep", "deepep", "hybridep", "ncclep")
	deepEP := r.flag("moe-enable-deepep")
	switch {
	case !hasExperts(s.Model):
		return
	case kind == "alltoall_seq":
		kind = "alltoall"
	case kind == "flex" && deepEP:
		kind = "deepep"
	case kind == "flex" && backend == "ncclep":
		kind = "hybridep"
		r.warn("moe-flex-dispatcher-backend", "ncclep is counted like hybridep")
	case kind == "flex":
		kind = backend
	}
	s.Kernels.Dispatcher = kind
	if (kind == "deepep" || kind == "hybridep") && s.Layout.EP == 1 && s.Layout.ETP == 1 {
		r.warn("moe-token-dispatcher-type", "Megatron-LM refuses flex where one rank has all experts; give --expert-model-parallel-size, or choose alltoall")
	}
}
