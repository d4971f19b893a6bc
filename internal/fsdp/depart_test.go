// This file owns departures at the ends of uses, errors that must not be lost, and where a
// recorded use is placed.

package fsdp

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/memory"
)

// pairs runs a step in which two units are in use at once, as parameters or as gradients, and
// are done in the given order. It ends early if only one is done.
func (l *lone) pairs(key memory.Key, grads bool, order ...int) error {
	step := l.p.Begin(key, l.s)
	done := make([]func(), 2)
	for u := range done {
		if grads {
			g, err := step.Grad(u, l.s)
			if err != nil {
				return errors.Join(err, step.End())
			}
			done[u] = g.Done
		} else {
			x, err := step.Use(u, l.s)
			if err != nil {
				return errors.Join(err, step.End())
			}
			done[u] = x.Done
		}
	}
	for _, u := range order {
		done[u]()
	}
	return step.End()
}

// A step may depart from its order where a use is done, and where gradients are: its end says
// so. What is still in use at its end is named.
func TestDeparturesAtTheEndOfUses(t *testing.T) {
	for _, grads := range []bool{false, true} {
		l := openLone(t, Config{Rank: 3, Units: units(3), Pool: bucket.Arena, Prefetch: 1, Behind: 1})
		key, what := memory.Key{Microbatches: 2, Shape: "4x5"}, "gathered parameters"
		if grads {
			what = "gradients"
		}
		for _, c := range []struct {
			order []int
			says  string
		}{
			{[]int{0, 1}, ""},
			{[]int{0, 1}, ""},
			{[]int{1, 0}, "fsdp: rank 3: " + what + `: expected the release of FSDP unit "unit 0" at entry 2 of the order recorded for this key (train, 2 microbatches, shape 4x5), got the release of FSDP unit "unit 1"; run steps of another order under another key`},
			{[]int{0}, `fsdp: rank 3: FSDP unit "unit 1" is still in use (` + what + `) at the end of the step; call Done first`},
			{[]int{0, 1}, ""},
		} {
			if err := l.pairs(key, grads, c.order...); (err == nil) != (c.says == "") || err != nil && err.Error() != c.says {
				t.Errorf("%v: %v, want %s", c.order, err, c.says)
			}
		}
		// The end of the step comes too early, or nothing of it was used.
		if err := l.p.Begin(key, l.s).End(); err == nil || !strings.Contains(err.Error(), what+": expected the use of FSDP unit \"unit 0\" at entry 0") {
			t.Error(err)
		}
	}
}

// A step that failed gives nothing more, and the first of its errors is its last.
func TestFailedStepsGiveNothing(t *testing.T) {
	l := openLone(t, Config{Units: units(3), Pool: bucket.Arena, Prefetch: 1, Behind: 1})
	key := memory.Key{Microbatches: 1}
	if err := l.uses(key, 0, 1, 2); err != nil {
		t.Fatal(err)
	}
	step := l.p.Begin(key, l.s)
	_, first := step.Use(2, l.s)
	if first == nil {
		t.Fatal("another order is followed")
	}
	before := l.comm.gathers
	if _, err := step.Use(0, l.s); err != first {
		t.Errorf("%v, want %v", err, first)
	}
	if _, err := step.Grad(0, l.s); err != first || l.comm.gathers != before {
		t.Errorf("%v, want %v; %d gathers", err, first, l.comm.gathers-before)
	}
	if err := step.End(); err != first {
		t.Errorf("%v, want %v", err, first)
	}
}

// A wrong number of values is refused, and nothing of them is taken.
func TestLoadCountsValues(t *testing.T) {
	l := openLone(t, Config{Rank: 4, Units: units(2), Pool: bucket.Arena, Prefetch: 1, Behind: 1})
	for _, n := range []int{0, 119, 121} {
		err := l.p.Load(0, 0, make([]float32, n))
		if err == nil || !strings.HasPrefix(err.Error(), `fsdp: rank 4: expected 120 values for parameter "w" of FSDP unit "unit 0", got `) {
			t.Errorf("%d values: %v", n, err)
		}
	}
}

// sulking is a device whose streams fail to wait, once told so.
type sulking struct {
	device.Device
	err error
}

type sulkingStream struct {
	device.Stream
	d *sulking
}

func (d *sulking) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	return &sulkingStream{s, d}, err
}

func (s *sulkingStream) Sync() error { return errors.Join(s.Stream.Sync(), s.d.err) }

// Who waits for the device returns what the device says: New, Load, Read and the end of a step
// that failed before.
func TestWaitingReturnsErrors(t *testing.T) {
	inner, err := cpuDevice()
	if err != nil {
		t.Fatal(err)
	}
	dev, lost := &sulking{Device: inner}, errors.New("the device is lost")
	l, err := newLone(dev, Config{Units: units(2), Pool: bucket.Arena, Prefetch: 1, Behind: 1})
	if err != nil {
		t.Fatal(err)
	}
	key := memory.Key{Microbatches: 1}
	if err := l.uses(key, 0, 1); err != nil {
		t.Fatal(err)
	}
	dev.err = lost
	if err := l.p.Load(0, 0, make([]float32, 120)); !errors.Is(err, lost) {
		t.Error("Load:", err)
	}
	if v, err := l.p.Read(0, 0, Weights); v != nil || !errors.Is(err, lost) {
		t.Error("Read:", err)
	}
	step := l.p.Begin(key, l.s)
	_, first := step.Use(1, l.s)
	if err := step.End(); !errors.Is(err, lost) || err.Error() != first.Error()+"; then the device failed: "+lost.Error() {
		t.Error("End:", err)
	}
	if p, err := New(dev, Config{Groups: l.p.cfg.Groups, Units: units(1), Pool: bucket.Arena, Prefetch: 1, Behind: 1, GradComm: BF16, MainGrads: FP32}); p != nil || !errors.Is(err, lost) {
		t.Error("New:", err)
	}
	dev.err = nil
	if err := errors.Join(l.close(), inner.Close()); err != nil {
		t.Error(err)
	}
}

// New memory is never read: shards begin as zeros. They have the bytes of their types.
func TestShardsBeginAsZeros(t *testing.T) {
	for _, main := range []bucket.Type{BF16, FP32} {
		err := check.On(cpuDevice, func(dev device.Device) error {
			us := units(2)
			us[1].Params[0].Type = FP32
			l, err := newLone(dev, Config{Units: us, Pool: bucket.Arena, Prefetch: 1, Behind: 1, GradComm: FP32, MainGrads: main})
			if err != nil {
				return err
			}
			held, n := &l.p.shards, memory.Bytes(l.p.layout.elements)
			if held.weights.Size() != 4*n || held.grads.Size() != main.Size*n || held.params.Size() != 2*memory.Bytes(l.p.layout.narrow) || (held.wide != nil) != (main == BF16) {
				t.Errorf("%s: %d weights, %d gradients and %d parameters for %d elements", main.Name, held.weights.Size(), held.grads.Size(), held.params.Size(), n)
			}
			for _, x := range l.p.Shards() {
				for i, r := range []device.Range{x.Weights, x.Params, x.Grads} {
					raw := make([]byte, r.Len)
					err = errors.Join(err, l.s.Download(raw, r))
					for at, v := range raw {
						if v != 0 {
							t.Errorf("%s: byte %d of part %d of unit %d is %#x", main.Name, at, i, x.Unit, v)
							break
						}
					}
				}
			}
			return errors.Join(err, l.close())
		})(check.New(check.Options{}))
		if err != nil {
			t.Error(err)
		}
	}
}

// A recorded use lies at the lowest place that no held use overlaps.
func TestLowestFree(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 3000 {
		p := &pool{}
		taken := map[memory.Bytes]bool{}
		for range rng.IntN(5) {
			lo, n, held := memory.Bytes(rng.IntN(12)), memory.Bytes(1+rng.IntN(4)), rng.IntN(3) > 0
			p.uses = append(p.uses, &poolUse{held: held, places: []bucket.Place{{Offset: lo, Bytes: 1}, {Offset: lo + 1, Bytes: n - 1}}})
			for b := range n {
				taken[lo+b] = taken[lo+b] || held
			}
		}
		size := memory.Bytes(1 + rng.IntN(4))
		fits := func(at memory.Bytes) bool {
			for b := range size {
				if taken[at+b] {
					return false
				}
			}
			return true
		}
		want := memory.Bytes(0)
		for !fits(want) {
			want++
		}
		if got := p.lowestFree(size); got != want {
			t.Fatalf("%d bytes lie at %d, want %d; %v are taken", size, got, want, taken)
		}
	}
}

// A step that uses all units forward and back needs no more than New has taken.
func TestPlainStepsDoNotGrow(t *testing.T) {
	for _, kind := range []bucket.PoolKind{bucket.Fixed, bucket.Max, bucket.Arena, bucket.Recorded} {
		l := openLone(t, Config{Units: units(4), Pool: kind, Prefetch: 2, Behind: 1})
		params, grads := l.p.params.buf.Size(), l.p.grads.buf.Size()
		for range 2 {
			step := l.p.Begin(memory.Key{Microbatches: 1}, l.s)
			for i := range 8 {
				u := min(i, 7-i)
				x, err := step.Use(u, l.s)
				if err != nil {
					t.Fatal(err)
				}
				if i > 3 {
					g, err := step.Grad(u, l.s)
					if err != nil {
						t.Fatal(err)
					}
					g.Done()
				}
				x.Done()
			}
			if err := step.End(); err != nil {
				t.Fatal(err)
			}
		}
		plan, other, _ := l.p.plans(memory.Key{Microbatches: 1})
		if p, g := l.p.params.buf.Size(), l.p.grads.buf.Size(); p != params || g != grads || plan.Bytes > p || other.Bytes > g {
			t.Errorf("%v: %d and %d, at first %d and %d, planned %d and %d", kind, p, g, params, grads, plan.Bytes, other.Bytes)
		}
	}
}
