package launch

import (
	"fmt"
	"strings"
	"testing"
)

func TestWrongNeMo(t *testing.T) {
	const start = "train:\n  global_batch_size: 8\nmodel:\n"
	checkWrong(t, []wrong{
		{start + "  num_query_groups: none", false, []string{"model.num_query_groups"}},
		{start + "  seq_length: 8\n  seq_length: 8", false, []string{"line 5", "seq_length is given twice; leave one of them out"}},
		{start + "  seq_length: [8", false, []string{"line 4 is not YAML with keys and values"}},
		{start + "  seq_length: 8\n  encoder_seq_length: 16", false, []string{"model.encoder_seq_length is 16", "model.seq_length is 8", "leave one of them out"}},
		{start + "  seq_length: 8\ndataset:\n  sequence_length: 16", false, []string{"model.seq_length is 8", "dataset.sequence_length is 16"}},
		{start + "  bias: perhaps", false, []string{"model.bias", "true or false"}},
		{start + "  hidden_size: {a: 1}", false, []string{"model.hidden_size"}},
		{start + "  normalization: batchnorm", true, []string{"model.normalization", "batchnorm"}},
		{start + "  activation: swish", false, []string{"model.activation is \"swish\"", "fast-swiglu"}},
		{start + "  fp8: true\n  fp8_hybrid: e5m2", false, []string{"model.fp8_hybrid is \"e5m2\"", "true or false"}},
		{start + "  mcore_gpt: perhaps", false, []string{"model.mcore_gpt", "true or false"}},
		{start + "  fp8: 8", false, []string{"model.fp8 is 8", "hybrid"}},
		{start + "  kd_config: {skip: 1}", true, []string{"model.kd_config", "teacher"}},
		{start + "  cpu_offloading: true", true, []string{"model.cpu_offloading"}},
		{start + "  seq_length: 8\npeft:\n  dim: 8", true, []string{"peft"}},
		{start + "  peft:\n    peft_scheme: lora\n    lora_tuning: {adapter_dim: 32}", true, []string{"model.peft.peft_scheme is lora", "frozen parameters", "remove model.peft"}},
		{start + "  peft: lora", false, []string{"model.peft is"}},
		{start + "  seq_length: 8\nmixed_precision: true", false, []string{"mixed_precision is true", "bf16_mixed"}},
		{start + "  seq_length: 8\nmixed_precision: [16]", false, []string{"mixed_precision is [16]", "bf16_mixed"}},
		{start + "  seq_length: 8\nmixed_precision: 8", false, []string{"\"8\" is not known", "bf16"}},
		{start + "  seq_length: 8\nmixed_precision: int7", false, []string{"int7", "bf16"}},
		{start + "  seq_length: 8\ntrainer:\n  devices: 1000000\n  num_nodes: 1000000", false, []string{"trainer.devices", "GPUs"}},
		{start + "  seq_length: 8\ntrainer:\n  devices: -1\n  num_nodes: 1", false, []string{"trainer.devices is -1"}},
		{start + "  num_layers: [32]", false, []string{"model.num_layers is [32]", "single value"}},
		{start + "  hidden_size: .inf\n  num_query_groups: .inf", false, []string{"model.num_query_groups is +Inf"}},
		{start + "  seq_length: 8\nmixed_precision: 16-mixed-ish", false, []string{"16_mixed_ish", "bf16"}},
		{start + "  seq_length: 8\nmixed_precision: bf16_with_love", false, []string{"bf16_with_love"}},
		{start + "  - a", false, []string{"model is", "keys of its own"}},
		{start + "  optim:\n    name: adafactor", true, []string{"model.optim.name", "adafactor"}},
	})
}

func TestNeMoPrecisions(t *testing.T) {
	for word, want := range map[string]string{
		"bf16-mixed":                          "true <nil> <nil>",
		"16-mixed":                            "false <nil> <nil>",
		"16":                                  "false <nil> <nil>",
		"32":                                  "false <nil> <nil>",
		"bf16_with_fp8_delayed_scaling_mixed": "true hybrid delayed",
		"fp16_with_mxfp8_mixed":               "false e4m3 mxfp8",
		"nemotron_h_bf16_with_fp8_current_scaling_mixed": "true hybrid tensorwise",
	} {
		f, err := Parse([]byte("train:\n  global_batch_size: 8\nmodel:\n  seq_length: 8\nmixed_precision: "+word), nil)
		if err != nil {
			t.Errorf("%s: %v", word, err)
			continue
		}
		if got := fmt.Sprintf("%v %v %v", f.Args["bf16"], f.Args["fp8-format"], f.Args["fp8-recipe"]); got != want {
			t.Errorf("%s is read as %s, want %s", word, got, want)
		}
	}
}

// Activations with a gate have its matrix, whatever is inside of the gate.
func TestNeMoActivations(t *testing.T) {
	for act, gated := range map[string]bool{"fast-swiglu": true, "geglu": true, "fast-reglu": true, "gelu": false, "approx-gelu": false, "squared-relu": false} {
		f, err := Parse([]byte("train:\n  global_batch_size: 8\nmodel:\n  seq_length: 8\n  activation: "+act), nil)
		if err != nil {
			t.Fatal(err)
		}
		notes := strings.Join(f.Notes, " ")
		if f.Args["swiglu"] == true != gated || strings.Contains(notes, "not known") || strings.Contains(notes, "planned as swiglu") != (act == "geglu" || act == "fast-reglu") {
			t.Errorf("%s: %v, %s", act, f.Args, notes)
		}
	}
}

// A table of adapters that names no scheme trains all parameters.
func TestNeMoWithoutAdapters(t *testing.T) {
	for _, none := range []string{"null", "none", `""`} {
		f, err := Parse([]byte("trainer:\n  devices: 1\nmodel:\n  seq_length: 8\n  peft:\n    peft_scheme: "+none+"\n    lora_tuning: {adapter_dim: 32}\n"), nil)
		if err != nil || strings.Contains(strings.Join(f.Notes, " "), "peft") {
			t.Errorf("%s: %v, %+v", none, err, f)
		}
	}
}

// Tables in one line, and those with anchors, are tables.
func TestNeMoTablesInOneLine(t *testing.T) {
	for _, text := range []string{
		"trainer: {devices: 8, num_nodes: 2}\nmodel: {seq_length: 8}", "trainer: &t # GPUs\n  devices: 8\n  num_nodes: 2\nmodel: &m\n  seq_length: 8",
	} {
		f, err := Parse([]byte(text), nil)
		if err != nil || f == nil || f.GPUs != 16 {
			t.Errorf("%s: %+v, %v", text, f, err)
		}
	}
	f, err := Parse([]byte("trainer: {devices: 8}\nmodel: {seq_length: 8}"), nil)
	if err != nil || f.GPUs != 8 || !strings.Contains(strings.Join(f.Notes, " "), "trainer.num_nodes is missing; one node is planned") {
		t.Errorf("without num_nodes: %+v, %v", f, err)
	}
}

// The tokenizer decides the vocabulary that the model leaves open.
func TestNeMoTokenizers(t *testing.T) {
	const sizes = "train:\n  global_batch_size: 8\nmodel:\n  num_layers: 2\n  hidden_size: 64\n"
	for text, want := range map[string]string{
		"tokenizer: {tokenizer_type: NullTokenizer, vocab_size: 64000}":                       "64000 NullTokenizer <nil>",
		"tokenizer: {tokenizer_type: HuggingFaceTokenizer, tokenizer_model: a/b}":             "<nil> HuggingFaceTokenizer a/b",
		"  tokenizer: {library: megatron, type: GPT2BPETokenizer, vocab_size: 9}":             "9 GPT2BPETokenizer <nil>",
		"  tokenizer: {library: sentencepiece, type: null, model: x.model}":                   "<nil> SentencePieceTokenizer x.model",
		"  tokenizer: {library: huggingface, type: a/b}":                                      "<nil> HuggingFaceTokenizer a/b",
		"  vocab_size: 7\ntokenizer: {vocab_size: 9}":                                         "7 <nil> <nil>",
		"tokenizer: {_target_: x.AutoTokenizer, pretrained_model_name: a/b}":                  "<nil> <nil> a/b",
		"tokenizer: {library: own}":                                                           "<nil> own <nil>",
		"tokenizer: ${model.tokenizer}":                                                       "<nil> <nil> <nil>",
		"tokenizer: {tokenizer_type: NullTokenizer, vocab_size: \"${model.words}\"}\nseed: 1": "<nil> NullTokenizer <nil>",
	} {
		f, err := Parse([]byte(sizes+text), nil)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if got := fmt.Sprintf("%v %v %v", f.Args["vocab-size"], f.Args["tokenizer-type"], f.Args["tokenizer-model"]); got != want {
			t.Errorf("%s is read as %s, want %s", text, got, want)
		}
	}
}
