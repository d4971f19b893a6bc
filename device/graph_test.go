// This file owns the tests of the memory that graphs hold.

package device_test

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
)

// A buffer is held as often as it was added, by itself or by launches.
func TestHeld(t *testing.T) {
	a, b, c := buffer(100), buffer(100), buffer(100)
	launch := func(bs ...*device.Buffer) *device.Launch {
		l := device.NewLaunch(kernel, 1, 1)
		for _, b := range bs {
			l.Read(b.All())
		}
		return &l
	}
	var h device.Held
	h.Check()
	h.Add(a)
	h.AddLaunch(launch(a, b, b))
	h.AddLaunch(launch(c))
	h.Check()
	h.DropLaunch(launch(a, b, b)) // leaves a, once
	b.Retire()
	h.Check()
	a.Retire()
	wantPanic(t, "use after free of "+a.String(), h.Check)
	h.Drop(a)
	h.Check()
	wantPanic(t, "does not hold", func() { h.Drop(a) })
	c.Retire()
	wantPanic(t, "use after free of "+c.String(), h.Check)
}
