// This file owns the example.

package hardware_test

import (
	"fmt"
	"log"

	"github.com/stowage-dev/stowage/plan/hardware"
)

func ExampleByName() {
	g, err := hardware.ByName("NVIDIA H100-80GB (DGX)")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s: %.0f TFLOP/s in bf16, %.0f GB/s to the host\n", g.Name, g.Flops["bf16"]/1e12, g.HostOut/1e9)
	// Output:
	// h100: 989 TFLOP/s in bf16, 55 GB/s to the host
}
