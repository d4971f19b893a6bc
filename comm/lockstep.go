// This file owns the drivers: a function run on every rank, all at once or one
// rank at a time in an order that is always the same.

package comm

import (
	"cmp"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// Run runs f for every rank, each on a goroutine of its own. If one fails, the
// communicator does, so that no rank waits for it; nor does one wait for a rank of
// this process whose f has returned. The error is that of the ranks that failed by
// themselves, or else the communicator's. A panic of a rank is passed on to the
// caller, and a goroutine's end is an error.
func Run(cs []Comm, f func(c Comm) error) error {
	for _, c := range cs {
		if d := drivenBy(c); d != nil {
			d.runs.Add(1)
			defer d.back.Store(false)
		}
	}
	return drive(cs, nil, f)
}

// driven says of a rank in this process how many functions Run runs for it, and
// whether the last of them has returned: then nobody need wait for its calls.
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

// returned wakes up ranks that wait for one whose function has returned.
func returned(c Comm) {
	if d := drivenBy(c); d != nil && d.runs.Add(-1) == 0 {
		d.back.Store(true)
		c.(*Local).g.w.rouse()
	}
}

// Lockstep is Run with one rank running at a time: from where it begins, or was
// let go, to where it waits for others; then comes the next in the order of ranks.
// So the ranks issue their work in the same order in every run, and a seeded
// schedule means the same each time. Ranks that all wait for each other fail at
// once. The ranks are all of a communicator made by NewLocal, and wait for each
// other nowhere but in its calls and in those of what was split from it.
func Lockstep(cs []Comm, f func(c Comm) error) error {
	var w *world
	l := &lockstep{gone: make([]bool, len(cs))}
	for r, c := range cs {
		x, ok := c.(*Local)
		if !ok || len(cs) != len(x.g.w.devs) || x.g.ranks[x.rank] != r {
			panic("comm: Lockstep runs all ranks of a communicator that NewLocal made, in their order")
		}
		w = x.g.w
		l.turn = append(l.turn, make(chan struct{}, 1))
	}
	if !w.lockstep.CompareAndSwap(nil, l) {
		panic("comm: Lockstep runs already")
	}
	defer w.lockstep.Store(nil)
	l.turn[0] <- struct{}{}
	return drive(cs, l, f)
}

// outcome is what became of one rank's function.
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
			o.rethrow(r)
		case !o.returned:
			own = errors.Join(own, fmt.Errorf("rank %d ended its goroutine, as runtime.Goexit does", r))
		case o.err != nil && !errors.As(o.err, &f):
			own = errors.Join(own, fmt.Errorf("rank %d: %w", r, o.err))
		default: // of many that say the same, one
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

// rethrow panics with what a rank did. Errors stay what they are; to others the
// rank's stack is added, which would be lost.
func (o *outcome) rethrow(rank int) {
	if err, ok := o.panicked.(error); ok {
		panic(err)
	}
	panic(fmt.Sprintf("%v\n\nrank %d was here:\n%s", o.panicked, rank, o.stack))
}

// lockstep lets one rank run at a time. Who runs has the turn, and only it
// touches the rest.
type lockstep struct {
	turn []chan struct{}
	gone []bool
	idle int // ranks in a row that had the turn and could not go on
}

// yield passes the turn on and comes back with it. It reports false if all ranks
// that are left have had it in vain.
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

// pass gives the turn to the next rank that is left, unless that is the same.
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
