// This file owns the seeded scheduler. It holds the work of all streams back and
// executes it one operation at a time on one stream of the inner device.

package check

import (
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
)

// Schedule chooses the order in which the work of all streams is executed. In the
// zero Schedule that is the order of issue: every operation is executed as soon as
// it is issued. A hold keeps one operation back, and with it the later work of its
// stream, while work of other streams overtakes it. Every order that the events
// allow is a set of holds, and a short set is a short explanation of a failure.
type Schedule struct {
	// Seed chooses the holds; zero chooses none. The same seed makes the same
	// choices for a program that issues the same work.
	Seed uint64
	// Holds gives the holds instead of the seed, as [Explore] prints them. The seed
	// then only decides between operations that are due at the same time. New
	// panics if Holds cannot be read.
	Holds string

	fixed []hold // the same, already read; nil leaves the choice to Holds and Seed
}

// hold keeps an operation back.
type hold struct {
	Stream int // the stream's number, in order of NewStream
	Lane   int // 0: the stream itself; beyond: side branches of graphs it replays
	Op     int // the operation's number in the lane, from zero
	// For is how many operations are issued meanwhile. A longer hold ends
	// earlier when the host waits for the operation.
	For uint64
}

// forever holds an operation until the host waits for it.
const forever uint64 = 1 << 40

// noHolds is how a schedule without holds is written; the empty string leaves the
// choice to the seed.
const noHolds = "none"

// formatHolds writes holds as Schedule.Holds has them: "0.0.3=16 1.0.2=forever" holds
// the operation 3 of stream 0 and the operation 2 of stream 1, both of lane 0.
func formatHolds(holds []hold) string {
	if len(holds) == 0 {
		return noHolds
	}
	words := make([]string, len(holds))
	for i, h := range holds {
		words[i] = fmt.Sprintf("%d.%d.%d=", h.Stream, h.Lane, h.Op)
		if h.For >= forever {
			words[i] += "forever"
		} else {
			words[i] += strconv.FormatUint(h.For, 10)
		}
	}
	return strings.Join(words, " ")
}

// parseHolds reads what formatHolds writes.
func parseHolds(text string) ([]hold, error) {
	holds := []hold{}
	if text == noHolds {
		return holds, nil
	}
	for _, word := range strings.Fields(text) {
		h := hold{For: forever}
		place, length, _ := strings.Cut(word, "=")
		_, err := fmt.Sscanf(place, "%d.%d.%d", &h.Stream, &h.Lane, &h.Op)
		if err == nil && length != "forever" {
			h.For, err = strconv.ParseUint(length, 10, 64)
		}
		if err != nil {
			return nil, fmt.Errorf(`expected holds such as "0.0.3=16 1.0.2=forever", got %q`, word)
		}
		holds = append(holds, h)
	}
	return holds, nil
}

type spot struct{ stream, lane, op int }

// schedule is the scheduler's state.
type schedule struct {
	seed   uint64
	holds  map[spot]uint64 // nil: the seed chooses
	last   *dev            // whose serial stream got work last
	calls  atomic.Int64    // host callbacks that are not done
	kept   bool            // keep taken, for shrinking
	taken  []hold          // the holds so far
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
	holds := o.fixed
	if holds == nil && o.Holds != "" {
		var err error
		if holds, err = parseHolds(o.Holds); err != nil {
			panic("check: Schedule.Holds: " + err.Error())
		}
	}
	if holds != nil {
		s.holds = map[spot]uint64{}
		for _, h := range holds {
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

// queue holds entries in order. Its memory is used again once it is empty.
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

// enqueue returns the entry of a piece of work, which is due now or after its hold.
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
		held = forever
	}
	e := entry{act: a, held: held, key: (a.seq+held)<<tieBits | chance>>(64-tieBits)}
	if held >= forever {
		e.key = 1<<63 | chance>>1
	}
	if held > 0 && s.kept {
		s.taken = append(s.taken, hold{at.stream, at.lane, at.op, held})
	}
	return e
}

// choose returns the seed's hold for an operation. It depends on nothing but the
// seed and the place, so that leaving one hold out leaves the others alone.
// Seeds take turns in what they try: nothing until the host waits and then any
// order, whole streams that come last, single operations that come last, small
// disorder, and a mixture.
func (s *schedule) choose(at spot) (held, chance uint64) {
	stream := mix(s.seed, uint64(at.stream), uint64(at.lane), 1<<32)
	op := mix(s.seed, uint64(at.stream), uint64(at.lane), uint64(at.op))
	switch dice := op >> 8 & 0xff; s.seed % 5 {
	case 0:
		held = forever
	case 1:
		if stream%2 == 0 {
			held = forever
		}
	case 2:
		if op%8 == 0 {
			held = forever
		}
	case 3:
		if op%2 == 0 {
			held = 1 + dice%8
		}
	case 4:
		switch {
		case stream%4 == 0 && op%8 != 0:
			held = forever
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

// settle does the same for one lane. It reports whether the lane passed a recording,
// for which others may be waiting.
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

// passed reports whether a recording's work has been executed.
func (c *Checker) passed(r *recording) bool {
	c.settle()
	return r.done
}

// nextLane returns the lane whose first operation is due first; nil if no lane can go
// on.
func (c *Checker) nextLane() *lane {
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

// runDue executes all that is due.
func (c *Checker) runDue() {
	for l := c.nextLane(); l != nil && l.queue.front().key>>tieBits <= c.seq; l = c.nextLane() {
		c.runFirst(l)
	}
}

// runOne executes the operation that is due first, due or not. There is one
// whenever a queue has work: a wait takes a recording made before it was
// called, so the operation that was issued first of all is held up by nothing.
func (c *Checker) runOne() {
	l := c.nextLane()
	if l == nil {
		panic("check: the scheduler has work left but none that can run; this is a bug of the checker")
	}
	c.runFirst(l)
}

// runFirst executes the first operation of a lane.
func (c *Checker) runFirst(l *lane) {
	e := *l.queue.front()
	l.queue.done++
	if c.sched.traced {
		c.sched.trace = append(c.sched.trace, executed{e.act, e.held})
	}
	for i := range e.act.op.uses {
		// The order of execution can bring a free before a use that it races
		// with; the inner device must not be made to touch such memory.
		if u := &e.act.op.uses[i]; u.buf.gone && e.act.op.frees == nil {
			c.setReport(&UseAfterFree{Use: e.act.describe(u), Free: u.buf.freed.describe(nil), Alloc: *u.buf.alloc})
		}
	}
	c.execute(e.act.op, c.serial(l.stream.dev))
}

// serial returns the stream of a device on which work is executed. When the device
// changes, its work waits for that of the device before, so that operations of all
// devices run one at a time.
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

// flushNow flushes unless a host callback is running, because that callback may be
// waiting for the caller. Otherwise what the program sees depends on the schedule alone.
func (c *Checker) flushNow() {
	if c.sched.calls.Load() == 0 {
		c.flush()
	}
}

// flushed flushes and returns the device's error.
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
