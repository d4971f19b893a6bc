// This file tests jobs that are not predicted: each is refused by its kind.

package megatron

import (
	"errors"
	"strings"
	"testing"
)

// What the planner does not model is refused by name, and the absence of a model comes
// before any other complaint.
func TestUnmodelled(t *testing.T) {
	for _, c := range []struct {
		changes []any
		kind    string
		want    string
	}{
		{[]any{"perform-rl-step", true}, reinforcement, "reinforcement learning"},
		{[]any{"grpo-group-size", 2}, reinforcement, "(--grpo-group-size)"},
		{[]any{programKey, "train_rl.py"}, reinforcement, "(train_rl.py)"},
		{[]any{"decoder-num-layers", 12}, encoderBeside, "an encoder beside a decoder (T5)"},
		{[]any{programKey, "pretrain_t5.py"}, encoderBeside, "(pretrain_t5.py)"},
		{[]any{"tokenizer-type", "BertWordPieceLowerCase"}, encoder, "--tokenizer-type BertWordPieceLowerCase"},
		{[]any{"vocab-file", "${DATA_PATH}/vocab.txt"}, encoder, "vocab.txt is a vocabulary of BERT"},
		{[]any{programKey, "../pretrain_bert.py"}, encoder, "(pretrain_bert.py)"},
		{[]any{"img-h", 336}, tower, "a vision or audio tower (--img-h)"},
		{[]any{"model-provider", "llava_vlm"}, tower, "--model-provider llava_vlm"},
		{[]any{programKey, "examples/multimodal/train.py"}, tower, "(train.py)"},
		{[]any{programKey, "inference"}, inference, "inference"},
		{[]any{"num-tokens-to-generate", 8}, inference, "(--num-tokens-to-generate)"},
		{[]any{programKey, "tools/checkpoint/convert.py"}, tool, "(convert.py)"},
		{[]any{programKey, "./tasks/msdp/main.py"}, tool, "(main.py)"},
		{[]any{"export-kd-teacher-load", "x"}, distillation, "a teacher"},
		{[]any{"freeze-all-layers", true}, frozen, "frozen"},
		{[]any{"flextron", true}, option, "give --flextron false to plan the job without it"},
		{[]any{"fp32-residual-connection", true}, option, "keeps residuals in twice the bytes"},
		{[]any{"optimizer", "lion"}, option, "--optimizer lion"},
		{[]any{"fp8-dot-product-attention", true}, option, "--fp8-dot-product-attention saves queries, keys and values in fp8"},
		{[]any{"fp8-format", "hybrid", "no-fp8-wgrad", true}, option, "--no-fp8-wgrad keeps the inputs of products in bf16"},
		{[]any{"fp8-format", "e4m3", "fp8-recipe", "custom"}, option, "--fp8-recipe custom"},
		{[]any{"ddp-param-name-patterns-for-fp32-local-accumulation", "all"}, option, "a second buffer of gradients"},
		{[]any{"optimizer", "muon", "muon-scalar-optimizer", "lion"}, option, "--muon-scalar-optimizer lion"},
		{[]any{"lora-target-modules", "qkv"}, option, "--lora-target-modules is not known, and its name says that it can change memory; give --lora-target-modules false to plan"},
		{[]any{"num-layers", nil, "hidden-size", nil, "num-attention-heads", nil, "tensor-model-parallel-size", 3}, noModelKind, "there is no model in this file"},
		{[]any{"num-layers", nil, "hidden-size", nil, "num-attention-heads", nil, programKey, "preprocess_data.py"}, noModelKind, "it runs preprocess_data.py"},
		{[]any{"num-layers", nil, "hidden-size", nil, "num-attention-heads", nil, "use-checkpoint-args", true}, noModelKind, "takes it from a checkpoint"},
		{[]any{"num-layers", nil, "hidden-size", nil, "num-attention-heads", nil, "trainer.devices", 8}, recipe, "NeMo recipe (trainer.devices)"},
	} {
		_, _, err := FromArgs(small(c.changes...), Options{GPUs: 16})
		var refused *Refused
		if !errors.As(err, &refused) || refused.Kind != c.kind || !strings.Contains(refused.Text, c.want) || strings.Contains(refused.Text, "\n") {
			t.Errorf("%v: %v, want %s with %q", c.changes, err, c.kind, c.want)
		}
	}
	for _, changes := range [][]any{
		{"lora-target-modules", false}, {"brand-new-flag", 1}, {"flextron", false}, {"freeze-all-layers", false}, {programKey, "pretrain_gpt.py"}, {programKey, "/data/albert/inference/pretrain_gpt.py"}, {programKey, "/srv/robert/train.py"}, {"mlp-chunks-for-training", 1}, {"model-provider", "hybrid"},
		{"vocab-file", "bpe/vocab.json"}, {"perform-rl-step", []string{"false"}},
	} {
		if _, _, err := FromArgs(small(changes...), Options{GPUs: 16}); err != nil {
			t.Errorf("%v: %v", changes, err)
		}
	}
}

// The mode of a functional test says what it runs.
func TestModes(t *testing.T) {
	for mode, kind := range map[string]string{"inference": inference, "rl": reinforcement, "pretraining": ""} {
		args, err := parseYAML([]byte("MODE: "+mode+"\nMODEL_ARGS:\n  --num-layers: 2\n  --hidden-size: 64\n  --num-attention-heads: 4\n  --seq-length: 8\n  --micro-batch-size: 1\n"), nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = FromArgs(args, Options{})
		var refused *Refused
		if errors.As(err, &refused) != (kind != "") || refused != nil && refused.Kind != kind {
			t.Errorf("%s: %v", mode, err)
		}
	}
	_, err := parseYAML([]byte("MODEL_ARGS:\nTEST_TYPE: regular\n"), nil)
	var refused *Refused
	if !errors.As(err, &refused) || refused.Kind != noModelKind {
		t.Errorf("an empty MODEL_ARGS: %v", err)
	}
}
