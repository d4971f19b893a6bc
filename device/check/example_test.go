// This file owns the example of the package's documentation.

package check_test

import (
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
)

// A tensor leaves for the host on one stream and is overwritten on another,
// which should have waited.
func Example() {
	inner, _ := cpu.Open(cpu.Options{})
	dev := check.New(check.Options{}).Wrap(inner)
	compute, _ := dev.NewStream("compute")
	out, _ := dev.NewStream("copy-out")
	tensor, _ := dev.Alloc(device.Accel, 1024, "activations")
	saved, _ := dev.Alloc(device.Host, 1024, "offload")

	out.Copy(saved.All(), tensor.All())
	compute.Fill(tensor.All(), 0)

	var race *check.Race
	if errors.As(compute.Sync(), &race) {
		fmt.Println(race.First)
		fmt.Println(race.Second)
		fmt.Println(race.Missing)
	}
	compute.Free(tensor)
	compute.Free(saved)
	_ = dev.Close()
	// Output:
	// copy #1 on stream "copy-out"
	// fill #1 on stream "compute"
	// stream "compute" must wait, before fill #1, for an event recorded on stream "copy-out" after copy #1; or the host must synchronise with the first before it issues the second
}
