// This file owns assistants: libraries that do the work of some kernels faster.

package cuda

import (
	"errors"

	"github.com/stowage-dev/stowage/device"
)

// Assist is a library that does the work of some kernels. To keep runs reproducible, what
// it accepts must depend on the kernel and its arguments alone, and its results on those
// and the memory. Launches with a slot are never offered, because only the node of a
// kernel can be given new arguments. Its methods may be called from any goroutine.
type Assist interface {
	// Takes reports whether launches of a kernel should be offered.
	Takes(k *device.Kernel) bool
	// Launch issues the work of a launch on a stream of the driver, which may be
	// captured, with the device's context current. It returns false if the kernel
	// should do the work. It uses no device memory beyond what the launch declares,
	// and does not keep args.
	Launch(k *device.Kernel, args []uint64, stream uintptr) (done bool, err error)
	// Close ends the library. It is called after all work, with the context current.
	Close()
}

// openAssist opens the assistant if there is one.
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

// assisted reports whether a launch needs no kernel, because the assistant issued its work
// or failed. A failure spoils the capture if there is one; otherwise it is the device's
// error, because its cause is unknown.
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
		_ = c.spoil(s, k.Name+" failed: "+err.Error(), "run it once before the capture to see whether it works there")
	default:
		d.fail(&device.DriverError{Device: d.name, Call: k.Name, Text: err.Error()})
	}
	return true
}
