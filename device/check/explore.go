// This file owns exploring: a program run under many schedules, and a failing
// schedule shrunk to the few holds that matter.

package check

import (
	"fmt"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/device"
)

// Program is something to run under a checker: it opens its devices, wraps them
// with c, works, compares its results and closes them. It returns what is
// wrong; it must not end its goroutine, as t.Fatal does. It runs many times.
type Program func(c *Checker) error

// On is the program that works on one device and closes it.
func On(open func() (device.Device, error), work func(d device.Device) error) Program {
	return func(c *Checker) (err error) {
		inner, err := open()
		if err != nil {
			return err
		}
		d := c.Wrap(inner)
		defer func() {
			// After a failure, what was not freed is no news.
			if e := d.Close(); err == nil {
				err = e
			}
		}()
		return work(d)
	}
}

// attempt runs a program once. A panic is a failure like any other.
func attempt(o Options, p Program, traced bool) (c *Checker, err error) {
	c = New(o)
	c.sched.kept, c.sched.traced = true, traced
	defer func() {
		if x := recover(); x != nil {
			switch report := x.(type) {
			case *UseAfterFree:
				err = report
			case *DoubleFree:
				err = report
			default:
				err = fmt.Errorf("panic: %v\n%s", x, debug.Stack())
			}
		}
	}()
	if err = p(c); err == nil {
		err = c.Err()
	}
	return c, err
}

// Explore runs a program under the seeds 1 to n, or under the seed of
// o.Schedule only if there is one, and returns a *Failure for the first seed
// under which it fails.
func Explore(o Options, n int, p Program) error {
	first, last := uint64(1), uint64(n)
	if o.Schedule != nil && o.Schedule.Seed != 0 {
		first, last = o.Schedule.Seed, o.Schedule.Seed
	}
	for seed := first; seed <= last; seed++ {
		o.Schedule = &Schedule{Seed: seed}
		c, err := attempt(o, p, false)
		if err != nil {
			return shrink(o, p, c.sched.taken, err)
		}
	}
	return nil
}

// Failure is a seed under which a program fails, and the shortest schedule
// found that makes it fail too.
type Failure struct {
	Seed  uint64
	Err   error // of the short schedule
	Holds []Hold
	// Of is the number of holds that the seed chose.
	Of int
	// Held and Executed are the operations held back, and all that were
	// executed from the first of them on until the last was, in order.
	Held, Executed []string
}

func (f *Failure) Unwrap() error { return f.Err }

func (f *Failure) Error() string {
	var s strings.Builder
	fmt.Fprintf(&s, "seed %d fails: %v\n", f.Seed, f.Err)
	if len(f.Holds) == 0 {
		fmt.Fprintf(&s, "  it fails in the order of issue already")
		return s.String()
	}
	fmt.Fprintf(&s, "  it takes %d held operations, of the %d that the seed chose:", len(f.Holds), f.Of)
	for _, h := range f.Held {
		fmt.Fprintf(&s, "\n    %s", h)
	}
	s.WriteString("\n  executed from there on:")
	for i, e := range f.Executed {
		if i == maxShown {
			fmt.Fprintf(&s, "\n    and %d more", len(f.Executed)-i)
			break
		}
		fmt.Fprintf(&s, "\n    %s", e)
	}
	fmt.Fprintf(&s, "\n  to run it again: check.Options{Schedule: &check.Schedule{Seed: %d, Holds: %#v}}", f.Seed, f.Holds)
	return s.String()
}

const (
	// maxShown is how many executed operations a failure prints.
	maxShown = 40
	// maxTries bounds the runs that shrinking may take.
	maxTries = 400
)

// shrinker tries smaller sets of holds.
type shrinker struct {
	o     Options
	p     Program
	seed  uint64
	tries int
	err   error // of the last set that failed
}

// fails tells whether the program fails under a set of holds.
func (s *shrinker) fails(holds []Hold) bool {
	if s.tries++; s.tries > maxTries {
		return false
	}
	s.o.Schedule = &Schedule{Seed: s.seed, Holds: append([]Hold{}, holds...)}
	_, err := attempt(s.o, s.p, false)
	if err != nil {
		s.err = err
	}
	return err != nil
}

// shrink reduces the holds of a failing seed: first to a set of which no part
// can be left out, then each to the shortest power of two. A program that fails
// by itself, now and then, keeps the holds of the seed.
func shrink(o Options, p Program, holds []Hold, err error) *Failure {
	f := &Failure{Seed: o.Schedule.Seed, Err: err, Of: len(holds)}
	s := &shrinker{o: o, p: p, seed: o.Schedule.Seed}
	switch {
	case s.fails(nil):
		holds = nil
	case s.fails(holds):
		holds = s.fewer(holds)
		s.shorter(holds)
	}
	if s.err != nil {
		f.Err = s.err
	}
	f.Holds = holds
	f.describe(o, p)
	return f
}

// fewer leaves out ever smaller parts, as long as the rest fails (delta
// debugging).
func (s *shrinker) fewer(holds []Hold) []Hold {
	for part := (len(holds) + 1) / 2; part > 0; {
		smaller := false
		for i := 0; i < len(holds) && len(holds) > 1; {
			rest := slices.Concat(holds[:i], holds[min(i+part, len(holds)):])
			if len(rest) > 0 && s.fails(rest) {
				holds, smaller = rest, true
				continue
			}
			i += part
		}
		if !smaller || part > 1 {
			part /= 2
		}
	}
	return holds
}

// shorter ends holds as early as the failure allows.
func (s *shrinker) shorter(holds []Hold) {
	for i := range holds {
		full := holds[i].For
		for n := uint64(1); n < min(full, 64); n *= 2 {
			holds[i].For = n
			if s.fails(holds) {
				break
			}
			holds[i].For = full
		}
	}
}

// describe runs the short schedule once more to see what it executes.
func (f *Failure) describe(o Options, p Program) {
	o.Schedule = &Schedule{Seed: f.Seed, Holds: append([]Hold{}, f.Holds...)}
	c, _ := attempt(o, p, true)
	from, to := uint64(1)<<63, -1
	for i, e := range c.sched.trace {
		if e.held > 0 {
			from, to = min(from, e.act.seq), i
		}
	}
	for i, e := range c.sched.trace {
		if i > to {
			break
		}
		line := fmt.Sprintf("%s at %s", e.act.describe(nil), e.act.op.site)
		if e.held > 0 {
			until := fmt.Sprintf(", while %d operations are issued", e.held)
			if e.held >= Forever {
				until = ", until the host waits for it"
			}
			f.Held = append(f.Held, line+until)
			line += "  <- held back"
		}
		if e.act.seq >= from {
			f.Executed = append(f.Executed, line)
		}
	}
}
