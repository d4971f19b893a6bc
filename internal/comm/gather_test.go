// This file owns the tests of Gather, which passes bytes between hosts.

package comm

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// Every rank gets what all ranks said, of any lengths, in the order of the communicator's
// ranks, between other calls and without work on a stream.
func TestGather(t *testing.T) {
	for name, drive := range map[string]driver{"run": Run, "lockstep": Lockstep} {
		for _, n := range []int{1, 2, 5} {
			t.Run(fmt.Sprintf("%s/%d", name, n), func(t *testing.T) {
				x := ofTest(t, n, 1, Options{})
				order := rand.New(rand.NewPCG(3, uint64(n))).Perm(n)
				err := drive(x.comms, func(c Comm) error {
					sub, err := c.Split(order)
					if err != nil {
						return err
					}
					for round := range 20 {
						of := func(c Comm, r int) []byte {
							return bytes.Repeat([]byte{byte(round), byte(c.Size()), byte(r)}, (r+round)%4)
						}
						for _, on := range []Comm{c, sub} {
							mine := of(on, on.Rank())
							all, err := on.Gather(mine)
							if err != nil {
								return err
							}
							for i := range mine {
								mine[i] = 0xee // the caller may
							}
							for r := range n {
								if !bytes.Equal(all[r], of(on, r)) {
									t.Errorf("round %d, rank %d: %v of rank %d", round, on.Rank(), all[r], r)
								}
							}
							all[0] = nil // which no other rank sees
						}
					}
					return sub.Close()
				})
				if err != nil {
					t.Error(err)
				}
				for r, at := range x.places {
					if n := at.Counters(); n.Launches+n.Copies != 0 {
						t.Errorf("rank %d was given work: %+v", r, n)
					}
				}
			})
		}
	}
}

// A gather that cannot be made returns why: a rank gave up, closed, returned or called
// something else.
func TestGatherFails(t *testing.T) {
	for name, drive := range map[string]driver{"run": Run, "lockstep": Lockstep} {
		t.Run(name, func(t *testing.T) {
			x := ofTest(t, 3, 1, Options{})
			err := drive(x.comms, func(c Comm) error {
				if c.Rank() == 1 {
					return errBroken
				}
				for range 2 {
					_, err := c.Gather([]byte("here"))
					var f *Failure
					if !errors.As(err, &f) || !errors.Is(err, errBroken) || f.By != 1 || f.Call != "gather #1" {
						t.Errorf("rank %d: %v", c.Rank(), err)
					}
				}
				return nil
			})
			wantError(t, err, "rank 1: the disk is full")

			x = ofTest(t, 2, 1, Options{})
			err = drive(x.comms, func(c Comm) error {
				sub, err := c.Split([]int{0, 1})
				if err != nil {
					return err
				}
				if c.Rank() == 0 {
					_, err := sub.Gather(nil)
					wantError(t, err, "comm: gather #1 of rank 0 was not made: rank 1 has closed the communicator")
				}
				return sub.Close()
			})
			if err != nil {
				t.Error(err)
			}

			x = ofTest(t, 2, 1, Options{})
			wantPanic(t, "make the same calls in the same order on all ranks", func() {
				_ = drive(x.comms, func(c Comm) error {
					s, _ := x.streamAndBuffer(c)
					if c.Rank() == 0 {
						c.Barrier(s)
						return nil
					}
					_, err := c.Gather(nil)
					return err
				})
			})
		})
	}
}

// Gather loses patience as other calls do, and names the ranks that did not come.
func TestGatherLosesPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := ofTest(t, 3, 1, Options{Patience: time.Minute})
		err := Run(x.comms, func(c Comm) error {
			if c.Rank() == 2 {
				time.Sleep(time.Hour)
				return nil
			}
			_, err := c.Gather(nil)
			return err
		})
		var a *Absent
		if !errors.As(err, &a) || !slices.Equal(a.Ranks, []int{2}) || a.Call != "gather #1" {
			t.Error(err)
		}
	})
}
