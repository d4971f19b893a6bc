// This file owns what is delayed until work is done: releasing freed memory and a graph's
// callbacks and events.

package cuda

import "slices"

// pending is a function to call once its event has passed.
type pending struct {
	event    uintptr // zero has passed
	borrowed bool    // the event is a stream's mark and stays in its use
	staging  bool    // it frees staging memory
	then     func()
}

// after runs fn once the work that was issued on the stream so far is done. A later call of
// the device runs it, on a failed device too. If the event cannot be recorded, after waits.
func (d *Device) after(s *stream, staging bool, fn func()) {
	d.addPending(pending{event: d.mark(s), staging: staging, then: fn})
}

// afterReplay does the same for a stream that may have begun a capture since. An event that
// is recorded now would become part of that capture, so afterReplay uses the event that was
// recorded at its beginning, behind all earlier work of the stream.
func (d *Device) afterReplay(s *stream, fn func()) {
	s.border.Lock()
	defer s.border.Unlock()
	switch {
	case s.closed.Load(): // no work is left on it
		d.addPending(pending{then: fn})
	case s.capture.Load() == nil:
		d.after(s, false, fn)
	case s.before != 0: // the device failed over it otherwise, and Close cleans up
		d.addPending(pending{event: s.before, borrowed: true, then: fn})
	}
}

func (d *Device) addPending(p pending) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pending = append(d.pending, p)
}

// mark records a new event behind the stream's work so far.
func (d *Device) mark(s *stream) uintptr {
	e := d.event()
	if e != 0 {
		r := d.call(&d.drv.eventRecord, e, s.handle)
		if r == success {
			return e
		}
		d.broken(&failure{&d.drv.eventRecord, r})
		d.recycle(e)
	}
	d.insist(&d.drv.streamSynchronize, s.handle)
	return 0
}

// event returns an unused event without timing, or zero if the device fails.
func (d *Device) event() uintptr {
	d.mu.Lock()
	if n := len(d.events); n > 0 {
		e := d.events[n-1]
		d.events = d.events[:n-1]
		d.mu.Unlock()
		return e
	}
	d.mu.Unlock()
	var e uint64
	if f := d.tryCall(&d.drv.eventCreate, uintptr(pointer(&e)), eventDisableTiming); f != nil {
		d.broken(f)
		return 0
	}
	return uintptr(e)
}

func (d *Device) recycle(e uintptr) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.events = append(d.events, e)
}

// runPassed runs what waits for events that have passed. When it returns, all of that is
// done, whichever goroutine did it, so a following Alloc finds the memory. It queries events
// on a failed device too, because only a broken context stops its work; such a context
// returns its error, which counts as passed.
func (d *Device) runPassed() {
	d.reaping.Lock()
	defer d.reaping.Unlock()
	d.mu.Lock()
	seen := slices.Clone(d.pending)
	d.mu.Unlock()
	if len(seen) == 0 {
		return
	}
	var left []pending
	var passed []uintptr
	for _, p := range seen {
		if !d.passed(p.event) {
			left = append(left, p)
			continue
		}
		p.then()
		if !p.borrowed && p.event != 0 {
			passed = append(passed, p.event)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.events = append(d.events, passed...)
	d.pending = append(left, d.pending[len(seen):]...) // others came meanwhile
}

func (d *Device) passed(event uintptr) bool {
	if event == 0 || d.gone.Load() {
		return true
	}
	r := d.call(&d.drv.eventQuery, event)
	if r != success && r != errNotReady {
		d.broken(&failure{&d.drv.eventQuery, r})
	}
	return r != errNotReady
}
