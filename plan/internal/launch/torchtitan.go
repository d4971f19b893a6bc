// This file owns torchtitan's TOML. It names a model and one of its flavors, whose sizes are
// those of torchtitan's registry.

package launch

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

var titanTable = regexp.MustCompile(`(?m)^\s*\[\s*(job|model|training|parallelism|activation_checkpoint)\s*\]`)

// isTitan reports whether a file is torchtitan's: tables of TOML under its names, of which a
// shell script or YAML has none.
func isTitan(data []byte) bool { return len(titanTable.FindAll(data, 2)) == 2 }

// titanModels has the flavors of each model: the name of a preset, or keys of a config.json
// of Hugging Face.
var titanModels = map[string]map[string]string{
	"llama3": {
		"debugmodel": llamaKeys(256, 6, 16, 16, 768, 2048, false),
		"1B":         llamaKeys(2048, 16, 32, 8, 8192, 128256, true),
		"3B":         llamaKeys(3072, 28, 24, 8, 8192, 128256, true),
		"8B":         "llama-3-8b", "70B": "llama-3-70b", "405B": "llama-3.1-405b",
	},
	"llama4": {
		"17bx16e": llama4Keys(24, 16, 1), "17bx128e": llama4Keys(24, 128, 2),
		"17bx16e_irope": llama4Keys(48, 16, 1), "17bx128e_irope": llama4Keys(48, 128, 2),
	},
	"deepseek_v3": {
		"debugmodel": `{"model_type": "deepseek_v2", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 16, "intermediate_size": 1024,
			"moe_intermediate_size": 256, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
			"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 2048}`,
		"16B": "deepseek-v2-lite", "236B": "deepseek-v2", "671B": "deepseek-v3",
	},
	"qwen3": {
		"0.6B": qwenKeys(1024, 28, 16, 3072, true), "1.7B": qwenKeys(2048, 28, 16, 6144, true), "4B": qwenKeys(2560, 36, 32, 9728, true),
		"8B": qwenKeys(4096, 36, 32, 12288, false), "14B": qwenKeys(5120, 40, 40, 17408, false), "32B": "qwen3-32b",
		"30B-A3B": "qwen3-30b-a3b", "235B-A22B": "qwen3-235b-a22b",
	},
	"gpt_oss": {"20b": "gpt-oss-20b", "120b": "gpt-oss-120b"},
}

func llamaKeys(hidden, layers, heads, groups, width, vocab int, tied bool) string {
	return fmt.Sprintf(`{"model_type": "llama", "hidden_size": %d, "num_hidden_layers": %d, "num_attention_heads": %d, "num_key_value_heads": %d,
		"intermediate_size": %d, "vocab_size": %d, "tie_word_embeddings": %t}`, hidden, layers, heads, groups, width, vocab, tied)
}

func qwenKeys(hidden, layers, heads, width int, tied bool) string {
	return fmt.Sprintf(`{"model_type": "qwen3", "hidden_size": %d, "num_hidden_layers": %d, "num_attention_heads": %d, "num_key_value_heads": 8,
		"head_dim": 128, "intermediate_size": %d, "vocab_size": 151936, "tie_word_embeddings": %t}`, hidden, layers, heads, width, tied)
}

// llama4Keys describes Llama 4 without norms of queries and keys, as torchtitan has it.
func llama4Keys(layers, experts, step int) string {
	return fmt.Sprintf(`{"model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": %d, "num_attention_heads": 40, "num_key_value_heads": 8,
		"head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": %d, "num_experts_per_tok": 1,
		"interleave_moe_layer_step": %d, "use_qk_norm": false, "vocab_size": 202048}`, layers, experts, step)
}

func titan(data []byte) (*File, error) {
	keys, err := parseTOML(string(data))
	if err != nil {
		return nil, fmt.Errorf("the TOML cannot be read: %w", err)
	}
	r := newReader("torchtitan")
	top := r.table("", keys)
	r.titanModel(top.sub("model"))
	r.titanLayout(top.sub("parallelism"))
	r.titanTraining(top.sub("training"))
	r.titanCheckpointing(top.sub("activation_checkpoint"))
	optimizer := top.sub("optimizer")
	if name := optimizer.word("name", "AdamW"); name != "Adam" && name != "AdamW" {
		r.refuse("optimizer.name %.40q has state of another size than Adam, which is not modelled", name)
	}
	optimizer.without(map[string]string{"early_step_in_backward": "updates parameters inside of the backward pass"})
	optimizer.rest("lr", "eps", "beta1", "beta2", "weight_decay", "implementation", "fused", "foreach")
	if top.sub("memory_estimation").flag("enabled", false) {
		r.note("memory_estimation only estimates memory; the job itself is planned")
	}
	if top.sub("compile").flag("enable", false) {
		r.note("compile is not modelled: kernels that it fuses save less than is counted")
	}
	r.set("cross-entropy-loss-fusion", false)
	r.note("the forecast is that of Megatron-FSDP, which holds 18 bytes a parameter in shards; FSDP2 with fp32 parameters holds 16")
	top.rest("job", "profiling", "metrics", "lr_scheduler", "checkpoint", "comm", "experimental", "float8", "mx", "quantize", "fault_tolerance",
		"validation", "debug", "logging")
	return r.done()
}

func (r *reader) titanModel(t *table) {
	name, flavor := t.word("name", "llama3"), t.word("flavor", "debugmodel")
	flavors := titanModels[name]
	if flavors == nil {
		r.refuse("model.name %.40q is not one of torchtitan's models that are known (%s)", name, strings.Join(slices.Sorted(maps.Keys(titanModels)), ", "))
		return
	}
	text := flavors[flavor]
	if text == "" {
		r.refuse("model.flavor %.40q of %s is not known; known are %s", flavor, name, strings.Join(slices.Sorted(maps.Keys(flavors)), ", "))
		return
	}
	r.file.Model = registered(name+" "+flavor, text)
	converters := fmt.Sprint(t.keys["converters"])
	if t.on("converters") && (strings.Contains(converters, "float8") || strings.Contains(converters, "mx")) {
		r.note("model.converters: eight-bit products are planned in bf16, because their inputs are saved so")
	}
	t.rest("tokenizer_path", "hf_assets_path", "tokenizer_name", "print_after_conversion", "norm_type", "use_flex_attn", "attn_mask_type")
}

func (r *reader) titanLayout(t *table) {
	tp, pp, cp := t.whole("tensor_parallel_degree", 1, 1, most), t.whole("pipeline_parallel_degree", 1, 1, most), t.whole("context_parallel_degree", 1, 1, most)
	r.set("tensor-model-parallel-size", tp)
	r.set("pipeline-model-parallel-size", pp)
	r.set("context-parallel-size", cp)
	r.set("expert-model-parallel-size", t.whole("expert_parallel_degree", 1, 1, most))
	r.set("expert-tensor-parallel-size", t.whole("expert_tensor_parallel_degree", 1, 1, most))
	r.set("sequence-parallel", tp > 1)
	if cp > 1 {
		r.set("cp-comm-type", map[string]string{"allgather": "all_gather", "alltoall": "p2p"}[t.word("context_parallel_rotate_method", "allgather", "allgather", "alltoall")])
	}
	shard, replicas := t.whole("data_parallel_shard_degree", -1, -1, most), t.whole("data_parallel_replicate_degree", 1, 1, most)
	switch {
	case shard == 0:
		r.fail("parallelism.data_parallel_shard_degree is 0; it must be -1, for all that is left, or at least 1")
	case shard == 1:
		r.refuse("parallelism.data_parallel_shard_degree 1 keeps whole parameters in fp32 and casts them, which is not modelled")
	case shard > 1 && float64(shard)*float64(replicas)*float64(tp)*float64(pp)*float64(cp) > most:
		r.fail("the degrees of parallelism multiply to more than %d GPUs", most)
	case shard > 1:
		r.file.GPUs = shard * replicas * tp * pp * cp
	}
	r.set("use-megatron-fsdp", true)
	keep := t.word("fsdp_reshard_after_forward", "default", "default", "always", "never")
	if keep == "never" || keep == "default" && pp > 1 {
		r.set("data-parallel-sharding-strategy", "optim_grads")
		r.note("parameters stay gathered between the passes, so they are planned whole, and gradients and optimiser sharded")
	} else {
		r.set("data-parallel-sharding-strategy", "optim_grads_params")
	}
	if replicas > 1 {
		r.set("num-distributed-optimizer-instances", replicas)
	}
	if pp > 1 {
		switch schedule := t.word("pipeline_parallel_schedule", "1F1B"); strings.ToLower(schedule) {
		case "1f1b":
		case "interleaved1f1b":
			r.set("num-virtual-stages-per-pipeline-rank", 2)
		default:
			r.refuse("parallelism.pipeline_parallel_schedule %.40q is not modelled; 1F1B and Interleaved1F1B are", schedule)
		}
		t.without(map[string]string{
			"pipeline_parallel_split_points": "divides the layers by hand", "pipeline_parallel_schedule_csv": "orders the passes by hand",
			"module_fqns_per_model_part": "divides the layers by hand", "pipeline_parallel_layers_per_stage": "divides the layers by hand",
		})
		r.set("micro-batch-size", t.whole("pipeline_parallel_microbatch_size", 1, 1, most))
	}
	t.rest("disable_loss_parallel", "enable_async_tensor_parallel", "enable_compiled_autograd", "pipeline_parallel_schedule", "context_parallel_rotate_method",
		"pipeline_parallel_microbatch_size", "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers", "pipeline_parallel_layers_per_stage",
		"context_parallel_load_balancer", "pipeline_parallel_expert_parallel_overlap")
}

func (r *reader) titanTraining(t *table) {
	key := "local_batch_size"
	if t.has("batch_size") {
		key = "batch_size" // the old name
	}
	local := t.whole(key, 8, 1, most)
	micro, divided := r.file.Args["micro-batch-size"].(int) // of a pipeline
	if !divided {
		micro = local
		r.set("micro-batch-size", local)
	}
	if local%micro != 0 {
		r.fail("training.%s is %d; parallelism.pipeline_parallel_microbatch_size, which is %d, must divide it", key, local, micro)
	}
	if n := t.whole("global_batch_size", -1, -1, most); n > 0 {
		r.set("global-batch-size", n)
	} else if n == 0 {
		r.fail("training.global_batch_size is 0; it must be -1, for one batch of each replica, or at least 1")
	} else {
		r.file.Accumulation = max(local/micro, 1)
	}
	r.set("seq-length", t.whole("seq_len", 2048, 1, most))
	t.without(map[string]string{"enable_cpu_offload": "keeps parameters, gradients and optimiser in host memory"})
	if dtype := t.word("dtype", "float32", "float32", "bfloat16"); dtype != "float32" {
		r.refuse("training.dtype bfloat16 keeps parameters and optimiser in bf16, which is not modelled")
	}
	r.set("bf16", t.word("mixed_precision_param", "bfloat16", "bfloat16", "float32") == "bfloat16")
	t.word("mixed_precision_reduce", "float32", "float32", "bfloat16")
	if t.flag("compile", false) {
		r.note("compile is not modelled: kernels that it fuses save less than is counted")
	}
	t.rest("dataset", "dataset_path", "max_norm", "steps", "gc_freq", "gc_debug", "seed", "deterministic", "data_parallel_degree")
}

// titanCheckpointing reads activation checkpointing. Its selection by operations has no
// equal among Megatron-LM's modules, so everything is planned to be saved.
func (r *reader) titanCheckpointing(t *table) {
	mode := t.word("mode", "selective", "none", "full", "selective", "memory_budget")
	option := t.keys["selective_ac_option"]
	if !t.has("selective_ac_option") {
		option = "2" // torchtitan's default: every second layer
	}
	switch {
	case mode == "memory_budget":
		r.refuse("activation_checkpoint.mode memory_budget lets the compiler choose what is saved, which is not modelled")
	case mode == "full":
		r.set("recompute-granularity", "full")
		r.set("recompute-method", "uniform")
		r.set("recompute-num-layers", 1)
	case mode == "selective" && option == "op":
		r.note("activation_checkpoint.mode selective saves some operations of each layer; all of them are counted, so the job takes less")
	case mode == "selective":
		r.titanEvery(option)
	}
	t.rest("per_op_sac_force_recompute_mm_shapes_by_fqns", "early_stop", "memory_budget", "visualize_memory_budget_pareto", "preserve_rng_state", "determinism_check", "debug")
}

// titanEvery reads the checkpointing of one layer in a number of them.
func (r *reader) titanEvery(option any) {
	every := 0
	_, err := fmt.Sscan(fmt.Sprint(option), &every)
	if err != nil || every < 1 || every > most {
		r.fail("activation_checkpoint.selective_ac_option is %s; it must be op or a whole number from 1 on", short(option))
		return
	}
	if r.file.Model == nil || r.err != nil {
		return
	}
	pp, _ := r.file.Args["pipeline-model-parallel-size"].(int)
	if r.file.Args["num-virtual-stages-per-pipeline-rank"] != nil {
		pp *= 2
	}
	layers := len(r.file.Model.Layers) / max(pp, 1) / every
	if layers == 0 {
		return
	}
	r.set("recompute-granularity", "full")
	r.set("recompute-method", "block")
	r.set("recompute-num-layers", layers)
}
