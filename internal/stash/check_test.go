// This file owns the stash under the race checker: every schedule gives the
// exact result, and every wait of the manager is needed.

package stash

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

func cpuDevice() (device.Device, error) { return cpu.Open(cpu.Options{CopyThreads: 1}) }

// training is a program for the checker: some steps of the loop.
func training(t testing.TB, c loopConfig, steps int, seed uint64) check.Program {
	return check.On(cpuDevice, func(dev device.Device) error {
		l, err := newLoop(t, dev, c)
		if err != nil {
			return err
		}
		if c.limit > 0 || c.Store.Pages[Device] < c.Store.Max[Device] {
			l.protect()
		}
		err = l.run(steps, rand.New(rand.NewPCG(seed, 1)), max(c.limit, c.maxRows))
		return errors.Join(err, l.close())
	})
}

var checkedPipelines = map[string]loopConfig{
	"pp1":         {pipeline: schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 2}},
	"1f1b":        {pipeline: schedule.Pipeline{Ranks: 3, Chunks: 1, Microbatches: 4}},
	"interleaved": {pipeline: interleaved},
}

// SPEC S1.2, S1.5, S6.2: no schedule of the streams changes a result, and the
// checker finds nothing, with pages and with a stack, with spills, reruns,
// growth and resized sets.
func TestManagerUnderAnySchedule(t *testing.T) {
	seeds := 25
	if testing.Short() {
		seeds = 3
	}
	for name, c := range checkedPipelines {
		for _, mode := range []Mode{Auto, PagesOnly} {
			for _, sets := range []int{1, 2, 3} {
				c := c
				c.layers, c.sets, c.maxRows = 2, sets, 100
				c.ManagerConfig = tight(5, 2, 256, 256)
				c.Mode = mode
				if sets == 2 {
					c.maxRows, c.limit = 40, 100
				}
				t.Run(fmt.Sprintf("%s, mode %d, %d sets", name, mode, sets), func(t *testing.T) {
					if err := check.Explore(check.Options{}, seeds, training(t, c, 3, uint64(sets))); err != nil {
						t.Fatal(err)
					}
				})
			}
		}
	}
}

// SPEC S1.2, S6.2: the model's random operations on two streams, under seeded
// schedules.
func TestStoreUnderAnySchedule(t *testing.T) {
	seeds := uint64(40)
	if testing.Short() {
		seeds = 4
	}
	for seed := range seeds {
		p := check.On(cpuDevice, func(dev device.Device) error {
			m, err := newModel(dev, rand.New(rand.NewPCG(seed, 9)))
			if err != nil {
				return err
			}
			return errors.Join(m.run(150), m.close())
		})
		if err := check.Explore(check.Options{}, 3, p); err != nil {
			t.Fatalf("model seed %d: %v", seed, err)
		}
	}
}

// SPEC S6.2: without any one of its waits the manager is caught.
func TestEveryWaitIsNeeded(t *testing.T) {
	for name, c := range checkedPipelines {
		for _, mode := range []Mode{Auto, PagesOnly} {
			c := c
			c.layers, c.sets, c.maxRows, c.ManagerConfig = 2, 3, 60, roomy(mode)
			if name == "pp1" {
				c.layers = 6 // or nearly everything would stay where it is
			}
			t.Run(fmt.Sprintf("%s, mode %d", name, mode), func(t *testing.T) {
				edges, err := check.DropEach(check.Waits, 0, training(t, c, 3, 1))
				if err != nil {
					t.Fatal(err)
				}
				t.Log(edges)
				if edges.Caught != edges.Total || edges.Total == 0 {
					t.Error("a wait that nobody misses")
				}
			})
		}
	}
}

// Whatever can fail is made to fail: the error is the typed one, and everything is
// given back.
func TestEverythingMayFail(t *testing.T) {
	c := loopConfig{pipeline: interleaved, layers: 2, sets: 2, maxRows: 40, limit: 100, ManagerConfig: tight(2, 1, 256, 256)}
	for _, class := range []check.Class{check.Allocs, check.Grows, check.Copies, check.Launches, check.Makes} {
		every := 1
		switch {
		case testing.Short():
			every = 7
		case class == check.Copies || class == check.Launches: // there are hundreds
			every = 3
		}
		f, err := check.FailEach(class, every, cpuDevice, func(dev device.Device) error {
			v, err := newMover(dev, c)
			if err == nil {
				err = v.run(3, rand.New(rand.NewPCG(1, 1)), 100, func() error { return v.m.Step(memory.Key{}, v.body) })
			}
			return errors.Join(err, v.close())
		})
		if err != nil {
			t.Fatal(err)
		}
		// Room to spare that cannot be had is done without.
		if len(f.Wrong) > 0 || f.Survived > 0 && class != check.Grows || f.Reported < f.Survived || f.Calls == 0 {
			t.Errorf("%v: %+v", class, f)
		}
	}
}

// SPEC S1.2, S5.5: between steps a workspace gets more sets or fewer, and no schedule of
// the streams changes a result. Memory follows the number of sets.
func TestSetsBetweenSteps(t *testing.T) {
	seeds := 10
	if testing.Short() {
		seeds = 2
	}
	for name, c := range checkedPipelines {
		c.layers, c.sets, c.maxRows, c.limit = 2, 1, 40, 100
		c.ManagerConfig = tight(5, 2, 256, 256)
		c.MoreSets = 2
		program := check.On(cpuDevice, func(dev device.Device) error {
			l, err := newLoop(t, dev, c)
			if err != nil {
				return err
			}
			l.protect()
			rng := rand.New(rand.NewPCG(6, 1))
			_, _, each := l.m.MoreSets()
			for _, more := range []int{0, 2, 1, 0, 1} {
				before := l.m.Generation()
				held, _ := l.m.Held()
				size := held / memory.Bytes(l.m.Sets()[0])
				changes := l.m.Sets()[0] != 1+more
				if err := l.m.SetMore(more); err != nil {
					return err
				}
				if (l.m.Generation() != before) != changes {
					return fmt.Errorf("%d more sets: generation %d after %d", more, l.m.Generation(), before)
				}
				held, _ = l.m.Held()
				if most, _ := l.m.Most(); held != size*memory.Bytes(1+more) || most != each*memory.Bytes(1+more) {
					return fmt.Errorf("%d more sets hold %v, at most %v; one set takes %v, at most %v", more, held, most, size, each)
				}
				if err := l.run(2, rng, 100); err != nil {
					return fmt.Errorf("%d more sets: %w", more, err)
				}
			}
			return l.close()
		})
		t.Run(name, func(t *testing.T) {
			if err := check.Explore(check.Options{}, seeds, program); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// SetMore changes nothing if there is no memory for the sets, and steps go on.
func TestSetsWithoutMemory(t *testing.T) {
	c := checkedPipelines["1f1b"]
	c.layers, c.sets, c.maxRows = 2, 1, 100
	c.ManagerConfig = tight(60, 0, 60, 0)
	c.MoreSets = 2
	var took memory.Bytes // with one set
	try := func(capacity memory.Bytes, body func(l *loop) error) {
		t.Helper()
		dev, err := cpu.Open(cpu.Options{CopyThreads: 1, Capacity: [memory.Kinds]memory.Bytes{memory.Device: capacity}})
		if err != nil {
			t.Fatal(err)
		}
		l, err := newLoop(t, dev, c)
		if err == nil {
			err = errors.Join(l.run(2, rand.New(rand.NewPCG(7, 1)), 100), body(l), l.run(2, rand.New(rand.NewPCG(8, 1)), 100))
			took = dev.Memory().Kind[memory.Device].Peak
			err = errors.Join(err, l.close())
		}
		if err = errors.Join(err, dev.Close()); err != nil {
			t.Fatal(err)
		}
	}
	try(0, func(*loop) error { return nil })
	try(took+took/100, func(l *loop) error {
		for _, n := range []int{2, 1} {
			var full *device.OutOfMemory
			if err := l.m.SetMore(n); !errors.As(err, &full) {
				t.Errorf("%d more sets: %v", n, err)
			}
		}
		if most, added, _ := l.m.MoreSets(); most != 2 || added != 0 {
			t.Errorf("%d of %d sets were added", added, most)
		}
		return nil
	})
}
