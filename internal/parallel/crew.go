// This file owns the goroutines that share one piece of work, and how a panic or a fault
// in one of them reaches the caller.

package parallel

import (
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// Crew runs one function in several goroutines at once, the caller's among them. The
// function takes parts of the work until none is left. A crew is used by one caller at a
// time and can be used again; [Crew.Run] allocates nothing.
type Crew struct {
	work    func()
	help    func() // made once: `go` with arguments would allocate a closure
	helpers sync.WaitGroup
	fault   atomic.Pointer[any]
}

// NewCrew returns a crew that runs work.
func NewCrew(work func()) *Crew {
	c := &Crew{work: work}
	c.help = func() {
		defer c.helpers.Done()
		debug.SetPanicOnFault(true) // this goroutine's own; a fault here must not end the process
		c.share()
	}
	return c
}

// Run runs the function here and in so many helpers, and returns when all are done. If one
// of them panics, Run panics with the first such value. An access to bad memory by a helper
// is a panic, too, and Run passes it on whatever the caller's setting of
// [debug.SetPanicOnFault].
func (c *Crew) Run(helpers int) {
	c.helpers.Add(helpers)
	for range helpers {
		go c.help()
	}
	func() {
		defer c.helpers.Wait() // also if the function ends this goroutine: helpers still use its memory
		c.share()
	}()
	if p := c.fault.Swap(nil); p != nil {
		panic(*p)
	}
}

// share runs the function once and keeps what it panicked with.
func (c *Crew) share() {
	returned := false
	defer func() {
		p := recover()
		if returned {
			return
		}
		if p == nil {
			p = "parallel: a function neither returned nor panicked, but ended its goroutine as runtime.Goexit does"
		}
		kept := p // a variable of its own, so that nothing is allocated if all goes well
		c.fault.CompareAndSwap(nil, &kept)
	}()
	c.work()
	returned = true
}
