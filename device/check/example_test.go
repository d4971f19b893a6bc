// This file owns the examples of the package's documentation.

package check_test

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// A tensor is copied to host memory on one stream and overwritten on another stream,
// which should have waited.
func Example() {
	inner, _ := cpu.Open(cpu.Options{})
	dev := check.New(check.Options{}).Wrap(inner)
	compute, _ := dev.NewStream("compute")
	out, _ := dev.NewStream("copy-out")
	tensor, _ := dev.Alloc(memory.Device, 1024, "activations")
	saved, _ := dev.Alloc(memory.Host, 1024, "offload")

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

// copyThere copies a buffer to host memory and back on two streams, and checks the bytes.
func copyThere(dev device.Device) error {
	out, err := dev.NewStream("copy-out")
	if err != nil {
		return err
	}
	in, err := dev.NewStream("copy-in")
	if err != nil {
		return err
	}
	done, err := dev.NewEvent(0)
	if err != nil {
		return err
	}
	tensor, err := dev.Alloc(memory.Device, 4, "activations")
	if err != nil {
		return err
	}
	saved, err := dev.Alloc(memory.Host, 4, "offload")
	if err != nil {
		return err
	}
	out.Upload(tensor.All(), []byte{1, 2, 3, 4})
	out.Copy(saved.All(), tensor.All())
	out.Record(done)
	in.Wait(done)
	in.Copy(tensor.All(), saved.All())
	got := make([]byte, 4)
	if err := in.Download(got, tensor.All()); err != nil {
		return err
	}
	if !bytes.Equal(got, []byte{1, 2, 3, 4}) {
		return errors.New("the bytes differ")
	}
	in.Free(tensor)
	in.Free(saved)
	return errors.Join(in.Close(), out.Close(), done.Close())
}

func openExample() (device.Device, error) { return cpu.Open(cpu.Options{}) }

// Run a program under twenty schedules, then without each of its waits.
func ExampleDropEach() {
	program := check.On(openExample, copyThere)
	fmt.Println("failure:", check.Explore(check.Options{}, 20, program))
	edges, err := check.DropEach(check.Waits, 3, program)
	fmt.Println(edges, err)
	// Output:
	// failure: <nil>
	// caught 1 of 1 <nil>
}

// Let every allocation of a program fail in turn.
func ExampleFailEach() {
	f, err := check.FailEach(check.Allocs, 1, openExample, func(dev device.Device) error {
		s, err := dev.NewStream("compute")
		if err != nil {
			return err
		}
		b, err := dev.Alloc(memory.Device, 1024, "weights")
		if err == nil {
			s.Free(b)
		}
		return errors.Join(err, s.Close())
	})
	fmt.Printf("%d allocation, %d reported, %d wrong, %v\n", f.Calls, f.Reported, len(f.Wrong), err)
	// Output: 1 allocation, 1 reported, 0 wrong, <nil>
}
