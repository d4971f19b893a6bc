// This file owns the manager under the race checker: every schedule of the streams
// gives the exact result, every wait is needed, and whatever can fail may.

package offload

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

func cpuDevice() (device.Device, error) {
	return cpu.Open(cpu.Options{CopyThreads: 1, Capacity: [memory.Kinds]memory.Bytes{64 * memory.MiB, 64 * memory.MiB}})
}

// openCUDA opens the first GPU, or skips with the reason.
func openCUDA(t testing.TB) device.Device {
	t.Helper()
	d, err := cuda.Open(cuda.Options{CopyKernel: kernels.GraphCopy})
	var no *device.Unsupported
	if errors.As(err, &no) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// onDevices runs a test on the CPU and on a GPU.
func onDevices(t *testing.T, f func(t *testing.T, open func(testing.TB) device.Device)) {
	t.Run("cpu", func(t *testing.T) { f(t, openCPU) })
	t.Run("cuda", func(t *testing.T) { f(t, openCUDA) })
}

// training is a program for the checker: some steps of a loop.
func training(c loopConfig, steps int) check.Program {
	return check.On(cpuDevice, func(dev device.Device) error { return onLoop(dev, c, steps, nil) })
}

// checked are the loops that the checker looks at: with everything, some things and
// nothing leaving, with reloads ahead of need and late, with budgets below what the
// step would take, and with memory of the caller's.
func checked(yield func(string, loopConfig) bool) {
	for _, p := range pipelines {
		for _, h := range []how{eager, whole, scopes, delayed} {
			for _, v := range []struct {
				name string
				c    loopConfig
			}{
				{"all leave", loopConfig{leave: all, ahead: 2}},
				{"some leave, none is ahead", loopConfig{leave: every3}},
				{"none leave", loopConfig{}},
				{"a tight budget", loopConfig{leave: every3, ahead: 3, Config: Config{Device: p.tight, Window: 1}}},
				{"borrowed inputs, cap 1", loopConfig{leave: all, ahead: 1, borrowed: true, Config: Config{Cap: 1}}},
			} {
				c := v.c
				if h >= scopes && c.Device > 0 { // nothing can leave to make room in a scope
					c.leave, c.ahead = all, 1
				}
				c.pipeline, c.rank, c.layers, c.how = p.Pipeline, p.rank, p.layers, h
				if !yield(fmt.Sprintf("%s, %v, %s", p.name, h, v.name), c) {
					return
				}
			}
		}
	}
}

// SPEC S4.1, S6.2: no schedule of the streams changes a result, and the checker
// finds nothing.
func TestUnderAnySchedule(t *testing.T) {
	seeds := 6
	if testing.Short() {
		seeds = 1
	}
	for name, c := range checked {
		t.Run(name, func(t *testing.T) {
			if err := check.Explore(check.Options{}, seeds, training(c, 4)); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// SPEC S6.2: without any one of its waits the manager is caught. Waits that only
// bound the copies under way are needed by nobody, so there is no cap.
func TestEveryWaitIsNeeded(t *testing.T) {
	for name, c := range checked {
		c.Cap = 0
		// One pipeline has everything, the others what differs between them.
		if tight := c.Device > 0; c.pipeline.Ranks < 3 && (!tight || c.how == delayed || testing.Short()) || raceEnabled && (c.how == whole || c.how == delayed || !tight) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			edges, err := check.DropEach(check.Waits, 0, training(c, 3))
			if err != nil {
				t.Fatal(err)
			}
			t.Log(edges)
			if edges.Caught != edges.Total || c.leave != nil && edges.Total == 0 {
				t.Error("a wait that nobody misses")
			}
		})
	}
}

// Whatever can fail is made to fail: the error is the typed one, and everything is
// given back.
func TestEverythingMayFail(t *testing.T) {
	for _, h := range []how{eager, whole, scopes} {
		p := pipelines[1]
		c := loopConfig{pipeline: p.Pipeline, rank: p.rank, layers: p.layers, how: h, leave: every3, ahead: 2, borrowed: h == eager}
		for _, class := range []check.Class{check.Allocs, check.Grows, check.Copies, check.Makes} {
			f, err := check.FailEach(class, 1, cpuDevice, func(dev device.Device) error {
				l, err := newLoop(dev, c)
				if err == nil {
					err = l.train(3, rand.New(rand.NewPCG(1, 1)))
				}
				return errors.Join(err, l.close())
			})
			if err != nil {
				t.Fatal(err)
			}
			// Where it cannot grow, what there is becomes the limit.
			if len(f.Wrong) > 0 || class != check.Grows && (f.Survived > 0 || f.Reported*2 < f.Calls) {
				t.Errorf("%v, %v: %+v", h, class, f)
			}
		}
	}
}

// few is a device that has so many events and no more.
type few struct {
	device.Device
	left int
}

func (d *few) NewEvent(f device.EventFlags) (device.Event, error) {
	if d.left--; d.left < 0 {
		return nil, &device.DriverError{Call: "NewEvent", Code: 2}
	}
	return d.Device.NewEvent(f)
}

// A device that has no event left, at whatever call of a step, is an error of the
// step. The next ones go well if it has, and everything is given back.
func TestEventsMayFail(t *testing.T) {
	p := pipelines[1]
	for i, h := range []how{eager, scopes, delayed, scopes} {
		c := loopConfig{pipeline: p.Pipeline, rank: p.rank, layers: p.layers, how: h, leave: all, ahead: 2}
		for n := 0; ; n++ {
			inner, err := cpuDevice()
			if err != nil {
				t.Fatal(err)
			}
			dev := &few{inner, n}
			l, err := newLoop(dev, c)
			l.slow = func() bool { return i == 3 }
			if err == nil {
				err = l.train(3, rand.New(rand.NewPCG(1, 1)))
			}
			all := dev.left >= 0
			var again error
			if dev.left = 1 << 30; l.m != nil {
				l.how = eager // which issues copies one by one, under the same plan
				again = l.train(3, rand.New(rand.NewPCG(1, 1)))
			}
			if again = errors.Join(again, l.close(), inner.Close()); again != nil {
				t.Fatalf("%v: behind event %d: %v", h, n, again)
			}
			var broken *device.DriverError
			if all == errors.As(err, &broken) {
				t.Fatalf("%v: event %d fails: %v", h, n, err)
			}
			if all {
				break
			}
		}
	}
}

// Steps use the events of the steps before them: a long run makes no more than a short one.
func TestEventsAreUsedAgain(t *testing.T) {
	p := pipelines[1]
	for _, h := range []how{eager, scopes} {
		inner, err := cpuDevice()
		if err != nil {
			t.Fatal(err)
		}
		dev := &few{inner, 1 << 30}
		l, err := newLoop(dev, loopConfig{pipeline: p.Pipeline, rank: p.rank, layers: p.layers, how: h, leave: all, ahead: 2})
		rng := rand.New(rand.NewPCG(1, 1))
		if err == nil {
			err = l.train(3, rng)
		}
		left := dev.left
		if err == nil {
			err = l.train(3, rng)
		}
		if err = errors.Join(err, l.close(), inner.Close()); err != nil || dev.left != left {
			t.Errorf("%v: %d more events after the third step, %v", h, left-dev.left, err)
		}
	}
}

// A scope that failed when it was issued in part leaves a step in which the caller
// can still give back what it has.
func TestStepsGoOnBehindABrokenScope(t *testing.T) {
	groups := []memory.GroupID{{Name: "a"}, {Name: "b"}, {Name: "c"}}
	for n := 0; ; n++ {
		dev := &few{openCPU(t), n}
		r := newRig(t, dev, Config{Cap: 1})
		r.m.Begin(leaves(groups...))
		x, y := r.alloc(100), r.alloc(1000)
		scope, err := r.m.Capture(func() (err error) {
			for _, g := range groups {
				s, failed := r.m.Alloc(1000)
				if failed != nil {
					return failed
				}
				r.compute.Fill(s.Range(), 1)
				_, failed = r.m.Save(g, flat(s))
				err = errors.Join(err, failed)
				s.Free()
			}
			return err
		})
		dev.left = 1 << 30
		r.compute.Fill(y.Range(), 1)
		x.Free()
		y.Free()
		if ended := r.m.End(); (ended == nil) != (err == nil) {
			t.Errorf("%d events: %v, at the end %v", n, err, ended)
		}
		if err == nil {
			r.ok(scope.Close())
		}
		if r.close(); err == nil {
			break
		}
	}
}
