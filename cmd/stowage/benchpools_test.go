package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/bench"
	"github.com/stowage-dev/stowage/internal/golden"
)

// SPEC S2.7: the report shows all pools and the lower bound side by side.
func TestBenchPools(t *testing.T) {
	stdout, stderr, code := command(strings.Fields("bench pools --ep 8")...)
	if code != exitOK || stderr != "" {
		t.Fatalf("code %d, errors %q", code, stderr)
	}
	golden.Check(t, "bench-pools.txt", stdout)

	chart := filepath.Join(t.TempDir(), "pools.svg")
	stdout, stderr, code = command(strings.Fields("bench pools --json --prefetch 2 --model Nemotron-H-56B --fallback dynamic --grad-comm-dtype fp32 --svg " + chart)...)
	if code != exitOK || stderr != "the chart is in "+chart+"\n" {
		t.Fatalf("code %d, errors %q", code, stderr)
	}
	var r bench.Pools
	if err := json.Unmarshal([]byte(stdout), &r); err != nil {
		t.Fatal(err)
	}
	m := r.Models[0]
	if r.Prefetch != 2 || r.ETP != 1 || r.GradType != "fp32" || r.Fallback != "dynamic" || len(r.Models) != 1 || m.Model != "nemotron-h-56b" {
		t.Errorf("implausible: %+v", r)
	}
	if m.Units != 118 || m.Loose != 3 || m.Weights.Live != 3 || len(m.Weights.Pools) != 6 || m.Gradients.Slots[0].Type != "fp32" {
		t.Errorf("implausible: %+v", m)
	}
	for _, p := range m.Weights.Pools {
		if p.Bytes < m.Weights.Lower || p.Waste < 0 {
			t.Errorf("%s takes %v of at least %v", p.Pool, p.Bytes, m.Weights.Lower)
		}
		if fixed := p.Pool == "arena" || p.Pool == "recorded"; fixed != (p.Dynamic == 0) {
			t.Errorf("%s: %v of it are dynamic", p.Pool, p.Dynamic)
		}
	}
	if text, err := os.ReadFile(chart); err != nil || !strings.HasPrefix(string(text), "<svg ") {
		t.Errorf("no chart: %v", err)
	}
}

func TestBenchPoolsHelp(t *testing.T) {
	stdout, stderr, code := command("bench", "pools", "--help")
	if code != exitOK || stderr != "" || !strings.Contains(stdout, "Examples:") {
		t.Errorf("code %d, errors %q", code, stderr)
	}
	golden.Check(t, "help-bench-pools.txt", stdout)
}

// A model of one's own, as Hugging Face writes it.
func TestBenchPoolsOfAFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.json")
	config := `{"model_type":"llama","hidden_size":64,"intermediate_size":128,"num_hidden_layers":3,"num_attention_heads":4,
		"num_key_value_heads":2,"vocab_size":100,"max_position_embeddings":128,"tie_word_embeddings":true,"rms_norm_eps":1e-5}`
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	stdout, stderr, code := command("bench", "pools", "--model", file)
	if code != exitOK || stderr != "" || !strings.Contains(stdout, "the max-pool of weights: 2 sets") || strings.Contains(stdout, "NaN") {
		t.Errorf("code %d, errors %q, printed\n%s", code, stderr, stdout)
	}
}

func TestBenchPoolsErrors(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.json")
	if err := os.WriteFile(bad, []byte(`{"model_type":"llama"`), 0o644); err != nil {
		t.Fatal(err)
	}
	list := filepath.Join(t.TempDir(), "list.json")
	if err := os.WriteFile(list, []byte(`[]`), 0o644); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]struct {
		code int
		text string
	}{
		"--prefetch 0":                           {exitUsage, "--fsdp-double-buffer"}, // SPEC S2.5
		"--prefetch -1":                          {exitUsage, "--prefetch must be between 1 and 1000, not -1"},
		"--tp 0":                                 {exitUsage, "--tp must be between 1 and 1048576, not 0"},
		"--etp -3":                               {exitUsage, "--etp must be between"},
		"--dp 0":                                 {exitUsage, "--dp must be between"},
		"--recompute -1":                         {exitUsage, "--recompute expects a number from 0, got -1"},
		"--grad-comm-dtype fp8":                  {exitUsage, `--grad-comm-dtype must be bf16 or fp32, not "fp8"`},
		"--fallback none":                        {exitUsage, "--fallback must be persistent or dynamic"},
		"--model lama-3-70b":                     {exitUsage, "did you mean llama-3-70b?"},
		"--model=":                               {exitUsage, "--model is empty"},
		"--recompute 999":                        {exitUsage, "--recompute 999 is more than the 118 layers of the largest model; give fewer"},
		"now":                                    {exitUsage, `unexpected argument "now"`},
		"--ep 3":                                 {exitUsage, "--ep 3 does not divide 8 experts; choose one that does"},
		"--model " + bad:                         {exitUsage, "bad.json: the config is not a JSON object: it ends too early"},
		"--model " + list:                        {exitUsage, "list.json: the config is not a JSON object: expected an object, got array; give"},
		"--model " + bad + ".json":               {exitUsage, "bad.json.json: the file cannot be read: no such file"},
		"--model llama-3-8b --svg " + bad + "/x": {exitUsage, "--svg: cannot write "},
	} {
		stdout, stderr, code := command(strings.Fields("bench pools " + line)...)
		if code != want.code || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, want.text) {
			t.Errorf("%q: code %d, output %q, errors %q", line, code, stdout, stderr)
		}
	}
}

// A model is a preset, a file, or the folder of one, and a preset comes before a folder of its name.
func TestPoolModels(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, dir := range []string{"mine", "llama-3-8b"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(smallModel), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, hidden := range map[string]int{"mine": 32, "mine/": 32, "./mine": 32, "mine/config.json": 32, "llama-3-8b": 4096, "./llama-3-8b": 32} {
		m, err := loadModel(name)
		if err != nil || m.Hidden != hidden {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
	}
	if _, err := loadModel("yours"); err == nil || !strings.Contains(err.Error(), "no preset is named") {
		t.Errorf("a model that is not there: %v", err)
	}
}
