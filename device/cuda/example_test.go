// This file owns the examples of the package's documentation. They are compiled and
// not run, because a machine need not have a GPU.

package cuda_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/memory"
)

// Open the first GPU, or say what the machine lacks.
func ExampleOpen() {
	gpu, err := cuda.Open(cuda.Options{DeviceCapacity: 8 * memory.GiB})
	var missing *device.Unsupported
	if errors.As(err, &missing) {
		fmt.Println(missing.Why, "-", missing.Need)
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	defer gpu.Close()
	weights, err := gpu.Alloc(memory.Device, memory.GiB, "weights")
	if err != nil {
		log.Fatal(err)
	}
	s, err := gpu.NewStream("compute")
	if err != nil {
		log.Fatal(err)
	}
	s.Fill(weights.All(), 0)
	if err := s.Sync(); err != nil {
		log.Fatal(err)
	}
	s.Free(weights)
}

// List the GPUs of the machine with their free memory.
func ExampleList() {
	gpus, err := cuda.List()
	if err != nil {
		log.Fatal(err)
	}
	for _, g := range gpus {
		fmt.Printf("%d: %s, %v of %v free\n", g.Ordinal, g.Name, g.Free, g.Total)
	}
}
