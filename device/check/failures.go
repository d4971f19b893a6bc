// This file owns the making of every call fail.

package check

import (
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/device"
)

// Failures are what became of a program whose calls of a class failed, one in each run.
type Failures struct {
	Calls    int     // of the class, in the program as it is
	Felt     int     // runs that ended with an error of the device's types
	Survived int     // runs that ended well
	Odd      []error // other errors, and memory that a run left behind
}

// FailEach runs a program once to count its calls of a class, then once for every by-th of
// them, which fails. Work gives back all that it took. The error is that of the program as
// it is.
func FailEach(class Class, by int, open func() (device.Device, error), work func(device.Device) error) (f Failures, err error) {
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
				left = errors.Join(left, fmt.Errorf("%v of %s memory is left", u.Current-u.Pending, device.Kind(k)))
			}
		}
		return c, left, errors.Join(err, d.Close())
	}
	c, left, err := run()
	if err := errors.Join(err, left); err != nil {
		return f, fmt.Errorf("the program fails with all its calls in place: %w", err)
	}
	f.Calls = c.Count(class)
	for n := 0; n < f.Calls; n += by {
		odd := func(err error) { f.Odd = append(f.Odd, fmt.Errorf("%v %d fails: %w", class, n, err)) }
		switch _, left, err := run(Fault{Class: class, N: n, Do: Fail}); {
		case left != nil:
			odd(left)
		case err == nil:
			f.Survived++
		case errors.As(err, new(*device.OutOfMemory)) || errors.As(err, new(*device.DriverError)):
			f.Felt++
		default:
			odd(err)
		}
	}
	return f, nil
}
