// This file owns the example.

package plan_test

import (
	"fmt"
	"log"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// Predict the memory of Mixtral on 16 GPUs with a budget of 80 GiB.
func Example() {
	m, err := model.Preset("mixtral-8x7b")
	if err != nil {
		log.Fatal(err)
	}
	p, err := plan.Predict(&plan.Setup{
		Model:     m,
		Layout:    plan.Layout{World: 16, TP: 1, PP: 2, VPP: 1, CP: 1, EP: 8, ETP: 1},
		Batch:     plan.Batch{Micro: 1, Global: 32, Seq: 4096},
		Optimizer: plan.Optimizer{Kind: "adam", Distributed: true},
		Recompute: plan.Recompute{Modules: []string{"moe_act"}},
		Kernels:   plan.Kernels{GroupedGEMM: true},
		Budget:    80 << 30,
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, r := range p.Ranks {
		fmt.Printf("rank %d: peak %.0f GiB, reserved up to %.0f GiB\n",
			r.Rank, float64(r.Peak.Expected)/(1<<30), float64(r.Reserved.High)/(1<<30))
	}
	fmt.Println("fits:", p.Fits)
	// Output:
	// rank 0: peak 77 GiB, reserved up to 86 GiB
	// rank 1: peak 65 GiB, reserved up to 73 GiB
	// fits: false
}
