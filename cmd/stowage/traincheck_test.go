// This file tests flags of `stowage train` that change nothing.

package main

import (
	"strings"
	"testing"
)

// A flag that changes nothing with this model and policy is answered with a warning.
func TestTrainIdleFlags(t *testing.T) {
	for line, want := range map[string]string{
		"--model tiny-dense --capacity-factor 2":                    "the capacity factor changes nothing, because tiny-dense has no experts",
		"--model tiny-dense --aux-loss 0.1":                         "the auxiliary loss changes nothing, because tiny-dense has no experts",
		"--model tiny-dense --dispatch ring":                        "the dispatch changes nothing, because tiny-dense has no experts",
		"--model tiny-dense --bias-rate 0.1":                        "the rate of the bias changes nothing, because no bias balances the experts of tiny-dense",
		"--model tiny-dense --offload-fraction 0.5":                 "the share to offload changes nothing, because no module is chosen for offloading",
		"--model tiny-dense":                                        "",
		"--policy stash --graph none":                               "",
		"--policy graphs --graph none":                              "the policy graphs captures nothing, because no scope is chosen",
		"--policy graphs --graph=":                                  "the policy graphs captures nothing, because no scope is chosen",
		"--policy offload+recompute --offload-modules=":             "the policy offload+recompute offloads nothing, because no module is chosen",
		"--policy offload --offload-modules=":                       "the policy offload offloads nothing, because no module is chosen",
		"--policy stash --model tiny-dense --graph attn moe_router": "the scope moe_router captures nothing, because tiny-dense has no experts",
		"--policy stash --ep 1 --graph attn mlp":                    "the scope mlp captures nothing, because tiny-moe has no dense layers",
		"--ep 1 --dispatch ring":                                    "the dispatch changes nothing, because one rank has all experts",
	} {
		_, stderr, code := command(strings.Fields("train --dry-run --policy none --micro 1 --seq 16 " + line)...)
		if want != "" {
			want = "warning: " + want + "\n"
		}
		if code != exitOK || stderr != want {
			t.Errorf("%s: code %d, errors %q, want %q", line, code, stderr, want)
		}
	}
}

// An empty option clears what a file says; without one it is refused.
func TestTrainClearsOptions(t *testing.T) {
	words := inFolder(t) + "--dry-run "
	writeFile(t, "c.yaml", "policy: offload\noffload_modules: [core_attn]\npool: arena\n")
	for line, want := range map[string]int{
		"--config c.yaml --offload-modules= --pool=": exitOK, "--policy offload --offload-modules=": exitOK,
		"--offload-modules=": exitUsage, "--pool=": exitUsage, "--config= --pool=": exitUsage, "--config c.yaml --out=": exitUsage, "--policy offload --pool=": exitUsage,
	} {
		if _, stderr, code := command(strings.Fields(words + line)...); code != want {
			t.Errorf("%s: code %d, errors %q", line, code, stderr)
		}
	}
}

// Products that do not exist are refused before any work, and once.
func TestTrainUnknownProducts(t *testing.T) {
	t.Setenv("STOWAGE_GEMM", "neon")
	stdout, stderr, code := command(strings.Fields(inFolder(t) + "--steps 1")...)
	const want = `stowage: STOWAGE_GEMM is "neon"; choose plain, avx2, avx512, avx512_bf16, amx_bf16, or leave it out for the best; see ` + "`stowage train --help`"
	if code != exitUsage || stdout != "" || strings.TrimSpace(stderr) != want {
		t.Errorf("code %d, output %q, errors %q", code, stdout, stderr)
	}
}
