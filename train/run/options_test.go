// This file tests options beside the reports that read them.

package run

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// trainingOptions are the options that change what a run computes. Runs that differ in
// another one are compared with each other.
var trainingOptions = []string{
	"model", "data", "steps", "seed", "hold_out", "pp", "vpp", "ep", "dp", "micro", "seq", "microbatches", "dispatch", "capacity_factor", "device",
	"grad_comm_dtype", "bf16", "lr", "min_lr", "warm_up", "decay", "beta1", "beta2", "weight_decay", "clip", "aux_loss", "bias_rate",
}

// A report compares runs that differ only in options that do not change their results.
func TestOptionsInReports(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, key := range optionKeys() {
		for dir, value := range map[string]string{"a": "1", "b": "2"} {
			for file, text := range map[string]string{report.ConfigFile: key + ": " + value + "\n", report.SummaryFile: `{"model":"one","policy":"` + dir + `","steps":2}`, report.EnvironmentFile: "{}"} {
				if err := os.MkdirAll(dir, 0o777); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o666); err != nil {
					t.Fatal(err)
				}
			}
		}
		r, err := report.Read("a", "b")
		if err != nil {
			t.Fatal(err)
		}
		if got, want := r.Runs[1].Apart, slices.Contains(trainingOptions, key); got != want {
			t.Errorf("runs that differ in %s are apart: %v, want %v", key, got, want)
		}
	}
}

// A module that cannot be named is refused, and not proposed for another.
func TestModulesThatCannotBeNamed(t *testing.T) {
	for _, name := range []string{"qk_norm", "qk_norms"} {
		o := DefaultOptions()
		o.Steps, o.Policy, o.Offload = 1, "stash", []string{name}
		var module *memory.ModuleError
		if _, err := NewJob(o, Machine{}, nil); !errors.As(err, &module) || strings.Contains(module.Remedy, "qk_norm") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A run remarks on the modules that its model does not have, once for all ranks.
func TestModulesWithoutEffect(t *testing.T) {
	ranks := []report.RankSummary{{Policy: []report.PolicyRow{{Group: "core_attn"}}}, {Policy: []report.PolicyRow{{Group: "fused_group_mlp"}, {Group: "router"}}}}
	for _, x := range []struct {
		options Options
		want    []string
	}{
		{Options{Fraction: 1, Offload: []string{"core_attn", "moe_act"}, Recompute: []string{"layernorm", "moe_act"}, Stash: []string{"expert_fc1"}}, nil},
		{Options{Fraction: 1, Offload: []string{"gdp_qkv", "core_attn"}, Recompute: []string{"mhc"}}, []string{"gdp_qkv has no effect", "mhc has no effect"}},
		{Options{Offload: []string{"core_attn"}}, []string{"Fraction 0 offloads nothing"}},
		// Rows are offloaded whatever the fraction.
		{Options{Offload: []string{"moe_act"}}, []string{"Fraction 0 does not apply to moe_act"}},
		{Options{Fraction: 0.5, Offload: []string{"core_attn", "fused_group_mlp"}}, []string{"Fraction 0.5 does not apply to fused_group_mlp"}},
		{Options{Fraction: 0.5}, []string{"Fraction 0.5 does not apply to fused_group_mlp"}}, // which the policy names
		{Options{Fraction: 0.5, Offload: []string{"core_attn"}}, nil},
		{Options{Fraction: 1}, nil},
	} {
		j := &Job{Options: x.options}
		j.config.Memory.Offload, j.config.Memory.Rows = []string{"fused_group_mlp"}, layer.Stashed
		notes := j.withoutEffect(groupNames(ranks))
		if len(notes) != len(x.want) {
			t.Errorf("%+v: %v", x.options, notes)
			continue
		}
		for i, want := range x.want {
			if !strings.Contains(notes[i].Error(), want) {
				t.Errorf("%q does not say %q", notes[i], want)
			}
		}
	}
}

// A file of YAML that is wrong gets a sentence that says what is wrong.
func TestWrongYAML(t *testing.T) {
	for text, want := range map[string]string{
		"\ufeffsteps: 3\n":              "",
		"---\nsteps: 3\n":               "",
		"steps: 3\nseed: 1\nsteps: 4\n": "f.yaml, line 3: steps is given twice",
		"model:\n\thidden_size: 3\n":    "a line begins with a tab",
		"steps: 3\n---\nseed: 1\n":      "f.yaml: line 3: expected one document",
		"steps: [3\n":                   "look for a bracket",
		"seed: 18446744073709551616\n":  "expected a whole number for seed, got 18446744073709551616",
	} {
		o := DefaultOptions()
		err := o.parse("f.yaml", []byte(text))
		if want == "" && (err != nil || o.Steps != 3) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %d steps, %v; want %q", text, o.Steps, err, want)
		}
	}
}

// Numbers of a file of options are decimal digits, as on a command line: others would be read as another number than was meant.
func TestNumbersOfOptions(t *testing.T) {
	const want = "c.yaml, line 2: expected a number in decimal digits for "
	for line, refused := range map[string]string{
		"steps: 0x10": "steps, such as 8, got 0x10", "steps: 1_000": "steps, such as 8, got 1_000", "seed:  010 # eight or ten": "seed, such as 8, got 010",
		"steps: '0b11'": "steps, such as 8, got 0b11", "lr: 0x1p-3": "lr, such as 8, got 0x1p-3", "aux_loss: 1_0": "aux_loss, such as 8, got 1_0",
		"{lr: 0.1, steps: 0x10}": "steps, such as 8, got 0x10", "  steps: 010": "steps, such as 8, got 010",
		"steps: 10": "", "steps: 0": "", "lr: 0.003": "", "lr: 1e-3": "", "hold_out: 0.0": "", "data: 0x10": "", "data: 2024_01": "", "# steps: 0x10": "",
	} {
		o := DefaultOptions()
		err := o.parse("c.yaml", []byte("# options\n"+line+"\n"))
		if refused == "" && err != nil || refused != "" && (err == nil || err.Error() != want+refused) {
			t.Errorf("%s: %v, want %s", line, err, refused)
		}
	}
}
