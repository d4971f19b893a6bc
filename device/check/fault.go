// This file owns fault injection: classes of calls that are counted, and rules
// that spoil one of them.

package check

import (
	"fmt"
	"time"

	"github.com/stowage-dev/stowage/device"
)

// Class is a class of calls. A call during capture counts once, when it is
// captured; a fault of it acts at every replay.
type Class uint8

const (
	Allocs   Class = iota // Alloc and Reserve
	Grows                 // Grow beyond the present size, and Backdrop
	Copies                // Copy, Copy2D, Upload and Download
	Launches              // Launch
	Waits                 // Stream.Wait
	Records               // Stream.Record
	Syncs                 // Stream.Sync and Event.Sync
	classes
)

func (c Class) String() string {
	return [classes]string{"allocation", "growth", "copy", "launch", "wait", "record", "sync"}[c]
}

// Action is what a fault does to a call.
type Action uint8

const (
	// Fail makes an allocation or growth run out of memory, and a copy or
	// launch fail with a device.DriverError.
	Fail Action = iota + 1
	// Corrupt overwrites a few bytes of what a copy has written. They are set
	// to one value, so data that holds exactly that value stays.
	Corrupt
	// Delay lets a copy or launch begin late, by Fault.For; under a schedule as
	// late as the host's waits allow.
	Delay
	// Drop leaves a wait, record or sync out.
	Drop
)

func (a Action) String() string {
	return [...]string{"no action", "fail", "corrupt", "delay", "drop"}[a]
}

// Fault spoils call N, from zero, of a class.
type Fault struct {
	Class Class
	N     int
	Do    Action
	For   time.Duration
}

// check panics on a rule without a meaning.
func (f Fault) check() {
	ok := false
	switch f.Do {
	case Fail:
		ok = f.Class == Allocs || f.Class == Grows || f.Class == Copies || f.Class == Launches
	case Corrupt:
		ok = f.Class == Copies
	case Delay:
		ok = f.Class == Copies || f.Class == Launches
	case Drop:
		ok = f.Class == Waits || f.Class == Records || f.Class == Syncs
	}
	if !ok || f.N < 0 {
		panic(fmt.Sprintf("check: there is no fault that makes %v %d %v", f.Class, f.N, f.Do))
	}
}

// call is one call of a class.
type call struct {
	class Class
	n     int
}

// Count is the number of calls of a class so far, so that a test can try a
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

// dropped counts a call and tells whether a rule drops it.
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

// spoilt applies a fault to an operation that is about to be issued.
func (o *op) spoilt(f Fault, dst device.Range) {
	run := o.run
	switch f.Do {
	case Fail:
		o.fails = &device.DriverError{Device: o.dev.inner.Info().Name, Call: o.name, Text: fmt.Sprintf("%v %d fails by rule", f.Class, f.N)}
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
