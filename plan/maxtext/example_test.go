// This file owns the example.

package maxtext_test

import (
	"fmt"
	"log"
	"strings"

	"github.com/stowage-dev/stowage/plan/config"
	"github.com/stowage-dev/stowage/plan/maxtext"
)

// Offload the inputs of attention, and print what becomes of a layer's tensors.
func ExampleConfig() {
	s, _, err := config.Resolve(config.Input{
		Model: "llama-3-8b", GPUs: 8,
		Settings: map[string][]string{"offload": {"core_attn"}, "recompute": {"mlp"}},
	})
	if err != nil {
		log.Fatal(err)
	}
	_, policy, _ := strings.Cut(maxtext.Config(s), "remat_policy: ")
	fmt.Print("remat_policy: " + policy)
	// Output:
	// remat_policy: custom
	// decoder_layer_input: device
	// query_proj: offload
	// key_proj: offload
	// value_proj: offload
	// context: device
	// attention_out: device
	// out_proj: device
	// mlpwi_0: remat
	// mlpwi_1: remat
}
