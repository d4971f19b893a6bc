package launch

import (
	"strings"
	"testing"
)

const maxTextStart = "per_device_batch_size: 4\nmax_target_length: 4096\n"

func TestWrongMaxText(t *testing.T) {
	var list []wrong
	for _, c := range []struct {
		more    string
		refused bool
		words   []string
	}{
		{"model_name: bert", true, []string{"bert", "mixtral-8x7b"}},
		{"model_name: llama3-8b\nbase_emb_dim: 64", true, []string{"base_emb_dim", "llama3-8b"}},
		{"remat_policy: fully", false, []string{"remat_policy", "fully", "minimal"}},
		{"quantization: eight", false, []string{"quantization is", "eight", "fp8_full"}},
		{"mu_dtype: float7", false, []string{"mu_dtype", "float7", "bfloat16"}},
		{"mlp_activations: silu", false, []string{"mlp_activations", "silu", "list"}},
		{"mlp_activations: [[[silu]]]", false, []string{"mlp_activations is [[[", "list such as"}},
		{"mlp_activations: [silu, linear, linear]", false, []string{"mlp_activations is [", "list such as"}},
		{"mlp_activations: []", false, []string{"mlp_activations is []", "list such as"}},
		{"mlp_activations: [1, 2]", false, []string{"mlp_activations is [1,2]", "list such as"}},
		{"mlp_activations: '[silu'", false, []string{"mlp_activations is", "list such as"}},
		{"base_emb_dim: -2", false, []string{"base_emb_dim is -2"}},
		{"base_num_query_heads: 3", false, []string{"kv_heads", "heads"}},
		{"decoder_block: gemma3", true, []string{"gemma3", "deepseek"}},
		{"attention_type: chunk", true, []string{"chunk", "mla"}},
		{"global_parameter_scale: 2", true, []string{"global_parameter_scale"}},
		{"ici_pipeline_parallelism: 4", true, []string{"pipeline"}},
		{"ici_sequence_parallelism: 4", true, []string{"sequence"}},
		{"ici_tensor_parallelism: 0", false, []string{"ici_tensor_parallelism is 0"}},
		{"ici_tensor_parallelism: -1\nici_fsdp_parallelism: 1", false, []string{"axis tensor is -1", "give its size"}},
		{"dcn_expert_parallelism: -1", false, []string{"axis expert is -1"}},
		{"ici_tensor_parallelism: many", false, []string{"ici_tensor_parallelism", "many"}},
		{"ici_tensor_parallelism: 100000\ndcn_context_parallelism: 100000", false, []string{"devices"}},
		{"gradient_accumulation_steps: 0", false, []string{"gradient_accumulation_steps is 0"}},
		{"opt_type: lion", true, []string{"lion"}},
		{"parameter_memory_host_offload: true", true, []string{"parameter_memory_host_offload"}},
		{"remat_policy: minimal_offloaded", true, []string{"minimal_offloaded"}},
		{"remat_policy: custom\ncontext: offload", true, []string{"context is offload"}},
		{"remat_policy: custom\ncontext: disk", false, []string{"context", "disk", "device"}},
		{"num_experts: 8\nnum_experts_per_tok: 2\nsparse_matmul: false", true, []string{"sparse_matmul"}},
		{"num_experts: 8\nnum_experts_per_tok: 9", false, []string{"top_k is 9"}},
		{"use_indexer: true\nindexer_topk: 2048", true, []string{"use_indexer"}},
		{"engram_layers: [1]", true, []string{"engram_layers"}},
		{"mhc_expansion_rate: 2", true, []string{"mhc_expansion_rate"}},
		{"use_ring_of_experts: true", true, []string{"use_ring_of_experts"}},
	} {
		list = append(list, wrong{maxTextStart + c.more, c.refused, c.words})
	}
	list = append(list, wrong{maxTextStart + "remat_policy: full\nremat_policy: minimal", false, []string{"line", "gives a key twice"}})
	list = append(list, wrong{"base_config: base.yml\nmodel_name: llama9-8b\n", true, []string{"llama9-8b", "mixtral-8x7b"}})
	for _, word := range []string{"per_device_batch_size=$B", "max_target_length=${L}", "per_device_batch_size=4 ici_fsdp_parallelism=$((2*4))"} {
		list = append(list, wrong{"python3 train.py base.yml run_name=$NAME model_name=llama3-8b remat_policy=full " + word, false, []string{"$", "variables of a script are not followed; write its value"}})
	}
	list = append(list, wrong{"M=llama3-8b\npython3 train.py base.yml model_name=$M per_device_batch_size=4", false, []string{"model_name is", "variables of a script are not followed; write its value"}})
	list = append(list, wrong{strings.Replace(maxTextStart, "4\n", "0.3\n", 1), false, []string{"per_device_batch_size is 0.3"}})
	checkWrong(t, list)
}

// What is read otherwise than MaxText does is noted.
func TestMaxTextNotes(t *testing.T) {
	for text, want := range map[string]string{
		"weight_dtype: bfloat16": "weight_dtype bfloat16", "base_config: other.yml": "base_config other.yml is not read", "base_config: configs/base.yml": "",
	} {
		f, err := Parse([]byte(maxTextStart+text), nil)
		if err != nil {
			t.Fatal(err)
		}
		notes := strings.Join(f.Notes, " ")
		if !strings.Contains(notes, want) || want == "" && strings.Contains(notes, "base_config") {
			t.Errorf("%s: %s", text, notes)
		}
	}
}

func TestMaxTextNames(t *testing.T) {
	want := map[string]int64{"llama2-7b": 6738415616, "llama2-13b": 13015864320, "llama2-70b": 68976648192, "mistral-7b": 7241732096, "llama3.1-8b": 8030261248}
	for name := range maxTextModels {
		f, err := Parse([]byte(maxTextStart+"model_name: "+name), nil)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if n := want[name]; n > 0 && f.Model.Parameters() != n {
			t.Errorf("%s has %d parameters, want %d", name, f.Model.Parameters(), n)
		}
	}
}

func TestMaxTextPolicies(t *testing.T) {
	for text, full := range map[string]bool{
		"": true, "remat_policy: full": true, "remat_policy: minimal": false, "remat_policy: save_qkv_proj": false,
		"remat_policy: custom": true, "remat_policy: custom\nmlpwi_0: device": false, "remat_policy: custom\ndecoder_layer_input: device": true,
	} {
		f, err := Parse([]byte(maxTextStart+text), nil)
		if err != nil || (f.Args["recompute-granularity"] == "full") != full {
			t.Errorf("%q: %+v, %v", text, f, err)
		}
	}
	f, err := Parse([]byte(maxTextStart+"ici_fsdp_parallelism: 1\nici_data_parallelism: 8"), nil)
	if err != nil || f.Args["use-distributed-optimizer"] != false || f.Args["use-megatron-fsdp"] != nil || f.GPUs != 8 {
		t.Errorf("replicas alone: %+v, %v", f, err)
	}
}
