// This file owns capture: the work of the streams that take part, as a list of
// steps in the order they were issued.

package check

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
)

// capture is a recording under way. Its steps, run again in order, are what a
// replay means; the branches become lanes.
type capture struct {
	origin   *stream
	branches []*branch
	steps    []step
	marks    int // recordings inside
	slots    map[device.Slot]int
	err      *device.CaptureError
	ended    bool
}

// branch is what one stream adds to a capture. known[i] is how many steps of
// branch i its next work is ordered after.
type branch struct {
	capture *capture
	stream  *stream
	index   int
	known   []int
	last    string // its last work, for messages
	number  int
}

// step is a piece of a graph: an operation, or a record or wait of an event,
// inside (mark) or across its border (event).
type step struct {
	kind   stepKind
	branch int
	op     *op
	mark   int
	event  *event
	site   *Site
	stream string
}

type stepKind uint8

const (
	doWork stepKind = iota
	recordInside
	waitInside
	recordOutside
	waitOutside
)

// place is a recording inside a capture.
type place struct {
	branch *branch
	mark   int
	known  []int
	site   *Site
}

func (s *stream) BeginCapture() {
	c := s.lock()
	defer c.unlock()
	if s.capture != nil {
		panic("check: stream " + s.name + " is captured already; call EndCapture first")
	}
	if s.inner != nil {
		s.inner.BeginCapture()
	}
	k := &capture{origin: s, slots: map[device.Slot]int{}}
	s.capture = k.join(s)
}

func (s *stream) Capturing() bool {
	c := s.lock()
	defer c.unlock()
	return s.capture != nil
}

func (k *capture) join(s *stream) *branch {
	b := &branch{capture: k, stream: s, index: len(k.branches)}
	k.branches = append(k.branches, b)
	return b
}

// addStep counts a step of the branch, which the origin must wait for.
func (b *branch) addStep(t step) {
	for len(b.known) <= b.index {
		b.known = append(b.known, 0)
	}
	b.known[b.index]++
	t.branch, t.stream = b.index, b.stream.name
	b.capture.steps = append(b.capture.steps, t)
}

// addOp records an operation.
func (b *branch) addOp(o *op) {
	b.number++
	o.number, o.graph = b.number, b.capture
	b.last = fmt.Sprintf("%s #%d at %s", o.name, o.number, o.site)
	b.addStep(step{kind: doWork, op: o})
}

// label notes the slot of the launch that is recorded next.
func (b *branch) label(slot device.Slot) {
	if slot == 0 {
		return
	}
	if _, twice := b.capture.slots[slot]; twice {
		panic("check: two launches of one capture have the same slot; give each its own")
	}
	b.capture.slots[slot] = len(b.capture.steps)
}

func (b *branch) record(e *event, site *Site) {
	if e.is(device.External) {
		b.last = fmt.Sprintf("the record at %s", site)
		b.addStep(step{kind: recordOutside, event: e, site: site})
		return
	}
	k := b.capture
	e.captured = &place{branch: b, mark: k.marks, known: append([]int(nil), b.known...), site: site}
	k.steps = append(k.steps, step{kind: recordInside, branch: b.index, stream: b.stream.name, mark: k.marks, event: e, site: site})
	k.marks++
}

func (b *branch) wait(e *event, site *Site) {
	switch p := e.captured; {
	case p != nil && p.branch.capture.ended:
		b.spoil("it waits for an event of another capture", "make the event External")
	case p != nil && p.branch.capture != b.capture:
		b.spoil("it waits for an event of another capture that is under way", "make the event External")
	case p != nil:
		for i, n := range p.known {
			for len(b.known) <= i {
				b.known = append(b.known, 0)
			}
			b.known[i] = max(b.known[i], n)
		}
		b.last = fmt.Sprintf("the wait at %s", site)
		b.addStep(step{kind: waitInside, mark: p.mark, site: site, event: e})
	case e.is(device.External):
		b.last = fmt.Sprintf("the wait at %s", site)
		b.addStep(step{kind: waitOutside, event: e, site: site})
	case e.mark != nil:
		b.spoil(fmt.Sprintf("at %s it waits for an event that was recorded outside of the capture, at %s", site, e.mark.site),
			"record the event inside, or make it External")
	}
}

// spoil stores the first reason why there will be no graph, and returns it.
func (b *branch) spoil(why, do string) error {
	k := b.capture
	if k.err == nil {
		k.err = &device.CaptureError{Stream: b.stream.name, Why: why, Do: do}
	}
	return k.err
}

func (s *stream) EndCapture() (device.Graph, error) {
	c := s.lock()
	defer c.unlock()
	if s.capture == nil || s.capture.capture.origin != s {
		panic("check: EndCapture on stream " + s.name + ", which did not call BeginCapture")
	}
	k := s.capture.capture
	k.ended = true
	for _, b := range k.branches {
		b.stream.capture = nil
	}
	var inner device.Graph
	var err error
	if s.inner != nil {
		inner, err = s.inner.EndCapture()
	}
	if mine := k.firstError(s.dev); mine != nil {
		if inner != nil {
			_ = inner.Close()
		}
		return nil, mine
	}
	if err != nil {
		return nil, err
	}
	g := &graph{dev: s.dev, inner: inner, capture: k, steps: k.steps}
	s.dev.open[g] = c.sites.callSite()
	return g, nil
}

// firstError returns why there is no graph: an earlier report, a call that cannot be
// captured, or a stream whose work the origin does not wait for.
func (k *capture) firstError(d *dev) error {
	if err := d.err(); err != nil {
		return err
	}
	if k.err != nil {
		return k.err
	}
	origin := k.branches[0]
	for i, b := range k.branches[1:] {
		at := 0
		if i+1 < len(origin.known) {
			at = origin.known[i+1]
		}
		if at < b.known[b.index] {
			return &device.CaptureError{
				Stream: k.origin.name,
				Why:    fmt.Sprintf("stream %q took part and was not joined; its last work is %s", b.stream.name, b.last),
				Do:     "record an event on it after that and wait for the event here",
			}
		}
	}
	return nil
}
