// This file owns the example.

package model_test

import (
	"fmt"

	"github.com/stowage-dev/stowage/plan/model"
)

// A DeepSeek-V3 layer holds some parameters whole on every tensor-parallel rank, divides
// others over the ranks, and gives the rest to its experts.
func Example() {
	m, err := model.Preset("deepseek-v3")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%.1f billion parameters, %.1f a token\n",
		float64(m.Parameters())/1e9, float64(m.ActiveParameters())/1e9)
	last := m.Layers[len(m.Layers)-1]
	for _, p := range m.LayerParams(last) {
		fmt.Printf("%-42s %5d x %5d x %3d %s\n", p.Name, p.Rows, p.Cols, p.Count,
			[]string{"whole", "tensor", "expert"}[p.Split])
	}
	// Output:
	// 682.6 billion parameters, 36.6 a token
	// input_layernorm.weight                      7168 x     1 x   1 whole
	// self_attention.linear_q_down_proj.weight    1536 x  7168 x   1 whole
	// self_attention.q_layernorm.weight           1536 x     1 x   1 whole
	// self_attention.linear_q_up_proj.weight     24576 x  1536 x   1 tensor
	// self_attention.linear_kv_down_proj.weight    576 x  7168 x   1 whole
	// self_attention.kv_layernorm.weight           512 x     1 x   1 whole
	// self_attention.linear_kv_up_proj.weight    32768 x   512 x   1 tensor
	// self_attention.linear_proj.weight           7168 x 16384 x   1 tensor
	// pre_mlp_layernorm.weight                    7168 x     1 x   1 whole
	// mlp.router.weight                            256 x  7168 x   1 whole
	// mlp.shared_experts.linear_fc1.weight        4096 x  7168 x   1 tensor
	// mlp.shared_experts.linear_fc2.weight        7168 x  2048 x   1 tensor
	// mlp.experts.linear_fc1.weight               4096 x  7168 x 256 expert
	// mlp.experts.linear_fc2.weight               7168 x  2048 x 256 expert
}
