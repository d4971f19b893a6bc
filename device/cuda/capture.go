// This file owns capture: which streams take part, and why a capture may fail. The driver
// records the nodes; the rules are checked here, so that they are the same on every
// device.

package cuda

import (
	"slices"
	"strconv"
	"sync"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicekit"
)

// capture is one recording. Its life cycle:
//
//  1. open: BeginCapture made it; streams join by waiting for its events.
//  2. spoilt (perhaps): a call cannot be captured; from here on nothing reaches the
//     driver, so that nothing runs by mistake.
//  3. ended: EndCapture let all streams go and made the graph or an error.
//
// Locks are taken in the order event, capture.
type capture struct {
	origin *stream

	mu      sync.Mutex
	members []*member // the origin first
	nodes   int
	err     *device.CaptureError
	ended   bool
	slots   map[device.Slot]*slot
	held    devicekit.HeldBuffers // the memory that the work declares
	events  map[*event]struct{}   // that are nodes
	calls   []*hostCall
}

// member is a stream that takes part. Its clock says which work of which member comes
// before its next work.
type member struct {
	*stream
	clock clock
}

// clock counts steps, one number for each member; those missing are zero.
type clock []int

func (c clock) at(i int) int {
	if i < len(c) {
		return c[i]
	}
	return 0
}

// join returns the later of two clocks, member by member.
func (c clock) join(other clock) clock {
	all := make(clock, max(len(c), len(other)))
	for i := range all {
		all[i] = max(c.at(i), other.at(i))
	}
	return all
}

// slot is a launch that Update may change.
type slot struct {
	node   uintptr
	fn     *function
	launch device.Launch // as it is at present
}

// byCapture reports whether a call failed because of a capture.
func (r result) byCapture() bool { return r >= errCaptureFirst && r <= errCaptureLast }

func (s *stream) Capturing() bool { return s.capture.Load() != nil || s.borrowed && s.captured() }

func (s *stream) BeginCapture() {
	if s.ready() != nil {
		panic("cuda: stream " + s.name + " is captured already; call EndCapture first")
	}
	c := &capture{origin: s, slots: map[device.Slot]*slot{}, events: map[*event]struct{}{}}
	s.join(c)
	s.issue(&s.dev.drv.streamBeginCapture, s.handle, captureRelaxed)
}

// join makes the stream part of a capture. Before that it records an event that marks the
// work that the stream was given.
func (s *stream) join(c *capture) {
	s.border.Lock()
	defer s.border.Unlock()
	s.endTiming()
	if s.before == 0 {
		s.before = s.dev.event()
	}
	if s.before != 0 {
		s.dev.insist(&s.dev.drv.eventRecord, s.before, s.handle)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.members = append(c.members, &member{stream: s})
	s.capture.Store(c)
}

// find returns the stream's place among the members; the caller holds mu.
func (c *capture) find(s *stream) int {
	return slices.IndexFunc(c.members, func(m *member) bool { return m.stream == s })
}

// work counts a node that the stream is given.
func (c *capture) work(s *stream) {
	c.step(s)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes++
}

// hold notes memory that captured work declares.
func (c *capture) hold(b *device.Buffer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held.Add(b)
}

// keep holds an event that is a node of the graph.
func (c *capture) keep(e *event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, known := c.events[e]; !known {
		c.events[e] = struct{}{}
		e.hold()
	}
}

// letGo releases what a capture holds that makes no graph.
func (c *capture) letGo() {
	forget(c.calls...)
	for e := range c.events {
		e.release()
	}
}

// step advances the stream's own time.
func (c *capture) step(s *stream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tick(c.find(s), nil)
}

// tick joins a clock into a member's clock and advances the member's own time.
func (c *capture) tick(i int, seen clock) {
	m := c.members[i]
	m.clock = m.clock.join(seen).join(make(clock, i+1))
	m.clock[i]++
}

// now returns what lies before the stream's next work.
func (c *capture) now(s *stream) clock {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.members[c.find(s)].clock
}

// admit reports whether the stream may wait for a recording of the capture. A stream that
// is not captured joins.
func (c *capture) admit(s *stream, recorded clock) bool {
	c.mu.Lock()
	ended := c.ended
	c.mu.Unlock()
	mine := s.capture.Load()
	switch {
	case mine == nil && ended:
		panic("cuda: stream " + s.name + " waits for an event recorded during a capture that has ended; make the event External")
	case mine == nil:
		s.join(c)
	case mine != c && ended:
		_ = mine.spoil(s, "it waits for an event of another capture", "make the event External")
		return false
	case mine != c:
		_ = mine.spoil(s, "it waits for an event of another capture that is under way", "make the event External")
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tick(c.find(s), recorded)
	return true
}

// spoil notes the first reason why there will be no graph, and returns it.
func (c *capture) spoil(s *stream, why, do string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = &device.CaptureError{Stream: s.name, Why: why, Do: do}
	}
	return c.err
}

func (c *capture) spoilt() *device.CaptureError {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// launch notes the memory of the launch that is about to be made, and keeps its
// slot for it.
func (c *capture) launch(l *device.Launch) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.Slot != 0 {
		if c.slots[l.Slot] != nil {
			panic("cuda: two launches of one capture have the same slot; give each its own")
		}
		c.slots[l.Slot] = &slot{launch: *l}
	}
	c.held.AddLaunch(l)
}

// label finds the node of the launch made just now: it is what later work of
// the stream would depend on.
func (c *capture) label(s *stream, n device.Slot, fn *function) {
	out := new(struct {
		status int32
		id     uint64
		graph  uintptr
		nodes  uint64 // the address of the driver's list
		count  uint64
	})
	d := s.dev
	f := d.tryCall(&d.drv.streamGetCaptureInfo, s.handle, uintptr(pointer(&out.status)), uintptr(pointer(&out.id)),
		uintptr(pointer(&out.graph)), uintptr(pointer(&out.nodes)), uintptr(pointer(&out.count)))
	if f != nil {
		s.judge(f.proc, f.result)
		return
	}
	if out.count != 1 {
		panic("cuda: after a launch the capture has " + strconv.Itoa(int(out.count)) + " last nodes")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.slots[n]
	at.node, at.fn = device.Slice[uintptr](out.nodes, 1)[0], fn
}

func (s *stream) EndCapture() (device.Graph, error) {
	c := s.capture.Load()
	if c == nil || c.origin != s {
		panic("cuda: EndCapture on stream " + s.name + ", which did not call BeginCapture")
	}
	handle, f := s.endCapture(c)
	d := s.dev
	loose := c.unjoined()
	switch {
	case d.err() != nil || c.err != nil:
	case loose != nil:
		c.err = &device.CaptureError{
			Stream: s.name,
			Why:    "stream \"" + loose.name + "\" took part and was not joined",
			Do:     "record an event on it after its last work and wait for that event here",
		}
	case f == nil:
		return d.newGraph(c, handle)
	case f.result.byCapture():
		c.err = &device.CaptureError{Stream: s.name, Why: d.drv.text(f.result), Do: "leave out what the driver cannot capture"}
	default:
		d.broken(f)
	}
	if handle != 0 {
		d.insist(&d.drv.graphDestroy, handle)
	}
	c.letGo()
	if err := d.err(); err != nil {
		return nil, err
	}
	return nil, c.err
}

// endCapture takes all streams out of the capture, on a failed device too, because the host
// cannot wait for a captured stream.
func (s *stream) endCapture(c *capture) (graph uintptr, f *failure) {
	var handle uint64
	f = s.dev.tryCall(&s.dev.drv.streamEndCapture, s.handle, uintptr(pointer(&handle)))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	for _, m := range c.members {
		m.capture.Store(nil)
	}
	return uintptr(handle), f
}

// drop ends a capture for which EndCapture will not be called.
func (s *stream) drop() {
	c := s.capture.Load()
	if c == nil || c.origin != s {
		return
	}
	if g, _ := s.endCapture(c); g != 0 {
		s.dev.insist(&s.dev.drv.graphDestroy, g)
	}
	c.letGo()
}

// unjoined finds a member whose last work the origin does not wait for.
func (c *capture) unjoined() *member {
	origin := c.members[0].clock
	for i, m := range c.members {
		if m.clock.at(i) > origin.at(i) {
			return m
		}
	}
	return nil
}
