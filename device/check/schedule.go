// This file owns the seeded scheduler: it holds the streams' work back and
// executes it one operation at a time on one stream of the inner device.

package check

import (
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
)

// Schedule chooses the order in which work is executed. Without holds the order
// is that of issue: every operation is executed as soon as it is issued, which
// the events always allow, because a wait takes a recording made before it. A
// hold keeps one operation, and with it what comes behind, waiting while work
// of other streams overtakes it. Every order that the events allow is a set of
// holds, and a short set is a short explanation.
type Schedule struct {
	// Seed chooses the holds; zero chooses none. The same seed makes the same
	// choices for a program that issues the same work.
	Seed uint64
	// Holds, if not nil, are the holds, whatever the seed; it still decides
	// between operations that are due at the same time.
	Holds []Hold
}

// Hold keeps an operation back.
type Hold struct {
	Stream int // the stream's number, in order of NewStream
	Lane   int // 0: the stream itself; beyond: side branches of graphs it replays
	Op     int // the operation's number in the lane, from zero
	// For is how many operations are issued meanwhile. A longer hold ends
	// earlier when the host waits for the operation.
	For uint64
}

// Forever holds an operation until the host waits for it.
const Forever uint64 = 1 << 40

type spot struct{ stream, lane, op int }

// schedule is the scheduler's state.
type schedule struct {
	seed   uint64
	holds  map[spot]uint64 // nil: the seed chooses
	last   *dev            // whose serial stream got work last
	calls  atomic.Int64    // host callbacks that are not done
	kept   bool            // keep taken, for shrinking
	taken  []Hold          // the holds so far
	traced bool            // keep trace, for the description
	trace  []executed
}

// executed is an operation in the order of execution.
type executed struct {
	act  *act
	held uint64
}

func (s *schedule) start(o Schedule) {
	s.seed = o.Seed
	if o.Holds != nil {
		s.holds = map[spot]uint64{}
		for _, h := range o.Holds {
			s.holds[spot{h.Stream, h.Lane, h.Op}] = h.For
		}
	}
}

// entry is a piece of a lane's queue: work, a recording that is made when all
// before it is executed, or a wait until one is.
type entry struct {
	act   *act
	key   uint64 // work is executed in the order of keys, as far as it may be
	held  uint64
	mark  *recording
	await *recording
}

// queue holds entries in order. Its room is used again once it is empty.
type queue struct {
	all  []entry
	done int
}

func (q *queue) push(e entry) {
	if q.done == len(q.all) {
		clear(q.all)
		q.all, q.done = q.all[:0], 0
	}
	q.all = append(q.all, e)
}

func (q *queue) empty() bool   { return q.done == len(q.all) }
func (q *queue) front() *entry { return &q.all[q.done] }

// Keys order the operations that may be executed: by when they are due, in
// operations issued, then by chance. What is held forever is due at the end of
// time, so chance alone decides.
const tieBits = 8

// enqueue makes the entry of a piece of work. It is due now, or after its hold.
func (s *schedule) enqueue(l *lane, a *act) entry {
	at := spot{l.stream.index, l.index, l.count}
	l.count++
	held, chance := uint64(0), uint64(0)
	if s.seed != 0 {
		held, chance = s.choose(at)
	}
	if s.holds != nil {
		held = s.holds[at]
	}
	if a.op.late {
		held = Forever
	}
	e := entry{act: a, held: held, key: (a.seq+held)<<tieBits | chance>>(64-tieBits)}
	if held >= Forever {
		e.key = 1<<63 | chance>>1
	}
	if held > 0 && s.kept {
		s.taken = append(s.taken, Hold{at.stream, at.lane, at.op, held})
	}
	return e
}

// choose is the seed's hold for an operation. It depends on nothing but the
// seed and the place, so that leaving one hold out leaves the others alone.
// Seeds take turns in what they try: nothing until the host waits and then any
// order, whole streams that come last, single operations that come last, small
// disorder, and a mixture.
func (s *schedule) choose(at spot) (held, chance uint64) {
	stream := mix(s.seed, uint64(at.stream), uint64(at.lane), 1<<32)
	op := mix(s.seed, uint64(at.stream), uint64(at.lane), uint64(at.op))
	switch dice := op >> 8 & 0xff; s.seed % 5 {
	case 0:
		held = Forever
	case 1:
		if stream%2 == 0 {
			held = Forever
		}
	case 2:
		if op%8 == 0 {
			held = Forever
		}
	case 3:
		if op%2 == 0 {
			held = 1 + dice%8
		}
	case 4:
		switch {
		case stream%4 == 0 && op%8 != 0:
			held = Forever
		case op%4 == 0:
			held = 1 + dice%64
		}
	}
	return held, op
}

// mix hashes numbers (splitmix64's finaliser after each).
func mix(ns ...uint64) uint64 {
	h := uint64(0x9e3779b97f4a7c15)
	for _, n := range ns {
		h += n + 0x9e3779b97f4a7c15
		h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
		h = (h ^ h>>27) * 0x94d049bb133111eb
		h ^= h >> 31
	}
	return h
}

// settle takes recordings and waits off the queues as far as they are passed.
func (c *Checker) settle() {
	for again := true; again; {
		again = false
		for _, l := range c.lanes {
			again = l.settle() || again
		}
	}
}

// settle tells whether the lane passed a recording, which others may wait for.
func (l *lane) settle() bool {
	passed := false
	for q := &l.queue; !q.empty(); q.done++ {
		e := q.front()
		if e.act != nil || e.await != nil && !e.await.done {
			break
		}
		if r := e.mark; r != nil {
			r.done, passed = true, true
			if e := r.event; e != nil && !e.closed && (e.mark == r || r.inside) {
				l.stream.dev.c.serial(l.stream.dev).Record(e.inner)
			}
		}
	}
	return passed
}

// passed tells whether a recording's work has been executed.
func (c *Checker) passed(r *recording) bool {
	c.settle()
	return r.done
}

// next is the lane whose first operation is due first; nil if no lane can go
// on.
func (c *Checker) next() *lane {
	c.settle()
	var first *lane
	for _, l := range c.lanes {
		if l.queue.empty() || l.queue.front().act == nil {
			continue
		}
		if first == nil || l.queue.front().key < first.queue.front().key {
			first = l
		}
	}
	return first
}

// pump executes all that is due.
func (c *Checker) pump() {
	for l := c.next(); l != nil && l.queue.front().key>>tieBits <= c.seq; l = c.next() {
		c.run(l)
	}
}

// runOne executes the operation that is due first, due or not. There is one
// whenever a queue has work: a wait takes a recording made before it was
// called, so the operation that was issued first of all is held up by nothing.
func (c *Checker) runOne() {
	l := c.next()
	if l == nil {
		panic("check: the scheduler has work left and none that can run; this is a fault of the checker")
	}
	c.run(l)
}

// run executes the first operation of a lane.
func (c *Checker) run(l *lane) {
	e := *l.queue.front()
	l.queue.done++
	if c.sched.traced {
		c.sched.trace = append(c.sched.trace, executed{e.act, e.held})
	}
	for i := range e.act.op.uses {
		// The order of execution can bring a free before a use that it races
		// with; the inner device must not be made to touch such memory.
		if u := &e.act.op.uses[i]; u.buf.gone && e.act.op.frees == nil {
			c.find(&UseAfterFree{Use: e.act.describe(u), Free: u.buf.freed.describe(nil), Alloc: *u.buf.alloc})
		}
	}
	c.execute(e.act.op, c.serial(l.stream.dev))
}

// serial is the stream of a device on which work is executed. When the device
// changes, its work waits for that of the other one, so that operations run one
// at a time over all devices.
func (c *Checker) serial(d *dev) device.Stream {
	from := c.sched.last
	c.sched.last = d
	switch {
	case from == nil || from == d || from.closed:
	case from.inner.Info().Backend == d.inner.Info().Backend:
		from.serial.Record(from.handOver)
		d.serial.Wait(from.handOver)
	default:
		_ = from.serial.Sync() // an error stays with the device and comes back
	}
	return d.serial
}

// flush waits until all that was handed to inner devices is done.
func (c *Checker) flush() {
	if d := c.sched.last; d != nil && !d.closed {
		_ = d.serial.Sync()
	}
}

// flushNow is flush for calls that must not wait. What the program sees then
// depends on the schedule alone, unless a host callback is under way: that may
// be waiting for the very caller.
func (c *Checker) flushNow() {
	if c.sched.calls.Load() == 0 {
		c.flush()
	}
}

// flushed is flush, and returns the device's error.
func (c *Checker) flushed(d *dev) error {
	c.flush()
	if d.serial == nil {
		return d.inner.Sync()
	}
	return d.serial.Sync()
}

// runUntil executes until a recording is passed, runLane until a lane is empty,
// runAll until all lanes of a device are.
func (c *Checker) runUntil(r *recording) {
	for !c.passed(r) {
		c.runOne()
	}
}

func (c *Checker) runLane(l *lane) {
	for c.settle(); !l.queue.empty(); c.settle() {
		c.runOne()
	}
}

func (c *Checker) runAll(d *dev) {
	for _, s := range d.streams {
		for _, l := range s.lanes {
			c.runLane(l)
		}
	}
}
