// This file owns MaxText's settings: YAML on top of its base.yml, or a command line with
// key=value. A model_name stands for the sizes of MaxText's own file of that name.

package launch

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/plan/model"
)

var (
	maxTextKey  = regexp.MustCompile(`(?m)(?:^|[\s"'])(base_config|model_name|per_device_batch_size|max_target_length|remat_policy|base_emb_dim|base_num_decoder_layers|base_num_query_heads|base_mlp_dim|(?:ici|dcn)_[a-z_]+_parallelism)\s*[:=]`)
	maxTextPair = regexp.MustCompile(`^([a-z][a-z0-9_]*)=(.*)$`)
	maxTextLine = regexp.MustCompile(`(?m)^\s*#.*$|\\\n`)
)

// maxTextQuantization matches the kinds of quantised products: their names begin with the library or the format.
var maxTextQuantization = regexp.MustCompile(`^(int|fp|aqt_|te_|nanoo_|qwix)[a-z0-9_]*$`)

// maxTextHarmless matches keys that change no memory of a step: data, logs, checkpoints,
// learning rates, positions, tiles of kernels.
var maxTextHarmless = regexp.MustCompile(`^(adam_|allow_|async_|attention$|base_config$|base_output|beta_|checkpoint|colocated|compile_|cosine|data_|dataset|decoder_block$|dropout|dump_|enable_|eval_|float32_|gcs_|goodput|gradient_clipping|grain|hardware$|hf_|hlo_|init_|jax_|learning_rate|load_|log_|logits_|max_position|max_segments|metrics|mlp_activations|monitor|mscale|n_routing|norm_topk|normaliz|num_slices|original_max|override_model|packing|profil|reuse_|rope_|routed_|run_name|sa_|save_|scan_layers|skip_|steps$|tfds|tokenizer|topk_routing|upload|use_iota|vocab_relative|warmup|weight_decay|wi_tile|wo_tile|xla_)`)

// megatronFlag finds a flag without which no script of Megatron-LM has a model. Its variables may have the names of
// MaxText's keys.
var megatronFlag = regexp.MustCompile(`(?:^|\s)--(?:num-layers|hidden-size|micro-batch-size)[\s=]`)

// isMaxText reports whether a file has two of MaxText's keys, and is no script of Megatron-LM.
func isMaxText(data []byte) bool {
	if megatronFlag.Match(data) {
		return false
	}
	var found []string
	for _, m := range maxTextKey.FindAllSubmatch(data, 64) {
		if key := string(m[1]); !slices.Contains(found, key) {
			found = append(found, key)
		}
	}
	return len(found) > 1
}

// maxTextModels has the values of model_name.
var maxTextModels = map[string]string{
	"llama2-7b": llamaKeys(4096, 32, 32, 32, 11008, 32000, false), "llama2-13b": llamaKeys(5120, 40, 40, 40, 13824, 32000, false),
	"llama2-70b": llamaKeys(8192, 80, 64, 8, 28672, 32000, false), "mistral-7b": llamaKeys(4096, 32, 32, 8, 14336, 32000, false),
	"llama3-8b": "llama-3-8b", "llama3.1-8b": "llama-3-8b", "llama3-70b": "llama-3-70b", "llama3.1-70b": "llama-3-70b", "llama3.3-70b": "llama-3-70b",
	"llama3-405b": "llama-3.1-405b", "llama3.1-405b": "llama-3.1-405b",
	"mixtral-8x7b": "mixtral-8x7b", "mixtral-8x22b": "mixtral-8x22b",
	"deepseek2-16b": "deepseek-v2-lite", "deepseek2-236b": "deepseek-v2", "deepseek3-671b": "deepseek-v3", "kimi-k2-1t": "kimi-k2",
	"qwen3-0.6b": qwenKeys(1024, 28, 16, 3072, true), "qwen3-1.7b": qwenKeys(2048, 28, 16, 6144, true), "qwen3-4b": qwenKeys(2560, 36, 32, 9728, true),
	"qwen3-8b": qwenKeys(4096, 36, 32, 12288, false), "qwen3-14b": qwenKeys(5120, 40, 40, 17408, false), "qwen3-32b": "qwen3-32b",
	"qwen3-30b-a3b": "qwen3-30b-a3b", "qwen3-235b-a22b": "qwen3-235b-a22b", "qwen3-next-80b-a3b": "qwen3-next-80b-a3b",
	"llama4-17b-16e": llama4Keys(48, 16, 1), "llama4-17b-128e": llama4Keys(48, 128, 2),
	"gpt-oss-20b": "gpt-oss-20b", "gpt-oss-120b": "gpt-oss-120b",
}

func maxText(data []byte) (*File, error) {
	keys, err := maxTextKeys(data)
	if err != nil {
		return nil, err
	}
	r := newReader("MaxText")
	t := r.table("", keys)
	t.without(map[string]string{
		"parameter_memory_host_offload": "keeps parameters in host memory", "use_ring_of_experts": "sends tokens around a ring of experts",
		"use_indexer": "adds an indexer of sparse attention", "engram_layers": "adds tables of n-grams",
		"share_kv_projections": "shares keys and values",
		"use_multimodal":       "adds a vision tower", "enable_diloco": "keeps a second optimiser", "use_dpo": "keeps a second model",
	})
	if n := t.whole("mhc_expansion_rate", 1, 0, most); n > 1 {
		r.refuse("mhc_expansion_rate %d widens the residual stream, which is not modelled", n)
	}
	if base := t.word("base_config", "base.yml"); path.Base(base) != "base.yml" {
		r.note("base_config %.80s is not read; what the file leaves open is as in base.yml", base)
	}
	r.maxTextModel(t)
	r.maxTextMesh(t)
	r.maxTextNumbers(t)
	r.maxTextRemat(t)
	r.maxTextExperts(t)
	r.set("seq-length", t.whole("max_target_length", 2048, 1, most))
	r.set("cross-entropy-loss-fusion", false)
	if t.word("attention", "autoselected") == "dot_product" {
		r.set("attention-backend", "unfused")
	}
	r.note("the forecast is that of Megatron-LM's operations; XLA fuses and orders them by itself")
	maps.DeleteFunc(t.keys, func(key string, _ any) bool { return maxTextHarmless.MatchString(key) })
	t.rest()
	r.variable(keys)
	return r.done()
}

// variable replaces an error about a value that is a variable of the shell, which the words of a command may have.
func (r *reader) variable(keys map[string]any) {
	for key, v := range keys {
		if text, is := v.(string); is && r.err != nil && strings.Contains(text, "$") && strings.HasPrefix(r.err.Error(), key+" is ") {
			r.err = fmt.Errorf("%s is %s, and variables of a script are not followed; write its value in their place", key, short(v))
		}
	}
}

// maxTextKeys returns the keys of YAML, or of the words of a command.
func maxTextKeys(data []byte) (map[string]any, error) {
	keys := map[string]any{}
	err := input.UnmarshalYAML(data, &keys)
	var wrong *input.YAMLError
	if errors.As(err, &wrong) && wrong.Twice {
		return nil, fmt.Errorf("line %d gives a key twice; leave one of them out", wrong.Line)
	}
	if err != nil || keys == nil {
		keys = map[string]any{}
		text := maxTextLine.ReplaceAllString(string(data), " ")
		for word := range strings.FieldsSeq(text) {
			if m := maxTextPair.FindStringSubmatch(strings.Trim(word, `"'`)); m != nil {
				keys[m[1]] = scalar(strings.Trim(m[2], `"';`))
			}
		}
		if len(keys) == 0 {
			return nil, fmt.Errorf("the file is neither YAML with keys and values nor a command with words such as per_device_batch_size=4")
		}
		return keys, nil
	}
	for key, v := range keys {
		switch v := v.(type) {
		case uint64:
			keys[key] = float64(v)
		case int64:
			keys[key] = float64(v)
		case string:
			keys[key] = scalar(v) // 8_192 and the like
		}
	}
	return keys, nil
}

// scalar returns a number or a boolean if a word is one.
func scalar(word string) any {
	switch strings.ToLower(word) {
	case "true", "false":
		return strings.EqualFold(word, "true")
	}
	if f, err := strconv.ParseFloat(strings.ReplaceAll(word, "_", ""), 64); err == nil && !math.IsNaN(f) && !math.IsInf(f, 0) {
		return f
	}
	return word
}

// activations returns the names in a list of functions, which a command gives as a text. It
// returns nil if the list holds anything else.
func activations(v any) (names []string) {
	if text, ok := v.(string); ok {
		if input.UnmarshalYAML([]byte(text), &names) != nil {
			return nil
		}
		return names
	}
	list, _ := v.([]any)
	for _, x := range list {
		name, ok := x.(string)
		if !ok {
			return nil
		}
		names = append(names, name)
	}
	return names
}

// maxTextModel reads the model by name or by its sizes.
func (r *reader) maxTextModel(t *table) {
	if n := t.whole("global_parameter_scale", 1, 1, most); n > 1 {
		r.refuse("global_parameter_scale %d scales every size of the model, which is not modelled", n)
	}
	name := t.word("model_name", "default")
	if name == "default" {
		r.maxTextSizes(t)
		return
	}
	if strings.Contains(name, "$") {
		r.fail("model_name is %s", short(name)) // variable says the rest
		return
	}
	text := maxTextModels[name]
	if text == "" {
		r.refuse("model_name %.40q is not one of MaxText's models that are known (%s)", name, strings.Join(slices.Sorted(maps.Keys(maxTextModels)), ", "))
		return
	}
	for key := range t.keys {
		if strings.HasPrefix(key, "base_") && key != "base_config" && key != "base_output_directory" || key == "num_experts" {
			r.refuse("%s changes the model that model_name %s names, which is not read; give all its sizes without model_name", key, name)
		}
	}
	r.file.Model = registered(name, text)
	r.maxTextFurther(t)
}

// registered returns a model of another system's registry: that of a preset or of keys of a
// config.json. It has no further heads unless the job asks for them.
func registered(name, text string) *model.Model {
	var m *model.Model
	var err error
	if strings.HasPrefix(text, "{") {
		m, err = model.ParseHF([]byte(text))
	} else {
		m, err = model.Preset(text)
	}
	if err != nil {
		panic("launch: " + name + ": " + err.Error())
	}
	m.Name, m.MTP = name, nil
	return m
}

// maxTextFurther adds the heads that predict further tokens.
func (r *reader) maxTextFurther(t *table) {
	if n := t.whole("mtp_num_layers", 0, 0, 64); n > 0 && r.err == nil {
		m := r.file.Model
		m.MTP = &model.MTP{Depth: n, Layers: m.Layers[len(m.Layers)-1:]}
	}
}

// maxTextSizes reads a model from its sizes. Defaults are those of base.yml.
func (r *reader) maxTextSizes(t *table) {
	const size = 1 << 20
	block := t.word("decoder_block", "llama2")
	if !slices.Contains([]string{"llama2", "default", "mistral", "mixtral", "deepseek", "qwen3", "qwen3_moe"}, block) {
		r.refuse("decoder_block %.40q is not modelled; llama2, mistral, mixtral, deepseek, qwen3 and qwen3_moe are", block)
		return
	}
	m := &model.Model{
		Hidden: t.whole("base_emb_dim", 2048, 1, size), Vocab: t.whole("vocab_size", 32000, 1, 1<<24),
		Tied: t.flag("logits_via_embedding", false), MaxPositions: t.whole("max_target_length", 2048, 1, most),
	}
	gated := true
	if t.has("mlp_activations") {
		names := activations(t.keys["mlp_activations"])
		if gated = len(names) == 2; len(names) == 0 || len(names) > 2 {
			r.fail("mlp_activations is %s; it must be a list such as [\"silu\", \"linear\"]", short(t.keys["mlp_activations"]))
		}
	}
	heads := t.whole("base_num_query_heads", 16, 1, size)
	layer := model.Layer{Attention: &model.Attention{
		Heads: heads, KVHeads: t.whole("base_num_kv_heads", 16, 1, size), HeadDim: t.whole("head_dim", 128, 1, size),
		QKNorm: t.flag("use_qk_norm", false), Rotary: true,
	}}
	switch kind := t.word("attention_type", "global"); kind {
	case "global":
	case "mla":
		layer = model.Layer{MLA: &model.MLA{
			Heads: heads, QRank: t.whole("q_lora_rank", 0, 0, size), KVRank: t.whole("kv_lora_rank", 512, 1, size), LatentNorm: true,
			Nope: t.whole("qk_nope_head_dim", 128, 1, size), Rope: t.whole("qk_rope_head_dim", 64, 0, size), V: t.whole("v_head_dim", 128, 1, size),
		}}
	default:
		r.refuse("attention_type %.40q is not modelled; global and mla are", kind)
	}
	width := t.whole("base_mlp_dim", 7168, 1, size)
	experts, dense := t.whole("num_experts", 1, 1, size), t.whole("first_num_dense_layers", 0, 0, size)
	moe := model.MoE{Experts: experts, TopK: t.whole("num_experts_per_tok", 1, 1, size), Gated: gated, Width: width}
	if n := t.whole("base_moe_mlp_dim", -1, -1, size); n > 0 {
		moe.Width = n
	}
	moe.SharedWidth = t.whole("shared_experts", 0, 0, 1024) * moe.Width
	moe.Bias, moe.Sigmoid = t.flag("routed_bias", false), t.word("routed_score_func", "") == "sigmoid"
	for i := range t.whole("base_num_decoder_layers", 16, 1, 1<<12) {
		var l model.Layer
		if a := layer.Attention; a != nil {
			own := *a
			l.Attention = &own
		}
		if a := layer.MLA; a != nil {
			own := *a
			l.MLA = &own
		}
		if experts > 1 && i >= dense {
			own := moe
			l.MoE = &own
		} else {
			l.Dense = &model.Dense{Width: width, Gated: gated}
		}
		m.Layers = append(m.Layers, l)
	}
	r.file.Model = m
	if r.maxTextFurther(t); r.err != nil {
		return
	}
	if err := m.Check(); err != nil {
		r.fail("the sizes do not make a model: %w", err)
	}
}

// axis multiplies the two parts of a mesh axis. Minus one stands for the GPUs that are left.
func (t *table) axis(name string, inside int) (n int, rest bool) {
	n = 1
	for i, prefix := range []string{"ici_", "dcn_"} {
		otherwise := []int{inside, 1}[i]
		switch k := t.whole(prefix+name+"_parallelism", otherwise, -1, most); {
		case k == -1:
			rest = true
		case k == 0:
			t.r.fail("%s%s_parallelism is 0; it must be -1 or at least 1", prefix, name)
		default:
			n = min(n*k, most)
		}
	}
	return n, rest
}

// maxTextMesh reads the mesh and the batch. Rows of the batch are divided over the axes data,
// fsdp and expert.
func (r *reader) maxTextMesh(t *table) {
	for _, name := range []string{"fsdp_transpose", "sequence", "tensor_transpose", "tensor_sequence", "autoregressive", "context_autoregressive", "diloco", "context_usp_ulysses"} {
		if n, rest := t.axis(name, 1); n > 1 || rest {
			r.refuse("the mesh axis %s is not modelled; data, fsdp, expert, tensor and context are", name)
		}
	}
	if n, rest := t.axis("pipeline", 1); n > 1 || rest {
		r.refuse("ici_pipeline_parallelism asks for MaxText's circular pipeline, which keeps other microbatches than 1F1B and is not modelled")
	}
	whole := func(name string) int {
		n, rest := t.axis(name, 1)
		if rest {
			r.fail("the mesh axis %s is -1, which leaves it to the number of devices; give its size", name)
		}
		return n
	}
	tp, cp, ep := whole("tensor"), whole("context"), whole("expert")
	fsdp, left := t.axis("fsdp", -1)
	data, more := t.axis("data", 1)
	r.set("tensor-model-parallel-size", tp)
	r.set("context-parallel-size", cp)
	r.set("expert-model-parallel-size", ep)
	r.set("expert-tensor-parallel-size", 1)
	r.set("sequence-parallel", tp > 1)
	if all := float64(tp) * float64(cp) * float64(ep) * float64(fsdp) * float64(data); all > most {
		r.fail("the axes of the mesh multiply to more than %d devices", most)
	} else if !left && !more {
		r.file.GPUs = int(all)
	}
	switch {
	case fsdp > 1 || left:
		r.set("use-megatron-fsdp", true)
		r.set("data-parallel-sharding-strategy", "optim_grads_params")
		if data > 1 {
			r.set("num-distributed-optimizer-instances", data)
		}
	case t.flag("shard_optimizer_over_data", false):
		r.set("use-distributed-optimizer", true)
	default:
		r.set("use-distributed-optimizer", false)
		r.set("overlap-param-gather", false)
	}
	each, ok := 12.0, true
	if t.has("per_device_batch_size") {
		each, ok = t.keys["per_device_batch_size"].(float64)
	}
	micro := each * float64(tp) * float64(cp)
	if !ok || micro < 1 || micro != math.Trunc(micro) || micro > most {
		r.fail("per_device_batch_size is %s; times the %d devices of a replica it must be a whole number of sequences, at least one", short(t.keys["per_device_batch_size"]), tp*cp)
		return
	}
	r.set("micro-batch-size", int(micro))
	r.file.Accumulation = t.whole("gradient_accumulation_steps", 1, 1, most)
}

func (r *reader) maxTextNumbers(t *table) {
	r.set("bf16", t.word("dtype", "bfloat16", "bfloat16", "float32") == "bfloat16")
	if t.word("weight_dtype", "float32", "float32", "bfloat16") == "bfloat16" {
		r.note("weight_dtype bfloat16 keeps no fp32 copy of parameters; one is counted, so the job takes less")
	}
	if t.word("grad_dtype", "float32", "float32", "bfloat16") == "bfloat16" {
		r.set("grad-reduce-in-bf16", true)
	}
	if t.word("mu_dtype", "", "", "float32", "bfloat16") == "bfloat16" {
		r.set("use-precision-aware-optimizer", true)
		r.set("exp-avg-dtype", "bf16")
	}
	if t.on("quantization") {
		if kind := t.word("quantization", ""); !maxTextQuantization.MatchString(kind) {
			t.wrong("quantization", "a kind of MaxText such as int8, fp8_full or te_fp8_delayedscaling")
		}
		r.note("quantization: products of eight bits are planned in bf16")
	}
	switch kind := t.word("opt_type", "adamw"); kind {
	case "adamw", "adam_pax":
	case "sgd", "muon":
		r.set("optimizer", kind)
	default:
		r.refuse("opt_type %.40q is not modelled; adamw, adam_pax, sgd and muon are", kind)
	}
	if t.flag("optimizer_memory_host_offload", false) {
		r.offloadOptimizer(1)
	}
}

// maxTextTensors are the tensors that remat_policy custom decides about.
var maxTextTensors = []string{
	"decoder_layer_input", "context", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "query_proj", "key_proj",
	"value_proj", "kv_proj", "qkv_proj", "out_proj", "query_wa_proj", "kv_wa_proj", "mla_q", "mla_kv", "attention_out",
}

var maxTextPolicy = regexp.MustCompile(`^(none|minimal|save)(_[a-z_]+)?$`)

// maxTextRemat reads what is recomputed. Only the policy full has an equal in Megatron-LM;
// under others everything is planned to be saved.
func (r *reader) maxTextRemat(t *table) {
	policy := t.word("remat_policy", "full")
	full := policy == "full"
	if policy == "custom" {
		full = true
		for _, key := range maxTextTensors {
			where := t.word(key, "remat", "remat", "device", "offload")
			if where == "offload" {
				r.refuse("%s is offload, which is planned only for Megatron-LM's modules", key)
			}
			full = full && (where == "remat" || key == "decoder_layer_input")
		}
	}
	switch {
	case strings.Contains(policy, "offload"):
		r.refuse("remat_policy %.40q offloads tensors, which is planned only for Megatron-LM's modules", policy)
	case full:
		r.set("recompute-granularity", "full")
		r.set("recompute-method", "uniform")
		r.set("recompute-num-layers", 1)
	case policy != "custom" && !maxTextPolicy.MatchString(policy):
		r.fail("remat_policy is %.40q; it must be full, custom, or one that begins with minimal or save", policy)
	default:
		r.note("remat_policy %.40s saves some tensors of each layer; all are counted, so the job takes less", policy)
	}
}

// maxTextExperts reads how experts compute.
func (r *reader) maxTextExperts(t *table) {
	factor := -1.0
	t.has("capacity_factor")
	if f, ok := t.keys["capacity_factor"].(float64); ok {
		factor = f
	}
	sparse := t.flag("sparse_matmul", true) && t.flag("megablox", true)
	m := r.file.Model
	if m == nil || !slices.ContainsFunc(m.Layers, func(l model.Layer) bool { return l.MoE != nil }) {
		return
	}
	switch {
	case sparse:
	case factor > 0:
		r.set("moe-expert-capacity-factor", factor)
		r.set("moe-pad-expert-input-to-capacity", true)
	case !t.flag("sparse_matmul", true):
		r.refuse("sparse_matmul false without a capacity_factor computes every expert for every token, which is not modelled")
	}
}
