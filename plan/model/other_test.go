package model_test

import (
	"fmt"
	"strings"
	"testing"
)

// A file that says that it is no decoder with attention in every layer is refused, although
// it has all keys of a Llama-like model.
func TestOtherModels(t *testing.T) {
	llama := read(t, "llama-3-8b").with("rms_norm_eps", 1e-5)
	for _, kind := range []string{"rwkv", "mamba2", "falcon_mamba", "recurrent_gemma", "xlstm", "retnet", "gated_deltanet", "lfm2", "zamba2", "kimi_linear"} {
		_, err := llama.with("model_type", kind).parse(t)
		names(t, kind, err, kind, "recurrent layers or linear attention", "nemotron_h")
		_, err = object{"text_config": llama.with("model_type", kind)}.parse(t)
		names(t, kind+" in text_config", err, kind, "recurrent layers")
	}
	for key, v := range map[string]any{
		"block_types": []string{"recurrent", "attention"}, "layers_block_type": []string{"mamba"}, "block_configs": []object{{"attention": nil}}, "linear_attn_config": object{"kda_layers": []int{1}},
		"lru_width": 4096, "altup_num_inputs": 4, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 10, "cla_share_factor": 2,
	} {
		_, err := llama.with("model_type", "novel", key, v).parse(t)
		names(t, "a novel model with "+key, err, "novel", key)
		_, err = llama.with(key, v).parse(t)
		names(t, "a Llama with "+key, err, "llama", key)
	}
	for key, v := range map[string]any{"q_lora_rank": 1536, "conv_L_cache": 3, "attn_mode": "chunk", "total_ut_steps": 4, "hidden_act": "xielu"} {
		_, err := llama.with("model_type", "novel", key, v).parse(t)
		names(t, "a novel model with "+key, err, "novel", key)
	}
	for _, class := range []string{"T5ForConditionalGeneration", "BartForConditionalGeneration", "BertForMaskedLM", "MambaForCausalLM", "RwkvForCausalLM"} {
		_, err := llama.with("architectures", []string{class}).parse(t)
		names(t, class, err, "architectures", class)
	}
	_, err := object{"peft_type": "LORA", "base_model_name_or_path": "a/b"}.parse(t)
	names(t, "adapters", err, "peft_type", "adapters")
	_, err = llama.with("architectures", "LlamaForCausalLM").parse(t)
	names(t, "a word for a list", err, "architectures", "array")
}

// What a file says of itself beside its sizes, and what the plan does not follow, is noted.
func TestNotesOfOtherModels(t *testing.T) {
	llama := read(t, "llama-3-8b").with("rms_norm_eps", 1e-5)
	tower := object{"text_config": llama, "architectures": []string{"Mistral3ForConditionalGeneration"}}
	for _, c := range []struct {
		o    object
		want string
	}{
		{llama.with("architectures", []string{"LlamaForCausalLM"}), ""},
		{llama.with("architectures", []string{"NovelForCausalLM"}), ""},
		{llama.with("model_type", "novel"), `model_type "novel" is not known; the file is read as that of a Llama-like model, a decoder with attention and a gated feed-forward part in every layer`},
		{llama.with("architectures", []string{"LlamaForSequenceClassification"}), `architectures names "LlamaForSequenceClassification", whose head is small; the output layer over the vocabulary is planned in its place`},
		{llama.with("architectures", []string{"NovelForConditionalGeneration"}), "the decoder alone is planned"},
		{tower, "the decoder alone is planned"},
		{object{"text_config": llama, "model_type": "llava_next"}, `text_config alone is read; what model_type "llava_next" has beside its language model takes no part`},
		{object{"text_config": llama}, ""},
		{llama.with("architectures", []string{"Qwen3MoeForCausalLM"}), `architectures names "Qwen3MoeForCausalLM" and model_type is "llama"; the file is read as`},
		{llama.with("quantization_config", object{"quant_method": "bitsandbytes", "load_in_4bit": true}), "quantization_config (bitsandbytes) takes no part"},
		{llama.with("moe", object{"num_experts": 8}), `"moe" is a table that model_type "llama" does not have; it takes no part`},
		{llama.with("moe", object{}, "rope_scaling", object{"factor": 8.0}, "id2label", object{"0": "a"}), ""},
		{llama.with("quantization_config", object{}), "quantization_config takes no part"},
		{read(t, "deepseek-v3").with("model_type", "kimi_k2", "architectures", []string{"DeepseekV3ForCausalLM"}), ""},
	} {
		got := strings.Join(c.o.must(t).Notes, "; ")
		if !strings.Contains(got, c.want) || c.want == "" && got != "" {
			t.Errorf("%s: the notes are %q, want %q", fmt.Sprint(c.o["architectures"], c.o["model_type"]), got, c.want)
		}
	}
}
