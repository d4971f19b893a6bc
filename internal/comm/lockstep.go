// This file owns the drivers, which run a function on every rank: all at once, or one rank
// at a time in an order that is always the same.

package comm

import (
	"cmp"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/stowage-dev/stowage/memory"
)

// Run runs f for every rank, each on a goroutine of its own. If f fails on one rank, the
// communicator fails, so that no rank waits for that one. No rank waits for a rank of this
// process whose f has returned either. Run returns the errors of the ranks that failed by
// themselves, or else the error of the communicator. It panics if a rank panics, and
// returns an error if a rank ends its goroutine.
func Run(cs []Comm, f func(c Comm) error) error {
	for _, c := range cs {
		if d := drivenBy(c); d != nil {
			d.runs.Add(1)
			defer d.back.Store(false)
		}
	}
	return drive(cs, nil, f)
}

// driven is the state of a rank in this process that Run drives: how many functions run
// for it, and whether the last of them has returned. No rank waits for its calls then.
type driven struct {
	runs atomic.Int32
	back atomic.Bool
}

func drivenBy(c Comm) *driven {
	if x, ok := c.(*Local); ok {
		return &x.g.w.driven[x.g.ranks[x.rank]]
	}
	return nil
}

// returned wakes the ranks that wait for a rank whose function has returned.
func returned(c Comm) {
	if d := drivenBy(c); d != nil && d.runs.Add(-1) == 0 {
		d.back.Store(true)
		c.(*Local).g.w.wakeAll()
	}
}

// Lockstep is Run with one rank running at a time. A rank runs until it waits for others;
// then the next rank runs, in the order of ranks. So ranks issue their work in the same
// order in every run, and a seeded schedule is reproducible. If all ranks wait for each
// other, they fail at once. cs must be all ranks of a communicator made by NewLocal, in
// order. The ranks may wait for each other only in calls of that communicator and of those
// split from it.
func Lockstep(cs []Comm, f func(c Comm) error) error {
	var w *world
	l := &lockstep{gone: make([]bool, len(cs))}
	for r, c := range cs {
		x, ok := c.(*Local)
		if !ok || len(cs) != len(x.g.w.devs) || x.g.ranks[x.rank] != r {
			panic("comm: Lockstep needs all ranks of a communicator made by NewLocal, in order")
		}
		w = x.g.w
		l.turn = append(l.turn, make(chan struct{}, 1))
	}
	if !w.lockstep.CompareAndSwap(nil, l) {
		panic("comm: Lockstep is already running on this communicator")
	}
	defer w.lockstep.Store(nil)
	l.turn[0] <- struct{}{}
	return drive(cs, l, f)
}

// outcome is how one rank's function ended.
type outcome struct {
	err      error
	panicked any
	stack    []byte
	returned bool
}

func drive(cs []Comm, l *lockstep, f func(c Comm) error) error {
	all := make([]outcome, len(cs))
	var ranks sync.WaitGroup
	for r, c := range cs {
		ranks.Add(1)
		go func() {
			defer ranks.Done()
			if l == nil {
				defer returned(c)
			} else {
				<-l.turn[r]
				defer l.leave(r)
			}
			all[r].run(c, f)
		}()
	}
	ranks.Wait()
	var own, others, unsaid error
	for r, c := range cs {
		o := &all[r]
		var f *Failure
		switch {
		case o.panicked != nil:
			o.rethrow(c.Rank())
		case !o.returned:
			own = errors.Join(own, fmt.Errorf("rank %d ended its goroutine, as runtime.Goexit does", c.Rank()))
		case o.err != nil && !errors.As(o.err, &f):
			own = errors.Join(own, memory.OnRank(c.Rank(), o.err))
		default: // ranks report the same failure; keep one
			others, unsaid = cmp.Or(others, o.err), cmp.Or(unsaid, c.Err())
		}
	}
	return cmp.Or(own, others, unsaid)
}

func (o *outcome) run(c Comm, f func(c Comm) error) {
	defer func() {
		if o.panicked = recover(); o.panicked != nil {
			o.stack = debug.Stack()
		}
		switch {
		case o.panicked != nil:
			c.Abort(fmt.Errorf("it panicked: %v", o.panicked))
		case !o.returned:
			c.Abort(errors.New("it ended its goroutine"))
		case o.err != nil:
			c.Abort(o.err)
		}
	}()
	o.err = f(c)
	o.returned = true
}

// rethrow panics with the value that a rank panicked with. It adds the rank's stack, which
// would be lost, unless the value is an error.
func (o *outcome) rethrow(rank int) {
	if err, ok := o.panicked.(error); ok {
		panic(err)
	}
	panic(fmt.Sprintf("%v\n\nrank %d was here:\n%s", o.panicked, rank, o.stack))
}

// lockstep lets one rank run at a time. The rank that runs has the turn, and only it
// accesses the other fields.
type lockstep struct {
	turn []chan struct{}
	gone []bool
	idle int // consecutive ranks that had the turn and could not go on
}

// yield passes the turn on and waits to get it back. It returns false if no remaining
// rank could go on.
func (l *lockstep) yield(rank int) bool {
	l.idle++
	left := 0
	for _, g := range l.gone {
		if !g {
			left++
		}
	}
	if l.idle > left {
		return false
	}
	if l.pass(rank) {
		<-l.turn[rank]
	}
	return true
}

// pass gives the turn to the next remaining rank. It returns false if there is no other.
func (l *lockstep) pass(rank int) bool {
	for k := 1; k <= len(l.turn); k++ {
		next := (rank + k) % len(l.turn)
		if !l.gone[next] {
			if next == rank {
				return false
			}
			l.turn[next] <- struct{}{}
			return true
		}
	}
	return false
}

func (l *lockstep) leave(rank int) {
	l.gone[rank] = true
	l.pass(rank)
}
