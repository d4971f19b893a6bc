package fsdp

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// lone is a pipeline of one rank without anything else.
type lone struct {
	dev  device.Device
	comm *counted
	s    device.Stream
	p    *Pipeline
}

// counted counts gathers.
type counted struct {
	comm.Comm
	gathers int
}

func (c *counted) AllGather(s device.Stream, dst, src device.Range) {
	c.gathers++
	c.Comm.AllGather(s, dst, src)
}

// units returns units with one parameter each, of unequal sizes. Loose ones are given by
// number.
func units(n int, loose ...int) (us []FSDPUnit) {
	for i := range n {
		us = append(us, FSDPUnit{
			Name: fmt.Sprint("unit ", i), Loose: slices.Contains(loose, i),
			Params: []Param{{Name: "w", Shape: []int64{int64(40 * (i + 1)), 3}, Type: BF16}},
		})
	}
	return us
}

func newLone(dev device.Device, cfg Config) (*lone, error) {
	cs, err := comm.NewLocal([]device.Device{dev}, comm.Options{})
	if err != nil {
		return nil, err
	}
	l := &lone{dev: dev, comm: &counted{Comm: cs[0]}}
	if cfg.Groups == nil {
		cfg.Groups = []RankGroup{{Name: "dense", Comm: l.comm}}
	}
	if cfg.GradComm == (bucket.Type{}) {
		cfg.GradComm, cfg.MainGrads = BF16, FP32
	}
	if l.s, err = dev.NewStream("compute"); err != nil {
		return nil, err
	}
	l.p, err = New(dev, cfg)
	return l, err
}

func (l *lone) close() (err error) {
	if l.p != nil {
		err = l.p.Close()
	}
	return errors.Join(err, l.s.Close(), l.comm.Close())
}

// openLone opens a lone pipeline that the test closes at its end, when nothing may be
// left.
func openLone(t *testing.T, cfg Config) *lone {
	t.Helper()
	dev, err := cpuDevice()
	if err != nil {
		t.Fatal(err)
	}
	l, err := newLone(dev, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(l.close(), dev.Close()); err != nil {
			t.Error(err)
		}
	})
	return l
}

// uses runs a step that uses units one after the other.
func (l *lone) uses(key memory.Key, order ...int) error {
	step := l.p.Begin(key, l.s)
	for _, u := range order {
		x, err := step.Use(u, l.s)
		if err != nil {
			return errors.Join(err, step.End())
		}
		x.Done()
	}
	return step.End()
}

// SPEC S2.1: evaluation, other numbers of microbatches and steps after them do not change
// each other's plans, addresses and bits.
func TestKeysStandApart(t *testing.T) {
	t.Parallel()
	mixed := func(w *world) error {
		return w.each(func(r *rank) error {
			if err := r.initialise(); err != nil {
				return err
			}
			r.dev.Freeze()
			for step, micro := range []int{1, 2, 1, 3, 2, 1, 3} {
				r.c.microbatches = micro
				r.feed(step)
				if err := errors.Join(r.step(), r.evaluate()); err != nil {
					return err
				}
			}
			return r.compute.Sync()
		})
	}
	for _, c := range []setup{{model: "hybrid", ranks: 1, ep: 1}, {model: "hybrid", ranks: 2, ep: 2}} {
		c.param, c.gradComm, c.mainGrads, c.microbatches, c.prefetch, c.behind, c.plain = BF16, FP32, FP32, 3, 2, 1, true
		want, err := c.train(cpuDevice, comm.Run, mixed)
		if err != nil {
			t.Fatal(err)
		}
		c.plain = false
		for _, c.kind = range bucket.PoolKinds[1:] {
			if testing.Short() && c.kind != bucket.Recorded {
				continue
			}
			got, err := c.train(cpuDevice, comm.Run, mixed)
			if err != nil {
				t.Fatal(c, err)
			}
			if err := same(got, want); err != nil {
				t.Fatal(c, ": ", err)
			}
			if err := check.Explore(check.Options{}, 1, c.program(want, mixed)); err != nil {
				t.Fatal(c, err)
			}
		}
	}
}

// SPEC S2.4, S2.6: from the second step on, units are gathered as far ahead as
// configured. A loose module is gathered when it is used, and nothing with it.
func TestPrefetch(t *testing.T) {
	order := []int{0, 1, 2, 0, 3, 4, 0} // 0 is loose
	for prefetch := range 4 {
		l := openLone(t, Config{Units: units(5, 0), Pool: bucket.Recorded, Prefetch: prefetch})
		for step := range 3 {
			before := l.comm.gathers
			s := l.p.Begin(memory.Key{}, l.s)
			for i, u := range order {
				x, err := s.Use(u, l.s)
				if err != nil {
					t.Fatal(err)
				}
				// The units so far, those ahead, and the loose modules so far.
				ahead, loose, far := 0, 0, prefetch
				if step == 0 {
					far = 0
				}
				for _, v := range order[:i+1] {
					if v == 0 {
						loose++
					} else {
						ahead++
					}
				}
				if ahead > 0 {
					ahead = min(4, ahead+far)
				}
				if got := l.comm.gathers - before; got != ahead+loose {
					t.Errorf("prefetch %d, step %d: %d gathers at use %d of unit %d, want %d units and %d loose", prefetch, step, got, i, u, ahead, loose)
				}
				x.Done()
			}
			if err := s.End(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A unit that is used again while it is still live is not gathered again.
func TestKeptUnits(t *testing.T) {
	l := openLone(t, Config{Units: units(3), Pool: bucket.Arena, Prefetch: 1})
	for step := range 3 {
		before := l.comm.gathers
		if err := l.uses(memory.Key{}, 0, 1, 2, 2, 1, 0); err != nil {
			t.Fatal(err)
		}
		want := 5
		if step == 0 {
			want = 6
		}
		if got := l.comm.gathers - before; got != want {
			t.Errorf("step %d gathered %d times, want %d", step, got, want)
		}
	}
}

// SPEC S2.1: a step that follows its order allocates nothing on the device or the heap,
// and the pools have the size of their plans.
func TestStepAllocatesNothing(t *testing.T) {
	for _, kind := range bucket.PoolKinds[1:] {
		l := openLone(t, Config{Units: units(5, 0), Pool: kind, Prefetch: 1, Behind: 1})
		l.dev.Freeze()
		step := func() {
			s := l.p.Begin(memory.Key{}, l.s)
			for i := range 10 {
				unit := min(i, 9-i)
				u, _ := s.Use(unit, l.s)
				_ = u.Param(0)
				if i >= 5 {
					g, _ := s.Grad(unit, l.s)
					_ = g.Param(0)
					g.Done()
				}
				u.Done()
			}
			if err := s.End(); err != nil {
				t.Fatal(err)
			}
			l.p.Cast(l.s)
		}
		step()
		// The queues of the CPU device grow with the work that waits in them. Two steps
		// wait at once here, and later one at a time.
		gate := make(chan struct{})
		l.s.Host(func() { <-gate })
		step()
		step()
		close(gate)
		sync := func() {
			if err := l.s.Sync(); err != nil {
				t.Fatal(err)
			}
		}
		sync()
		if n := testing.AllocsPerRun(20, func() { step(); sync() }); n != 0 && !raceEnabled {
			t.Errorf("%v: %v allocations a step", kind, n)
		}
		params, grads, _ := l.p.plans(memory.Key{})
		for owner, plan := range map[string]*bucket.PoolPlan{"rank 0 gathered parameters": params, "rank 0 gradients": grads} {
			for _, u := range l.dev.Memory().Owners {
				if u.Owner == owner && u.Current != plan.Bytes {
					t.Errorf("%v: %s take %v and their plan says %v", kind, owner, u.Current, plan.Bytes)
				}
			}
		}
	}
}

// Units may be used on several streams, and each stream waits for what it needs.
func TestSeveralStreams(t *testing.T) {
	program := check.On(cpuDevice, func(dev device.Device) (err error) {
		l, err := newLone(dev, Config{Units: units(4), Pool: bucket.Arena, Prefetch: 1, Behind: 1})
		if err != nil {
			return err
		}
		other, err := dev.NewStream("other")
		if err != nil {
			return err
		}
		streams := []device.Stream{l.s, other}
		for u := range 4 {
			values := make([]float32, 120*(u+1))
			for i := range values {
				values[i] = float32(u + 1)
			}
			if err := l.p.Load(u, 0, values); err != nil {
				return err
			}
		}
		wrong := 0
		for range 3 {
			s := l.p.Begin(memory.Key{}, l.s)
			for i := range 8 {
				u, on := min(i, 7-i), streams[i%2]
				x, err := s.Use(u, on)
				if err != nil {
					return err
				}
				r := x.Param(0)
				on.Host(func() {
					if v := numbers(uint64(r.Addr()), 1, 1)[0]; v != float32(u+1) {
						wrong++
					}
				}, device.Reads(r))
				g, err := s.Grad(u, on)
				if err != nil {
					return err
				}
				on.Copy(g.Param(0), r)
				g.Done()
				x.Done()
			}
			x, err := s.Use(0, other) // which no reduction follows
			if err != nil {
				return err
			}
			other.Host(func() {}, device.Reads(x.Param(0)))
			x.Done()
			if err := s.End(); err != nil {
				return err
			}
			for _, b := range []*device.Buffer{l.p.params.buf, l.p.grads.buf, l.p.shards.params, l.p.shards.grads} {
				touch(l.s, b.All()) // which comes after all of the step
			}
		}
		err = l.s.Sync()
		for u := range 4 {
			got, failed := l.p.Read(u, 0, Grads)
			if err = errors.Join(err, failed); err == nil && got[0] != float32(2*(u+1)) {
				err = fmt.Errorf("the gradient of unit %d is %v", u, got[0])
			}
		}
		if wrong > 0 {
			err = errors.Join(err, fmt.Errorf("%d wrong parameters", wrong))
		}
		return errors.Join(err, l.close(), other.Close())
	})
	if err := check.Explore(check.Options{}, 10, program); err != nil {
		t.Fatal(err)
	}
}

// SPEC S2.5: the type in which gradients are communicated decides the type of their pool,
// regardless of the parameters' type.
func TestGradCommDecidesThePool(t *testing.T) {
	for _, gradComm := range []bucket.Type{BF16, FP32} {
		for _, mainGrads := range []bucket.Type{BF16, FP32} {
			l := openLone(t, Config{Units: units(3), Pool: bucket.Max, Prefetch: 1, Behind: 1, GradComm: gradComm, MainGrads: mainGrads})
			s := l.p.Begin(memory.Key{}, l.s)
			g, err := s.Grad(2, l.s)
			if err != nil {
				t.Fatal(err)
			}
			if r := g.Param(0); r.Len != memory.Bytes(360*gradComm.Size) {
				t.Errorf("%s: 360 elements take %v", gradComm.Name, r.Len)
			}
			g.Done()
			if err := s.End(); err != nil {
				t.Fatal(err)
			}
			_, grads, _ := l.p.plans(memory.Key{})
			for _, slot := range grads.Slots {
				if slot.Type != gradComm {
					t.Errorf("gradients travel as %s and the pool has a slot of %s", gradComm.Name, slot.Type.Name)
				}
			}
		}
	}
}

// A frozen device refuses dynamic memory and nothing else.
func TestDynamicAfterFreeze(t *testing.T) {
	l := openLone(t, Config{Units: units(1), Pool: bucket.Dynamic})
	l.dev.Freeze()
	s := l.p.Begin(memory.Key{}, l.s)
	mustPanic(t, `device: "rank 0 gathered parameters" allocates 256 B of device memory after the freeze; reserve it before and grow it`,
		func() { _, _ = s.Use(0, l.s) })
}
