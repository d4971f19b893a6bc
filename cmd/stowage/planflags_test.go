package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

func ownFlags() *pflag.FlagSet {
	f := pflag.NewFlagSet("plan", pflag.ContinueOnError)
	f.String("model", "", "")
	f.String("gpu", "", "")
	f.Bool("json", false, "")
	f.StringArray("compare", nil, "")
	return f
}

// said writes settings in one line, to compare.
func said(w planWords) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(w.settings)) {
		out = append(out, fmt.Sprintf("%s=%s", name, strings.Join(w.settings[name], "+")))
	}
	return strings.Join(append(out, w.rest...), " ")
}

func TestSplitPlan(t *testing.T) {
	for line, want := range map[string]string{
		"--model x --tp 2 --json":                         "--model=x --json | tp=2",
		"--model=x --tp=2 --tensor-model-parallel-size 4": "--model=x | tensor-model-parallel-size=4 tp=2",
		"--offload core_attn moe_act --json":              "--json | offload=core_attn+moe_act",
		"--offload-modules core_attn,moe_act":             " | offload-modules=core_attn+moe_act",
		"--offload-modules=core_attn,moe_act":             " | offload-modules=core_attn+moe_act",
		"--hardware h100":                                 "--gpu=h100 | ",
		"--recompute_modules moe_act":                     " | recompute-modules=moe_act",
		"--sp --pp 2":                                     " | pp=2 sp=",
		"--compare a b --json":                            "--compare=a --compare=b --json | ",
		"--layout Et*3|(tt|)*29,m|L":                      " | layout=Et*3|(tt|)*29,m|L",
		"--moe-paged-stash-buffer-size-factor-cuda -1.1":  " | moe-paged-stash-buffer-size-factor-cuda=-1.1",
		"core_attn --tp 2":                                " | tp=2 core_attn",
		"-h":                                              "-h | ",
		"--micro-batch-size 1 --num-layers-per-virtual-pipeline-stage 2": " | micro-batch-size=1 num-layers-per-virtual-pipeline-stage=2",
	} {
		own, w, err := splitPlan(ownFlags(), strings.Fields(line))
		if got := strings.Join(own, " ") + " | " + said(w); err != nil || got != want {
			t.Errorf("%s: %q, %v, want %q", line, got, err, want)
		}
	}
	for line, want := range map[string]string{
		"--model":     "flag --model needs a value",
		"--compare a": "flag --compare needs two files",
	} {
		if _, _, err := splitPlan(ownFlags(), strings.Fields(line)); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %q", line, err, want)
		}
	}
}

// No command line makes the parser panic, and each word ends up somewhere but the one that ends the flags.
func FuzzSplitPlan(f *testing.F) {
	f.Add("--model x --tp 2 --offload a b c -h core_attn --compare a b --x=,")
	f.Add("--")
	f.Fuzz(func(t *testing.T, line string) {
		words := strings.Fields(line)
		own, w, err := splitPlan(ownFlags(), words)
		if err != nil {
			return
		}
		n := len(own) + len(w.rest)
		for _, v := range w.settings {
			n += 1 + len(v)
		}
		if len(words) > 0 && n == 0 && words[0] != "--" {
			t.Errorf("%q was dropped", line)
		}
	})
}
