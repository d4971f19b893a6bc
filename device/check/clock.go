// This file owns happens-before: vector clocks, and the lanes whose work they
// order.

package check

// clock is a vector clock: clock[slot] is how many pieces of work of that slot
// are known to be done. Missing entries are zero.
type clock []uint64

func (c clock) at(slot int) uint64 {
	if slot < len(c) {
		return c[slot]
	}
	return 0
}

// join makes c know what other knows.
func (c *clock) join(other clock) {
	for len(*c) < len(other) {
		*c = append(*c, 0)
	}
	for i, n := range other {
		(*c)[i] = max((*c)[i], n)
	}
}

func (c *clock) set(slot int, n uint64) {
	for len(*c) <= slot {
		*c = append(*c, 0)
	}
	(*c)[slot] = n
}

func (c clock) clone() clock { return append(clock(nil), c...) }

// hostSlot is the host's place in every clock; its accesses have tick zero,
// which is before everything. All goroutines are one host: the checker cannot
// tell them apart, so an order that one goroutine made by synchronising counts
// for what any goroutine issues later. That can hide a race between goroutines,
// and never invents one.
const hostSlot = 0

// lane is a sequence of work in program order: a stream (index 0), or a side
// branch of the graphs that the stream replays (from 1). Replays on one stream
// come one after the other, so all its graphs can share the side lanes.
type lane struct {
	stream *stream
	index  int
	slot   int
	clock  clock // what its next work is ordered after, beside what the host knows
	number int   // operations of the stream so far, for reports
	count  int   // pieces of work so far, for schedules
	queue  queue
	waits  [recentWaits]waited // a ring, for explanations
	nwaits int
}

// recentWaits is how many waits of a lane an explanation looks back at.
const recentWaits = 8

// waited is a call of Wait and the recording it took; nil if the event had
// none.
type waited struct {
	event *event
	took  *recording
	site  *Site
	seq   uint64
}

// recording is a mark in a lane, made by Record. Waits keep the recording they
// took, so a later one does not change them.
type recording struct {
	stream string // as the program knows it: inside graphs, the captured stream
	slot   int
	tick   uint64
	clock  clock
	site   *Site
	done   bool   // the scheduler has passed it
	event  *event // whose recording it is
	inside bool   // it means nothing outside of its graph
}

// newLane returns a lane that starts after all that the host has synchronised with. It
// reuses the slot of a closed stream and continues its count; the host has synchronised
// with all work of that stream, so every old entry stays in order.
func (c *Checker) newLane(s *stream, index int) *lane {
	l := &lane{stream: s, index: index}
	if n := len(c.spare); n > 0 {
		l.slot, c.spare = c.spare[n-1], c.spare[:n-1]
	} else {
		l.slot = c.slots
		c.slots++
	}
	l.clock = c.host.clone()
	c.lanes = append(c.lanes, l)
	return l
}

// step gives the lane's next piece of work its place in time.
func (l *lane) step() uint64 {
	n := l.clock.at(l.slot) + 1
	l.clock.set(l.slot, n)
	return n
}

// mark records the lane's work so far.
func (l *lane) mark(stream string, site *Site, e *event) *recording {
	r := &recording{stream: stream, slot: l.slot, tick: l.clock.at(l.slot), clock: l.clock.clone(), site: site, event: e}
	if c := l.stream.dev.c; c.scheduled() {
		l.queue.push(entry{mark: r})
	}
	return r
}

// wait orders the lane's later work after a recording; nil holds nothing back.
func (l *lane) wait(r *recording) {
	if r == nil {
		return
	}
	l.clock.join(r.clock)
	if c := l.stream.dev.c; c.scheduled() && !r.done {
		l.queue.push(entry{await: r})
	}
}

// noteWait remembers a wait for explanations.
func (l *lane) noteWait(w waited) {
	l.waits[l.nwaits%recentWaits] = w
	l.nwaits++
}

// learn notes that the host has synchronised with all that a clock knows. Lanes are not
// changed: later work comes after all that the host knows, so the shadow can forget those
// accesses.
func (c *Checker) learn(k clock) { c.host.join(k) }
