package maxtext

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/megatron"
	"github.com/stowage-dev/stowage/plan/model"
	"pgregory.net/rapid"
)

// known are keys of MaxText's base.yml at commit e591f30c (2026-08-22).
var known = strings.Fields(`
override_model_config base_num_decoder_layers base_emb_dim vocab_size logits_via_embedding attention_type
base_num_query_heads base_num_kv_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim head_dim
mlp_activations base_mlp_dim num_experts num_experts_per_tok base_moe_mlp_dim first_num_dense_layers shared_experts
mtp_num_layers ici_tensor_parallelism ici_context_parallelism ici_expert_parallelism ici_pipeline_parallelism
dcn_data_parallelism ici_fsdp_parallelism ici_data_parallelism num_layers_per_pipeline_stage num_pipeline_repeats
max_target_length per_device_batch_size num_pipeline_microbatches gradient_accumulation_steps dtype weight_dtype hardware
quantization opt_type mu_dtype optimizer_memory_host_offload capacity_factor remat_policy decoder_layer_input context mlpwi
mlpwi_0 mlpwi_1 mlpwo moe_mlpwi_0 moe_mlpwi_1 moe_mlpwo query_proj key_proj value_proj out_proj query_wa_proj kv_wa_proj
mla_q mla_kv attention_out`)

func setup(t testing.TB, preset string, gpus int, args map[string]any) *plan.Setup {
	m, err := model.Preset(preset)
	if err != nil {
		t.Fatal(err)
	}
	base := map[string]any{"bf16": true, "micro-batch-size": 1, "seq-length": 4096, "moe-grouped-gemm": true, "use-distributed-optimizer": true}
	for k, v := range args {
		base[k] = v
	}
	s, _, err := megatron.FromArgs(base, megatron.Options{Model: m, GPUs: gpus})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func parse(t testing.TB, text string) map[string]any {
	var keys map[string]any
	if err := yaml.Unmarshal([]byte(text), &keys); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	for key := range keys {
		if !slices.Contains(known, key) {
			t.Errorf("MaxText has no key %s", key)
		}
	}
	return keys
}

// SPEC S6.1: what the policy says of each module becomes a word for each tensor.
func TestRemat(t *testing.T) {
	s := setup(t, "deepseek-v3", 256, map[string]any{
		"expert-model-parallel-size": 32, "global-batch-size": 512,
		"recompute-granularity": "selective", "recompute-modules": "mla_up_proj mlp",
		"fine-grained-activation-offloading": true, "offload-modules": "moe_act attn_norm",
	})
	keys := parse(t, Config(s))
	for key, want := range map[string]string{
		"remat_policy": "custom", "decoder_layer_input": "offload",
		"mla_q": "remat", "mla_kv": "remat", "mlpwi_0": "remat", "mlpwi_1": "remat",
		"moe_mlpwi_0": "offload", "moe_mlpwi_1": "offload", "moe_mlpwo": "device",
		"query_wa_proj": "device", "context": "device", "out_proj": "device",
		"attention_type": "mla", "dtype": "bfloat16",
	} {
		if keys[key] != want {
			t.Errorf("%s is %v, want %s", key, keys[key], want)
		}
	}
	for key, want := range map[string]int{
		"first_num_dense_layers": 3, "num_experts": 256, "shared_experts": 1, "base_num_decoder_layers": 61,
		"ici_expert_parallelism": 32, "ici_data_parallelism": 8, "gradient_accumulation_steps": 2,
	} {
		if fmt.Sprint(keys[key]) != fmt.Sprint(want) {
			t.Errorf("%s is %v, want %d", key, keys[key], want)
		}
	}
	if keys["per_device_batch_size"] != 1.0 {
		t.Errorf("per_device_batch_size is %v", keys["per_device_batch_size"])
	}
	full := setup(t, "llama-3-8b", 8, map[string]any{"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1})
	if keys := parse(t, Config(full)); keys["remat_policy"] != "full" || keys["context"] != nil {
		t.Errorf("full recomputation: %v", keys)
	}
}

func TestNotes(t *testing.T) {
	s := setup(t, "mixtral-8x7b", 8, map[string]any{
		"use-megatron-fsdp": true, "fine-grained-activation-offloading": true, "offload-modules": "moe_act", "activation-offload-fraction": 0.5,
	})
	text := Config(s)
	if keys := parse(t, text); fmt.Sprint(keys["ici_fsdp_parallelism"]) != "8" || fmt.Sprint(keys["ici_data_parallelism"]) != "1" {
		t.Errorf("FSDP axes: %v", keys)
	}
	if !strings.Contains(text, "# MaxText moves a tensor in every layer, not in 0.5 of them") {
		t.Errorf("no word about the fraction:\n%s", text)
	}
}

// The axes of the mesh multiply to the devices, whatever the layout, and nothing
// but known keys is written.
func TestMesh(t *testing.T) {
	v6e, err := hardware.ByName("tpu-v6e")
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(rt *rapid.T) {
		draw := func(name string) int { return 1 << rapid.IntRange(0, 2).Draw(rt, name) }
		tp, cp, pp, ep, more := draw("tp"), draw("cp"), draw("pp"), draw("ep"), draw("more")
		gpus := tp * cp * pp * ep * more * rapid.SampledFrom([]int{1, 64}).Draw(rt, "pods")
		s := setup(t, "mixtral-8x7b", gpus, map[string]any{
			"tensor-model-parallel-size": tp, "context-parallel-size": cp, "pipeline-model-parallel-size": pp,
			"expert-model-parallel-size": ep, "expert-tensor-parallel-size": 1,
			"micro-batch-size": draw("micro"), "global-batch-size": 4 * gpus * draw("microbatches"),
		})
		s.Hardware = v6e
		keys := parse(t, Config(s))
		total := 1
		for key, v := range keys {
			if strings.HasPrefix(key, "ici_") || strings.HasPrefix(key, "dcn_") {
				n := 0
				if _, err := fmt.Sscan(fmt.Sprint(v), &n); err != nil {
					rt.Fatal(err)
				}
				total *= n
			}
		}
		if total != gpus {
			rt.Fatalf("%d devices, but the axes multiply to %d", gpus, total)
		}
		// Every step has all sequences: those of all devices, in each of the passes of one.
		number := func(key string) float64 {
			f := 1.0
			if v, ok := keys[key]; ok {
				if _, err := fmt.Sscan(fmt.Sprint(v), &f); err != nil {
					rt.Fatal(err)
				}
			}
			return f
		}
		if n := number("per_device_batch_size") * float64(gpus) * number("gradient_accumulation_steps"); n != float64(s.Batch.Global) {
			rt.Fatalf("a step has %g sequences, want %d", n, s.Batch.Global)
		}
	})
}
