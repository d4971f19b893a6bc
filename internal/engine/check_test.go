// This file owns the runtime under the race checker: every schedule of the streams
// gives the exact result, every wait is needed, and whatever can fail may.

package engine

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// training is a program for the checker: some steps of a loop. It runs by a steady clock.
func training(c loopConfig, n int) check.Program {
	c.work = cmp.Or(c.work, quick)
	return check.On(cpuDevice, func(dev device.Device) error { return run(dev, c, steps(n)) })
}

// checked are the loops that the checker looks at: every pipeline, eager and
// captured, with settings by hand, with budgets, recomputing, with a stash, and with
// memory of the caller's.
func checked(yield func(string, loopConfig) bool) {
	for i, p := range pipelines {
		for k, set := range []memory.Scopes{0, whole, scopes} {
			for name, c := range map[string]Config{
				"all":            {ByHand: byHand["all"]},
				"mixed":          {ByHand: byHand["mixed"]},
				"budget":         {SavedLimit: 40 * memory.KiB, NoRecompute: true},
				"tight":          {SavedLimit: 40 * memory.KiB, Window: 1},
				"with a stash":   {ByHand: hand("core_attn", "moe_act"), Stash: store(40, 400)},
				"borrowed, none": {},
			} {
				if c.SavedLimit > 0 && (c.Window > 0) != ((i+k)%2 > 0) {
					continue // the solver takes its time: one of the two
				}
				if set == scopes && c.ByHand != nil && c.Stash == nil {
					c.ByHand = hand("core_attn", "mlp_norm", "expert_fc1")
				}
				c.Scopes = set
				l := on(i, c)
				l.layers = 2
				if l.borrows = name == "borrowed, none"; c.Stash != nil {
					l.most = 40
				}
				if c.SavedLimit > 0 && i > 0 {
					l.SavedLimit = 48 * memory.KiB
				}
				if !yield(p.name+", "+set.String()+", "+name, l) {
					return
				}
			}
		}
	}
}

// SPEC S4.1, S5.1, S6.2: no schedule of the streams changes a result, and the
// checker finds nothing.
func TestUnderAnySchedule(t *testing.T) {
	t.Parallel()
	seeds := 2
	if testing.Short() || raceEnabled {
		seeds = 1
	}
	for name, c := range checked {
		t.Run(name, func(t *testing.T) {
			seeds := seeds
			if c.SavedLimit > 0 {
				seeds = 1 // every run solves twice
			}
			steady(t, func() {
				if err := check.Explore(check.Options{}, seeds, training(c, 4)); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// SPEC S6.2: without any one of its waits the runtime is caught, eager, with scopes
// and with the step captured whole.
func TestEveryWaitIsNeeded(t *testing.T) {
	t.Parallel()
	if testing.Short() || raceEnabled {
		t.Skip("a run for every wait")
	}
	// Copies that take no time come right before they are needed.
	fast := memory.Links{Out: 1e15, In: 1e15}
	for _, set := range []memory.Scopes{0, whole, scopes} {
		c := on(1, Config{Scopes: set, ByHand: hand("core_attn", "moe_act", "expert_fc1", "mlp_norm"), Links: fast})
		c.layers = 2
		t.Run(set.String(), func(t *testing.T) {
			steady(t, func() {
				edges, err := check.DropEach(check.Waits, 0, training(c, 3))
				t.Log(edges)
				if err != nil || edges.Caught != edges.Total || edges.Total == 0 {
					t.Error("a wait that nobody misses: ", err)
				}
			})
		})
	}
}

// Whatever can fail is made to fail: the error is the typed one, and everything is
// given back.
func TestEverythingMayFail(t *testing.T) {
	t.Parallel()
	for _, set := range []memory.Scopes{0, whole, scopes} {
		c := on(0, Config{Scopes: set, ByHand: hand("core_attn", "expert_fc1"), Stash: store(2, 400)})
		c.layers, c.pipeline.Microbatches, c.borrows, c.most, c.work = 2, 1, set == 0, 40, quick
		for _, class := range []check.Class{check.Allocs, check.Grows, check.Copies, check.Launches, check.Makes} {
			by := 1
			if class == check.Copies || class == check.Launches { // there are hundreds
				by = 3
			}
			if testing.Short() || raceEnabled {
				by = 7
			}
			var f check.Failures
			var err error
			steady(t, func() {
				f, err = check.FailEach(class, by, cpuDevice, func(dev device.Device) error {
					l, err := newLoop(dev, c)
					if err == nil {
						err = l.train(3, rand.New(rand.NewPCG(1, 1)))
					}
					return errors.Join(err, l.close())
				})
			})
			if err != nil {
				t.Fatal(err)
			}
			// Where it cannot grow, what there is becomes the limit.
			full := func(err error) bool { return class == check.Grows && errors.As(err, new(*residency.Full)) }
			f.Wrong = slices.DeleteFunc(f.Wrong, full)
			timing := class == check.Makes // without times nothing is recomputed
			if len(f.Wrong) > 0 || class != check.Grows && (f.Survived > 0 && !timing || f.Reported*2*by < f.Calls) {
				t.Errorf("%v, %v: %+v", set, class, f)
			}
		}
	}
}
