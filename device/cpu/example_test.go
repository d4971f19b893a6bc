// This file owns the examples of the package's documentation.

package cpu_test

import (
	"fmt"
	"log"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// A device with the memory and the links of a small accelerator: a copy to host memory
// takes as long as the link says.
func ExampleOpen() {
	dev, err := cpu.Open(cpu.Options{
		Capacity: [memory.Kinds]memory.Bytes{memory.Device: 64 * memory.MiB, memory.Host: memory.GiB},
		Links:    cpu.Links{Out: cpu.Link{BytesPerSecond: 100e6, Latency: time.Millisecond}},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	fmt.Println(dev.Info().Name, "has", dev.Info().Capacity[memory.Device])

	out, err := dev.NewStream("copy-out")
	if err != nil {
		log.Fatal(err)
	}
	tensor, err := dev.Alloc(memory.Device, memory.MiB, "activations")
	if err != nil {
		log.Fatal(err)
	}
	saved, err := dev.Alloc(memory.Host, memory.MiB, "offload")
	if err != nil {
		log.Fatal(err)
	}
	defer out.Free(tensor)
	defer out.Free(saved)

	begin, err := dev.NewEvent(device.Timing)
	if err != nil {
		log.Fatal(err)
	}
	end, err := dev.NewEvent(device.Timing)
	if err != nil {
		log.Fatal(err)
	}
	out.Record(begin)
	out.Copy(saved.All(), tensor.All())
	out.Record(end)
	if err := out.Sync(); err != nil {
		log.Fatal(err)
	}
	took, err := end.Since(begin)
	if err != nil {
		log.Fatal(err)
	}
	// 1 MiB at 100 MB/s takes 10.5 ms, and the latency is 1 ms.
	fmt.Println("the copy took at least 11 ms:", took >= 11*time.Millisecond)
	// Output:
	// cpu:0 has 64.00 MiB
	// the copy took at least 11 ms: true
}
