// Package check wraps devices and watches what a program does with them. It
// needs no change to the program: the wrapped device is a [device.Device].
//
//  1. Races. Every operation declares the bytes it uses. The checker keeps a
//     vector clock for each stream and reports the first operation that uses
//     bytes another one uses too, not both only to read, where no event, no
//     stream and no synchronisation of the host orders the two. Whether they
//     happened to run in a harmless order makes no difference: the decision is
//     made when the operation is issued. See [Race].
//  2. Schedules. With [Options].Schedule the operations of all streams are
//     held back and executed one at a time, in an order that the events allow
//     and a seed chooses. [Explore] tries many seeds and shrinks a failure.
//  3. Faults. [Options].Faults fail, corrupt, delay or drop the n-th call of a
//     class, and [Options].Limits lower the capacity. [EveryEdge] drops every
//     wait of a program in turn and tells which ones nobody missed.
//  4. Memory. Uses after a free and double frees are reported with the places
//     of the allocation and the free. See [UseAfterFree] and [DoubleFree].
//
// All of it follows work through graphs: at every replay the captured
// operations take part as if they were issued again.
//
// The first report sticks, like the first error of a device: the operation
// that was reported and all later work are skipped, and every later Sync,
// EndCapture and Close returns the report. Skipping matters, because a racy
// program may write where memory was given back. A call with a dead handle, a
// programmer's error of the contract, panics here too, with the report as its
// value; it does nothing, so it does not stick.
//
// What the checker cannot see: bytes that an operation uses but does not
// declare (schedules find those, by wrong results), Go memory that host
// callbacks share with the program, and an order that one goroutine lacks but
// another has: all goroutines are one host. What does not count as an order: a
// callback that tells the host by a channel that it ran; wait for an event.
//
// This file owns the checker; device.go, stream.go, op.go, event.go, capture.go
// and graph.go the wrapped objects, clock.go, span.go and shadow.go the race
// checker, schedule.go the scheduler, fault.go the rules, report.go and site.go
// what a user reads, explore.go and edges.go the drivers.
package check

import (
	"sync"

	"github.com/stowage-dev/stowage/device"
)

// Options say what to check beside races and uses after a free.
type Options struct {
	// Report is called with the report that sticks, and with those of calls
	// that panic: a *Race, *UseAfterFree or *DoubleFree, from the goroutine that
	// issued the second operation. Tests give t.Fatal.
	Report func(error)
	// Schedule makes the checker execute the streams' work one operation at a
	// time; nil leaves it to the wrapped device.
	Schedule *Schedule
	// Faults are the rules for failing, corrupting, delaying and dropping.
	Faults []Fault
	// Limits lower the capacity of each kind; zero leaves it.
	Limits [device.Kinds]device.Bytes
	// IgnoreRaces turns the race checker off, to see what a schedule does to a
	// program that has races. It needs a schedule: without one, such a program
	// could free memory under a running operation.
	IgnoreRaces bool
}

// Checker watches one or more devices. Streams of one may wait for events of
// another, as the ranks of a process do.
type Checker struct {
	o Options

	mu      sync.Mutex
	sites   sites
	found   error // the first report
	unsaid  error // a report that Options.Report has yet to hear
	devs    []*dev
	streams int

	host  clock  // what the host has synchronised with
	seq   uint64 // pieces of work issued so far
	slots int
	spare []int // slots of closed streams
	lanes []*lane

	imported []*buffer // live handles to memory of others
	foreign  *shadow   // its shadow, whoever imported it: handles may overlap

	counts [classes]int
	faults map[call]Fault
	drops  []string // what the rules dropped, in words

	sched schedule
}

// New makes a checker.
func New(o Options) *Checker {
	if o.IgnoreRaces && o.Schedule == nil {
		panic("check: races can be ignored only under a schedule; set Options.Schedule")
	}
	c := &Checker{
		o:       o,
		slots:   hostSlot + 1,
		foreign: newShadow(0, 1<<62),
		sites:   newSites(),
		faults:  map[call]Fault{},
	}
	for _, f := range o.Faults {
		f.check()
		c.faults[call{f.Class, f.N}] = f
	}
	if o.Schedule != nil {
		c.sched.start(*o.Schedule)
	}
	return c
}

// Wrap returns a device that does what inner does, and checks it. The checked
// device owns inner: closing it closes inner.
func (c *Checker) Wrap(inner device.Device) device.Device {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := &dev{c: c, inner: inner, live: map[*buffer]struct{}{}, loaded: map[*device.Kernel]bool{}}
	c.devs = append(c.devs, d)
	return d
}

// Err is the first report, or nil.
func (c *Checker) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.found
}

func (c *Checker) scheduled() bool { return c.o.Schedule != nil }

// unlock ends a call into the checker and passes a new report on. The callback
// may end the goroutine, so no lock is held.
func (c *Checker) unlock() {
	r := c.unsaid
	c.unsaid = nil
	c.mu.Unlock()
	if r != nil && c.o.Report != nil {
		c.o.Report(r)
	}
}

// find makes err the checker's report unless it has one.
func (c *Checker) find(err error) {
	if c.found == nil {
		c.found, c.unsaid = err, err
	}
}

// begin takes up a piece of work on a lane: it gets its place in time, and its
// uses are checked. It reports whether the work may be executed.
func (c *Checker) begin(l *lane, a *act) bool {
	if c.found != nil {
		return false
	}
	c.seq++
	a.on, a.slot, a.tick, a.seq = l, l.slot, l.step(), c.seq
	for i := range a.op.uses {
		u := &a.op.uses[i]
		if x := u.enter(a, l.clock); x != nil {
			c.find(c.race(x))
			return false
		}
		if f := u.buf.freed; f != nil && f != a {
			c.find(&UseAfterFree{Use: a.describe(u), Free: f.describe(nil), Alloc: *u.buf.alloc})
			return false
		}
	}
	return true
}

// enter puts a use into the shadow of its memory.
func (u *use) enter(a *act, k clock) *conflict {
	c := u.buf.dev.c
	if c.o.IgnoreRaces || u.empty() {
		return nil
	}
	return u.buf.shadow.access(cell{a, u}, k, c.host)
}

// look is an access of the host, at once.
func (c *Checker) look(name string, u use, site *Site) {
	if c.found != nil {
		return
	}
	c.seq++
	a := &act{op: &op{name: name, site: site, uses: []use{u}}, slot: hostSlot, seq: c.seq}
	if x := a.op.uses[0].enter(a, c.host); x != nil {
		c.find(c.race(x))
	}
}
