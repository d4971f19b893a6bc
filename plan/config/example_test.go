// This file owns the example.

package config_test

import (
	"fmt"
	"log"

	"github.com/stowage-dev/stowage/plan/config"
)

func ExampleResolve() {
	s, notes, err := config.Resolve(config.Input{
		Model: "deepseek-v3", Hardware: "gb200", GPUs: 256,
		Settings: map[string][]string{"pp": {"8"}, "ep": {"32"}, "gbs": {"2048"}, "recompute": {"mla_up_proj", "mlp"}},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("DP", s.Layout.DP(), "with", s.Batch.Global/s.Layout.DP()/s.Batch.Micro, "microbatches on", s.Hardware.Name)
	fmt.Println("recompute", s.Recompute.Modules)
	fmt.Println(len(notes), "notes")
	// Output:
	// DP 32 with 64 microbatches on gb200
	// recompute [mla_up_proj mlp]
	// 2 notes
}
