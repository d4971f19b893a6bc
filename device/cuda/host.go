// This file owns callbacks into Go, which arrive on threads of the driver.

package cuda

import (
	"fmt"
	"runtime"
	"sync"

	"github.com/ebitengine/purego"

	"github.com/stowage-dev/stowage/device"
)

// hostCall is a callback that the driver may make, once, or, if a graph holds
// it, at every replay. The driver knows it by its address: it is pinned, and
// the device's table keeps it.
type hostCall struct {
	dev  *Device
	fn   func()
	pin  runtime.Pinner
	once bool
}

// callback is the C function through which all callbacks of all devices enter. purego
// never frees such a function, so a process has one.
var callback = sync.OnceValue(func() uintptr {
	return purego.NewCallback(func(h *hostCall) { h.run() })
})

// run is called on a thread of the driver. A panic must not unwind into the driver, so it
// becomes the device's error.
func (h *hostCall) run() {
	defer func() {
		if p := recover(); p != nil {
			h.dev.fail(&device.DriverError{Device: h.dev.name, Call: "host callback", Text: fmt.Sprint(p)})
		}
		if h.once {
			h.forget()
		}
	}()
	if h.dev.failed.Load() == nil {
		h.fn()
	}
}

func (s *stream) Host(fn func(), access ...device.Access) {
	for _, a := range access {
		device.CheckAccess(a)
	}
	if c := s.ready(); c != nil {
		c.work(s)
		for _, a := range access {
			c.hold(a.Buf)
		}
	} else {
		s.begin(device.Launched, "host callback", 0, 0, true)
		defer s.ended()
	}
	s.onHost(fn)
}

// onHost makes the driver call fn when the earlier work of the stream is done.
func (s *stream) onHost(fn func()) {
	if s.idle() {
		return
	}
	d, c := s.dev, s.capture.Load()
	h := &hostCall{dev: d, fn: fn, once: c == nil}
	h.pin.Pin(h)
	d.callsMu.Lock()
	d.calls[h] = struct{}{}
	d.callsMu.Unlock()
	r := d.call(&d.drv.launchHostFunc, s.handle, callback(), uintptr(pointer(h)))
	switch {
	case r != success: // it will not be made
		h.forget()
		s.judge(&d.drv.launchHostFunc, r)
	case c != nil:
		c.mu.Lock()
		defer c.mu.Unlock()
		c.calls = append(c.calls, h)
	}
}

// forget releases callbacks that the driver will not make again. A graph of several ranks
// has callbacks of several devices.
func forget(calls ...*hostCall) {
	for _, h := range calls {
		h.forget()
	}
}

func (h *hostCall) forget() {
	d := h.dev
	d.callsMu.Lock()
	defer d.callsMu.Unlock()
	if _, known := d.calls[h]; known {
		delete(d.calls, h)
		h.pin.Unpin()
	}
}
