// This file owns the tests of the memory that graphs hold.

package devicekit_test

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicekit"
)

var kernel = &device.Kernel{Name: "kernel"}

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
	var h devicekit.HeldBuffers
	h.CheckLive()
	h.Add(a)
	h.AddLaunch(launch(a, b, b))
	h.AddLaunch(launch(c))
	h.CheckLive()
	h.RemoveLaunch(launch(a, b, b)) // leaves a, once
	b.Retire()
	h.CheckLive()
	a.Retire()
	wantPanic(t, "use after free of "+a.String(), h.CheckLive)
	h.Remove(a)
	h.CheckLive()
	wantPanic(t, "does not hold", func() { h.Remove(a) })
	d := buffer(100)
	h.Add(d) // after the buffers were listed
	d.Retire()
	wantPanic(t, "use after free of "+d.String(), h.CheckLive)
	h.Remove(d)
	c.Retire()
	wantPanic(t, "use after free of "+c.String(), h.CheckLive)
}
