// This file tests what `stowage plan` refuses: one sentence each, and what it
// names is true.

package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
)

// planMistakes are wrong in one way each.
var planMistakes = []string{
	"plan --gpu h100",
	"plan --sequ 3",
	"plan --model nope --zzz 2",
	"plan --megatron nowhere.sh --budget 60XB --micro-batch-siz 4",
	"plan explain --foo",
	"plan --model llama-3-8b --config missing.json",
	"plan --model lama-3-8b",
	"plan --modle llama-3-8b",
	"plan --model ./nowhere/config.json",
	"plan --config missing.json",
	"plan --config negative.json",
	"plan --config broken.json",
	"plan --config nowhere.json",
	"plan --megatron typo.sh",
	"plan --launch zero.json",
	"plan --launch stage.json --model llama-3-8b",
	"plan --launch zero.json --megatron typo.sh",
	"plan --launch typo.sh --model llama-3-8b",
	"plan --launch nowhere.json --model llama-3-8b",
	"plan --megatron empty.yaml",
	"plan --megatron nowhere.sh",
	"plan --megatron folder",
	"plan --config folder",
	"plan --config list.json",
	"plan --config nothing.json",
	"plan --model llama-3-8b --gpu h1000",
	"plan --model llama-3-8b --gpu gpu.json",
	"plan --model llama-3-8b --gpu list.json",
	"plan --model llama-3-8b --gpu word.json",
	"plan --model llama-3-8b --gpu nothing.json",
	"plan --model llama-3-8b --vocab -1",
	"plan --model llama-3-8b --vocab 1000",
	"plan --model llama-3-8b --gpus -8",
	"plan --model llama-3-8b --gpus eight",
	"plan --model llama-3-8b --gpus 8 --tp 3",
	"plan --model llama-3-8b --gpus 12 --tp 8",
	"plan --model llama-3-8b --gpus 8 --tp 0",
	"plan --model llama-3-8b --gpus 8 --mbs -1",
	"plan --model llama-3-8b --gpus 8 --seq 0",
	"plan --model llama-3-8b --gpus 8 --gbs 7",
	"plan --model llama-3-8b --gpus 8 --seq 1000000000",
	"plan --model llama-3-8b --gpus 8 --gbs 1000000000",
	"plan --model llama-3-8b --gpus 8 --seq-length 1000000000",
	"plan --model llama-3-8b --gpus 8 --seq 60000000 --mbs 8000 --gbs 64000",
	"plan --model llama-3-8b --gpus 8 --pp 5",
	"plan --model llama-3-8b --gpus 8 --pp 2 --layout Et*3|t*3L",
	"plan --model llama-3-8b --gpus 8 --cp 3",
	"plan --model mixtral-8x7b --gpus 8 --ep 16",
	"plan --model mixtral-8x7b --gpus 6 --ep 3",
	"plan --model llama-3-8b --recompute everything",
	"plan --model llama-3-8b --offload core_atn",
	"plan --model llama-3-8b --offload-modules core_atn",
	"plan --model mixtral-8x7b --offload-modules shared_experts",
	"plan --model mixtral-8x7b --recompute router",
	"plan --model llama-3-8b --fraction 1.5",
	"plan --model llama-3-8b --stash 1.5",
	"plan --model mixtral-8x7b --ep 8 --stash Inf",
	"plan --model mixtral-8x7b --ep 8 --stash 1e308",
	"plan --model mixtral-8x7b --ep 8 --stash 1e12",
	"plan --model mixtral-8x7b --ep 8 --stash 1.5 --moe-paged-stash-buffer-size-factor-cuda 1e300",
	"plan --model llama-3-8b --precision fp7",
	"plan --model llama-3-8b --graph layers",
	"plan --model llama-3-8b --pool max",
	"plan --model llama-3-8b --tensor-model-parallel-siz 2",
	"plan --model llama-3-8b --frobnicate-all 2",
	"plan --model llama-3-8b --ofload moe_act",
	"plan --model llama-3-8b --tp 2 4",
	"plan --model llama-3-8b --budget 60XB",
	"plan --model llama-3-8b --budget -1GiB",
	"plan --model llama-3-8b --budget",
	"plan --model llama-3-8b --gpu h100 --host-memory 0",
	"plan --model llama-3-8b --gpu h100 --host-memory -5GiB",
	"plan --model llama-3-8b --gpu h100 --host-memory much",
	"plan --model llama-3-8b --host-memory 900GiB",
	"plan --model llama-3-8b --gpu h100 --gpus-per-node 0",
	"plan --model llama-3-8b --gpu h100 --gpus-per-node 99999999",
	"plan --model llama-3-8b --gpu h100 --largest",
	"plan --model llama-3-8b --gpu h100 --largest=",
	"plan --model llama-3-8b --gpu h100 --largest model",
	"plan --model llama-3-8b --largest seq",
	"plan --model llama-3-8b --budget 60GiB --largest seq --search policy",
	"plan --model llama-3-8b --gpu h100 --largest seq --fewest-gpus",
	"plan --model llama-3-8b --gpu h100 --largest seq --seq 4096",
	"plan --model llama-3-8b --gpu h100 --largest microbatch --micro-batch-size 2",
	"plan --model llama-3-8b --gpu h100 --largest layers --num-layers 8",
	"plan --model llama-3-8b --gpu h100 --largest layers --pp 2 --layout Et*16|t*16L",
	"plan --model llama-3-8b --gpu h100 --gpus 8 --fewest-gpus",
	"plan --model llama-3-8b --gpu h100 --fewest-gpus 8",
	"plan --model llama-3-8b --gpu h100 --fewest-gpus=perhaps",
	"plan --model llama-3-8b --gpu h100 --mbs 3 --gbs 8 --fewest-gpus",
	"plan --model llama-3-8b --gpu h100 --gpus 12 --tp 8 --largest seq",
	"plan --megatron pattern.sh --gpu h100 --largest layers",
	"plan --compare least.json least.json --largest seq",
	"plan --model llama-3-8b --search everything",
	"plan --model llama-3-8b --search policy",
	"plan --model llama-3-8b --search layout --gpu h100",
	"plan --model llama-3-8b --flags deepspeed",
	"plan --model llama-3-8b --flags megatron --json",
	"plan --model llama-3-8b --rank 1",
	"plan --model llama-3-8b --routing uneven",
	"plan --model llama-3-8b --routing skewed:0.5",
	"plan --model llama-3-8b --routing skewed:NaN",
	"plan --model llama-3-8b --routing trace:trace.jsonl",
	"plan --model llama-3-8b --routing trace:nowhere.jsonl",
	"plan --model llama-3-8b --json=perhaps",
	"plan --model llama-3-8b -x",
	"plan llama-3-8b",
	"plan exlpain core_attn",
	"plan --compare report.json",
	"plan --compare report.json lost.json",
	"plan --compare lost.json report.json",
	"plan --compare nowhere.json lost.json",
	"plan --compare report.json lost.json --html x.html",
	"plan --compare report.json lost.json third.json",
	"plan --compare report.json lost.json --model llama-3-8b",
	"plan --compare broken.json lost.json",
	"plan --compare typed.json lost.json",
	"plan --compare least.json least.json --tp 2",
	"plan explain",
	"plan explain core_atn --model llama-3-8b --gpu h100",
	"plan explain core_attn --model llama-3-8b",
	"plan explain core_attn",
	"plan ring --ep 3",
	"plan ring --layers 0",
	"plan ring --layers -1",
	"plan ring --margin 0.5",
	"plan ring --margin NaN",
	"plan ring --width 99999999999",
	"plan ring --width 999999 --layers 999999 --seq 999999",
	"plan ring --seq many",
	"plan validate",
	"plan validate --cases nowhere.json",
	"plan validate --cases cases.json",
	"plan validate --cases none.json",
	"plan validate --cases list.json",
	"plan validate --cases words.json",
	"plan validate now",
}

// Every command line above is wrong in one way; the answer is one sentence on
// standard error that names what is wrong, nothing on standard output, and code
// 2.
func TestPlanErrors(t *testing.T) {
	folder, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	planFiles(t, map[string]string{
		"missing.json":  `{"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}`,
		"negative.json": `{"model_type": "llama", "hidden_size": -1, "num_hidden_layers": 2, "num_attention_heads": 32, "intermediate_size": 64, "vocab_size": 100}`,
		"broken.json":   `{"model_type": `,
		"zero.json":     `{"train_batch_size": 8, "zero_optimization": {"stage": 3}}`,
		"stage.json":    `{"zero_optimization": {"stage": 7}}`,
		"typo.sh":       "--num-layers 2 --hiden-size 4096 --num-attention-heads 32 --vocab-size 100",
		"empty.yaml":    "MODEL_ARGS:\n",
		"pattern.sh":    "--hybrid-layer-pattern M*M* --hidden-size 512 --num-attention-heads 8 --vocab-size 100 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 1",
		"gpu.json":      `{"name": "mine", "memory_bytes": -5}`,
		"trace.jsonl":   `{"version":1,"ranks":0}`,
		"report.json":   `{"version": 99, "ranks": []}`,
		"lost.json":     `{"version": 1, "heaviest_rank": 3, "ranks": [{"rank": 0}]}`,
		"cases.json":    `{"cases": 5}`,
		"none.json":     `{}`,
		"list.json":     `[]`,
		"word.json":     `{"name": "mine", "memory_bytes": "80GiB"}`,
		"nothing.json":  ``,
		"least.json":    `{"version": 1, "heaviest_rank": 0, "ranks": [{"rank": 0}]}`,
		"typed.json":    `{"version": 1, "heaviest_rank": 0, "ranks": [{"rank": "first"}]}`,
		"words.json":    `{"cases": [{"id": "a", "args": ["--bf16"]}]}`,
	})
	if err := os.Mkdir("folder", 0o755); err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, line := range planMistakes {
		stdout, stderr, code := command(strings.Fields(line)...)
		if code != exitUsage || stdout != "" || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%q: code %d, output %q, errors %q", line, code, stdout, stderr)
		}
		if regexp.MustCompile(`Go (value|struct)|json: cannot|goroutine`).MatchString(stderr) {
			t.Errorf("%q speaks of the program, not of the file: %q", line, stderr)
		}
		all.WriteString("$ stowage " + line + "\n" + stderr)
	}
	t.Chdir(folder)
	golden.Check(t, "plan-errors.txt", all.String())
}

// A budget that nothing meets is an answer: code 1, and the smallest that would.
// SPEC S6.1
func TestPlanBudgetTooSmall(t *testing.T) {
	var all strings.Builder
	for _, line := range []string{
		"plan --model llama-3-8b --gpu h100 --gpus 8 --tp 2 --gbs 16 --seq 4096 --budget 10GiB",
		"plan --model llama-3-8b --gpu h100 --gpus 8 --gbs 16 --seq 4096 --budget 2GiB --search layout",
		"plan --model mixtral-8x7b --gpu h100 --gpus 32 --pp 4 --ep 8 --gbs 64 --seq 4096 --search policy --budget 5GiB",
		"plan --model deepseek-v3 --gpu gb200 --gpus 256 --pp 8 --ep 32 --layout Et*7|(t*8|)*6t*6mL --gbs 2048 --seq 4096 --budget 8GiB",
	} {
		stdout, stderr, code := command(strings.Fields(line)...)
		if code != exitFailure || stdout != "" || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%q: code %d, output %q, errors %q", line, code, stdout, stderr)
		}
		all.WriteString("$ stowage " + line + "\n" + stderr)
		// What it names does.
		m := regexp.MustCompile(`give (--budget \d+GiB)`).FindStringSubmatch(stderr)
		if m == nil {
			t.Errorf("%s: no budget is named: %s", line, stderr)
			continue
		}
		line = regexp.MustCompile(`--budget \S+`).ReplaceAllString(line, m[1])
		if _, stderr, code := command(strings.Fields(line)...); code != exitOK {
			t.Errorf("%s: code %d, errors %q", line, code, stderr)
		}
	}
	golden.Check(t, "plan-too-small.txt", all.String())
}

// No budget is accepted or advised that the hardware does not have. SPEC S6.1
func TestPlanBudgetBeyondTheHardware(t *testing.T) {
	const job = "plan --model llama-3-8b --gpu h100 "
	for line, want := range map[string]string{
		"--budget 1GiB":                          "no policy fits h100, which leaves 74.65 GiB of 79.65 GiB",
		"--search policy":                        "no policy fits h100, which leaves 74.65 GiB of 79.65 GiB",
		"--gpus 1 --budget 9GiB --search layout": "use more --gpus, or a GPU with more memory",
	} {
		_, stderr, code := command(strings.Fields(job + line)...)
		if code != exitFailure || !strings.Contains(stderr, want) || strings.Contains(stderr, "give --budget") || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%s: code %d, errors %q", line, code, stderr)
		}
	}
	for _, line := range []string{"--budget 154GiB", "--budget 200TiB --search none", "--gpus 8 --budget 80GiB --search layout"} {
		_, stderr, code := command(strings.Fields(job + line)...)
		if code != exitUsage || !strings.Contains(stderr, "is more than h100 has; give at most 79.65 GiB") {
			t.Errorf("%s: code %d, errors %q", line, code, stderr)
		}
	}
	if _, stderr, code := command(strings.Fields(job + "--gpus 8 --tp 2 --budget 79GiB")...); code != exitOK {
		t.Errorf("79 GiB: code %d, errors %q", code, stderr)
	}
	stdout, _, _ := command(strings.Fields("plan explain core_attn --model llama-3-8b --gpu h100 --budget 1GiB")...)
	if !strings.Contains(strings.Join(strings.Fields(stdout), " "), "h100 leaves 74.65 GiB") {
		t.Errorf("explain says %q", stdout)
	}
}

// Where layers of experts are captured whole, Megatron-LM refuses to offload
// beside them: the search does not ask for it, and its flags are read again.
func TestPlanOffloadsNothingBesideWholeExperts(t *testing.T) {
	line := "plan --model mixtral-8x7b --gpu h100 --gpus 32 --pp 4 --ep 8 --gbs 64 --seq 4096 --graph attn moe --budget 52GiB --flags megatron"
	flags, stderr, code := command(strings.Fields(line)...)
	if code != exitOK || strings.Contains(flags, "offload-modules") || !strings.Contains(flags, "recompute") {
		t.Fatalf("code %d, errors %q, flags\n%s", code, stderr, flags)
	}
	planFiles(t, map[string]string{"flags.sh": flags})
	if _, stderr, code := command(strings.Fields("plan --megatron flags.sh --gpus 32 --gpu h100")...); code != exitOK {
		t.Errorf("code %d, errors %q", code, stderr)
	}
}
