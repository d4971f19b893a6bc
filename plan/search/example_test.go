// This file owns the example.

package search_test

import (
	"fmt"
	"log"

	"github.com/stowage-dev/stowage/plan/config"
	"github.com/stowage-dev/stowage/plan/search"
)

// Find the fastest policy that fits 52 GiB.
func ExamplePolicy() {
	s, _, err := config.Resolve(config.Input{
		Model: "mixtral-8x7b", Hardware: "h100", GPUs: 32, Budget: 52 << 30,
		Settings: map[string][]string{"pp": {"4"}, "ep": {"8"}, "gbs": {"64"}, "seq": {"4096"}},
	})
	if err != nil {
		log.Fatal(err)
	}
	r, err := search.Policy(s, search.Options{})
	if err != nil {
		log.Fatal(err)
	}
	for _, d := range r.Modules {
		if d.Chosen {
			fmt.Println(d.Choice, d.Module)
		}
	}
	for rank, share := range r.Ranks {
		fmt.Printf("rank %d offloads %.0f %%\n", rank, 100*share.Fraction)
	}
	// Output:
	// offload attn_norm
	// offload core_attn
	// offload expert_fc1
	// offload moe_act
	// rank 0 offloads 64 %
	// rank 1 offloads 27 %
	// rank 2 offloads 0 %
	// rank 3 offloads 0 %
}
