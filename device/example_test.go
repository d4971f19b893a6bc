// This file owns the examples of the package's documentation.

package device_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// A tensor in device memory is copied to host memory, and the ledger says what is used.
func Example() {
	dev, err := cpu.Open(cpu.Options{})
	if err != nil {
		log.Fatal(err)
	}
	tensor, err := dev.Alloc(memory.Device, 4, "activations")
	if err != nil {
		log.Fatal(err)
	}
	saved, err := dev.Alloc(memory.Host, 4, "offload")
	if err != nil {
		log.Fatal(err)
	}
	compute, err := dev.NewStream("compute")
	if err != nil {
		log.Fatal(err)
	}

	compute.Upload(tensor.All(), []byte{1, 2, 3, 4})
	compute.Fill(tensor.Slice(2, 2), 9)
	compute.Copy(saved.All(), tensor.All())
	if err := compute.Sync(); err != nil {
		log.Fatal(err)
	}
	fmt.Println(dev.View(saved.All(), device.Read))
	for _, o := range dev.Memory().Owners {
		fmt.Println(o.Owner, o.Current, "of", o.Kind, "memory")
	}

	compute.Free(tensor)
	compute.Free(saved)
	if err := dev.Close(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// [1 2 9 9]
	// activations 4 B of device memory
	// offload 4 B of host memory
}

// add is a kernel for the CPU: it adds its second argument to the bytes of its first.
var add = &device.Kernel{
	Name: "add",
	Go: func(l *device.Launch) {
		args := l.Args()
		bytes := device.Slice[byte](args[0], int(args[2]))
		for i := range bytes {
			bytes[i] += byte(args[1])
		}
	},
}

// A launch carries the kernel's arguments and declares the bytes that it uses.
func ExampleLaunch() {
	dev, err := cpu.Open(cpu.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	s, err := dev.NewStream("compute")
	if err != nil {
		log.Fatal(err)
	}
	b, err := dev.Alloc(memory.Device, 4, "counts")
	if err != nil {
		log.Fatal(err)
	}
	defer s.Free(b)
	s.Fill(b.All(), 1)

	l := device.NewLaunch(add, 1, 32)
	l.Write(b.All())
	l.Arg(5)
	l.Arg(uint64(b.Size()))
	s.Launch(l)

	got := make([]byte, 4)
	if err := s.Download(got, b.All()); err != nil {
		log.Fatal(err)
	}
	fmt.Println(got)
	// Output: [6 6 6 6]
}

// Captured work is replayed as one piece of work.
func ExampleStream_capture() {
	dev, err := cpu.Open(cpu.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	s, err := dev.NewStream("compute")
	if err != nil {
		log.Fatal(err)
	}
	b, err := dev.Alloc(memory.Device, 4, "counts")
	if err != nil {
		log.Fatal(err)
	}
	defer s.Free(b)

	s.BeginCapture()
	s.Fill(b.Slice(0, 2), 1)
	s.Fill(b.Slice(2, 2), 2)
	g, err := s.EndCapture()
	if err != nil {
		log.Fatal(err)
	}
	defer g.Close()
	s.Replay(g)

	got := make([]byte, 4)
	if err := s.Download(got, b.All()); err != nil {
		log.Fatal(err)
	}
	fmt.Println(g.Nodes(), "nodes:", got)
	// Output: 2 nodes: [1 1 2 2]
}

// An allocation that does not fit returns an error that names the holders.
func ExampleOutOfMemory() {
	dev, err := cpu.Open(cpu.Options{Capacity: [memory.Kinds]memory.Bytes{memory.Device: memory.MiB}})
	if err != nil {
		log.Fatal(err)
	}
	s, err := dev.NewStream("compute")
	if err != nil {
		log.Fatal(err)
	}
	weights, err := dev.Alloc(memory.Device, 768*memory.KiB, "weights")
	if err != nil {
		log.Fatal(err)
	}
	_, err = dev.Alloc(memory.Device, 512*memory.KiB, "stash")
	var full *device.OutOfMemory
	if errors.As(err, &full) {
		fmt.Println(full)
	}
	s.Free(weights)
	_ = dev.Close()
	// Output: cpu:0: out of device memory: "stash" asked for 512.00 KiB, but only 256.00 KiB of 1.00 MiB are free; held by "weights" 768.00 KiB; free some of it or ask for less
}
