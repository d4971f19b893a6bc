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
		"plan --megatron open.sh --env =4":             "--env =4: expected a variable",
		"plan --model llama-3-8b --gpu h100 --env A=1": "--env changes nothing without a file of arguments",
	} {
		if _, stderr, code := command(strings.Fields(given)...); code != exitUsage || !strings.Contains(stderr, want) {
			t.Errorf("%s: code %d, %q, want %q", given, code, stderr, want)
		}
	}
}

// --megatron - reads a script or YAML from standard input, and --launch - says so.
func TestPlanStandardInput(t *testing.T) {
	if _, stderr, code := command("plan", "--launch", "-"); code != exitUsage || !strings.Contains(stderr, "--launch does not read standard input; give the path") {
		t.Errorf("--launch -: code %d, %q", code, stderr)
	}
	yaml := "MODEL_ARGS:\n  --num-layers: 2\n  --hidden-size: 64\n  --num-attention-heads: 4\n  --seq-length: 8\n  --max-position-embeddings: 8\n  --micro-batch-size: 1\n"
	for name, c := range map[string]struct {
		text, want string
		code       int
	}{
		"script": {launchFile, "stdin: 2 layers, hidden 64", exitOK},
		"YAML":   {yaml, "stdin: 2 layers, hidden 64", exitOK},
		"flags":  {yaml, "the flags in standard input stay as they are", exitOK},
		"empty":  {"", "--megatron -: there is no model in this file", exitUsage},
		"large":  {strings.Repeat("x", 5<<20), "standard input is larger than 4.0 MiB", exitUsage},
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
		stdout, stderr, code := command("plan", "--megatron", "-", "--gpu", "h100")
		os.Stdin = before
		file.Close()
		if code != c.code || !strings.Contains(stdout+stderr, c.want) {
			t.Errorf("%s: code %d, %q, want %q", name, code, stderr, c.want)
		}
	}
}
