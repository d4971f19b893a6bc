package launch

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

func TestWrongDeepSpeed(t *testing.T) {
	checkWrong(t, []wrong{
		{"{\n\"train_batch_size\": 8,\n}", false, []string{"line 3 is not JSON", "comma"}},
		{`{"bf16": {"enabled": 1}}`, false, []string{"bf16.enabled is 1", "true or false"}},
		{`{"fp16" : {"enabled": 1}}`, false, []string{"fp16.enabled is 1", "true or false"}},
		{`{'train_batch_size': 8}`, false, []string{"line 1 is not JSON"}},
		{`{"train_batch_size": 8, "train_batch_size": 16}`, false, []string{`"train_batch_size" is there twice`}},
		{`{"zero_optimization": {"a": [{"b": 1}], "stage": 1, "stage": 2}}`, false, []string{`"stage" is there twice`}},
		{`{"zero_optimization": 3}`, false, []string{"zero_optimization is 3"}},
		{`{"zero_optimization": {"stage": 4}}`, false, []string{"zero_optimization.stage is 4", "0 to 3"}},
		{`{"train_batch_size": 1e400}`, false, []string{"the number 1e400 is too large"}},
		{`{"train_batch_size": 0}`, false, []string{"train_batch_size is 0"}},
		{`{"train_batch_size": 1.5}`, false, []string{"train_batch_size is 1.5"}},
		{`{"train_batch_size": 8, "gradient_accumulation_steps": 2}`, false, []string{"train_micro_batch_size_per_gpu"}},
		{`{"train_batch_size": 8, "bf16": {"enabled": true}, "fp16": {"enabled": true}}`, false, []string{"bf16.enabled", "fp16.enabled"}},
		{`{"train_batch_size": 8, "bf16": {"enabled": 1}}`, false, []string{"bf16.enabled is 1", "true or false"}},
		{`{"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}`, false, []string{"offload_optimizer", "stage"}},
		{`{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 2}}}`, false, []string{"ratio is 2"}},
		{`{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "tape"}}}`, false, []string{"device", "tape", "nvme"}},
		{`{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}`, true, []string{"offload_param"}},
		{`{"zero_optimization": {"stage": 3, "cpu_offload_params": true}}`, true, []string{"cpu_offload_params"}},
		{`{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2}`, false, []string{"train_batch_size is 64", "which is 10"}},
		{`{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}`, true, []string{"zero_hpz_partition_size"}},
		{`{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}`, true, []string{"zero_hpz_partition_size"}},
		{`{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}`, true, []string{"zero_quantized_weights"}},
		{`{"zero_optimization": {"stage": 3, "mics_shard_size": 8}}`, true, []string{"mics_shard_size"}},
		{`{"train_batch_size": 8, "optimizer": {"type": "Lamb"}}`, true, []string{"Lamb"}},
		{`{"train_batch_size": 8, "activation_checkpointing": {"cpu_checkpointing": true}}`, true, []string{"cpu_checkpointing"}},
		{`{"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}, "activation_checkpointing": {"partition_activations": true}}`, true, []string{"partition_activations"}},
		{`{"train_batch_size": 8, "hybrid_engine": {"enabled": true}}`, true, []string{"hybrid_engine"}},
	})
}

// The optimiser can be in host memory from stage 1 on.
func TestDeepSpeedOffloadsFromStageOneOn(t *testing.T) {
	for stage := range 4 {
		f, err := Parse(fmt.Appendf(nil, `{"zero_optimization": {"stage": %d, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}`, stage), nil)
		if (err == nil) != (stage > 0) || err == nil && (f.Args["optimizer-cpu-offload"] != true || f.Args["optimizer-offload-fraction"] != 0.5) {
			t.Errorf("stage %d: %+v, %v", stage, f, err)
		}
	}
}

// The three sizes of a batch say how many GPUs there are.
func TestDeepSpeedGPUs(t *testing.T) {
	for text, want := range map[string]int{
		`{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}`:                                        8,
		`{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "tensor_parallel": {"autotp_size": 2}}`: 16,
		`{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}`:                                   0,
		`{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}`:                                                                          0,
	} {
		if f, err := Parse([]byte(text), nil); err != nil || f.GPUs != want {
			t.Errorf("%s: %+v, %v, want %d GPUs", text, f, err, want)
		}
	}
}

// A batch is divided over replicas, whatever the sizes, and every size counts: GPUs are the
// replicas times the GPUs of each.
func TestDeepSpeedGPUsOfAnySizes(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		micro, times, replicas, tp, cp := 1+r.IntN(8), 1+r.IntN(8), 1+r.IntN(64), 1+r.IntN(8), 1+r.IntN(8)
		text := fmt.Sprintf(`{"train_batch_size": %d, "train_micro_batch_size_per_gpu": %d, "gradient_accumulation_steps": %d, "tensor_parallel": {"autotp_size": %d}, "sequence_parallel_size": %d}`,
			micro*times*replicas, micro, times, tp, cp)
		f, err := Parse([]byte(text), nil)
		if err != nil || f.GPUs != replicas*tp*cp || f.Args["micro-batch-size"] != any(micro) || f.Args["global-batch-size"] != any(micro*times*replicas) ||
			f.Args["tensor-model-parallel-size"] != any(tp) || cp > 1 && f.Args["context-parallel-size"] != any(cp) {
			t.Errorf("%s: %+v, %v, want %d GPUs", text, f, err, replicas*tp*cp)
		}
	}
}
