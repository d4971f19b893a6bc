// This file owns the checked stream: every call becomes an operation with its
// uses, which is checked and then given to the inner device, to the scheduler,
// or to a capture.

package check

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicekit"
	"github.com/stowage-dev/stowage/memory"
)

// stream is a checked stream. lanes[0] is the stream itself, the others are the
// side branches of graphs it replays.
type stream struct {
	dev     *dev
	name    string
	index   int           // among all streams of the checker
	inner   device.Stream // nil under a schedule
	lanes   []*lane
	capture *branch // where work is recorded, while the stream captures
	limbo   []*op   // frees that wait until nothing runs
	issued  uint64  // pieces of work outside of captures
	closed  bool
}

func (d *dev) NewStream(name string) (device.Stream, error) {
	c := d.c
	c.mu.Lock()
	defer c.unlock()
	if err := cmp.Or(d.err(), d.make("NewStream")); err != nil {
		return nil, err
	}
	s := &stream{dev: d, name: name, index: c.streams}
	switch {
	case !c.scheduled():
		inner, err := d.inner.NewStream(name)
		if err != nil {
			return nil, err
		}
		s.inner = inner
	case d.serial == nil:
		if err := d.openSerial(); err != nil {
			return nil, err
		}
	}
	if d.closed {
		panic("check: stream " + name + " opened on a closed device")
	}
	c.streams++
	s.lanes = []*lane{c.newLane(s, 0)}
	d.streams = append(d.streams, s)
	d.open[s] = c.sites.callSite()
	return s, nil
}

func (d *dev) openSerial() (err error) {
	if d.handOver, err = d.inner.NewEvent(0); err == nil {
		d.serial, err = d.inner.NewStream("schedule")
	}
	return err
}

func (s *stream) Name() string { return s.name }

// Issued returns the count of the inner stream, whose work an observer sees. Under a
// schedule all work runs on one inner stream, so it is counted here.
func (s *stream) Issued() uint64 {
	if s.inner != nil {
		return s.inner.Issued()
	}
	s.dev.c.mu.Lock()
	defer s.dev.c.mu.Unlock()
	return s.issued
}

func whole(r device.Range) device.Rect { return device.Rect{Range: r, Pitch: r.Len, Rows: 1} }

// lock begins a call that issues work.
func (s *stream) lock() *Checker {
	s.dev.c.mu.Lock()
	if s.closed {
		s.dev.c.mu.Unlock()
		panic("check: work on the closed stream " + s.name)
	}
	return s.dev.c
}

func (s *stream) Copy(dst, src device.Range) {
	s.dev.c.usable("copy", dst.Buf, src.Buf)
	devicekit.CheckCopy(dst, src)
	c := s.lock()
	defer c.unlock()
	s.copied(dst.Len)
	d, r := c.inside(dst), c.inside(src)
	o := &op{dev: s.dev, name: "copy", run: func(in device.Stream) { in.Copy(d, r) }}
	o.declare(whole(src), device.Read)
	o.declare(whole(dst), device.Write)
	s.issue(o, Copies, d)
}

func (s *stream) Copy2D(dst, src device.Rect) {
	s.dev.c.usable("2-D copy", dst.Buf, src.Buf)
	devicekit.CheckCopy2D(dst, src)
	if dst.Rows == 0 {
		return
	}
	c := s.lock()
	defer c.unlock()
	s.copied(dst.Len * memory.Bytes(dst.Rows))
	d, r := c.insideRect(dst), c.insideRect(src)
	o := &op{dev: s.dev, name: "2-D copy", run: func(in device.Stream) { in.Copy2D(d, r) }}
	o.declare(src, device.Read)
	o.declare(dst, device.Write)
	s.issue(o, Copies, d.Row(dst.Rows/2))
}

// copied counts a copy outside of graphs.
func (s *stream) copied(n memory.Bytes) {
	if s.capture == nil {
		s.dev.counters.Copies++
		s.dev.counters.CopiedBytes += uint64(n)
	}
}

func (s *stream) Fill(dst device.Range, value byte) {
	s.dev.c.usable("fill", dst.Buf)
	device.CheckAccess(device.Writes(dst))
	c := s.lock()
	defer c.unlock()
	d := c.inside(dst)
	o := &op{dev: s.dev, name: "fill", run: func(in device.Stream) { in.Fill(d, value) }}
	o.declare(whole(dst), device.Write)
	s.issue(o, classes, d)
}

func (s *stream) Launch(l device.Launch) {
	o := s.dev.launch(l)
	c := s.lock()
	defer c.unlock()
	if s.capture == nil {
		s.dev.counters.Launches++
	}
	if c.scheduled() {
		s.dev.prepare(o)
	}
	s.issue(o, Launches, device.Range{})
}

func (s *stream) Host(fn func(), access ...device.Access) {
	c := s.dev.c
	for _, a := range access {
		c.usable("host callback", a.Buf)
		device.CheckAccess(a)
	}
	s.lock()
	defer c.unlock()
	o := &op{dev: s.dev, name: "host callback"}
	inner := slices.Clone(access)
	for i, a := range access {
		o.declare(a.Rect, a.Mode)
		inner[i].Rect = c.insideRect(a.Rect)
	}
	o.run = func(in device.Stream) { in.Host(fn, inner...) }
	if c.scheduled() {
		o.run = func(in device.Stream) {
			c.sched.calls.Add(1)
			in.Host(func() {
				defer c.sched.calls.Add(-1)
				fn()
			}, inner...)
		}
	}
	s.issue(o, classes, device.Range{})
}

func (s *stream) Upload(dst device.Range, src []byte) {
	s.dev.c.usable("upload", dst.Buf)
	device.CheckAccess(device.Writes(dst))
	if int(dst.Len) != len(src) {
		panic(fmt.Sprintf("check: upload of %d bytes to %s: the lengths differ", len(src), dst))
	}
	c := s.lock()
	defer c.unlock()
	if s.capture != nil {
		s.capture.spoil("an upload cannot be captured", "upload before the capture, or copy from host memory")
		if s.inner != nil {
			s.inner.Upload(c.inside(dst), src)
		}
		return
	}
	if c.scheduled() {
		src = slices.Clone(src)
	}
	d := c.inside(dst)
	o := &op{dev: s.dev, name: "upload", run: func(in device.Stream) { in.Upload(d, src) }}
	o.declare(whole(dst), device.Write)
	s.issue(o, Copies, d)
}

func (s *stream) Download(dst []byte, src device.Range) error {
	s.dev.c.usable("download", src.Buf)
	device.CheckAccess(device.Reads(src))
	if int(src.Len) != len(dst) {
		panic(fmt.Sprintf("check: download of %s to %d bytes: the lengths differ", src, len(dst)))
	}
	c := s.lock()
	defer c.unlock()
	if s.capture != nil {
		err := s.capture.spoil("a download makes the host wait", "download after the replay")
		if s.inner != nil {
			_ = s.inner.Download(dst, c.inside(src))
		}
		return err
	}
	s.dev.counters.HostReads++
	var err error
	r := c.inside(src)
	o := &op{dev: s.dev, name: "download", run: func(in device.Stream) { err = in.Download(dst, r) }}
	o.declare(whole(src), device.Read)
	f := c.count(Copies)
	if f.Do == Corrupt && len(dst) > 0 {
		run := o.run
		o.run = func(in device.Stream) { run(in); dst[len(dst)/2] ^= 0xC5 }
	} else {
		o.applyFault(f, r)
	}
	s.issue(o, classes, r)
	l := s.lanes[0]
	if c.scheduled() {
		c.runLane(l)
	}
	c.learn(l.clock)
	return s.dev.firstError(err)
}

func (s *stream) Free(outer *device.Buffer) {
	b := s.freeable(outer)
	c := s.lock()
	defer c.unlock()
	if s.capture != nil {
		s.capture.spoil("memory cannot be freed by a graph", "free it after the capture")
		if s.inner != nil {
			s.inner.Free(b.inner)
		}
		return
	}
	outer.Retire()
	o := &op{dev: s.dev, name: opFree, frees: b}
	size := b.outer.Size()
	if !b.borrowed {
		s.dev.held[outer.Kind()] += size
	}
	o.run = func(in device.Stream) {
		if b.gone = true; !b.borrowed {
			s.dev.held[outer.Kind()] -= size
		}
		in.Free(b.inner)
	}
	all := device.Rect{Range: device.Range{Buf: outer, Len: outer.Max()}, Pitch: outer.Max(), Rows: 1}
	if !b.borrowed || !c.shared(b) {
		o.uses = []use{{newSpan(all), device.Write, b, all}}
	}
	delete(s.dev.live, b)
	b.freed = &act{op: o, on: s.lanes[0]}
	o.site, o.stream = c.sites.callSite(), s.name
	s.issued++
	s.lanes[0].number++
	o.number = s.lanes[0].number
	c.submit(s.lanes[0], b.freed)
	if b.borrowed {
		c.forget(b)
	}
}

// freeable returns the record of a buffer. It panics if another device made the buffer,
// and panics with a report if it was freed before.
func (s *stream) freeable(outer *device.Buffer) *buffer {
	c := s.dev.c
	b := c.recordOf(outer)
	if b.dev != s.dev {
		panic(fmt.Sprintf("check: %s is not memory of %s; free it with the device that made it", outer, s.dev.inner.Info().Name))
	}
	if outer.Live() {
		return b
	}
	c.mu.Lock()
	second := Operation{Name: opFree, Number: s.lanes[0].number + 1, Stream: s.name, Bytes: wholeOf(outer), Site: *c.sites.callSite()}
	c.refuse(&UseAfterFree{Use: second, Free: b.freed.describe(nil), Alloc: *b.alloc})
	return nil
}

func (s *stream) Sync() error {
	c := s.lock()
	if s.capture != nil {
		defer c.unlock()
		err := s.capture.spoil("a synchronisation makes the host wait", "synchronise after the replay")
		if s.inner != nil {
			_ = s.inner.Sync()
		}
		return err
	}
	s.dev.counters.HostSyncs++
	if c.dropped(Syncs, s.name, nil, c.sites.callSite()) {
		defer c.unlock()
		return s.dev.err()
	}
	return s.waitAndUnlock(func() error { return s.inner.Sync() })
}

// waitAndUnlock waits for the stream's work so far and releases the lock.
func (s *stream) waitAndUnlock(wait func() error) error {
	c := s.dev.c
	l := s.lanes[0]
	if c.scheduled() {
		defer c.unlock()
		c.runLane(l)
		err := c.flushed(s.dev)
		c.learn(l.clock)
		return s.dev.firstError(err)
	}
	known := l.clock.clone()
	c.mu.Unlock()
	err := wait()
	c.mu.Lock()
	defer c.unlock()
	c.learn(known)
	return s.dev.firstError(err)
}

func (s *stream) Close() error {
	c := s.lock()
	if s.capture != nil {
		c.mu.Unlock()
		panic("check: stream " + s.name + " closed while it captures; call EndCapture first")
	}
	s.letGo()
	err := s.waitAndUnlock(func() error { return s.inner.Close() })
	c.mu.Lock()
	defer c.unlock()
	s.retireLanes()
	return err
}

// letGo waits for all devices and then executes the frees in limbo.
func (s *stream) letGo() {
	if len(s.limbo) == 0 {
		return
	}
	for _, d := range s.dev.c.devs {
		if !d.closed || d == s.dev {
			_ = d.inner.Sync()
		}
	}
	for _, o := range s.limbo {
		o.run(s.inner)
	}
	s.limbo = nil
}

// retireLanes makes the stream's slots free for reuse. The host has waited for all its
// work.
func (s *stream) retireLanes() {
	c := s.dev.c
	s.closed = true
	delete(s.dev.open, s)
	for _, l := range s.lanes {
		c.spare = append(c.spare, l.slot)
		c.lanes = slices.DeleteFunc(c.lanes, func(o *lane) bool { return o == l })
	}
	s.dev.streams = slices.DeleteFunc(s.dev.streams, func(o *stream) bool { return o == s })
}
