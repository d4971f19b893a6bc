// This file owns YAML of NeMo and Megatron-Bridge: tables such as model, train and ddp whose
// keys are those of Megatron-LM's configuration classes.

package launch

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
)

var (
	nemoModel   = regexp.MustCompile(`(?m)^model:[ \t]*([#&{].*)?$`)
	nemoSibling = regexp.MustCompile(`^\$\{\.[a-z_]+\}$`)
	nemoRecipe  = regexp.MustCompile(`^([a-z_]+_)?(bf|fp)16_with_(fp8|mxfp8|nvfp4|[a-z0-9_]*(delayed|current|subchannel)_scaling)(_mixed)?$`)
	nemoOther   = regexp.MustCompile(`(?m)^(train|trainer|ddp):[ \t]*([#&{].*)?$`)
)

// isNeMo reports whether a file has a table of the model and one of its training.
func isNeMo(data []byte) bool { return nemoModel.Match(data) && nemoOther.Match(data) }

// nemoSame are keys that flags of Megatron-LM have too, with underscores.
var nemoSame = strings.Fields(`
	add_qkv_bias attention_dropout context_parallel_size cross_entropy_fusion_impl cross_entropy_loss_fusion
	cuda_graph_impl cuda_graph_scope cuda_graph_warmup_steps data_parallel_sharding_strategy delta_offload_bytes_across_pp_ranks
	expert_model_parallel_size expert_tensor_parallel_size ffn_hidden_size fine_grained_activation_offloading
	first_last_layers_bf16 fp8_param_gather fp8_recipe global_batch_size hidden_dropout hidden_size kv_channels kv_lora_rank
	make_vocab_size_divisible_by max_position_embeddings micro_batch_size moe_expert_capacity_factor moe_ffn_hidden_size
	moe_flex_dispatcher_backend moe_grouped_gemm moe_layer_freq moe_pad_expert_input_to_capacity moe_permute_fusion
	moe_router_dtype moe_router_enable_expert_bias moe_router_force_load_balancing moe_router_fusion moe_router_score_function
	moe_router_topk moe_shared_expert_gate moe_shared_expert_intermediate_size moe_shared_expert_overlap moe_token_dispatcher_type
	mtp_num_layers multi_latent_attention normalization num_attention_heads num_distributed_optimizer_instances num_layers
	offload_modules optimizer optimizer_cpu_offload optimizer_offload_fraction overlap_grad_reduce overlap_param_gather
	pipeline_model_parallel_layout pipeline_model_parallel_size position_embedding_type q_lora_rank qk_head_dim qk_layernorm
	qk_pos_emb_head_dim recompute_granularity recompute_method recompute_modules recompute_num_layers seq_length
	sequence_parallel tensor_model_parallel_size use_distributed_optimizer use_megatron_fsdp use_precision_aware_optimizer
	v_head_dim vocab_size`)

// nemoRenamed are keys whose flag has another name.
var nemoRenamed = map[string]string{
	"num_moe_experts": "num-experts", "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank", "gated_linear_unit": "swiglu",
	"encoder_seq_length": "seq-length", "sequence_length": "seq-length", "activations_checkpoint_granularity": "recompute-granularity",
	"activations_checkpoint_method": "recompute-method", "activations_checkpoint_num_layers": "recompute-num-layers",
}

// nemoOff are keys that switch off what a flag switches on.
var nemoOff = map[string]string{
	"add_bias_linear": "disable-bias-linear", "bias": "disable-bias-linear", "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
	"gradient_accumulation_fusion": "no-gradient-accumulation-fusion", "grad_reduce_in_fp32": "grad-reduce-in-bf16",
}

// nemoTables are read, and nemoOutside change no memory.
var (
	nemoTables  = []string{"model", "train", "dataset", "ddp", "dist", "optimizer", "comm_overlap"}
	nemoOutside = []string{
		"checkpoint", "exp_manager", "inprocess_restart", "logger", "name", "nvrx_straggler", "profiling", "rerun_state_machine", "restore_from_path",
		"rng", "run", "scheduler", "straggler", "tensor_inspect", "validation", "_target_", "hydra", "data",
	}
)

func nemo(data []byte, env map[string]string) (*File, error) {
	var keys map[string]any
	err := input.UnmarshalYAML(data, &keys)
	var invalid *input.YAMLError
	if errors.As(err, &invalid) && !invalid.Twice { // its words are those of the grammar
		return nil, fmt.Errorf("the YAML cannot be read: line %d is not YAML with keys and values; look for a tab, or for a bracket or quote without its other half", max(invalid.Line, 1))
	}
	if err != nil {
		return nil, fmt.Errorf("the YAML cannot be read: %w", err)
	}
	r := newReader("NeMo")
	keys, _ = r.fill("", plainNumbers(keys), env).(map[string]any)
	top := r.table("", keys)
	top.without(map[string]string{"peft": "trains adapters beside frozen parameters", "distillation": "holds a teacher beside the model", "kd_config": "holds a teacher beside the model"})
	for _, name := range nemoTables {
		r.nemoTable(top.sub(name))
	}
	r.nemoTokenizer(top)
	r.nemoTrainer(top.sub("trainer"))
	r.nemoPrecision(top)
	if r.err == nil && r.file.Args["num-query-groups"] != nil {
		r.set("group-query-attention", true)
	}
	if !r.file.Described() {
		r.note("what the recipe sets by itself is not in this file; give it as settings")
	}
	top.rest(nemoOutside...)
	return r.done()
}

// plainNumbers returns a value of YAML with the numbers of JSON.
func plainNumbers(v any) any {
	switch v := v.(type) {
	case uint64:
		return float64(v)
	case int64:
		return float64(v)
	case map[string]any:
		for key, inner := range v {
			v[key] = plainNumbers(inner)
		}
	case []any:
		for i, inner := range v {
			v[i] = plainNumbers(inner)
		}
	}
	return v
}

// nemoTable reads the keys of one table that flags of Megatron-LM stand for.
func (r *reader) nemoTable(t *table) {
	t.without(map[string]string{
		"cpu_offloading": "offloads whole layers by TransformerEngine", "vision_config": "adds a vision tower", "language_model_type": "describes a model of vision and language",
		"freeze_language_model": "freezes parameters", "freeze_vision_model": "freezes parameters", "use_torch_fsdp2": "shards by PyTorch's FSDP2",
		"teacher": "holds a teacher beside the model", "kd_config": "holds a teacher beside the model",
	})
	for _, key := range slices.Sorted(maps.Keys(t.keys)) {
		if own, ok := t.keys[key].(string); ok && nemoSibling.MatchString(own) {
			t.keys[key] = t.keys[own[3:len(own)-1]]
		}
		v := t.keys[key]
		if v == nil {
			continue
		}
		flag := nemoRenamed[key]
		if slices.Contains(nemoSame, key) || key == "num_query_groups" {
			flag = strings.ReplaceAll(key, "_", "-")
		}
		switch {
		case key == "num_query_groups" && !isUnset(v):
			t.read[key] = true
			r.set("num-query-groups", t.whole(key, 1, 1, most))
		case nemoOff[key] != "":
			if !t.flag(key, true) {
				r.set(nemoOff[key], true)
			}
		case slices.Contains(nemoSwitches, key) && !isUnset(v):
			t.flag(key, true)
		case key == "fp8":
			t.read[key] = true
			r.nemoFP8(t.path+key, v)
		case flag != "":
			t.read[key] = true
			r.nemoValue(t.path+key, flag, v)
		}
	}
	if t.path == "model." {
		r.nemoAdapters(t.sub("peft"))
		r.nemoActivation(t)
		r.nemoOptimizer(t.sub("optim"))
		r.nemoTokenizer(t)
		t.rest(nemoHarmless...)
	}
}

// nemoAdapters refuses the adapters of NeMo's older files, whose gradients and moments are those of
// few parameters. A scheme that is none, or no table at all, trains all of them.
func (r *reader) nemoAdapters(t *table) {
	scheme := strings.ToLower(fmt.Sprint(t.keys["peft_scheme"]))
	if len(t.keys) > 0 && !slices.Contains([]string{"<nil>", "none", "null", ""}, scheme) {
		r.refuse("model.peft.peft_scheme is %.40s, which trains adapters beside frozen parameters and is not modelled; remove model.peft to plan training of all parameters", scheme)
	}
}

// nemoActivation reads the activation of NeMo's older files. Those with a gate have the sizes of SwiGLU.
func (r *reader) nemoActivation(t *table) {
	if !t.has("activation") {
		return
	}
	switch act := t.word("activation", "gelu", "gelu", "geglu", "swiglu", "reglu", "squared-relu", "fast-geglu", "fast-swiglu", "fast-reglu", "approx-gelu", "relu"); {
	case strings.HasSuffix(act, "swiglu"):
		r.set("swiglu", true)
	case strings.HasSuffix(act, "glu"):
		r.set("swiglu", true)
		r.note("model.activation: %s is planned as swiglu, which has the same sizes", act)
	case act == "squared-relu":
		r.set("squared-relu", true)
	}
}

// nemoFP8 reads the key fp8: a format, or a switch in NeMo's own files.
func (r *reader) nemoFP8(key string, v any) {
	switch v {
	case false, "none", "":
	case true:
		r.set("fp8-format", "hybrid")
	case "hybrid", "e4m3":
		r.set("fp8-format", v)
	default:
		r.fail("%s is %s; it must be true, false, hybrid or e4m3", key, short(v))
	}
}

// nemoOptimizer reads the optimiser of NeMo's own files.
func (r *reader) nemoOptimizer(t *table) {
	switch name := t.word("name", ""); {
	case strings.HasPrefix(name, "distributed"):
		r.set("use-distributed-optimizer", true)
	case name != "" && !strings.Contains(name, "adam"):
		r.refuse("model.optim.name %.40q has state of another size than Adam, which is not modelled", name)
	}
}

// nemoHarmless are keys of a model that change no memory, or that other keys say too.
var nemoHarmless = strings.Fields(`
	_target_ activation_func apply_query_key_layer_scaling apply_rope_fusion attention_backend attention_softmax_in_fp32 bias_activation_fusion
	bias_dropout_fusion bias_dropout_add_fusion data data_path deallocate_pipeline_outputs encoder_type fp16 bf16 gradient_as_bucket_view init_method
	init_method_std layernorm_epsilon layernorm_zero_centered_gamma make_vocab_size_divisible_by masked_softmax_fusion mcore_gpt megatron_amp_O2
	native_amp_growth_interval native_amp_init_scale nsys_profile optim params_dtype perform_initialization pipeline_dtype rotary_base
	rotary_percent rotary_percentage scale_positional_embedding seed should_pad_vocab transformer_engine transformer_impl tp_comm_overlap
	use_cpu_initialization use_flash_attention use_te_rng_tracker normalize_attention_scores fp8_amax_compute_algo
	fp8_amax_history_len fp8_e4m3 fp8_hybrid fp8_interval fp8_margin reduce_amax`)

// nemoSwitches are harmless keys that must be true or false.
var nemoSwitches = []string{"fp8_e4m3", "fp8_hybrid", "mcore_gpt"}

// nemoLists are flags that take several words.
var nemoLists = []string{"cuda-graph-scope", "offload-modules", "pipeline-model-parallel-layout", "recompute-modules"}

// nemoValue sets a flag to a value. Interpolations of Hydra have no value here.
func (r *reader) nemoValue(key, flag string, v any) {
	if text, ok := v.(string); ok {
		switch {
		case isUnset(v): // the setting may be given otherwise, or not be used
		case strings.Contains(text, "${"):
			if flag == "num-layers" || flag == "hidden-size" {
				r.file.Unset = fmt.Sprintf("%s is %.60s", key, text)
			}
			r.note("%s is %.60s, which another file sets; it is left out", key, text)
			return
		case flag == "normalization":
			v = map[string]string{"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}[strings.ToLower(text)]
			if v == "" {
				r.refuse("%s %.40q is not modelled; RMSNorm and LayerNorm are", key, text)
			}
		case flag == "optimizer" && strings.Contains(text, "adam"):
			v = "adam"
		}
	}
	if list, ok := v.([]any); ok && flag != "moe-layer-freq" {
		if !slices.Contains(nemoLists, flag) {
			r.fail("%s is %s; it must be a single value", key, short(v))
			return
		}
		var words []string
		for _, x := range list {
			words = append(words, fmt.Sprint(x))
		}
		r.set(flag, words)
		return
	}
	if inner, nested := v.(map[string]any); nested {
		r.fail("%s holds %d keys of its own; it must be a value", key, len(inner))
		return
	}
	if before, number := r.file.Args[flag].(float64); number && v != before {
		r.fail("%s is %s and %s is %s, and both mean --%s; leave one of them out", r.file.Keys[flag], short(before), key, short(v), flag)
	}
	r.set(flag, v)
	r.file.Keys[flag] = key
}

// nemoTrainer reads the GPUs of NeMo's trainer.
func (r *reader) nemoTrainer(t *table) {
	for _, key := range []string{"devices", "num_nodes"} {
		if v := t.keys[key]; t.has(key) && isUnset(v) {
			r.note("trainer.%s is %s, and the variable is not set in the text; it is left out, so give --env %s=VALUE to count it", key, v, nemoEnv.FindStringSubmatch(v.(string))[1])
			return
		}
	}
	nodes := t.has("num_nodes")
	if t.has("devices") && !nodes {
		r.note("trainer.num_nodes is missing; one node is planned, as the trainer takes it")
	}
	if t.has("devices") {
		if n := t.whole("devices", 1, 1, most) * t.whole("num_nodes", 1, 1, most); n <= most {
			r.file.GPUs = n
		} else {
			r.fail("trainer.devices times trainer.num_nodes is more than %d GPUs", most)
		}
	}
}

// nemoPrecision reads the formats by the name of a recipe, or by the trainer's word.
func (r *reader) nemoPrecision(top *table) {
	word := "bf16"
	trainer := top.sub("trainer")
	if trainer.has("precision") {
		word = fmt.Sprint(trainer.keys["precision"])
	}
	switch v := top.keys["mixed_precision"].(type) {
	case nil:
	case string:
		word = v
	case float64:
		word = fmt.Sprint(v)
	case map[string]any:
		r.note("mixed_precision holds keys of its own; bf16 is planned, so give another format as a setting")
	default:
		r.fail("mixed_precision is %s; it must be a name such as bf16_mixed", short(v))
	}
	top.read["mixed_precision"] = true
	word = strings.ReplaceAll(strings.ToLower(word), "-", "_")
	switch {
	case slices.Contains([]string{"16", "16_mixed", "16_true", "fp16", "fp16_mixed", "fp16_true"}, word):
		r.set("fp16", true)
		r.set("bf16", false)
	case word == "32" || word == "32_true" || word == "fp32":
		r.set("bf16", false)
	case slices.Contains([]string{"bf16", "bf16_mixed", "bf16_true"}, word):
		r.set("bf16", true)
	case nemoRecipe.MatchString(word):
		half := !strings.Contains(word, "bf16")
		if r.set("bf16", !half); half {
			r.set("fp16", true)
		}
		for _, f := range []struct{ word, flag, value, recipe string }{
			{"mxfp8", "fp8-format", "e4m3", "mxfp8"}, {"current_scaling", "fp8-format", "hybrid", "tensorwise"}, {"subchannel", "fp8-format", "e4m3", "blockwise"},
			{"delayed", "fp8-format", "hybrid", "delayed"}, {"nvfp4", "fp4-format", "e2m1", ""}, {"fp8", "fp8-format", "hybrid", "delayed"},
		} {
			if strings.Contains(word, f.word) {
				if r.set(f.flag, f.value); f.recipe != "" {
					r.set("fp8-recipe", f.recipe)
				}
				break
			}
		}
	default:
		r.fail("the precision %.40q is not known; expected bf16, 16, 32, bf16_mixed or a recipe such as bf16_with_mxfp8_mixed", word)
	}
}
