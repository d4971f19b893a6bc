package main

import (
	"encoding/json"
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
