// This file owns the tests of the collectives under device/check: races, seeded
// schedules, and the proof that every wait is needed and watched.

package comm

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/memory"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
)

// under opens CPU devices under a checker.
func under(c *check.Checker) opener {
	return func(rank int) (device.Device, error) {
		d, err := openCPU(rank)
		if err != nil {
			return nil, err
		}
		return c.Wrap(d), nil
	}
}

// checked returns the program for the checker's drivers.
func (p *program) checked(o Options) check.Program {
	return func(c *check.Checker) error { return p.play(Lockstep, false, under(c), o) }
}

// replayed returns the program with the work of all ranks captured in one graph. The
// graph is replayed a few times with other work between.
func (p *program) replayed(times int) check.Program {
	return func(c *check.Checker) error { return p.capture(under(c), times) }
}

// capture runs a program of one stream as one graph of all ranks. Each rank rewrites its
// memory after each replay.
func (p *program) capture(open opener, times int) (err error) {
	x, err := newSetting(p.n, 1, false, open, Options{}, 7)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.close()) }()
	graphs := make([]Graph, p.n)
	err = Lockstep(x.comms, func(c Comm) (err error) {
		mine, err := p.split(c)
		if err != nil {
			return err
		}
		defer func() {
			for _, sub := range mine[1:] {
				if sub != nil {
					err = errors.Join(err, sub.Close())
				}
			}
		}()
		g, err := c.(Capturer).Capture(x.places[c.Rank()].streams[0], func() error {
			p.issue(x, c.Rank(), mine)
			return c.Err()
		})
		if err != nil {
			return err
		}
		graphs[c.Rank()] = g
		for range times {
			err = errors.Join(err, g.Replay())
			x.places[c.Rank()].rotate(0)
		}
		return err
	})
	all := *p
	all.actions = append(slices.Clone(p.actions), action{touch: true})
	want := all.want(x, times)
	for r, g := range graphs { // the host waits only when all work is issued
		if g != nil {
			err = errors.Join(err, p.compare(x, r, want), g.Close())
		}
	}
	return err
}

// everyCall returns a program with each collective once. All memory is rewritten before
// and after each.
func everyCall(n int, seed uint64) *program {
	rng := rand.New(rand.NewPCG(seed, 0))
	p := &program{n: n, streams: 1, ranks: [][]int{ranksBelow(n)}, actions: []action{{touch: true}}}
	for k := range exchange + 1 {
		if k >= barrier && k <= replay || k == recv {
			continue // they have tests of their own, and send includes receive
		}
		a := randomAction(rng, n)
		for a.kind != k || a.bytes == 0 {
			a = randomAction(rng, n)
		}
		if k == exchange {
			a.mutual()
		}
		p.actions = append(p.actions, a, action{touch: true})
	}
	return p
}

// mutual reduces an exchange to the messages that two ranks send to each other. Messages
// pass when both ends have met, so among more ranks a late one waits for ranks that it
// already follows through others.
func (a *action) mutual() {
	for i := range a.parts {
		for k := range a.parts {
			size := memory.Bytes(0)
			if i+k == 1 {
				size = memory.Bytes(40 + i)
			}
			a.parts[i][k].Len, a.places[k][i].Len = size, size
		}
	}
}

// SPEC S6.3: the collectives are right under every order that their events allow.
func TestSchedules(t *testing.T) {
	seeds := 25
	if testing.Short() {
		seeds = 5
	}
	for n := 2; n <= 4; n++ {
		rng := rand.New(rand.NewPCG(uint64(n), 1))
		p := randomProgram(rng, n, 2, 12, true)
		if err := check.Explore(check.Options{}, seeds, p.checked(Options{})); err != nil {
			t.Errorf("%d ranks: %v", n, err)
		}
		p = randomProgram(rng, n, 1, 12, true)
		if err := check.Explore(check.Options{}, seeds, p.replayed(3)); err != nil {
			t.Errorf("%d ranks in a graph: %v", n, err)
		}
	}
}

// The checker notices if any wait or record of any collective is dropped, so none is
// implied by another. SPEC S6.3
func TestEveryWaitIsNeeded(t *testing.T) {
	most := 4
	if testing.Short() {
		most = 2
	}
	for n := 2; n <= most; n++ {
		p := everyCall(n, uint64(n))
		for name, q := range map[string]check.Program{"issued": p.checked(Options{}), "replayed": p.replayed(2)} {
			for _, class := range []check.Class{check.Waits, check.Records} {
				e, err := check.DropEach(class, 3, q)
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("%d ranks, %s, each %v: %v", n, name, class, e)
				if e.Caught != e.Total || e.Total == 0 {
					t.Errorf("%d ranks, %s, each %v: %v", n, name, class, e)
				}
			}
		}
	}
}

// A barrier orders what ranks do with each other's memory without a collective.
func TestBarrierIsNeeded(t *testing.T) {
	for n := 2; n <= 5; n++ {
		e, err := check.DropEach(check.Waits, 3, func(c *check.Checker) (err error) {
			x, err := newSetting(n, 1, false, under(c), Options{}, 3)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, x.close()) }()
			err = Lockstep(x.comms, func(c Comm) error {
				mine, next := x.places[c.Rank()], x.places[(c.Rank()+1)%n]
				s := mine.streams[0]
				s.Fill(mine.bufs[0].Slice(0, half), byte(c.Rank()))
				c.Barrier(s)
				s.Copy(mine.bufs[0].Slice(half, half), next.bufs[0].Slice(0, half))
				c.Barrier(s)
				s.Fill(mine.bufs[0].Slice(0, half), 99)
				return nil
			})
			if err != nil {
				return err
			}
			for r, at := range x.places {
				got := make([]byte, half)
				if err := at.streams[0].Download(got, at.bufs[0].Slice(half, half)); err != nil {
					return err
				}
				if want := byte((r + 1) % n); got[0] != want || got[half-1] != want {
					return fmt.Errorf("got %d, want %d", got[0], want)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%d ranks: %v", n, e)
		if e.Caught != e.Total || e.Total != 4*(n-1) {
			t.Errorf("%d ranks: %v", n, e)
		}
	}
}

// Reductions of many ranks share scratch memory on all streams. The first use waits for
// nothing, and every other wait is needed.
func TestScratchIsOrdered(t *testing.T) {
	const n = 13
	rng := rand.New(rand.NewPCG(9, 9))
	p := &program{n: n, streams: 2, ranks: [][]int{ranksBelow(n)}}
	for i := range 2 {
		a := randomAction(rng, n)
		a.sig = sig{kind: reduceScatter, t: BF16, op: Mean, bytes: 64}
		a.stream = i
		p.actions = append(p.actions, a, action{touch: true, stream: i})
	}
	o := Options{scratch: 64}
	if err := check.Explore(check.Options{}, 3, p.checked(o)); err != nil {
		t.Error(err)
	}
	if testing.Short() {
		return
	}
	e, err := check.DropEach(check.Waits, 0, p.checked(o))
	if err != nil {
		t.Fatal(err)
	}
	t.Log(e)
	if e.Total-e.Caught != n {
		t.Errorf("want %d not caught: %v", n, e)
	}
}

// A graph of ranks on plain devices is large enough that ranks run at the same time.
func TestCapturedTogether(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 0))
	for n := 1; n <= 8; n++ {
		p := randomProgram(rng, n, 1, 20, true)
		if err := p.capture(openCPU, 20); err != nil {
			t.Errorf("%d ranks: %v", n, err)
		}
	}
}
