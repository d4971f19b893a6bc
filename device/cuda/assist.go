// This file owns assistance: libraries that do what some kernels do, only faster.

package cuda

import (
	"errors"

	"github.com/stowage-dev/stowage/device"
)

// Assist does the work of some kernels by a library. What it takes must follow
// from kernels and arguments alone, and its results from those and memory: runs
// are reproducible. Launches with a slot are never offered, in a capture or outside
// of one: only a kernel's node can be given new arguments. Any goroutine may call.
type Assist interface {
	// Takes tells whether launches of a kernel are to be offered at all.
	Takes(k *device.Kernel) bool
	// Launch issues the work of a launch on the driver's stream, which may capture,
	// with the device's context current; done is false if it leaves it to the kernel.
	// It needs no memory of the device beyond what the launch declares, and keeps no
	// hold of args.
	Launch(k *device.Kernel, args []uint64, stream uintptr) (done bool, err error)
	// Close comes after all work, with the context current.
	Close()
}

// openAssist makes the assistant if there is one to be had.
func (d *Device) openAssist(open func() (Assist, error)) (err error) {
	if open == nil {
		return nil
	}
	var a Assist
	d.within(func() { a, err = open() })
	var none *device.Unsupported
	switch {
	case errors.As(err, &none):
		return nil
	case err != nil:
		return err
	}
	d.assist = a
	return nil
}

// assisted tells whether a launch needs no kernel: its work was issued, or failed
// to be. Nobody can tell why a library failed: in a capture that spoils the
// capture, elsewhere it is the device's error.
func (s *stream) assisted(c *capture, k *device.Kernel, args []uint64) bool {
	d := s.dev
	f := d.drv.frames.Get().(*frame) // a heap object, unlike the launch
	n := copy(f.params[:], args)
	var done bool
	var err error
	d.within(func() { done, err = d.assist.Launch(k, f.params[:n], s.handle) })
	d.drv.frames.Put(f)
	switch {
	case err == nil:
		return done
	case c != nil:
		_ = c.spoil(s, k.Name+" failed: "+err.Error(), "run it once before the capture, to see whether it works outside")
	default:
		d.fail(&device.DriverError{Device: d.name, Call: k.Name, Text: err.Error()})
	}
	return true
}
