// This file tests that every command which plans a job prints what was noted about it.

package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/planview"
)

// What plan notes about a file, explain and --compare note, too.
func TestNotesOfExplainAndCompare(t *testing.T) {
	const job = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --vocab-size 128 --micro-batch-size 1 --bf16"
	planFiles(t, map[string]string{"a.sh": job + " --surprise 3\n", "b.sh": job + " --surprise 3 --num-query-groups 2\n", "quiet.sh": job})
	const surprise, groups = "--surprise: is not known, and was left out", "--num-query-groups: is 2, and Megatron-LM leaves it out"
	has := func(notes []string, want string) bool {
		return slices.ContainsFunc(notes, func(n string) bool { return strings.HasPrefix(n, want) })
	}

	const explain = "plan explain core_attn --megatron b.sh --gpu h100"
	stdout, _, _ := command(strings.Fields(explain)...)
	var e planview.Explanation
	text, _, code := command(strings.Fields(explain + " --json")...)
	if err := json.Unmarshal([]byte(text), &e); err != nil || code != exitOK {
		t.Fatalf("code %d, %v", code, err)
	}
	for _, want := range []string{surprise, groups} {
		if !strings.Contains(stdout, "\nnote: "+want) || !has(e.Warnings, want) {
			t.Errorf("%s is not in %s and %q", want, stdout, e.Warnings)
		}
	}

	_, report := planJSON(t, "plan --megatron a.sh --gpu h100")
	planFiles(t, map[string]string{"a.sh": job + " --surprise 3\n", "b.sh": job + " --surprise 3 --num-query-groups 2\n", "quiet.sh": job, "a.json": report})
	for _, a := range []string{"a.sh", "a.json"} {
		stdout, _, _ = command("plan", "--compare", a, "b.sh", "--gpu", "h100")
		if !strings.Contains(stdout, "\nnote on both: "+surprise) || !strings.Contains(stdout, "\nnote on B: "+groups) || strings.Count(stdout, surprise) != 1 {
			t.Errorf("the notes on %s are not in %s", a, stdout)
		}
		var c planview.Comparison
		text, _, code = command("plan", "--compare", a, "b.sh", "--gpu", "h100", "--json")
		if err := json.Unmarshal([]byte(text), &c); err != nil || code != exitOK || !has(c.A.Warnings, surprise) || has(c.A.Warnings, groups) || !has(c.B.Warnings, groups) {
			t.Errorf("%v, %q, %q", err, c.A.Warnings, c.B.Warnings)
		}
	}
}
