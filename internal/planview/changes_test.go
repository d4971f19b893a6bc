// This file owns the tests of flags that change.

package planview

import (
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/plan/megatron"
)

// A job may divide its layers, recompute and capture graphs by any of the flags that say so,
// old names included. If that changes, none of the flags before is left that says otherwise:
// the new flags ask for the new setup.
func TestChangedFlagsReplaceAll(t *testing.T) {
	base := map[string]any{
		"num-layers": 8, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 128, "max-position-embeddings": 128, "micro-batch-size": 1, "global-batch-size": 8,
		"pipeline-model-parallel-size": 2, "bf16": true,
	}
	for i, given := range []map[string]any{
		{"num-virtual-stages-per-pipeline-rank": 2}, {"num-layers-per-virtual-pipeline-stage": 2}, {"virtual-pipeline-model-parallel-size": 2},
		{"pipeline-model-parallel-layout": "Ett|tttt|tt|L"}, {"decoder-first-pipeline-num-layers": 3}, {"decoder-last-pipeline-num-layers": 3},
		{"num-layers": 6, "account-for-embedding-in-pipeline-split": true, "account-for-loss-in-pipeline-split": true},
		{"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}, {"recompute-granularity": "selective", "recompute-modules": "mlp"}, {"recompute-activations": true},
		{"cuda-graph-impl": "transformer_engine", "cuda-graph-modules": "attn"}, {"cuda-graph-impl": "transformer_engine", "cuda-graph-scope": "attn"}, {"enable-cuda-graph": true}, {"external-cuda-graph": true},
	} {
		args := map[string]any{}
		for _, m := range []map[string]any{base, given} {
			for name, v := range m {
				args[name] = v
			}
		}
		o := megatron.Options{GPUs: 2, Vocab: 1000}
		old, _, err := megatron.FromArgs(args, o)
		if err != nil {
			t.Fatalf("%v: %v", given, err)
		}
		next := map[string]any{}
		for name, v := range base {
			next[name] = v
		}
		next["num-layers"] = args["num-layers"]
		if i < 7 { // another division, with the same number of layers
			next["pipeline-model-parallel-size"] = 1
		}
		to, _, err := megatron.FromArgs(next, o)
		if err != nil {
			t.Fatal(err)
		}
		if to, err = to.Normalise(); err != nil {
			t.Fatal(err)
		}
		g := &Given{File: "job.sh", Args: args, Setup: old}
		words, changes, ok := g.changed(to)
		if !ok || len(changes) == 0 {
			t.Errorf("%v: the flags cannot be changed: %q", given, changes)
		}
		for name := range given {
			if name != "num-layers" && slices.ContainsFunc(words, func(w string) bool { return w == "--"+name || strings.HasPrefix(w, "--"+name+"=") }) {
				t.Errorf("%v: --%s is left in %q", given, name, words)
			}
		}
	}
}
