// This file owns the devices that a session works on: how they are opened, and what differs
// between them.

package session

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/device/cuda"
)

// backend is a device and the caller's streams on it.
type backend struct {
	device.Device
	// stream returns the caller's stream of a handle. The session asks once for each.
	stream func(handle uint64) (device.Stream, error)
	// relaxed runs a call inside of the caller's capture, so that what it allocates is
	// allowed and not captured.
	relaxed func(func())
	// hostComputes says that the caller computes on the host, which follows no stream: the
	// session waits for its streams before it returns memory.
	hostComputes bool
}

func openBackend(c *Config) (backend, error) {
	if c.Device == "cpu" {
		dev, err := cpu.Open(cpu.Options{Ordinal: c.Ordinal})
		return backend{dev, onlyStream(dev), func(call func()) { call() }, true}, err
	}
	dev, err := openGPU(c)
	if err != nil {
		return backend{}, err
	}
	borrow := func(handle uint64) (device.Stream, error) {
		return dev.BorrowStream(uintptr(handle), fmt.Sprintf("compute %#x", handle)), nil
	}
	return backend{dev, borrow, dev.Relaxed, false}, nil
}

func openGPU(c *Config) (*cuda.Device, error) {
	if c.Context == 0 {
		return cuda.Open(cuda.Options{Ordinal: c.Ordinal})
	}
	return cuda.OpenContext(uintptr(c.Context), cuda.Options{})
}

// onlyStream returns the streams of a device that has one, with handle 0.
func onlyStream(dev device.Device) func(uint64) (device.Stream, error) {
	return func(handle uint64) (device.Stream, error) {
		if handle != 0 {
			return nil, fmt.Errorf("stowage: expected stream 0 on the CPU, got %#x", handle)
		}
		return dev.NewStream("compute")
	}
}
