// This file owns checked events: the recording they hold, outside graphs or
// inside a capture.

package check

import (
	"cmp"
	"fmt"
	"time"

	"github.com/stowage-dev/stowage/device"
)

// event is a checked event. A captured recording of an event without External has a
// meaning in that capture only, and is kept beside the last recording outside.
type event struct {
	dev      *dev
	inner    device.Event
	flags    device.EventFlags
	mark     *recording // the last one outside of captures, or by a replay
	captured *place     // the last one, if it was made during a capture
	closed   bool
}

func (d *dev) NewEvent(flags device.EventFlags) (device.Event, error) {
	c := d.c
	c.mu.Lock()
	defer c.unlock()
	if err := cmp.Or(d.err(), d.make("NewEvent")); err != nil {
		return nil, err
	}
	inner, err := d.inner.NewEvent(flags)
	if err != nil {
		return nil, err
	}
	e := &event{dev: d, inner: inner, flags: flags}
	d.open[e] = c.sites.callSite()
	return e, nil
}

// event returns the event behind the interface. It accepts events of all devices of this
// checker.
func (c *Checker) event(e device.Event, what string) *event {
	ev, ok := e.(*event)
	if !ok || ev.dev.c != c {
		panic(fmt.Sprintf("check: a %T is not an event of this checker", e))
	}
	if ev.closed {
		panic("check: a closed event is " + what)
	}
	return ev
}

func (e *event) is(f device.EventFlags) bool { return e.flags&f != 0 }

// latest returns the recording that a wait would take now, for messages.
func (e *event) latest() *recording {
	if e.captured != nil {
		return &recording{stream: e.captured.branch.stream.name, site: e.captured.site}
	}
	return e.mark
}

func (s *stream) Record(de device.Event) {
	c := s.lock()
	defer c.unlock()
	e := c.event(de, "recorded")
	site := c.sites.callSite()
	if c.dropped(Records, s.name, e, site) {
		return
	}
	if s.inner != nil {
		s.inner.Record(e.inner)
	}
	if s.capture != nil {
		s.capture.record(e, site)
		return
	}
	e.mark, e.captured = s.lanes[0].mark(s.name, site, e), nil
}

func (s *stream) Wait(de device.Event) {
	c := s.lock()
	defer c.unlock()
	e := c.event(de, "waited for")
	site := c.sites.callSite()
	if c.dropped(Waits, s.name, e, site) {
		return
	}
	if e.captured != nil && e.captured.branch.capture.ended && s.capture == nil {
		panic("check: stream " + s.name + " waits for an event recorded during a capture that has ended; make the event External")
	}
	if s.inner != nil {
		s.inner.Wait(e.inner)
	}
	switch {
	case e.captured != nil && s.capture == nil:
		s.capture = e.captured.branch.capture.join(s)
		fallthrough
	case s.capture != nil:
		s.capture.wait(e, site)
	default:
		l := s.lanes[0]
		l.noteWait(waited{e, e.mark, site, c.seq})
		l.wait(e.mark)
	}
}

// Done reports whether the work is done. If it is, the host is ordered after it as if it
// had waited. Under a schedule every call runs one operation, so that a loop of calls
// comes to an end.
func (e *event) Done() bool {
	c := e.dev.c
	c.mu.Lock()
	defer c.unlock()
	r := e.mark
	if r == nil {
		return true
	}
	if c.scheduled() {
		if !c.passed(r) {
			c.runOne()
		}
		if !c.passed(r) {
			return false
		}
		c.flushNow()
	}
	if !e.inner.Done() {
		return false
	}
	c.learn(r.clock)
	return true
}

func (e *event) Sync() error {
	c := e.dev.c
	c.mu.Lock()
	e.dev.counters.HostSyncs++
	r := e.mark
	on := ""
	if r != nil {
		on = r.stream
	}
	if c.dropped(Syncs, on, e, c.sites.callSite()) {
		defer c.unlock()
		return e.dev.err()
	}
	var err error
	if c.scheduled() {
		defer c.unlock()
		if r != nil {
			c.runUntil(r)
		}
		err = c.flushed(e.dev)
	} else {
		c.mu.Unlock()
		err = e.inner.Sync()
		c.mu.Lock()
		defer c.unlock()
	}
	if r != nil {
		c.learn(r.clock)
	}
	return e.dev.firstError(err)
}

// Since returns the time between the inner events. Under a schedule only recordings that
// were executed have a time.
func (e *event) Since(earlier device.Event) (time.Duration, error) {
	c := e.dev.c
	c.mu.Lock()
	defer c.unlock()
	a := c.event(earlier, "compared")
	if err := e.dev.err(); err != nil {
		return 0, err
	}
	for _, x := range [2]*event{a, e} {
		if c.scheduled() && x.mark != nil && !c.passed(x.mark) {
			return 0, fmt.Errorf("%s: one of the two events is not done; synchronise with the later one first", e.dev.inner.Info().Name)
		}
	}
	return e.inner.Since(a.inner)
}

func (e *event) Close() error {
	c := e.dev.c
	c.mu.Lock()
	defer c.unlock()
	e.closed = true
	delete(e.dev.open, e)
	return e.inner.Close()
}
