// This file owns the tests of scopes beyond the loop: what is refused, and what must
// be captured again.

package offload

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

var someGroup = memory.GroupID{Name: "attn", Layer: 1}

func leaves(gs ...memory.GroupID) *residency.Plan {
	p := &residency.Plan{Offload: map[memory.GroupID]bool{}}
	for _, g := range gs {
		p.Offload[g] = true
	}
	return p
}

// rig is a manager on a device of its own.
type rig struct {
	t       testing.TB
	dev     device.Device
	compute device.Stream
	m       *Manager
}

func newRig(t testing.TB, dev device.Device, cfg Config) *rig {
	t.Helper()
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	m, err := New(dev, compute, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &rig{t, dev, compute, m}
}

func (r *rig) close() {
	r.t.Helper()
	r.ok(errors.Join(r.m.Close(), r.compute.Close(), r.dev.Close()))
}

func (r *rig) ok(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) alloc(n memory.Bytes) *Storage {
	r.t.Helper()
	s, err := r.m.Alloc(n)
	r.ok(err)
	return s
}

func (r *rig) save(g memory.GroupID, ts ...Tensor) {
	r.t.Helper()
	_, err := r.m.Save(g, ts...)
	r.ok(err)
}

// A capture that fails says why, ends the step with that reason, and leaves a
// manager that works.
func TestScopesThatFail(t *testing.T) {
	r := newRig(t, openCPU(t), Config{Rank: 2})
	bad := errors.New("the body's own")
	b, err := r.dev.Alloc(memory.Device, 64, "test")
	r.ok(err)
	for name, x := range map[string]struct {
		body  func() error
		whole bool
		want  string
	}{
		"an error of the body": {body: func() error { return bad }, want: "the body's own"},
		"what no graph holds":  {body: func() error { r.compute.Upload(b.All(), make([]byte, 64)); return nil }, want: "capture on stream"},
		"no room":              {body: func() error { _, err := r.m.Alloc(1 << 40); return err }, want: "do not fit"},
		"a graph in a graph":   {body: func() error { return nil }, whole: true, want: "the whole step is being captured"},
	} {
		if x.whole {
			r.compute.BeginCapture()
		}
		r.m.Begin(nil)
		s, err := r.m.Capture(x.body)
		ended := r.m.End()
		if x.whole {
			g, err := r.compute.EndCapture()
			r.ok(err)
			r.ok(g.Close())
		}
		var mine *Error
		if s != nil || !errors.As(err, &mine) || mine.Rank != 2 || !strings.Contains(err.Error(), x.want) || ended == nil {
			t.Errorf("%s: scope %v, error %v, at the end %v", name, s, err, ended)
		}
		r.m.Begin(leaves(someGroup))
		a := r.alloc(100)
		r.compute.Fill(a.Range(), 1)
		r.save(someGroup, flat(a))
		a.Free()
		r.ok(r.m.Load(someGroup))
		r.m.Release(someGroup)
		r.ok(r.m.End())
	}
	r.compute.Free(b)
	r.close()
}

// A scope may be closed in the step in which it was issued: what comes after its
// events does so still.
func TestScopesClosedInTheirStep(t *testing.T) {
	program := func(dev device.Device) error {
		l, err := newLoop(dev, loopConfig{pipeline: pipelines[1].Pipeline, rank: pipelines[1].rank, layers: 2, how: scopes, leave: all, ahead: 1})
		if err != nil {
			return errors.Join(err, l.close())
		}
		l.closes, l.plan = true, l.planned(dryOrder(l))
		rng := rand.New(rand.NewPCG(1, 1))
		for range 2 {
			l.feed(rng)
			err = errors.Join(err, l.one(), l.compare())
		}
		return errors.Join(err, l.close())
	}
	if err := check.Explore(check.Options{}, 5, check.On(cpuDevice, program)); err != nil {
		t.Error(err)
	}
}

// Close waits on the host in the step in which the scope was issued, be it captured there or
// replayed, and in no other: later work may come after its events.
func TestCloseWaitsForItsStep(t *testing.T) {
	for issuedAgain := range 2 {
		for closedLater := range 2 {
			r := newRig(t, openCPU(t), Config{})
			r.m.Begin(nil)
			s, err := r.m.Capture(func() error {
				a := r.alloc(100)
				r.compute.Fill(a.Range(), 1)
				a.Free()
				return nil
			})
			r.ok(err)
			if issuedAgain == 1 {
				r.ok(r.m.End())
				r.m.Begin(nil)
				r.ok(s.Replay())
			}
			if closedLater == 1 {
				r.ok(r.m.End())
				r.m.Begin(nil)
			}
			before := r.dev.Counters().HostSyncs
			r.ok(s.Close())
			if waited := r.dev.Counters().HostSyncs > before; waited == (closedLater == 1) {
				t.Errorf("issued again %d, closed later %d: the host waited %v", issuedAgain, closedLater, waited)
			}
			r.ok(r.m.End())
			r.close()
		}
	}
}

// SPEC S4.3, S4.6: a scope that is issued eagerly leaves the step as a captured one
// does: its memory and copies are the same, and scopes behind it are replayed.
func TestEagerScopes(t *testing.T) {
	for i, p := range pipelines {
		program := func(dev device.Device) error {
			l, err := newLoop(dev, loopConfig{pipeline: p.Pipeline, rank: p.rank, layers: p.layers, how: scopes, leave: all, ahead: 2})
			if err != nil {
				return errors.Join(err, l.close())
			}
			rng := rand.New(rand.NewPCG(1, uint64(i)))
			l.plan = l.planned(dryOrder(l))
			var first Stats
			for step, share := range []int{1, 0, 0, 2, 3, 0} {
				l.slow = func() bool { return share > 0 && rng.IntN(share) == 0 }
				l.feed(rng)
				if err := l.one(); err != nil {
					return errors.Join(err, l.close())
				}
				now := l.m.Last()
				if first.Counts == (residency.Counts{}) {
					first = now
				}
				if err := l.compare(); err != nil || l.moved != 0 || now.Counts != first.Counts || now.Extent != first.Extent || now.Host != first.Host {
					return errors.Join(err, l.close(), fmt.Errorf("step %d: %d scopes moved; %+v, at first %+v", step, l.moved, now, first))
				}
			}
			return l.close()
		}
		if err := check.Explore(check.Options{}, 3, check.On(cpuDevice, program)); err != nil {
			t.Error(p.name, err)
		}
	}
}

// SPEC S5.4, S4.6: bytes of a storage that two groups save are the first one's,
// whoever lets it leave, in a scope and outside: a name never moves more than it
// saves.
func TestWhoseBytesMove(t *testing.T) {
	a, b := memory.GroupID{Name: "a"}, memory.GroupID{Name: "b"}
	s := &schedule.Schedule{}
	s.Save(a)
	s.Save(b)
	s.Load(a)
	s.Load(b)
	plan := leaves(b)
	plan.Schedule = s
	for _, scope := range []bool{false, true} {
		r := newRig(t, openCPU(t), Config{})
		r.m.Begin(plan)
		x := r.alloc(1000)
		forward := func() error {
			r.compute.Fill(x.Range(), 1)
			r.save(a, flat(x))
			r.save(b, flat(x))
			return nil
		}
		var sc *Scope
		var err error
		if scope {
			sc, err = r.m.Capture(forward)
		} else {
			err = forward()
		}
		r.ok(err)
		x.Free()
		r.ok(r.m.End())
		if scope {
			r.ok(sc.Close())
		}
		if n := r.m.Last().Names; n["a"].Saved != 1000 || n["a"].Moved != 1000 || n["b"].Saved != 0 || n["b"].Moved != 0 {
			t.Errorf("scope %v: a %+v, b %+v", scope, *n["a"], *n["b"])
		}
		r.close()
	}
}

// A scope is captured again if anything before it differs: the plan, a size, the
// caller's memory, the budget. Else it is replayed, and results are exact.
func TestMovedScopes(t *testing.T) {
	p := pipelines[1]
	program := func(dev device.Device) error {
		l, err := newLoop(dev, loopConfig{pipeline: p.Pipeline, rank: p.rank, layers: p.layers, how: scopes, leave: all, ahead: 1})
		rng := rand.New(rand.NewPCG(1, 1))
		if err == nil {
			err = l.train(4, rng)
		}
		if err != nil || l.moved != 0 {
			return errors.Join(err, fmt.Errorf("%d scopes moved", l.moved), l.close())
		}
		same := *l.plan // equal, and another: nothing moves
		same.Offload = maps.Clone(l.plan.Offload)
		same.Offload[memory.GroupID{Name: "nobody"}] = false
		other := l.planned(l.plan.Schedule)
		other.Offload[l.group(l.passes[0], 0)] = false
		sooner := *l.plan
		sooner.Prefetch = make([][]memory.GroupID, len(l.plan.Prefetch))
		for i, x := range []struct {
			plan  *residency.Plan
			moves bool
		}{{&same, false}, {other, true}, {other, false}, {&sooner, true}, {&same, true}} {
			l.plan, l.moved = x.plan, 0
			l.feed(rng)
			if err = errors.Join(err, l.one(), l.compare()); x.moves != (l.moved > 0) {
				err = errors.Join(err, fmt.Errorf("plan %d: %d scopes moved", i, l.moved))
			}
		}
		return errors.Join(err, l.close())
	}
	if err := check.Explore(check.Options{}, 5, check.On(cpuDevice, program)); err != nil {
		t.Error(err)
	}
}

// Which group a step loads before a scope matters, by its name and by its numbers;
// and a scope that is issued eagerly inside of one is a part of that.
func TestWhatMovesScopes(t *testing.T) {
	r := newRig(t, openCPU(t), Config{})
	groups := []memory.GroupID{{Name: "a"}, {Name: "b"}, {Name: "a", Chunk: 1}, {Name: "a", Layer: 1}, {Name: "a", Microbatch: 1}}
	var scope *Scope
	for step, g := range append(groups, groups[0]) {
		r.m.Begin(nil)
		for _, g := range groups {
			s := r.alloc(1000)
			r.save(g, flat(s))
			s.Free()
		}
		r.ok(r.m.Load(g))
		r.m.Release(g) // now its place is free
		if step == 0 {
			var err error
			scope, err = r.m.Capture(func() error {
				return r.m.Eager(func() error { r.compute.Fill(r.alloc(1000).Range(), 1); return nil })
			})
			r.ok(err)
		} else {
			var moved *Moved
			if err := scope.Replay(); errors.As(err, &moved) != (step < len(groups)) {
				t.Errorf("with %v loaded: %v", g, err)
			}
		}
		r.ok(r.m.End())
	}
	r.ok(scope.Close())
	r.close()
}

// The caller's memory, borrowed before and inside of scopes, is used by replays
// while the handles are the same.
func TestScopesUseForeignMemory(t *testing.T) {
	program := func(dev device.Device) error {
		compute, err := dev.NewStream("compute")
		if err != nil {
			return err
		}
		m, err := New(dev, compute, Config{})
		if err != nil {
			return err
		}
		mem, err := dev.Alloc(memory.Device, 8192, "test")
		if err != nil {
			return err
		}
		var scope *Scope
		for step := range 4 {
			compute.Fill(mem.Slice(0, 2048), byte(step+1))
			m.Begin(leaves(someGroup))
			x, err := m.Borrow(mem.Slice(0, 1024), nil)
			if err != nil {
				return err
			}
			if step == 0 {
				scope, err = m.Capture(func() error {
					y, err := m.Borrow(mem.Slice(1024, 1024), nil)
					if err != nil {
						return err
					}
					_, err = m.Save(someGroup, flat(x), flat(y))
					y.Free()
					x.Free()
					return err
				})
			} else {
				err = scope.Replay()
			}
			if err = errors.Join(err, m.Load(someGroup)); err != nil {
				return err
			}
			for i, s := range m.Saved(someGroup) {
				compute.Copy(mem.Slice(memory.Bytes(4096+1024*i), 1024), s.Tensor().Range())
			}
			m.Release(someGroup)
			if err := m.End(); err != nil {
				return err
			}
			got := make([]byte, 2048)
			if err := compute.Download(got, mem.Slice(4096, 2048)); err != nil {
				return err
			}
			for i, b := range got {
				if b != byte(step+1) {
					return fmt.Errorf("step %d: byte %d is %d", step, i, b)
				}
			}
		}
		m.Begin(leaves(someGroup))
		if _, err := m.Borrow(mem.Slice(4096, 1024), nil); err != nil {
			return err
		}
		var moved *Moved
		if err := scope.Replay(); !errors.As(err, &moved) || moved.Captured != 1 || moved.Step != 5 || !strings.Contains(err.Error(), "capture it again") {
			return fmt.Errorf("a scope was replayed with other memory: %v", err)
		}
		err = errors.Join(m.End(), scope.Close(), m.Close())
		compute.Free(mem)
		return errors.Join(err, compute.Close())
	}
	if err := check.Explore(check.Options{}, 5, check.On(cpuDevice, program)); err != nil {
		t.Error(err)
	}
}
