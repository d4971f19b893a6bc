// This file owns the tests of the families whose published files lie in testdata: their
// totals are compared with the published ones. The files keep only the keys with
// dimensions, and "source" names the Hugging Face repository that they are from.

package model_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/plan/model"
)

func readData(t testing.TB, name string) object { t.Helper(); return readFrom(t, "testdata", name) }

// fromData has totals in numbers of parameters, and the parameters of one token in 10^9
// with the tolerance that follows from the published digits. Routers' biases and the scales
// of eight-bit weights are no parameters: a checkpoint of MiniMax-M2 has 13895936 numbers
// more, one of ERNIE 4.5 21B 1728.
var fromData = []struct {
	name     string
	total    int64
	active   float64
	within   float64 // per cent
	activeOf counted
	layers   string // of the first eight
}{
	{"olmoe-1b-7b", 6919161856, 1.28, 0.2, all, "AAAAAAAA"},
	{"phi-3.5-moe", 41873153344, 6.6, 1, all, "WWWWWWWW"},
	// The checkpoint has 108641793536, of which 871932416 are vision.
	{"llama-4-scout", 107769861120, 17, 1.1, all, "AAAAAAAA"},
	// The checkpoint has 401583781376, of which 871932416 are vision.
	{"llama-4-maverick", 400711848960, 17, 1.1, all, "aAaAaAaA"},
	{"ernie-4.5-21b-a3b", 21825436160, 3.35, 0.1, noEmbedding, "aAAAAAAA"},
	{"ernie-4.5-300b-a47b", 299484160000, 47, 0.2, noEmbedding, "aaaAAAAA"},
	{"falcon-h1-0.5b", 521411104, 0, 0, all, "aaaaaaaa"},
	{"falcon-h1-34b", 33642516224, 0, 0, all, "aaaaaaaa"},
	{"minimax-text-01", 456089655296, 45.9, 0.1, noVocab, "NNNNNNNA"},
	{"minimax-m2", 228689748992, 9.8, 0.1, noVocab, "AAAAAAAA"},
	// DeepSeek-V3 with 13959424 of the indexer in each of 61 layers and the MTP head.
	{"deepseek-v3.2", 683501956608, 37, 1.5, noEmbedding, "lllLLLLL"},
}

// SPEC S6.1: published files have the published parameters.
func TestPublishedMixtures(t *testing.T) {
	for _, c := range fromData {
		m := readData(t, c.name).must(t)
		if got := m.Parameters(); got != c.total {
			t.Errorf("%s has %d parameters, want %d", c.name, got, c.total)
		}
		if c.active > 0 {
			table := int64(m.Vocab) * int64(m.Hidden)
			compare(t, c.name+" of a token", m.ActiveParameters()+int64(noEmbedding-c.activeOf)*table, c.active, c.within)
		}
		if got := kinds(m)[:8]; got != c.layers {
			t.Errorf("%s begins with the layers %s, want %s", c.name, got, c.layers)
		}
	}
}

func TestIndexer(t *testing.T) {
	v3, v32 := read(t, "deepseek-v3").must(t), readData(t, "deepseek-v3.2").must(t)
	if got, want := v32.Parameters()-v3.Parameters(), int64(62*13959424); got != want {
		t.Errorf("the indexers have %d parameters, want %d", got, want)
	}
	for _, key := range []string{"index_n_heads", "index_head_dim", "index_topk", "q_lora_rank"} {
		_, err := readData(t, "deepseek-v3.2").with(key, nil).parse(t)
		names(t, "DeepSeek-V3.2 without "+key, err, key)
	}
}

// In Llama 4, one layer of four sees the whole sequence, without positions and norms.
func TestLlama4Layers(t *testing.T) {
	o := readData(t, "llama-4-scout")
	for i, l := range o.must(t).Layers {
		a, whole := l.Attention, i%4 == 3
		if a.Rotary == whole || a.QKNorm == whole || a.QKNormBare == whole || (a.Chunk == 0) != whole || l.MoE.SharedWidth != 8192 {
			t.Fatalf("layer %d is %+v", i, a)
		}
	}
	o = o.with("num_hidden_layers", 3, "intermediate_size_mlp", 16384)
	m := o.with("no_rope_layers", []int{0, 1, 1}, "moe_layers", []int{2}, "layer_types", []string{"full_attention", "chunked_attention", "full_attention"}).must(t)
	if l := m.Layers; l[0].Attention.Rotary || !l[1].Attention.Rotary || l[1].Attention.Chunk != 8192 || l[2].Attention.Chunk != 0 || l[0].Dense.Width != 16384 || l[2].MoE == nil {
		t.Errorf("lists of layers are not followed: %+v", l)
	}
	_, err := o.with("no_rope_layers", []int{1}).parse(t)
	names(t, "too few entries", err, "no_rope_layers", "num_hidden_layers")
}

func TestMiniMaxLayers(t *testing.T) {
	text := readData(t, "minimax-text-01").with("num_hidden_layers", 4, "attn_type_list", nil)
	for _, c := range []struct {
		change []any
		want   string
	}{
		{[]any{"attn_type_list", []int{0, 1, 0, 1}}, "NANA"},
		{[]any{"layer_types", []string{"linear_attention", "linear_attention", "full_attention", "full_attention"}}, "NNAA"},
		{nil, "ANAN"},
		{[]any{"model_type", "minimax_m2"}, "AAAA"},
	} {
		if got := kinds(text.with(c.change...).must(t)); got != c.want {
			t.Errorf("with %v: %s, want %s", c.change, got, c.want)
		}
	}
	for _, list := range [][]int{{0}, {0, 1, 2, 0}} {
		_, err := text.with("attn_type_list", list).parse(t)
		names(t, "a wrong list", err, "attn_type_list")
	}
	_, err := text.with("use_qk_norm", true, "qk_norm_type", "some").parse(t)
	names(t, "a strange norm", err, "qk_norm_type")
	m2 := readData(t, "minimax-m2")
	if notes := m2.must(t).Notes; len(notes) != 1 || !strings.Contains(notes[0], "num_mtp_modules") {
		t.Errorf("the notes are %q", notes)
	}
	if notes := m2.with("use_mtp", false).must(t).Notes; len(notes) != 0 {
		t.Errorf("without MTP the notes are %q", notes)
	}
}

func TestFalconH1Layers(t *testing.T) {
	o := readData(t, "falcon-h1-0.5b")
	if l := o.must(t).Layers[0]; !l.Parallel() || l.Mamba.Inner != 1536 || !l.Mamba.Ungated || l.Dense == nil {
		t.Errorf("a layer is %+v", l)
	}
	if m := o.with("mamba_d_ssm", nil, "mamba_d_head", "auto", "mamba_n_heads", 32).must(t); m.Layers[0].Mamba.Inner != 2048 {
		t.Errorf("the scan is %d wide", m.Layers[0].Mamba.Inner)
	}
	for _, c := range [][]any{{"mamba_d_head", 32}, {"mamba_n_heads", 7}, {"mamba_n_groups", 5}, {"mamba_proj_bias", true}, {"projectors_bias", true}, {"mamba_conv_bias", false}} {
		_, err := o.with(c...).parse(t)
		names(t, "a wrong "+c[0].(string), err, c[0].(string))
	}
}

// ERNIE's MTP head has a dense layer, and experts stop at an index.
func TestErnieLayers(t *testing.T) {
	o := readData(t, "ernie-4.5-21b-a3b").with("num_hidden_layers", 6)
	if got := kinds(o.with("moe_layer_end_index", 4, "moe_layer_interval", 2).must(t)); got != "aAaAaa" {
		t.Errorf("the layers are %s", got)
	}
	m := o.with("moe_layer_end_index", -1, "num_nextn_predict_layers", 1).must(t)
	if kinds(m) != "aAAAAA" || m.MTP == nil || m.MTP.Layers[0].Dense == nil {
		t.Errorf("the layers are %s, MTP %+v", kinds(m), m.MTP)
	}
	_, err := o.with("use_bias", true).parse(t)
	names(t, "biases", err, "use_bias")
	_, err = o.with("moe_k", 65).parse(t)
	names(t, "too many experts", err, "moe_k", "moe_num_experts")
}

// What is more than a decoder is refused by name, also in a family that is known.
func TestNotADecoder(t *testing.T) {
	llama := read(t, "llama-3-8b")
	for _, c := range []struct {
		o     object
		words []string
	}{
		{object{"model_type": "t5", "d_model": 512, "is_encoder_decoder": true}, []string{`"t5"`, "decoders"}},
		{object{"model_type": "bert", "hidden_size": 768}, []string{`"bert"`, "encoder"}},
		{object{"model_type": "whisper"}, []string{`"whisper"`}},
		{llama.with("is_encoder_decoder", true), []string{"is_encoder_decoder"}},
		{llama.with("vision_config", object{"hidden_size": 1024}), []string{"vision_config", "remove"}},
		{llama.with("mm_vision_tower", "openai/clip-vit-large-patch14-336"), []string{"mm_vision_tower"}},
		{object{"model_type": "llama4", "text_config": readData(t, "llama-4-scout"), "vision_config": object{"hidden_size": 1408}}, []string{"vision_config"}},
		{object{"model_type": "qwen2_audio", "text_config": llama, "audio_config": object{"d_model": 1280}}, []string{"audio_config"}},
		{llama.with("num_local_experts", 8), []string{"num_local_experts", "llama"}},
		{llama.with("num_nextn_predict_layers", 1), []string{"num_nextn_predict_layers"}},
		{llama.with("model_type", "novel", "rms_norm_eps", 1e-5, "num_nextn_predict_layers", 1), []string{"num_nextn_predict_layers", "novel"}},
	} {
		_, err := c.o.parse(t)
		names(t, strings.Join(c.words, " "), err, c.words...)
	}
	for _, off := range []object{llama.with("is_encoder_decoder", false), llama.with("vision_config", object{}), llama.with("num_experts", 0)} {
		if m := off.must(t); m.Parameters() != preset(t, "llama-3-8b").Parameters() {
			t.Error("a part that is switched off counts")
		}
	}
	m := object{"model_type": "llama4", "text_config": readData(t, "llama-4-scout")}.must(t)
	if m.Parameters() != 107769861120 {
		t.Errorf("the language model of Llama 4 has %d parameters", m.Parameters())
	}
}

// A family that is not known is read as a Llama with a note.
func TestUnknownFamilyIsNoted(t *testing.T) {
	m := read(t, "llama-3-8b").with("model_type", "novel", "rms_norm_eps", 1e-5).must(t)
	if len(m.Notes) != 1 || !strings.Contains(m.Notes[0], "novel") {
		t.Errorf("the notes are %q", m.Notes)
	}
	for _, name := range model.Presets() {
		if m := preset(t, name); len(m.Notes) > 0 {
			t.Errorf("%s has the notes %q", name, m.Notes)
		}
	}
}

// A family that is not known and does not look like a Llama is refused, with what to give.
func TestUnknownFamilyIsRefused(t *testing.T) {
	for what, x := range map[string]struct {
		change []any
		want   string
	}{
		"no key of Llama": {[]any{"model_type", "novel", "rms_norm_eps", nil}, `"novel" is not known, and rms_norm_eps, which every Llama-like model has, is missing; use one of deepseek_v2`},
		"no gate":         {[]any{"model_type", "novel", "hidden_act", "relu"}, "where a Llama-like model has a gate; use one of deepseek_v2"},
		"another part":    {[]any{"model_type", "novel", "cross_attention_layers", []int{3}}, `"cross_attention_layers" is no key of a Llama-like model; use one of`},
		"no family":       {[]any{"model_type", nil, "num_experts", 8}, `model_type is missing, and "num_experts" is no key of a Llama-like model; use one of`},
		"no model":        {[]any{"model_type", nil, "rms_norm_eps", nil}, "model_type is missing, and so is rms_norm_eps, which every Llama-like model has; give the config.json of a model"},
	} {
		_, err := read(t, "llama-3-8b").with("rms_norm_eps", 1e-5).with(x.change...).parse(t)
		names(t, what, err, x.want)
	}
}

func TestOutputBias(t *testing.T) {
	o := readData(t, "phi-3.5-moe")
	if n := o.must(t).Parameters() - o.with("lm_head_bias", false).must(t).Parameters(); n != 32064 {
		t.Errorf("the bias has %d numbers", n)
	}
	_, err := o.with("tie_word_embeddings", true).parse(t)
	names(t, "a tied layer with a bias", err, "lm_head_bias")
}

func TestTwoMixers(t *testing.T) {
	m := readData(t, "falcon-h1-0.5b").must(t)
	if err := m.Check(); err != nil {
		t.Error(err)
	}
	m.Layers = slices.Clone(m.Layers)
	m.Layers[0].Lightning = &model.Lightning{Heads: 8, HeadDim: 64}
	names(t, "three mixers", m.Check(), "3 mixers")
	m.Layers[0].Lightning = &model.Lightning{Heads: 8}
	names(t, "a lightning without a width", m.Check(), "lightning.head_dim")
}
