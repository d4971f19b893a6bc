// This file owns the example of the package's documentation.

package comm_test

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// Three ranks, a device each, add up what they have.
func Example() {
	var devs []device.Device
	for rank := range 3 {
		d, _ := cpu.Open(cpu.Options{Ordinal: rank})
		devs = append(devs, d)
	}
	ranks, _ := comm.NewLocal(devs, comm.Options{})
	err := comm.Lockstep(ranks, func(c comm.Comm) error {
		d := devs[c.Rank()]
		s, _ := d.NewStream("gradients")
		b, _ := d.Alloc(memory.Host, 2, "gradients")
		s.Upload(b.All(), []byte{0x80, 0x3f}) // 1.0 as bf16
		c.AllReduce(s, b.All(), b.All(), comm.BF16, comm.Sum)
		if err := s.Sync(); err != nil {
			return err
		}
		fmt.Printf("rank %d has %#x\n", c.Rank(), d.View(b.All(), device.Read)) // 3.0
		s.Free(b)
		return c.Close()
	})
	fmt.Println(err)
	for _, d := range devs {
		_ = d.Close()
	}
	// Unordered output:
	// rank 0 has 0x4040
	// rank 1 has 0x4040
	// rank 2 has 0x4040
	// <nil>
}
