// This file owns capture: streams that record their work as lanes of a graph.

package cpu

import (
	"fmt"
	"sync"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicekit"
)

// capture is one recording. Its life cycle:
//
//  1. open: BeginCapture made it; streams join by waiting for its events.
//  2. spoilt (perhaps): a call cannot be captured; work is still recorded, so that
//     nothing runs by mistake.
//  3. ended: EndCapture let all streams go and made the graph or an error.
//
// Streams of one capture may be used by several goroutines, so mu guards all
// of it. Locks are taken in the order stream, event, capture.
type capture struct {
	origin *stream

	mu    sync.Mutex
	lanes []*lane
	err   *device.CaptureError
	ended bool
	table []device.Launch       // the launches that have a slot
	slots map[device.Slot]int   // places in the table
	outer []outer               // external records and waits, in capture order
	held  devicekit.HeldBuffers // the memory that the work declares
}

// lane is what one stream recorded.
type lane struct {
	capture *capture
	stream  *stream
	index   int
	nodes   []node
}

// node is an operation and the places it waits for in other lanes.
type node struct {
	op
	after []place
}

// place is a point in a lane: its first n nodes.
type place struct{ lane, n int }

// outer is an external event's node: at every replay a record makes a ticket
// of this place, and a wait takes the event's ticket.
type outer struct {
	event  *event
	at     place
	record bool
}

func (s *stream) BeginCapture() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lane != nil {
		panic("cpu: stream " + s.name + " is captured already; call EndCapture first")
	}
	c := &capture{origin: s, slots: map[device.Slot]int{}}
	c.mu.Lock()
	defer c.mu.Unlock()
	s.lane = c.join(s)
}

func (s *stream) Capturing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lane != nil
}

// join adds a lane for a stream. The caller holds both locks.
func (c *capture) join(s *stream) *lane {
	l := &lane{capture: c, stream: s, index: len(c.lanes)}
	c.lanes = append(c.lanes, l)
	return l
}

// add appends a node; the caller holds the stream's lock and keeps it while it
// fills the node in.
func (l *lane) add(kind opKind) *op {
	l.nodes = append(l.nodes, node{op: op{kind: kind, index: -1}})
	o := &l.nodes[len(l.nodes)-1].op
	if kind == opLaunch {
		o.launch = new(device.Launch)
	}
	return o
}

// hold notes the memory of work that is recorded.
func (l *lane) hold(bs ...*device.Buffer) {
	l.capture.mu.Lock()
	defer l.capture.mu.Unlock()
	for _, b := range bs {
		l.capture.held.Add(b)
	}
}

func (l *lane) holdLaunch(launch *device.Launch) {
	l.capture.mu.Lock()
	defer l.capture.mu.Unlock()
	l.capture.held.AddLaunch(launch)
}

func (l *lane) here() place { return place{l.index, len(l.nodes)} }

// label adds a launch with a slot to the table. It panics before anything is recorded if
// the slot is taken.
func (l *lane) label(slot device.Slot, launch device.Launch) int {
	c := l.capture
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, twice := c.slots[slot]; twice {
		panic(fmt.Sprintf("cpu: two launches of one capture have slot %d; give each its own", slot))
	}
	c.slots[slot] = len(c.table)
	c.table = append(c.table, launch)
	return len(c.table) - 1
}

func (l *lane) recordExternal(e *event) {
	l.add(opJoin)
	l.outside(outer{event: e, at: l.here(), record: true})
}

func (l *lane) waitExternal(e *event) {
	at := l.here()
	l.add(opWait)
	l.outside(outer{event: e, at: at})
}

func (l *lane) outside(o outer) {
	l.capture.mu.Lock()
	defer l.capture.mu.Unlock()
	l.capture.outer = append(l.capture.outer, o)
}

// wait makes stream s wait for a place in the capture, and joins it to the capture if it
// is not part of it.
func (c *capture) wait(s *stream, from place) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.mu.Lock()
	ended := c.ended
	if !ended && s.lane == nil {
		s.lane = c.join(s)
	}
	c.mu.Unlock()
	switch {
	case ended && s.lane == nil:
		panic("cpu: stream " + s.name + " waits for an event recorded during a capture that has ended; make the event External")
	case ended:
		s.lane.capture.spoil(s, "it waits for an event of another capture", "make the event External")
	case s.lane.capture != c:
		s.lane.capture.spoil(s, "it waits for an event of another capture that is under way", "make the event External")
	default:
		s.lane.add(opJoin)
		n := &s.lane.nodes[len(s.lane.nodes)-1]
		n.after = append(n.after, from)
	}
	return true
}

// spoil notes the first reason why there will be no graph.
func (c *capture) spoil(s *stream, why, do string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = &device.CaptureError{Stream: s.name, Why: why, Do: do}
	}
}

// refuse spoils the capture that the stream takes part in, if any.
func (s *stream) refuse(why, do string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lane == nil {
		return false
	}
	s.lane.capture.spoil(s, why, do)
	return true
}

// captureError returns the reason noted by spoil.
func (s *stream) captureError() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lane == nil {
		return s.dev.err()
	}
	c := s.lane.capture
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (s *stream) EndCapture() (device.Graph, error) {
	s.mu.Lock()
	l := s.lane
	s.mu.Unlock()
	if l == nil || l.capture.origin != s {
		panic("cpu: EndCapture on stream " + s.name + ", which did not call BeginCapture")
	}
	c := l.capture
	c.mu.Lock()
	c.ended = true
	lanes := c.lanes
	c.mu.Unlock()
	for _, l := range lanes {
		l.stream.mu.Lock()
		l.stream.lane = nil
		l.stream.mu.Unlock()
	}
	if c.err != nil {
		return nil, c.err
	}
	if l := c.unjoined(); l != nil {
		return nil, &device.CaptureError{
			Stream: s.name,
			Why:    "stream \"" + l.stream.name + "\" took part and was not joined",
			Do:     "record an event on it after its last work and wait for that event here",
		}
	}
	return s.dev.newGraph(c), nil
}

// unjoined finds a lane whose last work the origin does not wait for, walking
// the edges back from the origin's end.
func (c *capture) unjoined() *lane {
	reached := make([]int, len(c.lanes))
	todo := []place{{0, len(c.lanes[0].nodes)}}
	for len(todo) > 0 {
		p := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for ; reached[p.lane] < p.n; reached[p.lane]++ {
			todo = append(todo, c.lanes[p.lane].nodes[reached[p.lane]].after...)
		}
	}
	for i, l := range c.lanes {
		if reached[i] < len(l.nodes) {
			return l
		}
	}
	return nil
}
