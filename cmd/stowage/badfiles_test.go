// This file tests what commands say about files whose contents are wrong.

package main

import (
	"os"
	"strings"
	"testing"
)

// badFiles has files that are wrong in one way each, the command that reads each, and a
// part of the sentence that it answers with.
var badFiles = []struct{ name, text, command, want string }{
	{"epsilon.json", hfWith(`"rms_norm_eps":-1e-5`), "train --dry-run --model", "--model epsilon.json: rms_norm_eps is -0.00001; it must be a number above 0"},
	{"large.json", hfWith(`"rms_norm_eps":1e300`), "train --dry-run --model", "rms_norm_eps is 1e300; it must be a number above 0 and up to 3e38"},
	{"tiny.json", hfWith(`"rms_norm_eps":1e-300`), "train --dry-run --model", "rms_norm_eps is 1e-300; it must be a number above 0"},
	{"theta.json", hfWith(`"rope_theta":0`), "train --dry-run --model", "rope_theta is 0; it must be a number above 0"},
	{"infinite.json", hfWith(`"rope_theta":Infinity`), "train --dry-run --model", "rope_theta is "},
	{"words.json", hfWith(`"head_dim":NaN`), "plan --config", `head_dim is "NaN"; it must be a whole number from 1 to`},
	{"words.json", hfWith(`"head_dim":NaN`), "train --dry-run --model", `head_dim is "NaN"; it must be a whole number from 1 to`},
	{"words.json", hfWith(`"head_dim":-Infinity`), "bench pools --model", `head_dim is "-Infinity"; it must be a whole number from 1 to`},
	{"object.json", hfWith(`"rope_theta":{}`), "train --dry-run --model", "rope_theta is {}; it must be a number above 0"},
	{"factor.json", hfWith(`"routed_scaling_factor":0`), "train --dry-run --model", "routed_scaling_factor is 0; it must be a number above 0"},
	{"balance.json", hfWith(`"router_aux_loss_coef":-1`), "train --dry-run --model", "router_aux_loss_coef is -1; it must be a number from 0 to 3e38"},
	{"act.json", hfWith(`"hidden_act":7`), "train --dry-run --model", "hidden_act is 7, and the trainer knows only silu and swish"},
	{"score.json", hfWith(`"scoring_func":"argmax"`), "train --dry-run --model", `scoring_func is "argmax", and the trainer knows only softmax and sigmoid`},
	{"size.json", hfWith(`"head_dim":1e30`), "train --dry-run --model", "head_dim is 1e30; "},
	{"normal.json", hfWith(`"norm_topk_prob":"yes"`), "train --dry-run --model", `norm_topk_prob is "yes"; it must be true or false`},
	{"infinite.yaml", "model_type: llama\nhidden_size: .inf\n", "train --dry-run --model", "--model infinite.yaml: hidden_size is \"Infinity\"; it must be a whole number"},
	{"twice.yaml", "hidden_size: 2\nmodel_type: llama\nhidden_size: 4\n", "train --dry-run --model", "--model twice.yaml gives a key of line 3 twice; leave one of them out"},
	{"second.yaml", "model_type: llama\n---\nhidden_size: 4\n", "train --dry-run --model", "--model second.yaml: line 3: expected one document, got a second one behind ---"},
	{"second.yaml", "num-layers: 2\n---\nhidden-size: 4\n", "plan --megatron", "line 3: expected one document, got a second one behind ---"},
	{"none.yaml", "policy: offload\noffload_modules: [\"\"]\n", "train --dry-run --config", `--offload-modules "" is unknown; `},
	{"long.yaml", "steps: " + strings.Repeat("9", 100_000) + "\n", "train --dry-run --config", `999…999999999999999999"`},
	{"empty.yaml", "policy: stash\nsteps:\n", "train --dry-run --config", "--config: empty.yaml: steps has no value; give one, or leave the line out"},
	{"tilde.yaml", "{model: ~, steps: 1}", "train --dry-run --config", "--config: tilde.yaml: model has no value; "},
	{"pointer.json", "version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 7\n", "plan --config", "--config ./pointer.json: the file cannot be read: it is a pointer of Git LFS in the place of a file; get the file with git lfs pull"},
	{"pointer.json", "version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 7\n", "bench pools --model", "get the file with git lfs pull"},
	{"name.json", hfWith(`"_name_or_path":7`), "train --dry-run --model", "_name_or_path is 7; it must be a string"},
	{"name.json", hfWith(`"_name_or_path":7`), "plan --config", "_name_or_path is 7; it must be a string"},
	{"twice.json", hfWith(`"hidden_size":64`), "train --dry-run --model", "--model twice.json: line 1 gives hidden_size different values; leave one of them out"},
	{"twice.json", "{\"text_config\":{\n\"a\":1,\n\"a\":2}}", "train --dry-run --model", "--model twice.json: lines 2 and 3 give a different values; leave one of them out"},
	{"digits.json", hfWith(`"head_dim":1e999`), "train --dry-run --model", "--model digits.json: head_dim is 1e999; it must be a whole number from 1 to 1048576"},
	{"digits.json", hfWith(`"novel":1e999`), "train --dry-run --model", "--model digits.json: the number 1e999 is too large or of the wrong kind"},
	{"wide.json", "{\x00}\x00", "train --dry-run --model", "--model wide.json: expected text in UTF-8, got binary data"},
	{"wide.yaml", "a\x00:\x00", "train --dry-run --model", "--model wide.yaml: expected text in UTF-8, got binary data"},
	{"comma.json", hfWith(`"x":1`) + ",", "plan --config", "it is not JSON from character"},
	{"list.yaml", "- num-layers\n", "plan --megatron", "line 1 is not YAML with keys and values, such as num-layers: 32; "},
	{"number.yaml", "5\n", "plan --megatron", "line 1 is not YAML with keys and values, "},
	{"tab.yaml", "MODEL_ARGS:\n\t--num-layers: 4\n", "plan --megatron", "line 2 is not YAML with keys and values, such as num-layers: 32; look for a tab, "},
	{"nested.json", `{"--num-layers": {"a": 1}}`, "plan --megatron", "\"--num-layers\" holds keys of its own; flags must stand side by side"},
	{"lists.yaml", "offload-modules: [null]\nvocab-size: 9\n", "plan --megatron", "--offload-modules: a list must hold numbers and words alone"},
	{"nemo.yaml", nemoWith("hidden_size: four"), "plan --launch", "--launch ./nemo.yaml: model.hidden_size four: a whole number is expected"},
	{"nemo.yaml", nemoWith("hidden_size: 64\n  qk_layernorm: 2"), "plan --launch", "--launch ./nemo.yaml: model.qk_layernorm is 2; it must be true or false"},
	{"slow.json", gpuWith(`"hbm":1e-300`), "plan --model llama-3-8b --gpu", `"hbm" is 1e-300; it must be a number from 1 to 1e30`},
	{"fast.json", gpuWith(`"hbm":3e12,"host_both":1e300`), "plan --model llama-3-8b --gpu", `"host_both" is 1e300; it must be a number from 1 to 1e30`},
	{"alone.json", gpuWith(`"hbm":3e12,"fast_link":4e11`), "plan --model llama-3-8b --gpu", "--gpu mine has no network, which times depend on"},
	{"counts.jsonl", "hello\n", "plan --model mixtral-8x7b --gpus 2 --ep 2 --routing counts:", "it is not JSON from character 1 on"},
}

// nemoWith returns a launch file of NeMo with more keys of the model.
func nemoWith(keys string) string {
	return "train:\n  global_batch_size: 8\nmodel:\n  num_layers: 2\n  num_attention_heads: 4\n  seq_length: 8\n  vocab_size: 100\n  " + keys + "\n"
}

// gpuWith returns the figures of a GPU with more keys, of which the last counts.
func gpuWith(keys string) string {
	return `{"name":"mine","memory_bytes":80000000000,"flops":{"bf16":1e15},"host_out":5e10,"host_in":5e10,` + keys + "}"
}

// hfWith returns the config.json of a small model with one more key.
func hfWith(key string) string { return strings.Replace(smallModel, "{", "{"+key+",", 1) }

// A wrong file is answered with code 2 and one sentence that names the key or the line in
// the words of the file, and no part of Go.
func TestBadFiles(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, x := range badFiles {
		writeFile(t, x.name, x.text)
		line := x.command + " " + x.name
		if strings.HasSuffix(x.command, ":") {
			line = x.command + x.name
		}
		stdout, stderr, code := command(strings.Fields(line)...)
		switch {
		case code != exitUsage, stdout != "", strings.Count(stderr, "\n") != 1, !strings.Contains(stderr, x.want), len(stderr) > 5000:
			t.Errorf("%s: code %d, output %.60q, errors %.500q, want %q", line, code, stdout, stderr, x.want)
		case goWords.MatchString(stderr):
			t.Errorf("%s: the sentence %q has %q", line, stderr, goWords.FindString(stderr))
		}
	}
}

// The mark that some editors put before UTF-8 is no part of a text, and no flag behind it
// is lost.
func TestMarkedFiles(t *testing.T) {
	t.Chdir(t.TempDir())
	const arguments = "--tensor-model-parallel-size 2 --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --vocab-size 1000 --bf16\n"
	for name, text := range map[string]string{
		"small.json": smallModel, "args.sh": arguments, "cases.json": `{"cases":[{"id":"a"}]}`, "options.yaml": "policy: none\nmodel: tiny-dense\n",
		"counts.jsonl": `{"version":1,"ranks":2,"tokens":10,"top_k":2,"layers":1,"microbatches":1,"experts":8}
{"step":0,"layer":0,"microbatch":0,"rank":0,"rows":13}
{"step":0,"layer":0,"microbatch":0,"rank":1,"rows":7}
`,
	} {
		writeFile(t, name, "\ufeff"+text)
	}
	for line, want := range map[string]string{
		"train --dry-run --policy none --micro 1 --seq 16 --model small.json": "small under none", "train --dry-run --micro 1 --seq 16 --config options.yaml": "tiny-dense under none",
		"plan --config small.json": "hidden ", "plan --megatron args.sh": "TP 2, ", "bench pools --dp 2 --model small.json": "DP 2", "plan validate --cases cases.json": "1 skipped",
		"plan --model mixtral-8x7b --gpus 2 --ep 2 --routing counts:counts.jsonl": "1.3 x the mean", "bench stash --trace counts.jsonl": "1 steps",
	} {
		stdout, stderr, code := command(strings.Fields(line)...)
		if code != exitOK || !strings.Contains(stdout, want) {
			t.Errorf("%s: code %d, errors %q, output %.300q", line, code, stderr, stdout)
		}
	}
}

// A history that is no file is the user's mistake, in words that a user knows.
func TestHistoryThatIsNoFile(t *testing.T) {
	t.Chdir(t.TempDir())
	result, _, _ := command("bench", "pools", "--model", "tiny-moe", "--json")
	writeFile(t, "result.json", result)
	if err := os.Symlink("loop", "loop"); err != nil {
		t.Fatal(err)
	}
	_, stderr, code := command("bench", "record", "result.json", "--to", "loop")
	if code != exitUsage || !strings.Contains(stderr, "cannot write loop: too many levels of symbolic links") {
		t.Errorf("code %d, errors %q", code, stderr)
	}
}
