// This file owns DeepSpeed's JSON. It says how a job is sharded and its batch, and leaves
// the model to the program.

package launch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
)

// most bounds counts of a file. The planner has bounds of its own below it.
const most = 1 << 26

// deepSpeedKeys returns the file as an object if it is DeepSpeed's. Keys of its batch or its
// sharding tell, and objects for its precision, which models have as single values.
func deepSpeedKeys(data []byte) (map[string]any, error) {
	if !strings.HasPrefix(strings.TrimSpace(string(data[:min(len(data), 4096)])), "{") || !deepSpeedKey.Match(data) && !deepSpeedPrecisions.Match(data) {
		return nil, nil
	}
	data = input.JSON(data)
	var keys map[string]any
	err := json.Unmarshal(data, &keys)
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		line := 1 + bytes.Count(data[:min(int(syntax.Offset), len(data))], []byte("\n"))
		return nil, fmt.Errorf("line %d is not JSON, which has no comments, no single quotes and no comma before a closing bracket", line)
	}
	if err != nil {
		return nil, input.Plain(err) // a number that is too large
	}
	for key, value := range keys {
		_, object := value.(map[string]any)
		if deepSpeedKey.MatchString(`"`+key+`"`) || object && (key == "bf16" || key == "fp16") {
			return keys, input.Repeated(data)
		}
	}
	return nil, nil
}

var deepSpeedPrecisions = regexp.MustCompile(`['"](bf16|fp16)['"]\s*:\s*\{`)

var deepSpeedKey = regexp.MustCompile(`['"](zero_optimization|train_micro_batch_size_per_gpu|train_batch_size|gradient_accumulation_steps|zero_allow_untested_optimizer)['"]`)

// deepSpeed reads the file. ZeRO is planned as Megatron-LM's sharding of the same parts: the
// distributed optimiser for stage 1, Megatron-FSDP for stages 2 and 3.
func deepSpeed(keys map[string]any) (*File, error) {
	r := newReader("DeepSpeed")
	r.noteAutomatic(automatic("", keys, 0))
	top := r.table("", keys)
	top.without(map[string]string{
		"amp": "makes Apex choose precisions", "torch_autocast": "keeps parameters in fp32 and casts them",
		"compression_training": "compresses layers", "quantize_training": "quantises layers", "progressive_layer_drop": "drops layers",
		"hybrid_engine": "keeps a copy for inference", "sparse_attention": "replaces attention", "elasticity": "changes the batch with the number of GPUs",
	})
	r.deepSpeedBatch(top)
	r.deepSpeedPrecision(top)
	r.zero(top.sub("zero_optimization"))
	r.deepSpeedOptimizer(top.sub("optimizer"))
	tp := top.sub("tensor_parallel")
	divided := tp.whole("autotp_size", 1, 1, most)
	r.set("tensor-model-parallel-size", divided)
	r.deepSpeedCheckpointing(top, divided > 1)
	tp.rest("tp", "partition_config", "preset_model", "tp_grain_size")
	if n := top.whole("sequence_parallel_size", 1, 1, most); n > 1 {
		r.set("context-parallel-size", n)
		r.set("cp-comm-type", "a2a")
	}
	r.deepSpeedGPUs(top)
	r.note("ZeRO is planned as Megatron-LM's sharding of the same parts; DeepSpeed's buckets and its memory for communication are not counted")
	top.rest("aio", "autotuning", "checkpoint", "comms_logger", "csv_monitor", "curriculum_learning", "data_efficiency", "disable_allgather",
		"dump_state", "eigenvalue", "flops_profiler", "gradient_clipping", "gradient_predivide_factor", "load_universal_checkpoint", "memory_breakdown",
		"monitor_config", "nebula", "prescale_gradients", "scheduler", "sparse_gradients", "steps_per_print", "tensorboard", "timers", "wall_clock_breakdown",
		"wandb", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last", "seed")
	return r.done()
}

// automatic removes values that Hugging Face's Trainer fills in, and returns their keys.
func automatic(path string, keys map[string]any, depth int) (found []string) {
	for key, v := range keys {
		switch v := v.(type) {
		case string:
			if v == "auto" {
				delete(keys, key)
				found = append(found, path+key)
			}
		case map[string]any:
			if depth < 3 {
				found = append(found, automatic(path+key+".", v, depth+1)...)
			}
		}
	}
	return found
}

// noteAutomatic names the automatic values that change the forecast.
func (r *reader) noteAutomatic(found []string) {
	matter := []string{"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16.enabled", "fp16.enabled"}
	found = slices.DeleteFunc(found, func(key string) bool { return !slices.Contains(matter, key) })
	if slices.Sort(found); len(found) > 0 {
		r.note("the program that launches the job decides %s (auto), so give their values as settings", strings.Join(found, ", "))
	}
}

func (r *reader) deepSpeedBatch(top *table) {
	if top.has("train_micro_batch_size_per_gpu") {
		r.set("micro-batch-size", top.whole("train_micro_batch_size_per_gpu", 1, 1, most))
	}
	switch {
	case top.has("train_batch_size"):
		r.set("global-batch-size", top.whole("train_batch_size", 1, 1, most))
		if !top.has("train_micro_batch_size_per_gpu") && top.has("gradient_accumulation_steps") {
			r.fail("train_batch_size and gradient_accumulation_steps leave the microbatch to the number of GPUs; add train_micro_batch_size_per_gpu")
		}
	case top.has("gradient_accumulation_steps") || top.has("train_micro_batch_size_per_gpu"):
		r.file.Accumulation = top.whole("gradient_accumulation_steps", 1, 1, most)
	}
	top.has("gradient_accumulation_steps") // follows from the others
}

// deepSpeedGPUs takes the number of GPUs from the three sizes of a batch, if all are given:
// the whole batch is that of a replica times the replicas.
func (r *reader) deepSpeedGPUs(top *table) {
	if !top.has("train_batch_size") || !top.has("train_micro_batch_size_per_gpu") || !top.has("gradient_accumulation_steps") {
		return
	}
	all := top.whole("train_batch_size", 1, 1, most)
	micro, times := top.whole("train_micro_batch_size_per_gpu", 1, 1, most), top.whole("gradient_accumulation_steps", 1, 1, most)
	each := top.sub("tensor_parallel").whole("autotp_size", 1, 1, most) * top.whole("sequence_parallel_size", 1, 1, most)
	if all%(micro*times) != 0 {
		r.fail("train_batch_size is %d; it must be train_micro_batch_size_per_gpu x gradient_accumulation_steps, which is %d, times a whole number of replicas", all, micro*times)
		return
	}
	if n := float64(all/(micro*times)) * float64(each); n <= most {
		r.file.GPUs = int(n)
	}
}

func (r *reader) deepSpeedPrecision(top *table) {
	half := top.sub("fp16")
	brain := top.sub("bf16")
	if !top.has("bf16") {
		brain = top.sub("bfloat16") // the old name
	}
	top.has("bfloat16")
	bf16, fp16 := brain.flag("enabled", false), half.flag("enabled", false)
	switch {
	case bf16 && fp16:
		r.fail("bf16.enabled and fp16.enabled are both true; one of them must be false")
	case fp16:
		r.set("fp16", true)
		r.set("bf16", false)
	case bf16 || top.has("bf16") && !brain.has("enabled"): // auto was removed
		r.set("bf16", true)
	default:
		r.set("bf16", false)
		r.note("neither bf16 nor fp16 is enabled: parameters are planned in fp32")
	}
	if top.sub("data_types").word("grad_accum_dtype", "fp32", "fp32", "bf16", "fp16") == "bf16" {
		r.set("grad-reduce-in-bf16", true)
	}
	top.has("communication_data_type")
}

// zero reads the stage of ZeRO and what is offloaded.
func (r *reader) zero(z *table) {
	stage := z.whole("stage", 0, 0, 3)
	switch stage {
	case 0:
		r.set("use-distributed-optimizer", false)
		r.set("overlap-param-gather", false)
	case 1:
		r.set("use-distributed-optimizer", true)
	default:
		r.set("use-megatron-fsdp", true)
		r.set("data-parallel-sharding-strategy", map[int]string{2: "optim_grads", 3: "optim_grads_params"}[stage])
	}
	z.without(map[string]string{
		"zero_quantized_weights": "gathers weights in eight bits (ZeRO++)", "zero_quantized_nontrainable_weights": "gathers weights in eight bits (ZeRO++)",
		"zero_quantized_gradients": "reduces gradients in four bits (ZeRO++)", "mics_shard_size": "shards within groups (MiCS)", "cpu_offload_params": "moves parameters to host memory between uses",
	})
	if n := z.whole("zero_hpz_partition_size", 1, 0, most); n > 1 {
		r.refuse("zero_optimization.zero_hpz_partition_size keeps a second copy of parameters in each node (ZeRO++), which is not modelled")
	}
	if old, ok := z.keys["cpu_offload"].(bool); ok && old {
		z.read["cpu_offload"] = true
		r.offloadOptimizer(1)
	}
	if p := z.sub("offload_param"); p.word("device", "none", "none", "cpu", "nvme") != "none" {
		r.refuse("zero_optimization.offload_param moves parameters to host memory between uses, which is not modelled")
	}
	if o := z.sub("offload_optimizer"); o.word("device", "none", "none", "cpu", "nvme") != "none" {
		if stage == 0 {
			r.fail("zero_optimization.offload_optimizer needs stage 1, 2 or 3")
		}
		r.offloadOptimizer(o.share("ratio", 1))
		if o.word("device", "") == "nvme" {
			r.note("what zero_optimization.offload_optimizer moves to NVMe is counted as host memory")
		}
	}
	z.rest("allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "contiguous_gradients", "round_robin_gradients",
		"sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
		"stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters", "elastic_checkpoint",
		"load_from_fp32_weights", "use_multi_rank_bucket_allreduce", "model_persistence_threshold", "cpu_offload_use_pin_memory",
		"legacy_stage1", "memory_efficient_linear", "log_trace_cache_warnings", "override_module_apply")
}

func (r *reader) offloadOptimizer(fraction float64) {
	r.set("optimizer-cpu-offload", true)
	r.set("optimizer-offload-fraction", fraction)
	r.set("use-precision-aware-optimizer", true)
}

func (r *reader) deepSpeedOptimizer(o *table) {
	kind := o.word("type", "AdamW")
	switch strings.ToLower(kind) {
	case "adam", "adamw", "fusedadam", "deepspeedcpuadam", "torch_adam":
	case "sgd":
		r.set("optimizer", "sgd")
	case "muon":
		r.set("optimizer", "muon")
	default:
		r.refuse("optimizer.type %.40q has state of another size than Adam, SGD or Muon, which is not modelled", kind)
	}
	o.rest("params", "legacy_fusion")
}

// deepSpeedCheckpointing reads the options of activation checkpointing. The program asks for
// it, layer by layer as a rule.
func (r *reader) deepSpeedCheckpointing(top *table, divided bool) {
	if !top.on("activation_checkpointing") {
		return
	}
	c := top.sub("activation_checkpointing")
	c.without(map[string]string{"cpu_checkpointing": "offloads the inputs of layers and recomputes the rest"})
	if divided {
		c.without(map[string]string{"partition_activations": "divides the inputs of layers over tensor-parallel ranks"})
	}
	r.set("recompute-granularity", "full")
	r.set("recompute-method", "uniform")
	r.set("recompute-num-layers", 1)
	r.note("activation_checkpointing is taken to recompute every layer; if the program does not call it, recompute nothing")
	c.rest("contiguous_memory_optimization", "number_checkpoints", "synchronize_checkpoint_boundary", "profile", "cpu_checkpointing", "partition_activations")
}
