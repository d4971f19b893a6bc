// This file owns what an observer is told. Timing events are recorded around work and read
// once they have passed. The host never waits for them.

package cuda

import (
	"math"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicekit"
	"github.com/stowage-dev/stowage/memory"
)

const (
	// batch is how many pieces of work are reported as one: an event costs the host
	// about a microsecond, and a launch two to four.
	batch = 16
	// few is how many of them there must be for a recording to end the batch, because
	// another stream may wait there.
	few = 4
	// referenceSpan is how long a reference is used: the driver gives times in float32
	// milliseconds, whose last bit is a quarter of a microsecond at four seconds.
	referenceSpan = 4 * time.Second
)

// watch is what a device needs for its observer: events, and one of them, the reference,
// whose time on the host's clock is known.
type watch struct {
	device.Observer
	mu    sync.Mutex
	free  []uintptr // timing events that nobody uses
	all   []uintptr // every one that was made
	ref   uintptr   // the reference
	zero  int64     // its time
	least int64     // how long the host took to see it, at least
	out   float32   // what the driver has answered

	serves time.Duration    // how long a reference does
	labels devicekit.Labels // of streams; guarded by the device's mutex
}

// timing is work between two events of a stream.
type timing struct {
	device.Work
	begin, end uintptr
	soft       bool // other such work may join it
}

// track is what is measured of one stream.
type track struct {
	label  string
	mu     sync.Mutex
	open   bool
	now    timing
	closed []timing // in order, whose end may not have passed yet
}

// observe sets the observer. The reference is the recording, of several, that the host saw
// soonest; its time is uncertain by half of that delay.
func (d *Device) observe(o device.Observer) error {
	if o == nil {
		return nil
	}
	d.ledger.Observe(o)
	w := &watch{Observer: o, least: math.MaxInt64, serves: referenceSpan, labels: devicekit.Labels{}}
	var handle uint64
	if f := d.tryCall(&d.drv.streamCreate, uintptr(pointer(&handle)), streamNonBlocking); f != nil {
		return d.refused(f, memory.Device, 0, "stream of the trace")
	}
	s := uintptr(handle)
	defer d.insist(&d.drv.streamDestroy, s)
	for range 8 {
		e := d.stamped(w, s)
		asked := device.Now()
		if e == 0 || !d.callOrFail(&d.drv.eventRecord, e, s) || !d.callOrFail(&d.drv.eventSynchronize, e) {
			d.unwatch(w)
			return d.err()
		}
		now := device.Now()
		if now-asked >= w.least {
			w.free = append(w.free, e)
			continue
		}
		if w.ref != 0 {
			w.free = append(w.free, w.ref)
		}
		w.ref, w.zero, w.least = e, asked+(now-asked)/2, now-asked
	}
	d.watch = w
	return nil
}

// unwatch ends the events; no work is left that they mark.
func (d *Device) unwatch(w *watch) {
	if w == nil {
		return
	}
	for _, e := range w.all {
		d.insist(&d.drv.eventDestroy, e)
	}
	w.all, w.free = nil, nil
}

// stamped returns a timing event that is recorded behind a stream's work so far. It returns
// zero if there is none, and the work is then not reported.
func (d *Device) stamped(w *watch, stream uintptr) uintptr {
	w.mu.Lock()
	var e uintptr
	if n := len(w.free); n > 0 {
		e, w.free = w.free[n-1], w.free[:n-1]
	}
	w.mu.Unlock()
	if e == 0 {
		var handle uint64
		if d.tryCall(&d.drv.eventCreate, uintptr(pointer(&handle)), 0) != nil {
			return 0
		}
		e = uintptr(handle)
		w.mu.Lock()
		w.all = append(w.all, e)
		w.mu.Unlock()
	}
	if d.call(&d.drv.eventRecord, e, stream) != success {
		w.recycle(e)
		return 0
	}
	return e
}

func (w *watch) recycle(es ...uintptr) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.free = append(w.free, es...)
}

// begin counts a piece of work that is about to be issued outside of captures, and begins to
// time it if there is an observer. Soft work is reported in batches.
func (s *stream) begin(kind device.WorkKind, name string, n memory.Bytes, to memory.Kind, soft bool) {
	t := s.track
	if t == nil {
		s.issued.Add(1)
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	number := s.issued.Add(1) - 1
	if t.open && !(soft && t.now.soft) {
		s.finish()
	}
	if t.open {
		t.now.Kind, t.now.Name, t.now.Bytes, t.now.Last = device.Mixed, "", 0, number+1
		return
	}
	if e := s.stamp(); e != 0 {
		t.open = true
		t.now = timing{device.Work{Kind: kind, Stream: t.label, First: number, Last: number + 1, Name: name, Bytes: n, To: to}, e, 0, soft}
	}
}

// ended ends the timing of the piece that was issued, unless more may join it.
func (s *stream) ended() {
	if t := s.track; t != nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.open && (!t.now.soft || t.now.Last-t.now.First >= batch) {
			s.finish()
		}
		s.reportPassed()
	}
}

// recorded ends what an event of the caller's has marked.
func (s *stream) recorded() {
	if t := s.track; t != nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.open && t.now.Last-t.now.First >= few {
			s.finish()
		}
	}
}

// endTiming ends the timing of what was issued: a capture begins, or the host waits.
func (s *stream) endTiming() {
	if t := s.track; t != nil && s.capture.Load() == nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.open {
			s.finish()
		}
	}
}

// report tells the observer what is done.
func (s *stream) report() {
	if t := s.track; t != nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		s.reportPassed()
	}
}

// stamp records an event unless the stream is captured, by this device or by its owner.
func (s *stream) stamp() uintptr {
	if s.idle() || s.capture.Load() != nil || s.borrowed && s.captured() {
		return 0
	}
	return s.dev.stamped(s.dev.watch, s.handle)
}

// finish ends the open span. The caller holds the track.
func (s *stream) finish() {
	t := s.track
	t.open = false
	if t.now.end = s.stamp(); t.now.end == 0 {
		s.dev.watch.recycle(t.now.begin)
		return
	}
	t.closed = append(t.closed, t.now)
}

// reportPassed reports the spans that have passed, in order, without waiting. The caller
// holds the track.
func (s *stream) reportPassed() {
	t, d := s.track, s.dev
	done := 0
	for ; done < len(t.closed) && !d.gone.Load(); done++ {
		x := &t.closed[done]
		r := d.call(&d.drv.eventQuery, x.end)
		if r == errNotReady {
			break
		}
		if r == success {
			d.watch.reportSpan(d, x)
		}
	}
	if done > 0 {
		t.closed = append(t.closed[:0], t.closed[done:]...)
	}
}

// reportSpan reads the times of a span, reports it and recycles its events. Now and then the
// end of a span becomes the reference.
func (w *watch) reportSpan(d *Device, x *timing) {
	w.mu.Lock()
	begin, ok := w.eventTime(d, x.begin)
	end, both := w.eventTime(d, x.end)
	w.free = append(w.free, x.begin)
	if both && time.Duration(end-w.zero) > w.serves {
		w.free = append(w.free, w.ref)
		w.ref, w.zero = x.end, end
	} else {
		w.free = append(w.free, x.end)
	}
	w.mu.Unlock()
	if ok && both {
		x.Begin, x.End = begin, max(begin, end)
		w.WorkDone(x.Work)
	}
}

// eventTime returns the time of an event that has passed.
func (w *watch) eventTime(d *Device, e uintptr) (int64, bool) {
	f := d.tryCall(&d.drv.eventElapsedTime, uintptr(pointer(&w.out)), w.ref, e)
	return w.zero + int64(float64(w.out)*1e6), f == nil
}
