// This file owns the tests of what surrounds steps: memory prepared beforehand,
// owners told in time, times, and misuse.

package offload

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// SPEC S4.2: memory that was prepared for what a tape predicts is never grown in a
// step, and its address never changes.
func TestPreparedStepsDoNotGrow(t *testing.T) {
	for _, p := range pipelines {
		ck := check.New(check.Options{})
		inner, err := cpuDevice()
		if err != nil {
			t.Fatal(err)
		}
		dev := ck.Wrap(inner)
		c := loopConfig{pipeline: p.Pipeline, rank: p.rank, layers: p.layers, leave: all, ahead: 1}
		var dry residency.Tape
		err = onLoop(dev, c, 2, func(l *loop) error { dry = *l.m.Tape(); return nil })
		l, failed := newLoop(dev, c)
		if err = errors.Join(err, failed); err == nil {
			l.plan = l.planned(dry.Schedule())
			m, bad := l.predict(&dry, l.m.limit[memory.Device])
			err = errors.Join(bad, l.m.Prepare(m.Device().Top(), m.Host().Top()))
			dev.Freeze()
			grown := ck.Count(check.Grows)
			err = errors.Join(err, l.train(3, rand.New(rand.NewPCG(1, 1))))
			if n := ck.Count(check.Grows) - grown; n > 0 {
				t.Errorf("%s: %d growths in prepared steps", p.name, n)
			}
		}
		if err = errors.Join(err, l.close(), dev.Close()); err != nil {
			t.Error(p.name, err)
		}
	}
}

// Owners of borrowed memory are told when a later copy out shows that theirs lies
// back far enough, not at the end of the step, and not while it is in use.
func TestOwnersAreToldInTime(t *testing.T) {
	program := func(dev device.Device) error {
		compute, err := dev.NewStream("compute")
		if err != nil {
			return err
		}
		m, err := New(dev, compute, Config{Window: 2})
		if err != nil {
			return err
		}
		const groups = 6
		plan := leaves()
		group := func(i int) memory.GroupID { return memory.GroupID{Name: "mlp", Layer: i} }
		for i := range groups {
			plan.Offload[group(i)] = true
		}
		sum, err := dev.Alloc(memory.Device, groups*512, "sum")
		if err != nil {
			return err
		}
		m.Begin(plan)
		var told []int
		for i := range groups {
			b, err := dev.Alloc(memory.Device, 512, "input")
			if err != nil {
				return err
			}
			compute.Fill(b.All(), byte(i))
			s, err := m.Borrow(b.All(), func() { told = append(told, i); compute.Free(b) })
			if err != nil {
				return err
			}
			if _, err := m.Save(group(i), flat(s)); err != nil {
				return err
			}
			s.Free()
			if want := max(0, i-1); len(told) != want {
				return fmt.Errorf("after %d groups %d owners were told, want %d", i+1, len(told), want)
			}
		}
		for i := groups - 1; i >= 0; i-- {
			if err := m.Load(group(i)); err != nil {
				return err
			}
			compute.Copy(sum.Slice(memory.Bytes(512*i), 512), m.Saved(group(i))[0].Tensor().Range())
			m.Release(group(i))
		}
		if len(told) != groups {
			return fmt.Errorf("%d of %d owners were told by the last load", len(told), groups)
		}
		err = m.End()
		raw := make([]byte, sum.Size())
		err = errors.Join(err, compute.Download(raw, sum.All()))
		for i, b := range raw {
			if int(b) != i/512 {
				err = errors.Join(err, fmt.Errorf("byte %d is %d", i, b))
				break
			}
		}
		compute.Free(sum)
		return errors.Join(err, m.Close(), compute.Close())
	}
	if err := check.Explore(check.Options{}, 10, check.On(cpuDevice, program)); err != nil {
		t.Error(err)
	}
	edges, err := check.DropEach(check.Waits, 0, check.On(cpuDevice, program))
	if err != nil || edges.Caught != edges.Total || edges.Total == 0 {
		t.Error(edges, err)
	}
}

// Times are compute's own: what it waits for is not in them, and calls in between
// lie in order.
func TestTimes(t *testing.T) {
	for _, scoped := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			const pause, wait = 4 * time.Millisecond, 250 * time.Millisecond
			dev, err := cpu.Open(cpu.Options{CopyThreads: 1, Links: cpu.Links{In: cpu.Link{Latency: wait}}})
			if err != nil {
				t.Fatal(err)
			}
			r := newRig(t, dev, Config{Device: memory.MiB, Host: memory.MiB})
			tape := r.rests(scoped, pause)
			r.close()
			if tape.Span != 4*pause {
				t.Errorf("scoped %v: compute worked for %v, and it rested %v", scoped, tape.Span, 4*pause)
			}
			var last time.Duration
			at := map[schedule.Event]time.Duration{}
			for _, op := range tape.Ops {
				if op.At < last || op.At > tape.Span {
					t.Errorf("scoped %v: a call at %v after one at %v, of %v", scoped, op.At, last, tape.Span)
				}
				last = op.At
				switch op.Kind {
				case residency.OpSave:
					at[schedule.Event{Group: op.Group}] = op.At
				case residency.OpLoad:
					at[schedule.Event{Group: op.Group, Load: true}] = op.At
				}
			}
			if got := at[schedule.Event{Group: timesA, Load: true}]; got != 3*pause {
				t.Errorf("scoped %v: the second load is at %v", scoped, got)
			}
			// The calls of a scope share the time of its graph.
			a, b := at[schedule.Event{Group: timesA}], at[schedule.Event{Group: timesB}]
			if !scoped && (a != pause || b != 2*pause) || scoped && !(0 < a && a < b && b < 2*pause) {
				t.Errorf("scoped %v: the saves are at %v and %v", scoped, a, b)
			}
		})
	}
}

var timesA, timesB = memory.GroupID{Name: "a"}, memory.GroupID{Name: "b"}

// rests profiles a step of two groups with a pause in each of its passes.
func (r *rig) rests(scoped bool, pause time.Duration) *residency.Tape {
	r.t.Helper()
	rest := func() { r.compute.Host(func() { time.Sleep(pause) }) }
	r.m.BeginProfile(leaves(timesA, timesB))
	body := func() error {
		for _, g := range []memory.GroupID{timesA, timesB} {
			rest()
			s := r.alloc(1000)
			r.compute.Fill(s.Range(), 1)
			r.save(g, flat(s))
			s.Free()
		}
		return nil
	}
	var scope *Scope
	if scoped {
		var err error
		scope, err = r.m.Capture(body)
		r.ok(err)
	} else {
		r.ok(body())
	}
	for _, g := range []memory.GroupID{timesB, timesA} {
		r.ok(r.m.Load(g))
		rest()
		r.m.Release(g)
	}
	r.ok(r.m.End())
	r.ok(r.m.Times())
	if scope != nil {
		r.ok(scope.Close())
	}
	return r.m.Tape()
}

// The times of saves and loads are taken, and the calls between two of them share the
// time between them.
func TestTimesOfCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const pause = 4 * time.Millisecond
		r := newRig(t, openCPU(t), Config{Device: memory.MiB, Host: memory.MiB})
		rest := func() { r.compute.Host(func() { time.Sleep(pause) }) }
		r.m.BeginProfile(nil)
		rest()
		s := r.alloc(1000)
		rest()
		r.save(timesA, flat(s))
		rest()
		s.Free()
		rest()
		r.ok(r.m.Load(timesA))
		rest()
		r.m.Release(timesA)
		rest()
		r.ok(r.m.End())
		r.ok(r.m.Times())
		want := map[residency.OpKind]time.Duration{residency.OpTake: 0, residency.OpSave: 2, residency.OpGive: 3, residency.OpLoad: 4, residency.OpRelease: 5}
		for _, op := range r.m.Tape().Ops {
			if op.At != want[op.Kind]*pause {
				t.Errorf("%v is at %v, want %v", op.Kind, op.At, want[op.Kind]*pause)
			}
		}
		if tape := r.m.Tape(); len(tape.Ops) != len(want) || tape.Span != 6*pause {
			t.Errorf("%d calls in %v", len(tape.Ops), tape.Span)
		}
		r.close()
	})
}

// brokenEvent cannot be closed.
type brokenEvent struct {
	device.Event
	err error
}

func (e brokenEvent) Close() error { return e.err }

func TestEventsCannotBeClosed(t *testing.T) {
	first, second := errors.New("first"), errors.New("second")
	w := stopwatch{events: []device.Event{brokenEvent{}, brokenEvent{err: first}, brokenEvent{err: second}}}
	if err := w.close(); err != first || w.events != nil {
		t.Errorf("got %v, %d events are left", err, len(w.events))
	}
}

// Programmers' errors panic with one sentence that says what was done.
func TestMisuse(t *testing.T) {
	r := newRig(t, openCPU(t), Config{})
	defer r.close()
	r.m.Begin(leaves(someGroup))
	dead, away := r.alloc(100), r.alloc(100)
	dead.Free()
	r.save(someGroup, flat(away))
	saved := r.m.Saved(someGroup)[0]
	away.Free()
	panics := func(want string, f func()) {
		t.Helper()
		defer func() {
			if x := recover(); !strings.Contains(fmt.Sprint(x), want) {
				t.Errorf("panics with %v, want %q", x, want)
			}
		}()
		f()
	}
	other := memory.GroupID{Name: "other"}
	panics("begun inside", func() { r.m.Begin(nil) })
	panics("prepared inside", func() { _ = r.m.Prepare(1, 1) })
	panics("after it was freed", func() { dead.Range() })
	panics("after it was freed", func() { dead.Free() })
	panics("load a group that saved it", func() { away.Range() })
	panics("before its Load", func() { saved.Tensor() })
	panics("not saved", func() { _ = r.m.Load(other) })
	panics("not saved", func() { r.m.Release(other) })
	live := r.alloc(100)
	panics("does not lie", func() { _, _ = r.m.Save(other, Tensor{Storage: live, Element: 4, Shape: []int{26}}) })
	panics("does not lie", func() {
		_, _ = r.m.Save(other, Tensor{Storage: live, Element: 1, Shape: []int{2, 3}, Strides: []int{1}})
	})
	panics("-1 bytes", func() { _, _ = r.m.Alloc(-1) })
	r.ok(r.m.Load(someGroup))
	tensor := saved.Tensor()
	r.m.Release(someGroup)
	panics("used after", func() { saved.Tensor() })
	held := r.alloc(100)
	r.save(other, flat(held)) // that keeps the storage alive
	again := r.m.Saved(other)[0]
	r.ok(r.m.Load(other))
	r.m.Release(other)
	panics("after its Release", func() { again.Tensor() })
	r.ok(r.m.End())
	panics("after its step", func() { tensor.Range() })
	panics("outside of a step", func() { _, _ = r.m.Alloc(1) })
	panics("outside of a step", func() { _ = r.m.End() })
	panics("that was profiled", func() { _ = r.m.Times() })
	if _, err := New(r.dev, r.compute, Config{Cap: -1}); err == nil || !strings.Contains(err.Error(), "negative") {
		t.Error(err)
	}
}
