package planvalidate

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// What one case lacks comes from the first of the same source and model that
// states it, layout and batch separately; not from another source or model.
func TestCompleted(t *testing.T) {
	const text = `{"external_cases": [
	{"id": "bare", "source": {"paper": "p"}, "model": {"name": "Llama-3-70B"}},
	{"id": "elsewhere", "source": {"paper": "q"}, "model": {"name": "Llama-3-70B"}, "n_gpus": 8, "parallelism": {"TP": 8}, "batch": {"MBS": 9, "seq": 9}},
	{"id": "other", "source": {"paper": "p"}, "model": {"name": "Llama-3-8B"}, "n_gpus": 16, "parallelism": {"TP": 4}, "batch": {"MBS": 8, "seq": 8}},
	{"id": "batch", "source": {"paper": "p"}, "model": {"name": "Llama-3-70B"}, "batch": {"MBS": 2, "seq": 4096}},
	{"id": "layout", "source": {"paper": "p"}, "gpu": "H100", "model": {"name": "Llama-3-70B"}, "n_gpus": 64, "parallelism": {"TP": 2, "PP": 4}, "batch": {"MBS": 1, "seq": 8192}},
	{"id": "sourceless", "model": {"name": "Llama-3-70B"}}]}`
	var f file
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		t.Fatal(err)
	}
	c := completed(f.External[0], f.External)
	if c.GPUs != 64 || c.GPU != "H100" || c.Layout.PP != 4 || c.Batch.Micro != 2 || c.Batch.Seq != 4096 {
		t.Errorf("%+v, %+v, %+v", c, c.Layout, c.Batch)
	}
	if c := completed(f.External[4], f.External); c.Batch.Seq != 8192 {
		t.Errorf("a stated batch became %+v", c.Batch)
	}
	if c := completed(f.External[5], f.External); c.Layout != nil || c.Batch != nil {
		t.Errorf("a case without a source got %+v, %+v", c.Layout, c.Batch)
	}
}

// Values of Megatron-LM's tests from before its offloading was rewritten are compared with
// what the older one does, which brings nothing back ahead.
func TestOlderOffloading(t *testing.T) {
	peak := func(day string) memory.Bytes {
		r := one(t, "cases", `{"id": "a", "kind": "dense", "gpu": "H100", "n_gpus": 2, "source": {"values_last_changed": ["c0ffee", "`+day+`"]},
			"args": {"num-layers": 8, "hidden-size": 4096, "num-attention-heads": 32, "seq-length": 4096, "max-position-embeddings": 4096, "micro-batch-size": 1, "global-batch-size": 8,
			"pipeline-model-parallel-size": 2, "num-layers-per-virtual-pipeline-stage": 2, "bf16": true, "vocab-size": 1024, "attention-backend": "unfused", "fine-grained-activation-offloading": true, "offload-modules": "[core_attn]"},
			"measured": {"mem_max_allocated_bytes_second_logged": 1e9, "second_logged_step": 2}}`)
		if len(r.Rows) != 1 {
			t.Fatalf("%+v, %+v", r.Rows, r.Skipped)
		}
		return r.Rows[0].Predicted
	}
	if older, today := peak("2026-01-13"), peak("2026-01-14"); older >= today {
		t.Errorf("the older one takes %d bytes, that of today %d", older, today)
	}
}

// Figures of what recomputation saves, by module.
func TestRecomputeSavings(t *testing.T) {
	r := one(t, "external_cases", `{"id": "a", "model": {"name": "DeepSeek-V3"}, "gpu": "GB200", "n_gpus": 256, "parallelism": {"PP": 8, "EP": 32, "VPP": 4}, "batch": {"MBS": 1, "GBS": 2048, "seq": 4096},
		"measured": {"mla_up_proj_saves_GB": 30, "swiglu_saves_GB": 10, "permutation_saves_GB": 5, "layernorm_saves_GB": "8-10"}}`)
	if len(r.Rows) != 2 {
		t.Fatalf("%+v, %+v", r.Rows, r.Skipped)
	}
	for i, module := range []string{"mla_up_proj", "moe_act"} {
		row := r.Rows[i]
		if row.Quantity != Saving || !strings.HasSuffix(row.What, module) || row.Predicted <= 0 || row.Predicted > 60e9 {
			t.Errorf("%+v, want what %s saves", row, module)
		}
	}
}

// The kind of a case that is not modelled, from what it states.
func TestStatedKind(t *testing.T) {
	for text, want := range map[string]string{
		`{}`:                                   unknown,
		`{"model": {"name": "Unheard-of-7B"}}`: unknown,
		`{"model": {"name": "Llama-3-8B"}}`:    "dense",
		`{"model": {"name": "Qwen3-30B-A3B"}, "measured": {"mem_allocated_GB": 47.2}}`:           "moe large",
		`{"model": {"name": "Nemotron-3-Nano"}}`:                                                 "hybrid",
		`{"model": {"name": "Llama-3-8B"}, "fsdp": "params"}`:                                    "fsdp",
		`{"model": {"name": "Llama-3-8B"}, "offload": ["core_attn"]}`:                            "offload",
		`{"args": {"num-layers": 2}}`:                                                            "dense",
		`{"args": {"num-experts": 8}}`:                                                           "moe small",
		`{"args": {"num-experts": 8, "hybrid-override-pattern": "ME"}}`:                          "hybrid",
		`{"args": {"use-megatron-fsdp": true}}`:                                                  "fsdp",
		`{"args": {"use-megatron-fsdp": false, "fine-grained-activation-offloading": true}}`:     "offload",
		`{"args": {"num-layers": 2}, "measured": {"per_pp_stage": [{"max_allocated_MiB": 12}]}}`: "per stage",
	} {
		var c record
		if err := json.Unmarshal([]byte(text), &c); err != nil {
			t.Fatal(err)
		}
		if got := statedKind(c); got != want {
			t.Errorf("%s is of the kind %q, want %q", text, got, want)
		}
	}
}

// What Megatron-Bridge's recipes set goes by the framework that a case states.
func TestBridge(t *testing.T) {
	for repo, want := range map[string]bool{"NVIDIA-NeMo/Megatron-Bridge": true, "NVIDIA/Megatron-LM": false} {
		var c record
		if err := json.Unmarshal([]byte(`{"source": {"repo": "`+repo+`"}, `+llama+`}`), &c); err != nil {
			t.Fatal(err)
		}
		s, err := fromFacts(c)
		if err != nil {
			t.Fatal(err)
		}
		if k := s.Kernels; (k.Loss == "native") != want || k.WeightedSquaredReLU != want || s.Precision.GradsInBF16 != want {
			t.Errorf("%s: %+v", repo, k)
		}
	}
}
