// This file owns the tests of captures by somebody else.

package cuda

import (
	"runtime"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// capturing has somebody else capture a stream while f runs; the result is their graph.
func capturing(t *testing.T, d *Device, theirs *stream, f func()) (graph uintptr) {
	t.Helper()
	d.call(&d.drv.streamBeginCapture, theirs.handle, captureRelaxed)
	f()
	out := new(uint64)
	d.call(&d.drv.streamEndCapture, theirs.handle, uintptr(pointer(out)))
	return uintptr(*out)
}

// SPEC S6.4: a stream that somebody else captures is known to be captured, and only as
// long as it is; work of ours that is ordered with it by events becomes part of their
// graph, on a thread on which nothing is forbidden meanwhile.
func TestCapturedBySomebodyElse(t *testing.T) {
	d, f := openFake(t, Options{})
	theirs := newStream(t, d, "theirs").(*stream)
	in, own := d.BorrowStream(theirs.Handle(), "borrowed"), newStream(t, d, "own")
	b, h := alloc(t, d, memory.Device, 512), alloc(t, d, memory.Host, 512)
	in.Fill(b.All(), 0)
	in.Launch(addLaunch(b.All(), 0)) // its code is there before the capture
	var events [2]device.Event
	for i := range events {
		e, err := d.NewEvent(0)
		if err != nil {
			t.Fatal(err)
		}
		events[i] = e
	}
	if in.Capturing() || own.Capturing() {
		t.Error("nobody captures yet")
	}
	before := f.calls["cuThreadExchangeStreamCaptureMode"]
	graph := capturing(t, d, theirs, func() {
		d.Relaxed(func() {
			if !in.Capturing() {
				t.Error("it is captured")
			}
			in.Launch(addLaunch(b.All(), 5))
			in.Record(events[0])
			own.Wait(events[0])
			own.Copy(h.All(), b.All())
			own.Launch(addLaunch(b.All(), 7))
			own.Record(events[1])
			in.Wait(events[1])
			in.Launch(addLaunch(b.All(), 1))
		})
	})
	if n := f.calls["cuThreadExchangeStreamCaptureMode"] - before; n != 2 {
		t.Errorf("the mode was exchanged %d times", n)
	}
	if in.Capturing() || own.Capturing() {
		t.Error("the capture is over")
	}
	if w := words(t, in, b.All()); w[0] != 0 {
		t.Errorf("work was done instead of captured: %d", w[0])
	}
	exec := new(uint64)
	d.call(&d.drv.graphInstantiate, uintptr(pointer(exec)), graph, 0)
	for range 3 {
		d.call(&d.drv.graphLaunch, uintptr(*exec), theirs.handle)
	}
	if w, seen := words(t, in, b.All()), words(t, in, h.All()); w[0] != 3*13 || seen[0] != 2*13+5 {
		t.Errorf("three replays give %d, and the host saw %d", w[0], seen[0])
	}
	d.call(&d.drv.graphExecDestroy, uintptr(*exec))
	d.call(&d.drv.graphDestroy, graph)
	for _, e := range events {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
	in.Free(b)
	in.Free(h)
	for _, s := range []device.Stream{in, own, theirs} {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	closeDevice(t, d)
}

// Relaxed gives the thread back its mode, also from a panic.
func TestRelaxedGivesTheModeBack(t *testing.T) {
	d, f := openFake(t, Options{})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	func() {
		defer func() {
			if recover() != "theirs" {
				t.Error("the panic is lost")
			}
		}()
		d.Relaxed(func() { panic("theirs") })
	}()
	if n := f.calls["cuThreadExchangeStreamCaptureMode"]; n != 2 {
		t.Errorf("the mode was exchanged %d times", n)
	}
	closeDevice(t, d)
}
