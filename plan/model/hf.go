// This file owns how a Hugging Face config.json is read. An error is one sentence that
// names the key. Keys that change neither a parameter nor the work of a layer are ignored,
// because such files have many of them.

package model

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
)

// ParseHF reads a model from the config.json of a Hugging Face repository. It reads the
// language model under text_config if the file has one, and returns an error that names the
// part if the file describes more than a decoder: an encoder, or a vision or audio tower.
// What the description leaves out is in Model.Notes.
func ParseHF(data []byte) (*Model, error) {
	c := &config{}
	data = input.JSON(data)
	if err := json.Unmarshal(data, &c.keys); err != nil {
		return nil, fmt.Errorf("the config is not a JSON object: %w", input.Plain(err))
	}
	for _, table := range []string{"", "text_config"} {
		if err := input.Contradiction(input.JSONKeys(data, table)); err != nil {
			return nil, err
		}
	}
	kind := c.word("model_type")
	name := c.word("_name_or_path")
	c.mustBeModel()
	c.mustBeDecoder(kind)
	c.mustAttend(kind)
	c.readArchitectures(kind)
	c.readQuantised()
	if raw, ok := c.get("text_config"); ok && families[kind] == nil {
		text := &config{}
		if err := json.Unmarshal(raw, &text.keys); err != nil {
			return nil, fmt.Errorf("text_config is not a JSON object: %w", input.Plain(err))
		}
		if tied, ok := c.get("tie_word_embeddings"); ok && text.keys != nil && text.keys["tie_word_embeddings"] == nil {
			text.keys["tie_word_embeddings"] = tied
		}
		if kind != "" && !slices.ContainsFunc(c.notes, func(n string) bool { return strings.Contains(n, "decoder alone") }) {
			c.note("text_config alone is read; what model_type %.40q has beside its language model takes no part", kind)
		}
		text.err, text.notes = c.err, c.notes
		c, kind = text, text.word("model_type")
		c.mustAttend(kind)
	}
	read := families[kind]
	switch {
	case read == nil:
		c.mustBeLlama(kind)
		read = llama
	case slices.Contains(plain, kind):
		c.mustBePlain(kind)
	}
	m := c.base(kind)
	read(c, m)
	m.Name, m.Notes = strings.Join(strings.Fields(name), " "), c.notes
	if name == "" {
		m.Name = kind
	}
	if c.err != nil {
		return nil, c.err
	}
	return m, m.Check()
}

// encoders are well-known models that are not decoders.
var encoders = []string{
	"albert", "bart", "bert", "camembert", "clip", "deberta", "deberta-v2", "distilbert", "electra", "hubert", "led", "longformer",
	"longt5", "m2m_100", "marian", "mbart", "modernbert", "mpnet", "mt5", "nomic_bert", "pegasus", "roberta", "siglip", "speech_to_text",
	"switch_transformers", "t5", "t5gemma", "umt5", "vit", "wav2vec2", "whisper", "xlm-roberta",
}

// towers are keys of the parts that a model has beside its language model.
var towers = []string{
	"vision_config", "audio_config", "speech_config", "vit_config", "visual", "vision_tower", "mm_vision_tower", "vision_model_config",
	"audio_encoder_config", "thinker_config", "talker_config", "token2wav_config", "encoder", "encoder_config",
}

// mustBeDecoder reports which part of the file is not a decoder, if one is.
func (c *config) mustBeDecoder(kind string) {
	if slices.Contains(encoders, kind) {
		c.fail("model_type %.40q has an encoder, and only decoders are modelled; give the config.json of a decoder", kind)
	}
	if c.on("is_encoder_decoder") {
		c.fail("is_encoder_decoder is true, and only decoders are modelled; give the config.json of a decoder")
	}
	for _, key := range towers {
		if c.on(key) {
			c.fail("%s describes a part beside the language model, which is not modelled; remove it from the file to plan the language model alone", key)
		}
	}
}

// on reports whether a key has a value that does not switch a part off.
func (c *config) on(key string) bool {
	raw, ok := c.get(key)
	return ok && !slices.Contains([]string{"false", "0", "[]", "{}", `""`}, string(raw))
}

// foreign are the beginnings of keys that a Llama-like model does not have. They belong to
// parts that would otherwise be left out of the count silently.
var foreign = []string{
	"num_experts", "num_local_experts", "n_routed_experts", "moe_", "kv_lora_rank", "linear_num_",
	"mamba_", "ssm_", "state_size", "conv_kernel", "index_", "text_config", "encoder_", "attn_type_list",
	"num_nextn_predict_layers", "cross_attention_",
	// kinds of blocks that differ from layer to layer
	"block_types", "layers_block_type", "block_configs", "full_attn_idxs", "num_key_value_heads_per_layer", "intermediate_size_per_layer",
	// recurrences, convolutions and linear attention
	"linear_attn_", "lru_width", "attn_mode", "use_short_conv", "conv_L_cache", "expand_k", "mlstm", "slstm", "time_mix", "decay_low_rank_dim",
	// parts beside attention and the feed-forward part, and layers that are shared or run again
	"altup_", "laurel_", "hidden_size_per_layer_input", "num_kv_shared_layers", "cla_share_factor", "total_ut_steps", "n_shared_experts", "n_experts",
	"expert_", "q_lora_rank", "qk_nope_head_dim", "num_memory_", "zero_expert_",
}

// plain are the families whose layers have attention and a dense part and nothing else.
// structural are keys that would give them more.
var (
	plain      = []string{"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox"}
	structural = []string{
		"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "kv_lora_rank", "index_topk", "attn_type_list",
		"mamba_d_state", "ssm_state_size", "linear_num_key_heads", "num_nextn_predict_layers", "block_types", "layers_block_type", "block_configs",
		"linear_attn_config", "lru_width", "num_kv_shared_layers", "altup_num_inputs", "hidden_size_per_layer_input", "cla_share_factor",
	}
	// harmlessTables change neither a parameter nor the work of a layer, or are noted elsewhere.
	harmlessTables = []string{
		"rope_scaling", "rope_parameters", "quantization_config", "task_specific_params", "id2label", "label2id", "auto_map", "transformers.js_config",
	}
)

// mustBePlain reports a key that a plain family does not have and that would change it.
func (c *config) mustBePlain(kind string) {
	for _, key := range structural {
		if c.on(key) {
			c.fail("%s is no key of model_type %q, and it changes the model; correct model_type, or remove the key", key, kind)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(c.keys)) {
		if strings.HasPrefix(string(c.keys[key]), "{") && c.on(key) && !slices.Contains(harmlessTables, key) {
			c.note("%.40q is a table that model_type %q does not have; it takes no part", key, kind)
		}
	}
}

// mustBeLlama reports why a model of an unknown kind cannot be read as a Llama-like one.
// Values that switch such a part off do not count.
func (c *config) mustBeLlama(kind string) {
	unknown := fmt.Sprintf("model_type %.40q is not known", kind)
	if kind == "" {
		unknown = "model_type is missing"
	}
	one := "use one of " + strings.Join(slices.Sorted(maps.Keys(families)), ", ")
	for _, key := range slices.Sorted(maps.Keys(c.keys)) {
		alien := slices.ContainsFunc(foreign, func(f string) bool { return strings.HasPrefix(key, f) })
		if alien && c.on(key) {
			c.fail("%s, and %.40q is no key of a Llama-like model; %s", unknown, key, one)
			return
		}
	}
	_, named := c.get("rms_norm_eps")
	switch act := c.word("hidden_act"); {
	case !named && kind == "":
		c.fail("model_type is missing, and so is rms_norm_eps, which every Llama-like model has; give the config.json of a model")
	case !named:
		c.fail("%s, and rms_norm_eps, which every Llama-like model has, is missing; %s", unknown, one)
	case act != "" && !gates(act):
		c.fail("%s, and hidden_act is %.40q, where a Llama-like model has a gate; %s", unknown, act, one)
	}
	c.note("%s; the file is read as that of a Llama-like model, a decoder with attention and a gated feed-forward part in every layer", unknown)
}

// gates reports whether Llama-like models have a gate with this activation.
func gates(act string) bool {
	return strings.HasPrefix(act, "silu") || strings.HasPrefix(act, "swi") || strings.Contains(act, "gelu")
}

// config reads the keys of one object. It keeps the first error and goes on with harmless
// values. A key that is null counts as missing.
type config struct {
	keys  map[string]json.RawMessage
	err   error
	notes []string
}

func (c *config) note(format string, args ...any) {
	c.notes = append(c.notes, fmt.Sprintf(""+format, args...))
}

func (c *config) fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf(""+format, args...)
	}
}

func (c *config) get(key string) (json.RawMessage, bool) {
	raw, ok := c.keys[key]
	return raw, ok && string(raw) != "null"
}

// first returns the first of some keys that have the same meaning.
func (c *config) first(keys []string) (string, json.RawMessage, bool) {
	for _, key := range keys {
		if raw, ok := c.get(key); ok {
			return key, raw, true
		}
	}
	return keys[0], nil, false
}

// same reports two names of one size with different values.
func (c *config) same(keys ...string) {
	first, one, _ := c.first(keys)
	for _, key := range keys {
		if other, ok := c.get(key); ok && string(other) != string(one) {
			c.fail("%s is %s and %s is %s, which are one size; leave one of them out", first, shorten(one), key, shorten(other))
		}
	}
}

// size reads a number that must be present.
func (c *config) size(keys ...string) int { return c.sizeTo(maxSize, keys...) }

func (c *config) sizeTo(top int, keys ...string) int {
	key, raw, ok := c.first(keys)
	if !ok {
		c.fail("%s is missing", key)
		return 1
	}
	return c.number(key, raw, 1, top)
}

// optional reads a number from lo on that has a default.
func (c *config) optional(lo, def int, keys ...string) int {
	key, raw, ok := c.first(keys)
	if !ok {
		return def
	}
	return c.number(key, raw, lo, maxSize)
}

func (c *config) number(key string, raw json.RawMessage, lo, top int) int {
	x, err := strconv.ParseFloat(string(raw), 64) // 64.0 and 1e3 are whole, too
	if err != nil || x != math.Trunc(x) || x < float64(lo) || x > float64(top) {
		c.fail("%s is %s; it must be a whole number from %d to %d", key, shorten(raw), lo, top)
		return max(lo, 1)
	}
	return int(x)
}

// shorten cuts a value so that the error stays one line.
func shorten(raw json.RawMessage) string {
	s := strings.Join(strings.Fields(string(raw)), " ")
	if len(s) > 40 {
		return fmt.Sprintf("%.40s...", s)
	}
	if !strings.HasPrefix(s, `"`) {
		s = strings.ReplaceAll(s, "e+", "e") // a number, as people write it
	}
	return s
}

// flag reads false or true. A missing flag has a default.
func (c *config) flag(def bool, key string) bool {
	raw, ok := c.get(key)
	if !ok {
		return def
	}
	if err := json.Unmarshal(raw, &def); err != nil {
		c.fail("%s is %s; it must be true or false", key, shorten(raw))
	}
	return def
}

// must reports an error if a flag has a value that the description cannot express.
func (c *config) must(want bool, keys ...string) {
	for _, key := range keys {
		if c.flag(want, key) != want {
			c.fail("%s is %t, which is not supported; it must be %t", key, !want, want)
		}
	}
}

// word reads a string. It is empty if the key is missing.
func (c *config) word(key string) (s string) {
	if raw, ok := c.get(key); ok {
		if err := json.Unmarshal(raw, &s); err != nil {
			c.fail("%s is %s; it must be a string", key, shorten(raw))
		}
	}
	return s
}

// list reads an array. It is nil if the key is missing.
func list[T any](c *config, key string) (l []T) {
	if raw, ok := c.get(key); ok {
		if err := json.Unmarshal(raw, &l); err != nil {
			c.fail("%s is %s; it must be an array of %Ts", key, shorten(raw), *new(T))
		}
	}
	return l
}

// atMost and divide compare two keys.
func (c *config) atMost(key string, n int, other string, top int) {
	if n > top {
		c.fail("%s is %d; it must be at most %s, which is %d", key, n, other, top)
	}
}

func (c *config) divide(key string, n int, other string, of int) {
	if of%n != 0 {
		c.fail("%s is %d; it must divide %s, which is %d", key, n, other, of)
	}
}

// base reads the keys that all families but GPT-2 share.
func (c *config) base(kind string) *Model {
	if kind == "gpt2" {
		return &Model{Vocab: c.sizeTo(maxVocab, "vocab_size"), Tied: c.flag(true, "tie_word_embeddings")}
	}
	m := &Model{
		Hidden: c.size("hidden_size"),
		Vocab:  c.sizeTo(maxVocab, "vocab_size"),
		Tied:   c.flag(false, "tie_word_embeddings"),
	}
	if raw, ok := c.get("max_position_embeddings"); ok {
		m.MaxPositions = c.number("max_position_embeddings", raw, 1, math.MaxInt32)
	}
	return m
}

// layers adds the layers that layer describes one by one.
func (c *config) layers(m *Model, layer func(i int) Layer) {
	for i := range c.sizeTo(maxLayers, "num_hidden_layers") {
		m.Layers = append(m.Layers, layer(i))
	}
}

// layerTypes are the kinds of the layers where the file lists them, nil where
// it does not.
func (c *config) layerTypes(key string, known ...string) []string {
	types := list[string](c, key)
	for i, t := range types {
		if !slices.Contains(known, t) {
			c.fail("%s[%d] is %.40q; it must be one of %s", key, i, t, strings.Join(known, ", "))
			return nil
		}
	}
	if n := c.sizeTo(maxLayers, "num_hidden_layers"); types != nil && len(types) != n {
		c.fail("%s has %d entries; it must have num_hidden_layers, which is %d", key, len(types), n)
		return nil
	}
	return types
}
