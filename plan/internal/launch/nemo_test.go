package launch

import (
	"fmt"
	"testing"
)

func TestWrongNeMo(t *testing.T) {
	const start = "train:\n  global_batch_size: 8\nmodel:\n"
	checkWrong(t, []wrong{
		{start + "  num_query_groups: none", false, []string{"model.num_query_groups"}},
		{start + "  bias: perhaps", false, []string{"model.bias", "true or false"}},
		{start + "  hidden_size: {a: 1}", false, []string{"model.hidden_size"}},
		{start + "  normalization: batchnorm", true, []string{"model.normalization", "batchnorm"}},
		{start + "  fp8: 8", false, []string{"model.fp8 is 8", "hybrid"}},
		{start + "  kd_config: {skip: 1}", true, []string{"model.kd_config", "teacher"}},
		{start + "  cpu_offloading: true", true, []string{"model.cpu_offloading"}},
		{start + "  seq_length: 8\npeft:\n  dim: 8", true, []string{"peft"}},
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
		f, err := Parse([]byte("train:\n  global_batch_size: 8\nmodel:\n  seq_length: 8\nmixed_precision: " + word))
		if err != nil {
			t.Errorf("%s: %v", word, err)
			continue
		}
		if got := fmt.Sprintf("%v %v %v", f.Args["bf16"], f.Args["fp8-format"], f.Args["fp8-recipe"]); got != want {
			t.Errorf("%s is read as %s, want %s", word, got, want)
		}
	}
}
