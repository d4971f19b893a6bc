// This file owns fault injection: classes of calls that are counted, and the faults
// that spoil one of them.

package check

import (
	"fmt"
	"time"

	"github.com/stowage-dev/stowage/device"
)

// Class is a class of calls, which the checker counts and a [Fault] picks one of. A call
// that is captured counts once, and its fault acts at every replay.
type Class uint8

const (
	Allocs   Class = iota // Alloc and Reserve
	Grows                 // Grow beyond the present size, and Backdrop
	Copies                // Copy, Copy2D, Upload and Download
	Launches              // Launch
	Waits                 // Stream.Wait
	Records               // Stream.Record
	Syncs                 // Stream.Sync and Event.Sync
	Makes                 // NewStream and NewEvent
	classes
)

// String returns the name of one call of the class.
func (c Class) String() string {
	return [classes]string{"allocation", "growth", "copy", "launch", "wait", "record", "sync", "stream or event"}[c]
}

// Action is what a fault does to a call.
type Action uint8

const (
	// Fail makes an allocation or growth fail with a [device.OutOfMemory], and a
	// copy, a launch or a new stream or event with a [device.DriverError].
	Fail Action = iota + 1
	// Corrupt overwrites a few bytes that a copy has written with one value. Data
	// that has this value already stays as it is.
	Corrupt
	// Delay delays the beginning of a copy or launch by Fault.For. Under a schedule
	// it delays it until the host waits for it.
	Delay
	// Drop leaves a wait, record or sync out.
	Drop
)

func (a Action) name() string {
	return [...]string{"no action", "fail", "corrupt", "delay", "drop"}[a]
}

// Fault spoils one call of a class. Allocations, growths, and new streams and events can
// fail; copies can fail, be corrupted or delayed; launches can fail or be delayed; waits, records and syncs can
// be dropped. [New] panics on any other combination.
type Fault struct {
	Class Class
	N     int           // the number of the call in its class, from zero
	Do    Action        // what happens to it
	For   time.Duration // how long Delay delays it
}

// check panics on a fault that does not exist.
func (f Fault) check() {
	ok := false
	switch f.Do {
	case Fail:
		ok = f.Class == Allocs || f.Class == Grows || f.Class == Copies || f.Class == Launches || f.Class == Makes
	case Corrupt:
		ok = f.Class == Copies
	case Delay:
		ok = f.Class == Copies || f.Class == Launches
	case Drop:
		ok = f.Class == Waits || f.Class == Records || f.Class == Syncs
	}
	if !ok || f.N < 0 {
		panic(fmt.Sprintf("check: a fault cannot %s %v %d; see check.Fault for what can happen to which class", f.Do.name(), f.Class, f.N))
	}
}

// call is one call of a class.
type call struct {
	class Class
	n     int
}

// Count returns the number of calls of a class so far. A test that knows it can try a
// fault on each of them.
func (c *Checker) Count(k Class) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts[k]
}

// count counts a call and returns the fault for it, if there is one.
func (c *Checker) count(k Class) Fault {
	n := c.counts[k]
	c.counts[k]++
	if len(c.faults) == 0 {
		return Fault{}
	}
	return c.faults[call{k, n}]
}

// make counts a new stream or event and returns the error of its fault, if there is one.
func (d *dev) make(what string) error {
	if d.c.count(Makes).Do != Fail {
		return nil
	}
	return &device.DriverError{Device: d.inner.Info().Name, Call: what, Text: fmt.Sprintf("%v %d fails because of a check.Fault", Makes, d.c.counts[Makes]-1)}
}

// dropped counts a call and reports whether a fault drops it.
func (c *Checker) dropped(k Class, on string, e *event, site *Site) bool {
	if c.count(k).Do != Drop {
		return false
	}
	what := fmt.Sprintf("%s %d on stream %q at %s", k, c.counts[k]-1, on, site)
	if k == Waits && e != nil {
		if r := e.latest(); r != nil {
			what += fmt.Sprintf(", for the event recorded on stream %q at %s", r.stream, r.site)
		}
	}
	c.drops = append(c.drops, what)
	return true
}

// applyFault applies a fault to an operation that is about to be issued.
func (o *op) applyFault(f Fault, dst device.Range) {
	run := o.run
	switch f.Do {
	case Fail:
		o.fails = &device.DriverError{Device: o.dev.inner.Info().Name, Call: o.name, Text: fmt.Sprintf("%v %d fails because of a check.Fault", f.Class, f.N)}
	case Delay:
		o.late = true
		if !o.dev.c.scheduled() {
			o.run = func(s device.Stream) {
				s.Host(func() { time.Sleep(f.For) })
				run(s)
			}
		}
	case Corrupt:
		const few = 16
		n := min(dst.Len, few)
		wrong := dst.Slice((dst.Len-n)/2, n)
		o.run = func(s device.Stream) {
			run(s)
			s.Fill(wrong, 0xC5)
		}
	}
}
