// This file owns the tests of the families: the layers that follow from their keys.
// Totals are those of the published checkpoints.

package model_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/plan/model"
)

// kinds returns a letter for each layer: attention (a, or w with a window), MLA (l),
// Mamba (m), delta net (g), lightning attention (n). Layers with experts have capitals. A layer without a mixer is
// d or E.
func kinds(m *model.Model) string {
	var b strings.Builder
	for _, l := range m.Layers {
		letter := "d"
		switch {
		case l.Attention != nil && l.Attention.Window > 0:
			letter = "w"
		case l.Attention != nil:
			letter = "a"
		case l.MLA != nil:
			letter = "l"
		case l.Mamba != nil:
			letter = "m"
		case l.DeltaNet != nil:
			letter = "g"
		case l.Lightning != nil:
			letter = "n"
		case l.MoE != nil:
			letter = "e"
		}
		if l.MoE != nil {
			letter = strings.ToUpper(letter)
		}
		b.WriteString(letter)
	}
	return b.String()
}

func TestWhichLayers(t *testing.T) {
	for _, c := range []struct {
		preset string
		change []any
		want   string
	}{
		{"deepseek-v3", []any{"num_hidden_layers", 6}, "lllLLL"},
		{"deepseek-v3", []any{"num_hidden_layers", 6, "moe_layer_freq", 2, "first_k_dense_replace", 1}, "llLlLl"},
		{"deepseek-v3", []any{"num_hidden_layers", 3, "n_routed_experts", nil, "num_nextn_predict_layers", 0}, "lll"},
		{"qwen3-next-80b-a3b", []any{"num_hidden_layers", 8}, "GGGAGGGA"},
		{"qwen3-next-80b-a3b", []any{"num_hidden_layers", 3, "layer_types", []string{"full_attention", "linear_attention", "linear_attention"}}, "AGG"},
		{"qwen3-30b-a3b", []any{"num_hidden_layers", 6, "intermediate_size", 6144, "decoder_sparse_step", 2, "mlp_only_layers", []int{1}}, "aaaAaA"},
		{"tiny-hybrid", nil, "MMMAMMMA"},
		{"tiny-hybrid", []any{"num_hidden_layers", 2, "layer_types", nil}, "MM"},
		{"tiny-hybrid", []any{"num_local_experts", 0}, "mmmammma"},
		{"gpt-oss-20b", []any{"num_hidden_layers", 4}, "WAWA"},
		{"gpt-oss-20b", []any{"num_hidden_layers", 2, "layer_types", []string{"full_attention", "sliding_attention"}}, "AW"},
		{"jamba-1.5-large", []any{"num_hidden_layers", 9}, "mMmMaMmMm"},
		{"jamba-1.5-large", []any{"num_hidden_layers", 9, "num_experts", 1}, "mmmmammmm"},
		{"jamba-1.5-large", []any{"num_hidden_layers", 9, "attn_layer_period", nil, "attn_layer_offset", nil, "expert_layer_period", nil, "expert_layer_offset", nil}, "mMmMaMmMm"},
		{"jamba-1.5-large", []any{"num_hidden_layers", 4, "attn_layer_period", 3, "attn_layer_offset", 2, "expert_layer_offset", 0}, "MmAm"},
		{"nemotron-3-nano-30b-a3b", []any{"num_hidden_layers", 4, "hybrid_override_pattern", "ME*-", "intermediate_size", 7}, "mEad"},
		{"nemotron-3-nano-30b-a3b", []any{"num_hidden_layers", nil, "hybrid_override_pattern", nil, "intermediate_size", 7,
			"layers_block_type", []string{"mamba", "moe", "attention", "mlp", "linear_attention", "full_attention"}}, "mEadma"},
		{"llama-3-8b", []any{"model_type", "mistral", "num_hidden_layers", 2, "sliding_window", 4096}, "ww"},
		{"qwen2.5-72b", []any{"num_hidden_layers", 3, "sliding_window", 4096, "max_window_layers", 1}, "aaa"},
		{"qwen2.5-72b", []any{"num_hidden_layers", 3, "sliding_window", 4096, "max_window_layers", 1, "use_sliding_window", true}, "aww"},
		{"llama-3-8b", []any{"model_type", "gemma2", "num_hidden_layers", 4, "sliding_window", 4096}, "wawa"},
		{"llama-3-8b", []any{"model_type", "gemma3_text", "num_hidden_layers", 7, "sliding_window", 512}, "wwwwwaw"},
	} {
		if got := kinds(read(t, c.preset).with(c.change...).must(t)); got != c.want {
			t.Errorf("%s with %v: %s, want %s", c.preset, c.change, got, c.want)
		}
	}
}

// Models that are not built in are read from the keys of their published files.
func TestPublishedFiles(t *testing.T) {
	gemma := object{"hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16,
		"num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096, "max_position_embeddings": 8192}
	gemma3 := object{"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
		"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512}
	for _, c := range []struct {
		name   string
		config object
		want   int64
	}{
		{"gpt2", object{"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}, 124439808},
		{"pythia-6.9b", object{"model_type": "gpt_neox", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
			"num_attention_heads": 32, "vocab_size": 50432, "max_position_embeddings": 2048}, 6857302016},
		{"mistral-7b-v0.1", object{"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
			"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": nil, "vocab_size": 32000, "sliding_window": 4096}, 7241732096},
		{"qwen1.5-moe-a2.7b", object{"model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
			"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4,
			"vocab_size": 151936}, 14315784192},
		{"qwen2.5-0.5b", object{"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
			"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": true}, 494032768},
		{"gemma-2-9b", gemma.with("model_type", "gemma2"), 9241705984},
		{"gemma-3-1b", gemma3, 999885952},
		{"gemma-3-1b inside another", object{"model_type": "gemma3", "text_config": gemma3}, 999885952},
		{"jamba-v0.1", object{"model_type": "jamba", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
			"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536, "num_experts": 16, "num_experts_per_tok": 2,
			"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_dt_rank": "auto"}, 51570323328},
		// The checkpoint has the MTP head that its config.json does not name.
		{"qwen3-next-80b-a3b", read(t, "qwen3-next-80b-a3b").with("mtp_num_hidden_layers", 1), 81324862720},
	} {
		m, err := c.config.parse(t)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if got := m.Parameters(); got != c.want {
			t.Errorf("%s has %d parameters, want %d", c.name, got, c.want)
		}
	}
}

// Properties of routers do not show in the number of parameters.
func TestRouters(t *testing.T) {
	for _, c := range []struct {
		preset        string
		bias, sigmoid bool
	}{
		{"deepseek-v2", false, false},
		{"deepseek-v3", true, true},
		{"kimi-k2", true, true},
		{"glm-4.5", true, true},
		{"nemotron-3-nano-30b-a3b", true, true},
		{"mixtral-8x7b", false, false},
		{"qwen3-30b-a3b", false, false},
	} {
		m := preset(t, c.preset)
		for i, l := range m.Layers {
			if l.MoE != nil && (l.MoE.Bias != c.bias || l.MoE.Sigmoid != c.sigmoid) {
				t.Errorf("%s, layer %d: bias %t, sigmoid %t", c.preset, i, l.MoE.Bias, l.MoE.Sigmoid)
			}
		}
	}
	if m := preset(t, "nemotron-3-super-120b-a12b"); !m.MTP.Repeated || len(m.MTP.Layers) != 2 {
		t.Errorf("the MTP head of Nemotron 3 Super is %+v", m.MTP)
	}
	plain := read(t, "deepseek-v3").with("topk_method", nil, "scoring_func", nil).must(t)
	if e := plain.Layers[60].MoE; !e.Bias || !e.Sigmoid {
		t.Error("DeepSeek-V3 without the keys of its router is not balanced by a bias on sigmoids")
	}
}

// Positions come from the layers that keep a state, if there are any.
func TestRotary(t *testing.T) {
	for name, want := range map[string]bool{"llama-3-8b": true, "qwen3-next-80b-a3b": true, "jamba-1.5-large": false, "nemotron-h-8b": false} {
		for i, l := range preset(t, name).Layers {
			if l.Attention != nil && l.Attention.Rotary != want {
				t.Errorf("%s, layer %d: rotary is %t", name, i, l.Attention.Rotary)
			}
		}
	}
}

// A multimodal model says outside of its language model whether that is tied.
func TestTiedOutside(t *testing.T) {
	text := read(t, "llama-3-8b").with("tie_word_embeddings", nil)
	for _, tied := range []bool{false, true} {
		m := object{"model_type": "seeing", "tie_word_embeddings": tied, "text_config": text}.must(t)
		inside := object{"model_type": "seeing", "tie_word_embeddings": !tied, "text_config": text.with("tie_word_embeddings", tied)}.must(t)
		if m.Tied != tied || inside.Tied != tied {
			t.Errorf("tied %t is read as %t outside and %t inside", tied, m.Tied, inside.Tied)
		}
	}
}

// In Granite's hybrids, the width of the scan follows from its heads or from the hidden
// width, and positions are rotated only if the file says so.
func TestGraniteHybrid(t *testing.T) {
	o := read(t, "tiny-hybrid")
	m := o.must(t)
	if l := m.Layers[0]; l.Mamba.Inner != 256 || l.MoE.SharedWidth != 64 || l.MoE.SharedGate || !m.Layers[3].Attention.Rotary {
		t.Errorf("layers are %+v, %+v and %+v", l.Mamba, l.MoE, m.Layers[3].Attention)
	}
	m = o.with("mamba_d_head", "auto").with("mamba_expand", 3).with("position_embedding_type", nil).with("tie_word_embeddings", nil).must(t)
	if m.Layers[0].Mamba.Inner != 384 || m.Layers[3].Attention.Rotary || !m.Tied {
		t.Errorf("layers are %+v and %+v, tied: %t", m.Layers[0].Mamba, m.Layers[3].Attention, m.Tied)
	}
	m = o.with("num_local_experts", 0).with("shared_intermediate_size", 96).must(t)
	if d := m.Layers[0].Dense; d == nil || d.Width != 96 || !d.Gated {
		t.Errorf("without experts it is %+v", d)
	}
	_, err := o.with("position_embedding_type", "learned").parse(t)
	names(t, "learned positions", err, "position_embedding_type")
}

// Layers share nothing: changing one changes no other.
func TestLayersAreApart(t *testing.T) {
	gpt2 := object{"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}.must(t)
	models := []*model.Model{gpt2}
	for _, name := range model.Presets() {
		models = append(models, preset(t, name))
	}
	for _, m := range models {
		layers := m.Layers
		if m.MTP != nil {
			layers = append(layers, m.MTP.Layers...)
		}
		seen := map[any]bool{}
		for i, l := range layers {
			for _, part := range []any{l.Attention, l.MLA, l.Mamba, l.DeltaNet, l.Dense, l.MoE} {
				if seen[part] && !reflect.ValueOf(part).IsNil() {
					t.Fatalf("%s: layer %d shares a %T", m.Name, i, part)
				}
				seen[part] = true
			}
		}
	}
}
