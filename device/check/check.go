// Package check wraps devices and checks what a program does with them. The program
// does not change, because a wrapped device is a [device.Device]:
//
//	inner, err := cpu.Open(cpu.Options{})
//	...
//	checker := check.New(check.Options{Report: func(err error) { t.Fatal(err) }})
//	dev := checker.Wrap(inner)
//
// The checker does five things:
//
//  1. It finds races. A race is two operations that use the same bytes, at least one
//     of them to write, without an event, a stream or a wait of the host that orders
//     them. The checker keeps a vector clock for each stream and decides when an
//     operation is issued, so a race is found even if the operations happen to run
//     in a harmless order. See [Race].
//  2. It finds uses of freed memory, second frees included. See [UseAfterFree].
//  3. It runs the work in other orders. With [Options].Schedule it holds the
//     operations of all streams back and executes them one at a time, in an order
//     that the events allow and a seed chooses. [Explore] tries many seeds and
//     shrinks a failure to a few held operations.
//  4. It injects faults. [Options].Faults fail, corrupt, delay or drop the n-th call
//     of a class, and [Options].Limits lower the capacity. [DropEach] drops every
//     wait of a program in turn and reports those that were not missed. [FailEach]
//     makes every allocation fail in turn.
//  5. It finds what is left open. A program that [On] or [FailEach] runs must close
//     its streams, events and graphs; the error says where they were made.
//
// All of this includes graphs: at every replay the captured operations take part as if
// they were issued again.
//
// # Reports
//
// The first report sticks, like the first error of a device. The reported operation and
// all later work are skipped, because a racy program may write to memory that was given
// back, and every later Sync, EndCapture and Close returns the report. A call with a
// dead handle panics, as on every device; the value of the panic is the report, and
// because the call did nothing, that report does not stick.
//
// # Limits
//
// The checker sees only declared bytes. An operation that uses other bytes is found by
// schedules, if its results are wrong. The checker does not see Go memory that host
// callbacks share with the program, and it treats all goroutines as one host. A callback
// that tells the host over a channel that it ran does not order anything; wait for an
// event instead.
//
// # Files
//
// This file owns the checker; device.go, stream.go, op.go, event.go, capture.go and
// graph.go the wrapped objects, clock.go, span.go and shadow.go the race checker,
// schedule.go the scheduler, fault.go the faults, report.go and site.go what a user
// reads, explore.go, edges.go and failures.go what runs a program many times, left.go what
// it leaves open.
package check

import (
	"sync"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Options configure a [Checker]. The zero value finds races and uses of freed memory.
type Options struct {
	// Report, if not nil, is called with the report that sticks and with the
	// reports of calls that panic: a *Race or a *UseAfterFree. It is called on the
	// goroutine that issued the second operation, and may end that goroutine as
	// t.Fatal does.
	Report func(error)
	// Schedule, if not nil, makes the checker execute the work of all streams one
	// operation at a time. Otherwise the wrapped device executes it.
	Schedule *Schedule
	// Faults lists the calls to fail, corrupt, delay or drop.
	Faults []Fault
	// Limits lowers the capacity of each kind of memory; zero leaves it.
	Limits [memory.Kinds]memory.Bytes
	// IgnoreRaces turns the race checker off, to see what a schedule does to a
	// program that has races. It needs a Schedule, because such a program could
	// otherwise free memory under a running operation.
	IgnoreRaces bool
}

// Checker checks one or more devices. A stream of one may wait for an event of another,
// as the ranks of a process do. Its methods may be called from any goroutine.
type Checker struct {
	o Options

	mu      sync.Mutex
	sites   sites
	found   error // the first report
	unsaid  error // a report that Options.Report was not called with yet
	devs    []*dev
	streams int

	host  clock  // what the host has synchronised with
	seq   uint64 // pieces of work issued so far
	slots int
	spare []int // slots of closed streams
	lanes []*lane

	borrowed       []*buffer // live handles to borrowed memory
	borrowedShadow *shadow   // one for all of them, because handles may overlap

	counts [classes]int
	faults map[call]Fault
	drops  []string // descriptions of the calls that faults dropped

	sched schedule
}

// New returns a checker. It panics if an option makes no sense: a fault that does not
// exist, or IgnoreRaces without a Schedule.
func New(o Options) *Checker {
	if o.IgnoreRaces && o.Schedule == nil {
		panic("check: races can be ignored only under a schedule; set Options.Schedule")
	}
	c := &Checker{
		o:              o,
		slots:          hostSlot + 1,
		borrowedShadow: newShadow(0, 1<<62),
		sites:          newSites(),
		faults:         map[call]Fault{},
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

// Wrap returns a device that does what inner does and checks it. The returned device
// owns inner: closing it closes inner. Events, buffers and graphs of a wrapped device
// can be used only with devices of the same checker.
func (c *Checker) Wrap(inner device.Device) device.Device {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := &dev{c: c, inner: inner, live: map[*buffer]struct{}{}, loaded: map[*device.Kernel]bool{}, open: map[any]*Site{}}
	c.devs = append(c.devs, d)
	return d
}

// Err returns the first report, or nil if there is none.
func (c *Checker) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.found
}

func (c *Checker) scheduled() bool { return c.o.Schedule != nil }

// unlock ends a call into the checker and calls Options.Report with a new report. The
// callback may end the goroutine, so the lock is released before.
func (c *Checker) unlock() {
	r := c.unsaid
	c.unsaid = nil
	c.mu.Unlock()
	if r != nil && c.o.Report != nil {
		c.o.Report(r)
	}
}

// setReport makes err the checker's report unless there is one already.
func (c *Checker) setReport(err error) {
	if c.found == nil {
		c.found, c.unsaid = err, err
	}
}

// checkUses gives a piece of work its place in time on a lane and checks its uses for races
// and freed memory. It reports whether the work may be executed.
func (c *Checker) checkUses(l *lane, a *act) bool {
	if c.found != nil {
		return false
	}
	c.seq++
	a.on, a.slot, a.tick, a.seq = l, l.slot, l.step(), c.seq
	for i := range a.op.uses {
		u := &a.op.uses[i]
		if x := u.enter(a, l.clock); x != nil {
			c.setReport(c.race(x))
			return false
		}
		if f := u.buf.freed; f != nil && f != a {
			c.setReport(&UseAfterFree{Use: a.describe(u), Free: f.describe(nil), Alloc: *u.buf.alloc})
			return false
		}
	}
	return true
}

// enter adds a use to the shadow of its memory.
func (u *use) enter(a *act, k clock) *conflict {
	c := u.buf.dev.c
	if c.o.IgnoreRaces || u.empty() {
		return nil
	}
	return u.buf.shadow.access(cell{a, u}, k, c.host)
}

// hostAccess checks an access of the host that happens now.
func (c *Checker) hostAccess(name string, u use, site *Site) {
	if c.found != nil {
		return
	}
	c.seq++
	a := &act{op: &op{name: name, site: site, uses: []use{u}}, slot: hostSlot, seq: c.seq}
	if x := a.op.uses[0].enter(a, c.host); x != nil {
		c.setReport(c.race(x))
	}
}
