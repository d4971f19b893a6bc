package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/planscan"
)

const launchFile = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --bf16\n"

func TestPlanScan(t *testing.T) {
	planFiles(t, map[string]string{"job.sh": launchFile, "rl.sh": strings.TrimSpace(launchFile) + " --perform-rl-step\n"})
	stdout, stderr, code := command("plan", "scan", ".")
	if code != exitOK || stderr != "" {
		t.Fatalf("code %d, errors %q", code, stderr)
	}
	for _, want := range []string{"rl.sh: the job is reinforcement learning", "    2  files\n", "    1  planned as they are\n", "    1  refused: reinforcement learning\n"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("%q is missing in %s", want, stdout)
		}
	}
	stdout, _, code = command("plan", "scan", ".", "--name", "job.sh", "--json")
	var r planscan.Report
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitOK || r.Files != 1 || r.Planned != 1 {
		t.Errorf("code %d, %v, %s", code, err, stdout)
	}
	for line, want := range map[string]string{
		"plan scan":                     "give a folder with launch files",
		"plan scan nowhere":             "nowhere cannot be read: no such file or directory",
		"plan scan . --gpu h1000":       "--gpu h1000",
		"plan scan . --name [":          "is not a pattern of names",
		"plan scan . --name *.launcher": "no launch files are below .",
		"plan scan . --golden":          "no measured peaks (golden_values_*.json) lie beside the planned files",
	} {
		if _, stderr, code := command(strings.Fields(line)...); code != exitUsage || !strings.Contains(stderr, want) {
			t.Errorf("%s: code %d, %q, want %q", line, code, stderr, want)
		}
	}
}

// A job that is not modelled gets no verdict: the exit code is 1, and the sentence names
// what it is.
func TestPlanCannotSay(t *testing.T) {
	planFiles(t, map[string]string{"rl.sh": strings.TrimSpace(launchFile) + " --perform-rl-step\n", "tool.sh": "python preprocess.py --workers 3\n"})
	stdout, stderr, code := command("plan", "--megatron", "rl.sh", "--gpu", "h100")
	if want := "--megatron rl.sh: cannot say: the job is reinforcement learning"; code != exitFailure || stdout != "" || !strings.Contains(stderr, want) {
		t.Errorf("code %d, %q, want %q", code, stderr, want)
	}
	if _, stderr, code := command("plan", "--megatron", "rl.sh", "--gpu", "h100", "--perform-rl-step", "false"); code != exitOK {
		t.Errorf("code %d, %q", code, stderr)
	}
	_, stderr, code = command("plan", "--megatron", "tool.sh", "--gpu", "h100")
	if want := "--megatron tool.sh: there is no model in this file"; code != exitUsage || !strings.Contains(stderr, want) {
		t.Errorf("code %d, %q, want %q", code, stderr, want)
	}
}

// What a script takes from its environment is asked for by name and can be given.
func TestPlanEnvironment(t *testing.T) {
	planFiles(t, map[string]string{"open.sh": strings.Replace(launchFile, "--num-layers 2", "--num-layers $LAYERS --global-batch-size $((SIZE * 2))", 1)})
	line := []string{"plan", "--megatron", "open.sh", "--gpu", "h100"}
	_, stderr, code := command(line...)
	if want := "give --env SIZE=VALUE and --env LAYERS=VALUE"; code != exitUsage || !strings.Contains(stderr, want) {
		t.Errorf("code %d, %q, want %q", code, stderr, want)
	}
	stdout, stderr, code := command(append(line, "--env", "LAYERS=4", "--env", "SIZE=4")...)
	if code != exitOK || !strings.Contains(stdout, "4 layers") || !strings.Contains(stdout, "8 sequences") {
		t.Errorf("code %d, %q, %s", code, stderr, stdout)
	}
	for given, want := range map[string]string{
		"plan --megatron open.sh --env LAYERS":         "--env LAYERS: expected a variable of the file with its value",
		"plan --megatron open.sh --env 4A=4":           "--env 4A=4: expected a variable",
		"plan --megatron open.sh --env A=4 --env A=5":  "--env A=5: A is given twice; leave one of them out",
		"plan --megatron open.sh --env =4":             "--env =4: expected a variable",
		"plan --model llama-3-8b --gpu h100 --env A=1": "--env changes nothing without a file of arguments",
	} {
		if _, stderr, code := command(strings.Fields(given)...); code != exitUsage || !strings.Contains(stderr, want) {
			t.Errorf("%s: code %d, %q, want %q", given, code, stderr, want)
		}
	}
}

// A variable that nothing uses gets a note, whatever the file is.
func TestPlanUnusedVariable(t *testing.T) {
	planFiles(t, map[string]string{"job.sh": launchFile, "ds.json": `{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}}`})
	for line, want := range map[string]string{
		"--megatron job.sh --env TYPO=4":                              "note: the variable TYPO changes nothing: the file does not use it",
		"--launch ds.json --model mixtral-8x7b --gpus 32 --env SEQ=4": "note: the variable SEQ changes nothing: the file does not read it",
	} {
		stdout, stderr, code := command(append([]string{"plan", "--gpu", "h100"}, strings.Fields(line)...)...)
		if code != exitOK || !strings.Contains(stdout, want) {
			t.Errorf("%s: code %d, %q, want %q in %s", line, code, stderr, want, stdout)
		}
	}
}

// --megatron - and --launch - read standard input.
func TestPlanStandardInput(t *testing.T) {
	yaml := "MODEL_ARGS:\n  --num-layers: 2\n  --hidden-size: 64\n  --num-attention-heads: 4\n  --seq-length: 8\n  --max-position-embeddings: 8\n  --micro-batch-size: 1\n"
	for name, c := range map[string]struct {
		flags, text, want string
		code              int
	}{
		"script":       {"--megatron -", launchFile, "stdin: 2 layers, hidden 64", exitOK},
		"YAML":         {"--megatron -", yaml, "stdin: 2 layers, hidden 64", exitOK},
		"flags":        {"--megatron -", yaml, "the flags in standard input stay as they are", exitOK},
		"empty":        {"--megatron -", "", "--megatron -: there is no model in this file", exitUsage},
		"large":        {"--megatron -", strings.Repeat("x", 5<<20), "--megatron -: standard input is larger than 4.0 MiB", exitUsage},
		"launch":       {"--launch -", launchFile, "stdin: 2 layers, hidden 64", exitOK},
		"launch, YAML": {"--launch -", yaml, "stdin: 2 layers, hidden 64", exitOK},
		"launch, TOML": {"--launch -", "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n", "32 layers, hidden 4096", exitOK},
		"launch, JSON": {"--launch - --model mixtral-8x7b --gpus 32", `{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}`, "2 a microbatch", exitOK},
		"launch large": {"--launch -", strings.Repeat("x", 5<<20), "--launch -: standard input is larger than 4.0 MiB", exitUsage},
		"no job":       {"--launch -", "echo", "--launch -: there is no model in this file", exitUsage},
		"broken JSON":  {"--launch -", `{"a": `, "--launch -: the file is not valid JSON", exitUsage},
		"broken YAML":  {"--megatron -", "MODEL_ARGS: [", "--megatron -: the YAML cannot be read", exitUsage},
		"doctor large": {"--doctor - --model llama-3-8b", strings.Repeat("x", 5<<20), "--doctor -: standard input is larger than 4.0 MiB", exitUsage},
		"asked, large": {"--launch - --largest seq", strings.Repeat("x", 5<<20), "--launch -: standard input is larger than 4.0 MiB", exitUsage},
		"asked":        {"--launch - --largest microbatch", launchFile, "largest microbatch with which the job fits", exitOK},
		"asked, GPUs":  {"--megatron - --fewest-gpus", launchFile, "fewest GPUs with which the job fits", exitOK},
		"both":         {"--launch - --megatron -", launchFile, "--megatron and --launch both name a launch file", exitUsage},
	} {
		file, err := os.Create(filepath.Join(t.TempDir(), "in"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := file.WriteString(c.text); err != nil {
			t.Fatal(err)
		}
		if _, err := file.Seek(0, 0); err != nil {
			t.Fatal(err)
		}
		before := os.Stdin
		os.Stdin = file
		stdout, stderr, code := command(append([]string{"plan", "--gpu", "h100"}, strings.Fields(c.flags)...)...)
		os.Stdin = before
		file.Close()
		if code != c.code || !strings.Contains(stdout+stderr, c.want) {
			t.Errorf("%s: code %d, %q, want %q", name, code, stderr, c.want)
		}
	}
}
