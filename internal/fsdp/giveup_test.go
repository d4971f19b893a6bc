// This file owns the tests of steps that are given up in the middle.

package fsdp

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// SPEC S2.1: a step that all ranks give up in the middle changes nothing. Later steps
// have the same bits as without it.
func TestStepGivenUpByAllRanks(t *testing.T) {
	t.Parallel()
	c := setup{model: "hybrid", ranks: 2, ep: 2, param: BF16, gradComm: BF16, mainGrads: FP32, prefetch: 2, behind: 1, microbatches: 1, steps: 3}
	want := c.reference(t)
	for _, k := range kinds {
		if c.kind, c.fallback = k.kind, k.fallback; testing.Short() && c.kind != bucket.Max {
			continue
		}
		body := func(w *world) error {
			return w.each(func(r *rank) error {
				if err := r.initialise(); err != nil {
					return err
				}
				for step := range c.steps {
					if err := r.giveUp(3*step + 1); err != nil {
						return err
					}
					r.feed(step)
					if err := r.step(); err != nil {
						return err
					}
				}
				return r.compute.Sync()
			})
		}
		if err := check.Explore(check.Options{}, 2, c.program(want, body)); err != nil {
			t.Fatal(c, ": ", err)
		}
	}
}

// giveUp begins a step and ends it after some uses. The last use is not done, and its
// gradients are written.
func (r *rank) giveUp(uses int) error {
	r.e.begin(r.key())
	for i := range r.pass {
		x := &r.pass[i]
		switch {
		case x.do != nil:
		case x.leave:
			r.done[x.unit]()
		default:
			_, done, err := r.e.use(x.unit)
			if err != nil {
				return err
			}
			if uses--; uses == 0 {
				g, err := r.e.(*sharded).step.Grad(x.unit, r.compute)
				if err == nil { // not if the gradients' order is another
					r.compute.Fill(g.Param(0), 3)
				}
				if r.e.end() == nil {
					return errors.New("a step that was given up ended well")
				}
				return nil
			}
			r.done[x.unit] = done
		}
	}
	return errors.New("the step has fewer uses")
}

// A step whose caller recovered from a panic can be ended, and leaves the pipeline as it
// was.
func TestStepGivenUp(t *testing.T) {
	for _, kind := range bucket.PoolKinds {
		for _, recorded := range []bool{false, true} {
			l := openLone(t, Config{Units: units(4, 0), Pool: kind, Prefetch: 2, Behind: 1})
			if recorded {
				if err := l.uses(memory.Key{}, 0, 1, 2, 3, 2, 1); err != nil {
					t.Fatal(err)
				}
			}
			for at := range 4 {
				func() {
					s := l.p.Begin(memory.Key{}, l.s)
					defer func() {
						if x := recover(); x != "out of data" {
							t.Error(x)
						}
						if err := s.End(); err == nil {
							t.Error("no error at the end")
						}
					}()
					for i, u := range []int{0, 1, 2, 3} {
						x, err := s.Use(u, l.s)
						if err != nil {
							t.Fatal(err)
						}
						if i == at {
							panic("out of data")
						}
						x.Done()
					}
				}()
				if err := l.uses(memory.Key{Shape: fmt.Sprint(at)}, 3, 2, 1, 0); err != nil {
					t.Error(err)
				}
			}
			if err := errors.Join(l.uses(memory.Key{}, 0, 1, 2, 3, 2, 1), l.uses(memory.Key{}, 0, 1, 2, 3, 2, 1)); err != nil {
				t.Error(kind, recorded, err)
			}
		}
	}
}

// Work of a step that was given up comes before the next step, although nothing marks its
// end.
func TestGivenUpWorkComesFirst(t *testing.T) {
	for _, kind := range bucket.PoolKinds {
		program := check.On(cpuDevice, func(dev device.Device) error {
			l, err := newLone(dev, Config{Units: units(3), Pool: kind, Prefetch: 1, Behind: 1})
			if err != nil {
				return err
			}
			other, err := dev.NewStream("other")
			if err != nil {
				return err
			}
			for range 3 {
				if err := l.train(l.s, 3); err != nil {
					return err
				}
				step := l.p.Begin(memory.Key{}, l.s)
				u, err := step.Use(0, other)
				if err != nil {
					return err
				}
				other.Host(func() {}, device.Reads(u.Param(0)))
				if step.End() == nil {
					return errors.New("a step that was given up ended well")
				}
			}
			return errors.Join(l.train(l.s, 3), l.close(), other.Close())
		})
		if err := check.Explore(check.Options{}, 2, program); err != nil {
			t.Fatal(kind, err)
		}
	}
}

// A pipeline may be closed in the middle of a step, whether or not its order is known. It
// leaves nothing behind.
func TestCloseInTheMiddle(t *testing.T) {
	for _, kind := range bucket.PoolKinds {
		for _, recorded := range []bool{false, true} {
			l := openLone(t, Config{Units: units(3), Pool: kind, Prefetch: 1, Behind: 1})
			if recorded {
				if err := l.train(l.s, 3); err != nil {
					t.Fatal(err)
				}
			}
			step := l.p.Begin(memory.Key{}, l.s)
			if _, err := step.Use(0, l.s); err != nil {
				t.Fatal(err)
			}
			if _, err := step.Grad(2, l.s); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// counting counts the events of a device.
type counting struct {
	device.Device
	events int
}

func (d *counting) NewEvent(f device.EventFlags) (device.Event, error) {
	d.events++
	return d.Device.NewEvent(f)
}

// Steps that are given up before their order is known reuse the same events.
func TestGivenUpStepsLeaveNoEvents(t *testing.T) {
	inner, err := cpuDevice()
	if err != nil {
		t.Fatal(err)
	}
	dev := &counting{Device: inner}
	l, err := newLone(dev, Config{Units: units(3), Pool: bucket.Arena, Prefetch: 1, Behind: 1})
	if err != nil {
		t.Fatal(err)
	}
	first := 0
	for i := range 5 {
		step := l.p.Begin(memory.Key{}, l.s)
		for u := range 3 {
			if _, err := step.Use(u, l.s); err != nil {
				t.Fatal(err)
			}
			if _, err := step.Grad(u, l.s); err != nil {
				t.Fatal(err)
			}
		}
		if step.End() == nil {
			t.Error("a step that was given up ended well")
		}
		if i == 0 {
			first = dev.events
		}
	}
	if dev.events != first {
		t.Errorf("%d events after one step, %d after five", first, dev.events)
	}
	if err := errors.Join(l.close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// A step is recorded, and there is no memory for its plan: the step fails at its end, again
// and again, and gives back its events each time.
func TestUnplannedStepsLeaveNoEvents(t *testing.T) {
	cfg := Config{Units: units(4), Pool: bucket.Rotary}
	// nested uses all units at once: a rotary pool then takes the largest of them four times.
	nested := func(l *lone, inside func()) error {
		step := l.p.Begin(memory.Key{}, l.s)
		var uses []Use
		for u := range 4 {
			x, err := step.Use(u, l.s)
			if err != nil {
				return errors.Join(err, step.End())
			}
			uses = append(uses, x)
		}
		inside()
		for _, x := range uses {
			x.Done()
		}
		return step.End()
	}
	dev := limited(t, 0)
	l, err := newLone(dev, cfg)
	if err != nil {
		t.Fatal(err)
	}
	var recorded, planned memory.Bytes
	if err := nested(l, func() { recorded = dev.Memory().Kind[memory.Device].Current }); err != nil {
		t.Fatal(err)
	}
	if planned = dev.Memory().Kind[memory.Device].Current; planned <= recorded {
		t.Fatalf("the plan takes %v, the recorded step took %v", planned, recorded)
	}
	if err := errors.Join(l.close(), dev.Close()); err != nil {
		t.Fatal(err)
	}
	counted := &counting{Device: limited(t, planned-1)}
	if l, err = newLone(counted, cfg); err != nil {
		t.Fatal(err)
	}
	first := 0
	for i := range 5 {
		var oom *device.OutOfMemory
		if err := nested(l, func() {}); !errors.As(err, &oom) {
			t.Errorf("step %d: %v", i, err)
		}
		if i == 0 {
			first = counted.events
		}
	}
	if counted.events != first {
		t.Errorf("%d events after one step, %d after five", first, counted.events)
	}
	if err := errors.Join(l.close(), counted.Close()); err != nil {
		t.Error(err)
	}
}

// The pool of gradients has room for Behind units that wait for their reduction, and that
// of parameters for Prefetch units that are gathered ahead.
func TestPoolsHaveTheirOwnDepth(t *testing.T) {
	for _, x := range []struct{ prefetch, behind int }{{3, 1}, {1, 3}, {2, 0}} {
		dev := limited(t, 0)
		l, err := newLone(dev, Config{Units: units(6), Pool: bucket.Rotary, Prefetch: x.prefetch, Behind: x.behind})
		if err != nil {
			t.Fatal(err)
		}
		forward, back := l.p.plainOrder()
		for _, r := range []struct {
			name   string
			spec   bucket.Spec
			buf    *device.Buffer
			ahead  int
			behind int
		}{
			{"parameters", l.p.layout.spec(nil), l.p.params.buf, x.prefetch, 0},
			{"gradients", l.p.layout.spec(&l.p.cfg.GradComm), l.p.grads.buf, 0, x.behind},
		} {
			r.spec.Order, r.spec.Prefetch, r.spec.Behind = back, r.ahead, r.behind
			if r.name == "parameters" {
				r.spec.Order = append(forward, back...)
			}
			plan, err := bucket.NewPoolPlan(bucket.Rotary, r.spec, bucket.Options{})
			if err != nil || r.buf.Size() != plan.Bytes || plan.Live != 1+r.ahead+r.behind {
				t.Errorf("prefetch %d, behind %d: the pool of %s takes %v, want %v, %v", x.prefetch, x.behind, r.name, r.buf.Size(), plan.Bytes, err)
			}
		}
		if err := errors.Join(l.close(), dev.Close()); err != nil {
			t.Error(err)
		}
	}
}

// A key keeps a mark for the gather of each of its uses and one for its release. The marks
// of the step that was recorded are given back when the plan is made.
func TestKeysKeepTwoEventsAUse(t *testing.T) {
	inner, err := cpuDevice()
	if err != nil {
		t.Fatal(err)
	}
	dev := &counting{Device: inner}
	l, err := newLone(dev, Config{Units: units(3), Pool: bucket.Arena, Prefetch: 1, Behind: 1})
	if err != nil {
		t.Fatal(err)
	}
	const uses = 3
	last := 0
	for i := range 6 {
		key := memory.Key{Microbatches: i}
		if err := errors.Join(l.uses(key, 0, 1, 2), l.uses(key, 0, 1, 2)); err != nil {
			t.Fatal(err)
		}
		if grown := dev.events - last; i > 0 && grown != 2*uses {
			t.Errorf("key %d takes %d events, want %d", i, grown, 2*uses)
		}
		last = dev.events
	}
	if err := errors.Join(l.close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// Every call of a pipeline may fail, also while it is closed: nothing is left open and no
// memory is kept.
func TestFailuresLeaveNothing(t *testing.T) {
	for _, kind := range []bucket.PoolKind{bucket.Dynamic, bucket.Recorded} {
		work := func(dev device.Device) (err error) {
			cs, err := comm.NewLocal([]device.Device{dev}, comm.Options{})
			if err != nil {
				return err
			}
			s, err := dev.NewStream("compute")
			if err != nil {
				return errors.Join(err, cs[0].Close())
			}
			p, err := New(dev, Config{Units: units(3), Groups: []RankGroup{{Name: "dense", Comm: cs[0]}}, Pool: kind, Prefetch: 1, Behind: 1, GradComm: BF16, MainGrads: FP32})
			if err != nil {
				return errors.Join(err, s.Close(), cs[0].Close())
			}
			l := &lone{dev: dev, s: s, p: p, comm: &counted{Comm: cs[0]}}
			for range 3 {
				if err == nil {
					err = l.train(s, 3)
				}
			}
			if err == nil {
				_, err = p.Read(1, 0, Weights)
			}
			return errors.Join(err, l.close())
		}
		for _, class := range []check.Class{check.Allocs, check.Grows, check.Copies, check.Launches, check.Makes} {
			f, err := check.FailEach(class, 1, cpuDevice, work)
			if err != nil || len(f.Wrong) > 0 || f.Survived > 0 {
				t.Errorf("%v, %v: %+v, %v", kind, class, f, err)
			}
		}
	}
}

// A step ends with the failure of any of its groups of ranks, not only of the first.
func TestFailureOfAnyGroup(t *testing.T) {
	for at := range 3 {
		dev, err := cpuDevice()
		if err != nil {
			t.Fatal(err)
		}
		var groups []RankGroup
		for range 3 {
			cs, err := comm.NewLocal([]device.Device{dev}, comm.Options{})
			if err != nil {
				t.Fatal(err)
			}
			groups = append(groups, RankGroup{Comm: cs[0]})
		}
		l, err := newLone(dev, Config{Units: units(2), Groups: groups, Pool: bucket.Arena, Prefetch: 1, Behind: 1})
		if err != nil {
			t.Fatal(err)
		}
		gone := errors.New("no more data")
		step := l.p.Begin(memory.Key{}, l.s)
		groups[at].Comm.Abort(gone)
		if err := step.End(); !errors.Is(err, gone) {
			t.Errorf("group %d failed, and the step ended with %v", at, err)
		}
		for _, g := range groups {
			err = errors.Join(err, g.Comm.Close())
		}
		if err := errors.Join(err, l.close(), dev.Close()); err != nil {
			t.Error(err)
		}
	}
}
