// This file owns the order in which the operations of several processes happen.

package disktest

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
)

// turns lets one operation happen at a time. Without it operations happen as they come.
type turns struct {
	mu      sync.Mutex
	waiting []turn
}

// turn is an operation that waits.
type turn struct {
	p    *Process
	what string
	go_  chan struct{}
}

func (t *turns) wait(p *Process, what string) {
	if t == nil {
		return
	}
	x := turn{p, what, make(chan struct{})}
	t.mu.Lock()
	t.waiting = append(t.waiting, x)
	t.mu.Unlock()
	<-x.go_
}

// Choose picks one of the processes that are ready, given their names in order. Last is
// the index of the one that was picked before, or -1 if it is not ready.
type Choose func(names []string, last int) int

// Run runs processes at once, with a clock of their own, until all have returned. Before
// each operation on the disk choose decides whose is next, so the same choices give the
// same order. It returns the operations in their order.
func (d *Disk) Run(t *testing.T, choose Choose, work map[*Process]func(p *Process)) (log []string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		d.turns = &turns{}
		defer func() { d.turns = nil }()
		for p, f := range work {
			go f(p)
		}
		last := ""
		for {
			synctest.Wait() // every process waits for its turn, or has returned
			ready := d.turns.ready()
			if len(ready) == 0 {
				return
			}
			var names []string
			for _, x := range ready {
				names = append(names, x.p.name)
			}
			names = slices.Compact(names)
			name := names[choose(names, slices.Index(names, last))]
			next := slices.IndexFunc(ready, func(x turn) bool { return x.p.name == name })
			last = name
			log = append(log, name+": "+ready[next].what)
			d.turns.release(ready[next])
		}
	})
	return log
}

// ready returns what waits, in an order that does not depend on the runtime.
func (t *turns) ready() []turn {
	t.mu.Lock()
	defer t.mu.Unlock()
	slices.SortStableFunc(t.waiting, func(a, b turn) int { return cmp.Or(cmp.Compare(a.p.name, b.p.name), cmp.Compare(a.what, b.what)) })
	return slices.Clone(t.waiting)
}

func (t *turns) release(x turn) {
	t.mu.Lock()
	t.waiting = slices.DeleteFunc(t.waiting, func(y turn) bool { return y.go_ == x.go_ })
	t.mu.Unlock()
	close(x.go_)
}

// Random chooses by chance.
func Random(r *rand.Rand) Choose {
	return func(names []string, _ int) int { return r.IntN(len(names)) }
}

// Switches is an order in which processes run until a switch: a process that can go on
// does so, except at the given operations, where the next one gets its turn. All orders
// of two processes with at most two switches find most races.
func Switches(at ...int) Choose {
	op := 0
	return func(names []string, last int) int {
		op++
		switch {
		case last < 0:
			return 0
		case slices.Contains(at, op):
			return (last + 1) % len(names)
		}
		return last
	}
}
