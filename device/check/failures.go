// This file owns the test that every call of a program can fail.

package check

import (
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Failures is the result of [FailEach].
type Failures struct {
	Calls    int     // calls of the class in the complete program
	Reported int     // runs that ended with an OutOfMemory or a DriverError
	Survived int     // runs that ended without an error
	Wrong    []error // runs that ended with another error, or left memory or handles behind
}

// FailEach runs a program once to count its calls of a class (Allocs, Grows, Copies,
// Launches or Makes), and then once for each of them, or for every n-th if every is n, and makes
// that call fail. Use it to prove that a program survives failures or reports them, and
// frees its memory and closes its handles in any case. The error is that of the complete
// program.
func FailEach(class Class, every int, open func() (device.Device, error), work func(device.Device) error) (f Failures, err error) {
	run := func(faults ...Fault) (c *Checker, left, err error) {
		c = New(Options{Faults: faults})
		inner, err := open()
		if err != nil {
			return c, nil, err
		}
		d := c.Wrap(inner)
		err = work(d)
		for k, u := range d.Memory().Kind {
			if u.Current != u.Pending {
				left = errors.Join(left, fmt.Errorf("%v of %s memory was not freed", u.Current-u.Pending, memory.Kind(k)))
			}
		}
		left = errors.Join(left, d.(*dev).Left())
		return c, left, errors.Join(err, d.Close())
	}
	c, left, err := run()
	if err := errors.Join(err, left); err != nil {
		return f, fmt.Errorf("the program fails with all its calls in place: %w", err)
	}
	f.Calls = c.Count(class)
	for n := 0; n < f.Calls; n += every {
		odd := func(err error) { f.Wrong = append(f.Wrong, fmt.Errorf("%v %d fails: %w", class, n, err)) }
		switch _, left, err := run(Fault{Class: class, N: n, Do: Fail}); {
		case left != nil:
			odd(left)
		case err == nil:
			f.Survived++
		case errors.As(err, new(*device.OutOfMemory)) || errors.As(err, new(*device.DriverError)):
			f.Reported++
		default:
			odd(err)
		}
	}
	return f, nil
}
