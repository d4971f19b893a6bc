// This file owns events: the ticket of their last recording, outside of graphs or inside
// of one.

package cpu

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stowage-dev/stowage/device"
)

// event holds its last recording: a ticket, or, for one made during a capture
// without External, the place in that capture.
type event struct {
	dev   *dev
	flags device.EventFlags
	stamp atomic.Int64 // when the last timed recording was reached, on the clock of device.Now; zero is never

	mu      sync.Mutex
	last    ticket
	capture *capture
	place   place
	closed  bool
}

func (d *dev) NewEvent(flags device.EventFlags) (device.Event, error) {
	d.mustBeOpen("an event")
	if err := d.err(); err != nil {
		return nil, err
	}
	return &event{dev: d, flags: flags}, nil
}

// eventOf returns the event behind the interface. It accepts events of any CPU device,
// because a stream may wait for another device's event.
func eventOf(e device.Event) *event {
	ev, ok := e.(*event)
	if !ok {
		panic(fmt.Sprintf("cpu: a %T is not an event of a CPU device", e))
	}
	return ev
}

func (e *event) is(f device.EventFlags) bool { return e.flags&f != 0 }

func (e *event) ticket() ticket {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.last
}

func (e *event) Done() bool { return e.ticket().done() }

func (e *event) Sync() error {
	e.dev.hostSyncs.Add(1)
	e.ticket().wait()
	return e.dev.err()
}

func (e *event) Since(earlier device.Event) (time.Duration, error) {
	a := eventOf(earlier)
	if !e.is(device.Timing) || !a.is(device.Timing) {
		panic("cpu: Since needs two events made with Timing")
	}
	if err := e.dev.err(); err != nil {
		return 0, err
	}
	if !a.Done() || !e.Done() || a.stamp.Load() == 0 || e.stamp.Load() == 0 {
		return 0, fmt.Errorf("%s: one of the two events is not done; synchronise with the later one first", e.dev.name)
	}
	return time.Duration(e.stamp.Load() - a.stamp.Load()), nil
}

func (e *event) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	return nil
}

// Record stores the ticket of the work so far. Only a timed event adds work: reading the
// clock when the stream gets there.
func (s *stream) Record(de device.Event) {
	e := eventOf(de)
	if e.is(device.Timing) {
		s.issue(opStamp, func(o *op) { o.event = e })
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		panic("cpu: a closed event is recorded")
	}
	switch {
	case s.lane == nil:
		e.last, e.capture = ticket{s.line, s.issued}, nil
	case e.is(device.External):
		s.lane.recordExternal(e)
	default:
		e.capture, e.place = s.lane.capture, s.lane.here()
	}
}

// issue adds an operation that fill completes. If fill panics, nothing is issued.
func (s *stream) issue(kind opKind, fill func(*op)) {
	o := s.reserveSlot(kind)
	filled := false
	defer func() {
		if filled {
			s.publish()
		} else {
			s.mu.Unlock()
		}
	}()
	fill(o)
	filled = true
}

func (s *stream) Wait(de device.Event) {
	e := eventOf(de)
	e.mu.Lock()
	last, cap, from, closed := e.last, e.capture, e.place, e.closed
	e.mu.Unlock()
	if closed {
		panic("cpu: a closed event is waited for")
	}
	if cap != nil && cap.wait(s, from) {
		return
	}
	s.mu.Lock()
	capturing := s.lane != nil
	switch {
	case capturing && e.is(device.External):
		s.lane.waitExternal(e)
	case capturing && last.t != nil:
		s.lane.capture.spoil(s, "it waits for an event that was recorded outside of the capture", "record the event inside, or make it External")
	}
	s.mu.Unlock()
	if capturing || last.done() || last.t == s.line {
		return
	}
	s.issue(opWait, func(o *op) { o.ticket = last })
}
