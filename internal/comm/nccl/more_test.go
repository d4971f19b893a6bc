// This file tests graphs that ranks do not agree on, worlds that cannot be opened, and notes.

package nccl

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/nccl/nccltest"
)

// Ranks that capture, or replay, while others call something else are told of it.
func TestGraphsThatDisagree(t *testing.T) {
	for _, word := range []string{"begin-capture", "replay"} {
		_ = run(t, nccltest.Libraries(2, 0), func(p *place) error {
			capture := func() (comm.Graph, error) {
				return p.c.(comm.Capturer).Capture(p.s, func() error { p.c.Barrier(p.s); return nil })
			}
			var g comm.Graph
			if word == "replay" {
				var err error
				if g, err = capture(); err != nil {
					t.Error(err)
					return err
				}
			}
			switch {
			case p.c.Rank() == 0:
				p.c.Barrier(p.s)
			case word == "replay":
				_ = g.Replay()
			default:
				_, _ = capture()
			}
			err := errors.Join(p.s.Sync(), p.c.Err())
			if err == nil || !strings.Contains(err.Error(), "calls "+word+" #") || !strings.Contains(err.Error(), "calls barrier #") {
				t.Errorf("rank %d: %v, want words of %s", p.c.Rank(), err, word)
			}
			if g != nil && (g.Replay() == nil || g.Close() != nil) {
				t.Errorf("rank %d: a replay after the failure says nothing", p.c.Rank())
			}
			return nil
		})
	}
}

// What a device cannot make or do while a world is opened is an error on all ranks, and nothing
// stays open.
func TestOpenOnABadDevice(t *testing.T) {
	for _, class := range []check.Class{check.Makes, check.Allocs, check.Launches} {
		for n, done := 0, false; !done; n++ {
			good, bad := check.New(check.Options{}), check.New(check.Options{Faults: []check.Fault{{Class: class, N: n, Do: check.Fail}}})
			work := func(devs ...device.Device) error {
				cs, err := open(t, devs, nccltest.Libraries(2, 0))
				if done = err == nil; !done {
					if cs[0] != nil || cs[1] != nil || len(strings.Split(err.Error(), "because of a check.Fault")) < 3 && class != check.Allocs {
						t.Errorf("%v %d: %v", class, n, err)
					}
					return nil
				}
				errs := make([]error, len(cs))
				var ranks sync.WaitGroup
				for r, c := range cs {
					ranks.Go(func() { errs[r] = c.Close() })
				}
				ranks.Wait()
				return errors.Join(errs...)
			}
			err := check.On(func() (device.Device, error) { return openCPU(0) }, func(first device.Device) error {
				err := check.On(func() (device.Device, error) { return openCPU(1) }, func(second device.Device) error { return work(first, second) })(bad)
				if err != nil && (done || strings.Contains(err.Error(), "left open") || class != check.Launches) {
					return err
				}
				return nil
			})(good)
			if err != nil {
				t.Errorf("%v %d: %v", class, n, err)
			}
			if least := map[check.Class]int{check.Makes: 4, check.Allocs: 1, check.Launches: 1}[class]; done && n < least {
				t.Errorf("a world is opened with %d of %v", n, class)
			}
		}
	}
}

// Calls are noted by name, number and ranks when they are compared.
func TestNotes(t *testing.T) {
	var mu sync.Mutex
	notes := map[int][]string{}
	libs := nccltest.Libraries(3, 0)
	places, devs := openWorld(t, libs)
	noted = func(rank int) func(string) {
		return func(call string) {
			mu.Lock()
			defer mu.Unlock()
			notes[rank] = append(notes[rank], call)
		}
	}
	defer func() { noted = nil }()
	all, err := open(t, devs, libs)
	if err != nil {
		t.Fatal(err)
	}
	var ranks sync.WaitGroup
	for r, p := range places {
		ranks.Go(func() {
			c := all[r]
			var err error
			if r != 1 {
				sub, e := c.Split([]int{2, 0})
				if e != nil {
					t.Error(e)
					return
				}
				sub.Barrier(p.s)
				err = errors.Join(p.s.Sync(), sub.Err(), sub.Close())
			}
			c.AllReduce(p.s, p.b.Slice(0, 8), p.b.Slice(0, 8), comm.F32, comm.Sum)
			_, e := c.Gather(nil)
			if err = errors.Join(err, e, p.s.Sync(), c.Err(), c.Close()); err != nil {
				t.Error(err)
			}
		})
	}
	ranks.Wait()
	for r, got := range notes {
		want := []string{"all-reduce 1 of all ranks", "gather 2 of all ranks"}
		if r != 1 {
			want = append(want, "barrier 1 of ranks 0 and 2")
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("rank %d notes %q, want %q", r, got, want)
		}
	}
	if len(notes) != 3 {
		t.Errorf("notes of %d ranks", len(notes))
	}
}

// A world may be captured several times, with several calls each: those of a later capture do not wait for what an earlier
// one recorded, and graphs are replayed in any order.
func TestCapturedAgain(t *testing.T) {
	err := run(t, nccltest.Libraries(2, 1), func(p *place) error {
		var graphs []comm.Graph
		for range 3 {
			g, err := p.c.(comm.Capturer).Capture(p.s, func() error {
				p.c.Barrier(p.s)
				p.c.AllReduce(p.s, p.b.Slice(0, 8), p.b.Slice(0, 8), comm.F32, comm.Sum)
				return nil
			})
			if err != nil {
				return err
			}
			graphs = append(graphs, g)
			p.c.Barrier(p.s)
		}
		for _, i := range []int{2, 0, 1, 2} {
			if err := graphs[i].Replay(); err != nil {
				return err
			}
		}
		err := errors.Join(p.s.Sync(), p.c.Err())
		var got [8]byte
		err = errors.Join(err, p.s.Download(got[:], p.b.Slice(0, 8)))
		// Each of the four replays has doubled 0x40404040, which adds one to the exponent.
		if want := [8]byte{0x40, 0x40, 0x40, 0x42, 0x40, 0x40, 0x40, 0x42}; got != want {
			t.Errorf("rank %d has %x, want %x", p.c.Rank(), got, want)
		}
		for _, g := range graphs {
			err = errors.Join(err, g.Close())
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
