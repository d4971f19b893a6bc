// This file owns the tests of the drivers, and of ranks that return early.

package comm

import (
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/stowage-dev/stowage/device"
)

// In lockstep, ranks that all wait for each other fail at once.
func TestStuck(t *testing.T) {
	x := ofTest(t, 3, 1, Options{})
	err := Lockstep(x.comms, func(c Comm) error {
		s, b := x.streamAndBuffer(c)
		c.Barrier(s)
		c.Recv(s, b.Slice(0, 8), (c.Rank()+1)%3)
		return c.Err()
	})
	wantError(t, err, "and no other rank can go on")
	y := ofTest(t, 2, 1, Options{})
	err = Lockstep(y.comms, func(c Comm) error {
		s, _ := y.streamAndBuffer(c)
		if c.Rank() == 0 {
			return nil // and leaves the other one alone
		}
		c.Barrier(s)
		return c.Err()
	})
	wantError(t, err, "comm: barrier #1 of rank 1 was not made: rank 1 waits in barrier #1, and no other rank can go on")
}

// A rank that returns may let another rank go on, for which a third one waits.
func TestLeavingIsNoStandstill(t *testing.T) {
	x := ofTest(t, 3, 1, Options{})
	err := Lockstep(x.comms, func(c Comm) error {
		s, b := x.streamAndBuffer(c)
		if c.Rank() == 0 {
			c.Recv(s, b.Slice(0, 8), 1)
			return c.Err()
		}
		sub, err := c.Split([]int{1, 2})
		if err != nil {
			return err
		}
		if c.Rank() == 1 {
			sub.Barrier(s)
			wantError(t, sub.Err(), "rank 2 has closed the communicator")
			c.Send(s, b.Slice(0, 8), 0)
		}
		return sub.Close()
	})
	if err != nil {
		t.Error(err)
	}
}

// A rank that returns an error, panics or ends its goroutine blocks no other rank, and
// the caller learns of it.
func TestDrivers(t *testing.T) {
	for name, drive := range map[string]driver{"run": Run, "lockstep": Lockstep} {
		t.Run(name, func(t *testing.T) {
			var x *setting
			fails := func(f func() error) func() error {
				x = ofTest(t, 3, 1, Options{})
				return func() error {
					return drive(x.comms, func(c Comm) error {
						s, _ := x.streamAndBuffer(c)
						c.Barrier(s)
						if c.Rank() == 1 {
							return f()
						}
						c.Barrier(s)
						return c.Err()
					})
				}
			}
			err := fails(func() error { return errBroken })()
			if err == nil || err.Error() != "rank 1: the disk is full" || !errors.Is(err, errBroken) {
				t.Errorf("a rank's error comes back as %v", err)
			}
			wantError(t, fails(func() error { runtime.Goexit(); return nil })(), "rank 1 ended its goroutine")
			wantError(t, x.comms[0].Err(), "rank 1 gave up: it ended its goroutine")
			wantPanic(t, "out of paper\n\nrank 1 was here:\ngoroutine ", func() { _ = fails(func() error { panic("out of paper") })() })
			if p := panicOf(func() { _ = fails(func() error { panic(errBroken) })() }); p != errBroken {
				t.Errorf("a rank's error panics as %v", p)
			}
			wantPanic(t, "work on the closed stream", func() {
				x := ofTest(t, 3, 1, Options{})
				_ = drive(x.comms, func(c Comm) error {
					s, err := x.places[c.Rank()].NewStream("closed")
					if err == nil {
						err = s.Close()
					}
					b := x.places[c.Rank()].bufs[0]
					c.AllGather(s, b.Slice(0, 96), b.Slice(512, 32)) // the last one to come finds out
					return err
				})
			})
		})
	}
	x := ofTest(t, 2, 1, Options{})
	wantPanic(t, "which waits in barrier #1; a rank makes one call at a time", func() {
		_ = Run(x.comms, func(c Comm) error {
			s, _ := x.streamAndBuffer(c)
			if c.Rank() == 0 {
				go func() { c.Abort(fmt.Errorf("%v", panicOf(func() { c.Barrier(s) }))) }()
				c.Barrier(s)
			}
			for c.Err() == nil { // rank 0 would not wait for one that has returned
				runtime.Gosched()
			}
			return nil
		})
		panic(x.comms[0].Err())
	})
	x = ofTest(t, 2, 1, Options{})
	wantPanic(t, "in order", func() { _ = Lockstep(x.comms[:1], func(Comm) error { return nil }) })
	wantPanic(t, "Lockstep is already running", func() {
		_ = Lockstep(x.comms, func(Comm) error { return Lockstep(x.comms, func(Comm) error { return nil }) })
	})
}

// No rank waits for a rank whose function has returned, in any communicator and in any
// order. The next run begins afresh unless a call was lost.
func TestReturnWakesPeers(t *testing.T) {
	for i, calls := range []func(c, sub Comm, s device.Stream, b *device.Buffer){
		func(c, sub Comm, s device.Stream, b *device.Buffer) { c.Barrier(s) },
		func(c, sub Comm, s device.Stream, b *device.Buffer) { sub.Recv(s, b.Slice(0, 8), 1) },
		func(c, sub Comm, s device.Stream, b *device.Buffer) { sub.Recv(s, b.Slice(0, 8), 1) },
		func(c, sub Comm, s device.Stream, b *device.Buffer) {
			sub.Exchange(s, []Message{{1, b.Slice(0, 8)}}, []Message{{1, b.Slice(8, 8)}})
		},
	} {
		late := i%2 == 1
		x := ofTest(t, 3, 1, Options{})
		subs := make([]Comm, 3)
		for range 20 { // ranks that return at different times are no failure
			err := Run(x.comms, func(c Comm) (err error) {
				s, _ := x.streamAndBuffer(c)
				c.Barrier(s)
				if subs[c.Rank()] == nil {
					subs[c.Rank()], err = c.Split([]int{0, 2, 1})
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		err := Run(x.comms, func(c Comm) error {
			if s, b := x.streamAndBuffer(c); c.Rank() != 2 {
				calls(c, subs[c.Rank()], s, b)
				wantError(t, errors.Join(c.Err(), subs[c.Rank()].Err()), "was not made: the function of rank 2 has returned")
				return nil
			}
			for late && waiting(x.comms[0])+waiting(subs[0]) < 2 {
				runtime.Gosched()
			}
			return nil
		})
		var f *Failure
		if !errors.As(err, &f) || f.By != 2 {
			t.Error(err)
		}
		for _, sub := range subs {
			if err := sub.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// waiting returns how many ranks wait in a call.
func waiting(c Comm) (n int) {
	g := c.(*Local).g
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range g.calls {
		if g.calls[i].waiting {
			n++
		}
	}
	return n
}
