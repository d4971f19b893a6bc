// This file owns exploring: a program run under many schedules, and a failing
// schedule shrunk to the few holds that matter.

package check

import (
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/device"
)

// Program is a program to run under a checker. It opens devices, wraps them with c, does
// its work, compares the results and closes the devices. It returns an error if something
// is wrong; it must not end its goroutine as t.Fatal does. It is run many times.
type Program func(c *Checker) error

// On returns the program that opens one device, wraps it, works on it and closes it. The
// program fails if the work leaves a stream, an event or a graph open.
func On(open func() (device.Device, error), work func(d device.Device) error) Program {
	return func(c *Checker) (err error) {
		inner, err := open()
		if err != nil {
			return err
		}
		d := c.Wrap(inner)
		defer func() {
			// After a failure, what was not closed or freed says nothing new.
			left := d.(*dev).Left()
			if e := d.Close(); err == nil {
				err = errors.Join(e, left)
			}
		}()
		return work(d)
	}
}

// attempt runs a program once. A panic counts as a failure.
func attempt(o Options, p Program, traced bool) (c *Checker, err error) {
	c = New(o)
	c.sched.kept, c.sched.traced = true, traced
	defer func() {
		if x := recover(); x != nil {
			if report, ok := x.(*UseAfterFree); ok {
				err = report
			} else {
				err = fmt.Errorf("panic: %v\n%s", x, debug.Stack())
			}
		}
	}()
	if err = p(c); err == nil {
		err = c.Err()
	}
	return c, err
}

// Explore runs a program under the seeds 1 to n, or only under the seed of o.Schedule if
// there is one. It returns nil if the program never fails. Otherwise it shrinks the
// schedule of the first seed that fails, and the error names the seed, the operations
// that must be held back to make the program fail, and the options that repeat it.
// errors.As finds a [Race] or the program's own error in it.
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

// failure is a seed under which a program fails, with the shortest schedule found that
// makes it fail.
type failure struct {
	Seed  uint64
	Err   error // of the short schedule
	Holds []hold
	// Of is the number of holds that the seed chose.
	Of int
	// Held are the operations that were held back. Executed are all operations from
	// the first of them to the last, in the order of execution.
	Held, Executed []string
}

func (f *failure) Unwrap() error { return f.Err }

func (f *failure) Error() string {
	var s strings.Builder
	fmt.Fprintf(&s, "seed %d fails: %v\n", f.Seed, f.Err)
	if len(f.Holds) == 0 {
		fmt.Fprintf(&s, "  it fails in the order of issue already")
		return s.String()
	}
	fmt.Fprintf(&s, "  it fails with %d held operations, of the %d that the seed chose:", len(f.Holds), f.Of)
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
	fmt.Fprintf(&s, "\n  to repeat it: check.Options{Schedule: &check.Schedule{Seed: %d, Holds: %q}}", f.Seed, formatHolds(f.Holds))
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

// fails reports whether the program fails under a set of holds.
func (s *shrinker) fails(holds []hold) bool {
	if s.tries++; s.tries > maxTries {
		return false
	}
	s.o.Schedule = &Schedule{Seed: s.seed, fixed: append([]hold{}, holds...)}
	_, err := attempt(s.o, s.p, false)
	if err != nil {
		s.err = err
	}
	return err != nil
}

// shrink reduces the holds of a failing seed: first to a set of which no part can be left
// out, then each hold to the shortest power of two. If the program does not fail again
// under the seed's holds, they are kept.
func shrink(o Options, p Program, holds []hold, err error) *failure {
	f := &failure{Seed: o.Schedule.Seed, Err: err, Of: len(holds)}
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

// fewer leaves out smaller and smaller parts as long as the rest fails (delta
// debugging).
func (s *shrinker) fewer(holds []hold) []hold {
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
func (s *shrinker) shorter(holds []hold) {
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
func (f *failure) describe(o Options, p Program) {
	o.Schedule = &Schedule{Seed: f.Seed, fixed: append([]hold{}, f.Holds...)}
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
			if e.held >= forever {
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
