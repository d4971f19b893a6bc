// This file owns the example.

package cost_test

import (
	"fmt"
	"log"

	"github.com/stowage-dev/stowage/plan/config"
	"github.com/stowage-dev/stowage/plan/cost"
)

// What recompute costs a step.
func Example() {
	for _, recompute := range []string{"none", "full"} {
		s, _, err := config.Resolve(config.Input{
			Model: "llama-3-8b", Hardware: "h100", GPUs: 8,
			Settings: map[string][]string{"tp": {"2"}, "gbs": {"128"}, "seq": {"8192"}, "recompute": {recompute}},
		})
		if err != nil {
			log.Fatal(err)
		}
		m, err := cost.New(s)
		if err != nil {
			log.Fatal(err)
		}
		step := m.Step(m.Policy().Passes)
		fmt.Printf("recompute %s: %.1f s a step\n", recompute, step.Total)
	}
	// Output:
	// recompute none: 15.1 s a step
	// recompute full: 20.1 s a step
}
