// Package order keeps streams of one device in order by events: waits are issued
// only where nothing else gives the order, and as late as the work that needs them.
package order

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
)

// MaxLanes is the most streams of a set.
const MaxLanes = 8

// clock says, for each lane, up to which of its marks something comes after.
type clock [MaxLanes]uint64

func (c *clock) join(d *clock) {
	for i := range c {
		c[i] = max(c[i], d[i])
	}
}

// Mark is an event at its last recording, with all that comes before it. One that
// was never recorded comes before everything.
type Mark struct {
	event device.Event
	from  int
	clock clock
}

// Done reports whether the work before the mark is over.
func (k *Mark) Done() bool { return k.event.Done() }

// before tells whether whoever knows c comes after the mark already.
func (k *Mark) before(c *clock) bool { return c[k.from] >= k.clock[k.from] }

// Lane is a stream and what its work is known to come after. Waits are kept until
// Flush, and one that another implies is never issued.
type Lane struct {
	Stream  device.Stream
	id      int
	clock   clock
	pending []*Mark
	last    Mark
	graph   *graph // under way, or nil
}

// graph is work of a lane that is gathered and issued as a whole.
type graph struct {
	inside map[*Mark]bool
	wait   func(device.Event)
	before []*Mark // that the whole of it comes after
}

// Record records a mark after the lane's work so far.
func (l *Lane) Record(k *Mark) {
	l.Stream.Record(k.event)
	l.Recorded(k)
}

// Recorded notes that a mark's event is recorded at this point of the lane's work
// already: by a graph that the stream has just been given.
func (l *Lane) Recorded(k *Mark) {
	l.clock[l.id]++
	k.from, k.clock = l.id, l.clock
	l.last = *k
}

// After makes the lane's next work come after a mark; nil is no mark. The mark is
// not recorded again before Flush.
func (l *Lane) After(k *Mark) {
	if k != nil {
		l.pending = append(l.pending, k)
	}
}

// Passed notes that the host has seen a mark's work to be over: what the lane is given
// next comes after it without a wait.
func (l *Lane) Passed(k *Mark) { l.clock.join(&k.clock) }

// Join makes the lane's next work come after the newest mark of another: after all
// of its work, if it marks that.
func (l *Lane) Join(other *Lane) { l.After(&other.last) }

// Flush issues the waits that are left. It comes before work.
func (l *Lane) Flush() {
	for i, k := range l.pending {
		if k.before(&l.clock) || l.implied(i) {
			continue
		}
		switch g := l.graph; {
		case g == nil:
			l.Stream.Wait(k.event)
		case g.inside[k]:
			g.wait(k.event)
		default:
			g.before = append(g.before, k)
		}
		l.clock.join(&k.clock)
	}
	l.pending = l.pending[:0]
}

// Gather begins a graph of the lane: waits for marks that graphs record at every
// replay, which are inside, are given to wait to become part of it, and the others
// are kept for Gathered. The caller gathers the lane's work.
func (l *Lane) Gather(inside map[*Mark]bool, wait func(device.Event)) {
	l.graph = &graph{inside: inside, wait: wait}
}

// Gathered ends the graph, and issues the waits that come before it: the caller
// replays it next.
func (l *Lane) Gathered() {
	if len(l.pending) > 0 {
		panic("order: a graph ends with waits that no work follows; call Flush first")
	}
	g, later := l.graph, l.clock
	l.graph, l.clock, l.pending = nil, clock{}, g.before // a wait inside does not order the work before it
	l.Flush()
	l.clock.join(&later)
}

// Waits reports whether Flush would issue a wait.
func (l *Lane) Waits() bool {
	return slices.ContainsFunc(l.pending, func(k *Mark) bool { return !k.before(&l.clock) })
}

// implied tells whether a later pending wait makes pending wait i needless.
func (l *Lane) implied(i int) bool {
	for _, k := range l.pending[i+1:] {
		if l.pending[i].before(&k.clock) {
			return true
		}
	}
	return false
}

// Set is a set of streams that exchange memory, with the events between them.
type Set struct {
	dev    device.Device
	lanes  []*Lane
	known  clock // what nobody needs to wait for
	events []device.Event
	spare  []*Mark
}

// NewSet returns a set without lanes.
func NewSet(dev device.Device) *Set { return &Set{dev: dev} }

// Lanes returns all lanes so far.
func (s *Set) Lanes() []*Lane { return s.lanes }

// Lane returns the lane of a stream. It makes the lane on the first call for the stream.
func (s *Set) Lane(stream device.Stream) *Lane {
	for _, l := range s.lanes {
		if l.Stream == stream {
			return l
		}
	}
	if len(s.lanes) == MaxLanes {
		panic(fmt.Sprintf("order: stream %q exceeds the %d streams that may exchange memory; use fewer streams", stream.Name(), MaxLanes))
	}
	l := &Lane{Stream: stream, id: len(s.lanes), clock: s.known}
	s.lanes = append(s.lanes, l)
	return l
}

// Mark returns a new mark, which may be recorded any number of times.
func (s *Set) Mark() (*Mark, error) {
	if n := len(s.spare); n > 0 {
		k := s.spare[n-1]
		s.spare, *k = s.spare[:n-1], Mark{event: k.event}
		return k, nil
	}
	e, err := s.dev.NewEvent(0)
	if err != nil {
		return nil, err
	}
	s.events = append(s.events, e)
	return &Mark{event: e}, nil
}

// External returns a mark for an event of the caller, which graphs record.
func External(e device.Event) *Mark { return &Mark{event: e} }

// Drop gives a mark back. Nothing may wait for it afterwards.
func (s *Set) Drop(k *Mark) { s.spare = append(s.spare, k) }

// Settle notes that nobody needs to wait for what came before, on lanes to come
// neither: the host has waited for all of it, or something else orders what comes
// next.
func (s *Set) Settle() {
	for _, l := range s.lanes {
		s.known.join(&l.clock)
	}
	for _, l := range s.lanes {
		l.clock, l.pending, l.graph = s.known, l.pending[:0], nil
	}
}

// Sync waits until the lanes are empty, and settles.
func (s *Set) Sync() (first error) {
	for _, l := range s.lanes {
		if err := l.Stream.Sync(); first == nil {
			first = err
		}
	}
	s.Settle()
	return first
}

// Close closes the events of all marks.
func (s *Set) Close() (first error) {
	for _, e := range s.events {
		if err := e.Close(); first == nil {
			first = err
		}
	}
	s.events, s.spare = nil, nil
	return first
}
