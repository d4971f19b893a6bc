// This file owns checked graphs and their replay.

package check

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
)

// graph is a capture that can be replayed. A replay runs its steps as if they
// were issued again, on the replaying stream and its side lanes.
type graph struct {
	dev     *dev
	inner   device.Graph // nil under a schedule
	capture *capture
	steps   []step // replays issued before an Update keep the operation they had
	replays int
	last    *recording // the end of the replay issued last
	closed  bool
}

func (g *graph) Nodes() int {
	if g.inner != nil {
		return g.inner.Nodes()
	}
	n := 0
	for _, t := range g.steps {
		if t.kind == doWork || t.kind == waitOutside {
			n++
		}
	}
	return n
}

func (g *graph) Update(slot device.Slot, l device.Launch) error {
	o := g.dev.launch(l)
	c := g.dev.c
	c.mu.Lock()
	defer c.unlock()
	i, known := g.capture.slots[slot]
	if !known {
		return fmt.Errorf("%s: the graph has no launch with slot %d; set Launch.Slot during capture", g.dev.inner.Info().Name, slot)
	}
	old := g.steps[i].op
	was := old.launch
	if was.Kernel != l.Kernel || was.Grid != l.Grid || was.Block != l.Block || was.Shared != l.Shared {
		return fmt.Errorf("%s: slot %d holds kernel %s; an update keeps the kernel and its shape, so capture again", g.dev.inner.Info().Name, slot, was.Kernel.Name)
	}
	if g.inner != nil && old.fails == nil { // the inner device never got a launch that fails
		if err := g.inner.Update(slot, *o.launch); err != nil {
			return err
		}
	}
	o.number, o.stream, o.site, o.graph, o.fails, o.late = old.number, old.stream, c.sites.callSite(), old.graph, old.fails, old.late
	g.steps[i].op = o
	return nil
}

func (s *stream) Replay(dg device.Graph) {
	c := s.lock()
	defer c.unlock()
	g, ok := dg.(*graph)
	switch {
	case !ok || g.dev != s.dev:
		panic(fmt.Sprintf("check: a %T is not a graph of this device", dg))
	case g.closed:
		panic("check: a closed graph is replayed")
	}
	if s.capture != nil {
		_ = s.capture.spoil("a graph cannot be replayed inside a capture", "replay it before or after")
		if s.inner != nil {
			s.inner.Replay(g.inner)
		}
		return
	}
	s.dev.counters.Replays++
	s.issued++
	if !s.replay(g) || s.dev.err() != nil {
		return
	}
	if s.inner != nil {
		if err := g.failure(); err != nil {
			s.dev.failed = err
			return
		}
		s.inner.Replay(g.inner)
		return
	}
	c.runDue()
}

// failure returns what a rule wants of an operation inside the graph.
func (g *graph) failure() error {
	for _, t := range g.steps {
		if t.kind == doWork && t.op.fails != nil {
			return t.op.fails
		}
	}
	return nil
}

// replay runs the steps on the stream's lanes and reports whether all of them
// may be executed. Replays of one graph come one after the other.
func (s *stream) replay(g *graph) bool {
	c := s.dev.c
	for len(s.lanes) < len(g.capture.branches) {
		s.lanes = append(s.lanes, c.newLane(s, len(s.lanes)))
	}
	g.replays++
	s.lanes[0].wait(g.last)
	marks := make([]*recording, g.capture.marks)
	acts := make([]act, len(g.steps))
	for i := range g.steps {
		t := &g.steps[i]
		l := s.lanes[t.branch]
		switch t.kind {
		case doWork:
			acts[i] = act{op: t.op, replay: g.replays}
			if !c.checkUses(l, &acts[i]) {
				return false
			}
			if c.scheduled() {
				l.queue.push(c.sched.enqueue(l, &acts[i]))
			}
		case recordInside:
			marks[t.mark] = l.mark(t.stream, t.site, nil)
			if t.event.is(device.Timing) {
				marks[t.mark].event, marks[t.mark].inside = t.event, true
			}
		case waitInside:
			l.noteWait(waited{&event{mark: marks[t.mark]}, marks[t.mark], t.site, c.seq})
			l.wait(marks[t.mark])
		case recordOutside:
			t.event.mark = l.mark(t.stream, t.site, t.event)
		case waitOutside:
			l.noteWait(waited{t.event, t.event.mark, t.site, c.seq})
			l.wait(t.event.mark)
		}
	}
	g.last = s.lanes[0].mark(s.name, nil, nil)
	return true
}

// Close ends the graph; under a schedule its replays stay in the queues.
func (g *graph) Close() error {
	c := g.dev.c
	c.mu.Lock()
	defer c.unlock()
	if g.closed {
		panic("check: graph closed twice")
	}
	g.closed = true
	delete(g.dev.open, g)
	if g.inner != nil {
		return g.inner.Close()
	}
	return nil
}
