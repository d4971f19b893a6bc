// This file owns events: the driver's, and where they were recorded last.

package cuda

import (
	"fmt"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// event remembers its last recording: outside of captures, or, for one without
// External, in which capture.
type event struct {
	dev    *Device
	handle uintptr
	flags  device.EventFlags

	mu       sync.Mutex
	recorded bool
	capture  *capture
	clock    clock // of the recording in the capture
	closed   bool
}

// NewEvent implements [device.Device].
func (d *Device) NewEvent(flags device.EventFlags) (device.Event, error) {
	d.mustBeOpen("NewEvent")
	if err := d.err(); err != nil {
		return nil, err
	}
	e := &event{dev: d, flags: flags}
	var handle uint64
	how := uintptr(eventDisableTiming)
	if e.is(device.Timing) {
		how = 0
	}
	if f := d.tryCall(&d.drv.eventCreate, uintptr(pointer(&handle)), how); f != nil {
		return nil, d.refused(f, memory.Device, 0, "event")
	}
	e.handle = uintptr(handle)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.users[e.handle] = 1
	return e, nil
}

// hold keeps the driver's event for a graph, until release.
func (e *event) hold() {
	e.dev.mu.Lock()
	defer e.dev.mu.Unlock()
	e.dev.users[e.handle]++
}

// release ends one use of the driver's event, and destroys the event after the last use.
// A closed device has destroyed it already.
func (e *event) release() {
	d := e.dev
	d.mu.Lock()
	n := d.users[e.handle] - 1
	if n > 0 {
		d.users[e.handle] = n
	} else {
		delete(d.users, e.handle)
	}
	d.mu.Unlock()
	if n == 0 {
		d.insist(&d.drv.eventDestroy, e.handle)
	}
}

// eventOf returns the event behind the interface. It accepts events of any CUDA device,
// because a stream may wait for another device's event.
func eventOf(e device.Event) *event {
	ev, ok := e.(*event)
	if !ok {
		panic(fmt.Sprintf("cuda: a %T is not an event of a CUDA device", e))
	}
	return ev
}

func (e *event) is(f device.EventFlags) bool { return e.flags&f != 0 }

// marks reports whether the event marks work that the driver knows. An event that was
// recorded last in a capture marks none.
func (e *event) marks() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		panic("cuda: a closed event is used")
	}
	return e.capture == nil
}

// timed reports whether the event has a time: it was recorded and has passed. A replay
// records external events without the device seeing it; for those the driver decides.
func (e *event) timed() bool {
	e.mu.Lock()
	known := e.recorded || e.is(device.External)
	e.mu.Unlock()
	return known && e.Done()
}

func (e *event) Done() bool { return !e.marks() || e.dev.passed(e.handle) }

func (e *event) Sync() error {
	e.dev.hostSyncs.Add(1)
	if e.marks() {
		e.dev.insist(&e.dev.drv.eventSynchronize, e.handle)
	}
	return e.dev.err()
}

func (e *event) Since(earlier device.Event) (time.Duration, error) {
	a := eventOf(earlier)
	if !e.is(device.Timing) || !a.is(device.Timing) {
		panic("cuda: Since needs two events made with Timing")
	}
	d := e.dev
	if !a.timed() || !e.timed() {
		return 0, errNotDone(d.name)
	}
	if err := d.err(); err != nil {
		return 0, err
	}
	var ms float32
	f := d.tryCall(&d.drv.eventElapsedTime, uintptr(pointer(&ms)), a.handle, e.handle)
	switch {
	case f == nil:
		return time.Duration(float64(ms) * float64(time.Millisecond)), nil
	case f.result == errInvalidHandle: // external, and never recorded
		return 0, errNotDone(d.name)
	}
	return 0, d.broken(f)
}

func errNotDone(name string) error {
	return fmt.Errorf("%s: one of the two events is not done; synchronise with the later one first", name)
}

// Close ends the handle. Graphs in which the event is a node keep the event.
func (e *event) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closed {
		e.closed = true
		e.release()
	}
	return nil
}

func (s *stream) Record(de device.Event) {
	e, v := eventOf(de), &s.dev.drv.eventRecord
	c := s.ready()
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.closed:
		panic("cuda: a closed event is recorded")
	case c == nil:
		e.recorded, e.capture = true, nil
		s.order(v, e.handle, s.handle)
		s.recorded()
	case e.is(device.External):
		c.step(s)
		c.keep(e)
		s.order(&s.dev.drv.eventRecordWithFlags, e.handle, s.handle, eventExternal)
	default:
		e.capture, e.clock = c, c.now(s)
		s.order(v, e.handle, s.handle)
	}
}

func (s *stream) Wait(de device.Event) {
	e, v := eventOf(de), &s.dev.drv.streamWaitEvent
	c := s.ready()
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.closed:
		panic("cuda: a closed event is waited for")
	case e.capture != nil:
		if e.capture.admit(s, e.clock) {
			s.order(v, s.handle, e.handle, 0)
		}
	case c == nil:
		s.begin(device.Waited, "", 0, 0, false)
		s.order(v, s.handle, e.handle, 0)
		s.ended()
	case e.is(device.External):
		c.work(s)
		c.keep(e)
		s.order(v, s.handle, e.handle, eventExternal)
	case e.recorded:
		_ = c.spoil(s, "it waits for an event that was recorded outside of the capture", "record the event inside, or make it External")
	}
}
