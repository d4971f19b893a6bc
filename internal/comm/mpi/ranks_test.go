// This file owns the tests of ranks over the MPI in memory.

package mpi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/commtest"
	"github.com/stowage-dev/stowage/internal/mpi"
	"github.com/stowage-dev/stowage/memory"
)

// together runs f for every rank at once and returns the errors.
func together(ps []*Process, f func(p *Process) error) error {
	errs := make([]error, len(ps))
	var all sync.WaitGroup
	for r, p := range ps {
		all.Go(func() {
			if err := f(p); err != nil {
				errs[r] = fmt.Errorf("rank %d: %w", r, err)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// Ranks over any MPI pass the suite, directly and through pinned buffers, whenever messages arrive.
func TestConformanceInMemory(t *testing.T) { // SPEC S7.2
	for _, c := range []struct {
		size   int
		staged bool
	}{{2, true}, {3, false}, {3, true}} {
		t.Run(fmt.Sprintf("%d ranks, staged %v", c.size, c.staged), func(t *testing.T) {
			_, ps := startJob(t, c.size, uint64(c.size))
			held := make([]int, c.size)
			for r := range held {
				held[r] = r
			}
			commtest.Run(t, commtest.World{
				Size: c.size,
				Held: held,
				Device: func(rank int) (device.Device, error) {
					d, err := cpu.Open(cpu.Options{Ordinal: rank, Capacity: [memory.Kinds]memory.Bytes{256 * memory.MiB, 64 * memory.MiB}})
					if err == nil {
						d = check.New(check.Options{Report: func(err error) { t.Error(err) }}).Wrap(d)
					}
					return d, err
				},
				Open: func(devs []device.Device) ([]comm.Comm, error) {
					comms := make([]comm.Comm, c.size)
					return comms, together(ps, func(p *Process) (err error) {
						comms[p.Rank()], err = p.Open(devs[p.Rank()], Options{Scratch: 256 * memory.KiB, Staged: c.staged, largest: 10_000})
						return err
					})
				},
				Large: memory.MiB,
			})
		})
	}
}

// What processes find under a launcher, ranks over the MPI in memory find as well.
func TestRanks(t *testing.T) {
	for _, c := range []struct {
		name string
		size int
		tidy bool
		do   func(p *Process) error
	}{
		{"come and go", 2, true, comeAndGo}, {"notes", 2, true, notes}, {"hearsay", 3, false, hearsay}, {"poor", 2, true, poor},
		{"direct", 2, true, direct}, {"replay", 2, true, replayed}, {"absent", 3, false, absent}, {"gone", 3, true, gone}, {"split and gone", 3, false, splitAndGone},
		{"scratch", 2, true, scratch}, {"many", 2, true, many}, {"text", 3, true, text},
		{"many ranks", 18, true, manyRanks}, {"far memory", 2, true, farMemory}, {"long words", 2, true, longWords},
		{"alone", 1, true, alone}, {"in flight", 2, true, inFlight}, {"errors of the end", 2, true, endsBadly},
	} {
		t.Run(c.name, func(t *testing.T) {
			j, ps := startJob(t, c.size, 3)
			j.tidy = c.tidy
			if err := together(ps, c.do); err != nil {
				t.Error(err)
			}
		})
	}
}

// MPI that does not start leaves nothing open, and its error is that of Start.
func TestDoesNotStart(t *testing.T) {
	open := func() (n int) {
		const dir = "/proc/self/fd"
		list, _ := os.ReadDir(dir)
		for _, f := range list {
			if name, err := os.Readlink(filepath.Join(dir, f.Name())); err == nil && strings.Contains(name, "eventfd") {
				n++
			}
		}
		return n
	}
	before := open()
	wrong := errors.New("there is no network")
	const often = 20 // more than earlier processes may close meanwhile
	for range often {
		if _, err := start(func() (library, requests, mpi.Info, error) { return nil, nil, mpi.Info{}, wrong }); err != wrong {
			t.Error(err)
		}
	}
	if after := open(); after >= before+often {
		t.Errorf("%d files are left open", after-before)
	}
}

// The loop rests if there is nothing to poll for, wakes in time for news, and polls while calls wait, less and
// less often.
func TestPauses(t *testing.T) {
	idle, waits := &world{}, &world{staged: true, active: map[*op]struct{}{{}: {}}}
	for _, c := range []struct {
		worlds      []*world
		waited      time.Duration
		least, most time.Duration
	}{
		{nil, 0, time.Minute, 24 * time.Hour},
		{[]*world{idle}, 0, time.Millisecond, 100 * time.Millisecond}, {[]*world{idle}, time.Hour, time.Millisecond, 100 * time.Millisecond},
		{[]*world{idle, waits}, 0, 0, 0}, {[]*world{waits, idle}, loopPolls - 1, 0, 0},
		{[]*world{waits}, loopPolls, 1, loopPolls / 8}, {[]*world{waits, idle}, time.Hour, longPause, longPause},
		{[]*world{{telling: 1}}, 0, 0, 0}, {[]*world{{closing: func() {}}}, 0, 0, 0}, {[]*world{{staged: true}}, 0, time.Millisecond, time.Second},
		{[]*world{{active: waits.active}}, 0, time.Millisecond, time.Second},
	} {
		p := &Process{worlds: map[*world]struct{}{}}
		for _, w := range c.worlds {
			p.worlds[w] = struct{}{}
		}
		if got := p.pause(c.waited); got < c.least || got > c.most {
			t.Errorf("%d worlds, waited %v: it rests for %v, want %v to %v", len(c.worlds), c.waited, got, c.least, c.most)
		}
	}
}
