// This file owns what hand-written test programs are made with.

package check_test

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// world is a checked CPU device with a few streams and buffers. Its first
// unexpected error ends the program by a panic, which the drivers report.
type world struct {
	c         *check.Checker
	dev       device.Device
	a, b, out device.Stream
	x, y      *device.Buffer // device memory
	host      *device.Buffer
	bufs      []*device.Buffer
}

const size = 4096

func newWorld(c *check.Checker, ordinal int) *world {
	inner, err := cpu.Open(cpu.Options{Ordinal: ordinal, CopyThreads: 1})
	must(err)
	return worldOn(c, inner)
}

// worldOn returns a world on a device.
func worldOn(c *check.Checker, inner device.Device) *world {
	w := &world{c: c, dev: c.Wrap(inner)}
	w.a, w.b, w.out = w.stream("a"), w.stream("b"), w.stream("copy-out")
	w.x, w.y = w.alloc(memory.Device, "x"), w.alloc(memory.Device, "y")
	w.host = w.alloc(memory.Host, "host")
	return w
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func (w *world) stream(name string) device.Stream {
	s, err := w.dev.NewStream(name)
	must(err)
	return s
}

func (w *world) event(flags device.EventFlags) device.Event {
	e, err := w.dev.NewEvent(flags)
	must(err)
	return e
}

func (w *world) alloc(k memory.Kind, owner string) *device.Buffer {
	b, err := w.dev.Alloc(k, size, owner)
	must(err)
	w.bufs = append(w.bufs, b)
	return b
}

// order makes stream b wait for what stream a has been given so far.
func (w *world) order(a, b device.Stream) {
	e := w.event(0)
	a.Record(e)
	b.Wait(e)
}

// close ends the program and returns what was found.
func (w *world) close() error {
	err := w.dev.Sync()
	for _, b := range w.bufs {
		if b.Live() {
			w.a.Free(b)
		}
	}
	if e := w.dev.Close(); err == nil {
		err = e
	}
	return err
}

// mix returns a launch that reads src and changes dst.
func mix(dst, src device.Range) device.Launch {
	l := device.NewLaunch(mixKernel, 1, 1)
	l.Write(dst)
	l.Read(src)
	l.Arg(uint64(dst.Len))
	l.Arg(7)
	return l
}

// inWorld returns a program on a world. It fails by a panic with an error.
func inWorld(work func(w *world)) check.Program {
	return func(c *check.Checker) (err error) {
		w := newWorld(c, 0)
		defer func() {
			if p := recover(); p != nil {
				err = p.(error)
			}
			if e := w.close(); err == nil {
				err = e
			}
		}()
		work(w)
		return c.Err()
	}
}

// run runs a program once.
func run(t *testing.T, o check.Options, p check.Program) (c *check.Checker, err error) {
	t.Helper()
	c = check.New(o)
	err = p(c)
	return c, err
}
