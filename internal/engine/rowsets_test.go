// This file owns tests of rows under a budget: pages, sets and the memory that they take.

package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// rowBudget is a loop under a budget in which rows cross a slow link. One more set pays.
func rowBudget() loopConfig {
	c := on(1, Config{Budget: 1240 * memory.KiB, Stash: store(0, 400), Links: memory.Links{Out: 2e7, In: 2e7}})
	c.Stash.HostMax, c.Stash.Tables = 400, 28*memory.KiB
	c.most, c.sets, c.work = 40, 1, 100*time.Microsecond
	return c
}

// SPEC S5.5: under a budget the solver adds a set if that makes the step shorter. Results
// are exact, and the device never holds more than the budget.
func TestSetsUnderABudget(t *testing.T) {
	must(t, rowBudget(), func(l *loop, rng *rand.Rand) error {
		err := l.train(5, rng)
		f := l.rt.Decision(l.key()).Forecast
		if f.Sets != 1 || f.RowBytes == 0 || !slices.Equal(l.rt.stash.Sets(), []int{2}) {
			t.Errorf("%d sets added, %d bytes of rows moved, workspaces with %d sets", f.Sets, f.RowBytes, l.rt.stash.Sets())
		}
		if peak := l.dev.Memory().Kind[memory.Device].Peak; peak > l.Budget || f.Extent > l.Budget {
			t.Errorf("the device held %v, with a forecast of %v, of a budget of %v", peak, f.Extent, l.Budget)
		}
		return err
	})
}

// A decision that has pages in place of a set gives the set back before it takes the pages,
// so that the device does not hold both.
func TestPagesInPlaceOfASet(t *testing.T) {
	must(t, rowBudget(), func(l *loop, rng *rand.Rand) error {
		if err := l.train(3, rng); err != nil {
			return err
		}
		k, d := l.rt.keys[l.key()], *l.rt.Decision(l.key())
		f, use := &d.Forecast, func() device.KindUsage { return l.dev.Memory().Kind[memory.Device] }
		more := schedule.Pages(f.SetBytes / l.rt.stash.Page())
		if f.Sets != 1 || more == 0 {
			t.Errorf("%d sets of %v, and pages of %v", f.Sets, f.SetBytes, l.rt.stash.Page())
		}
		rest, err := l.dev.Alloc(memory.Device, use().Peak-use().Current, "test") // now it holds as much as ever
		if err != nil {
			return err
		}
		before := use().Peak
		f.Sets, f.DevicePages = 0, f.DevicePages+more
		f.SetBytes -= memory.Bytes(more) * l.rt.stash.Page() // activations keep their memory
		err = l.rt.apply(k, &d, k.profile)
		if n := l.rt.stash.Store().Pages(stash.Device); n != f.DevicePages || !slices.Equal(l.rt.stash.Sets(), []int{1}) {
			t.Errorf("%d device pages of %d, and %d sets", n, f.DevicePages, l.rt.stash.Sets())
		}
		if after := use().Peak; after > before {
			t.Errorf("the device held %v, and %v before", after, before)
		}
		l.compute.Free(rest)
		return err
	})
}

// withoutSets is a device that has no memory for a workspace to grow a second time.
type withoutSets struct {
	device.Device
	grown map[*device.Buffer]int
	tries int
}

func (d *withoutSets) Grow(b *device.Buffer, size memory.Bytes) error {
	if strings.HasPrefix(b.Owner(), "workspace") {
		if d.grown[b]++; d.grown[b] > 1 {
			d.tries++
			return &device.OutOfMemory{Asked: size, Owner: b.Owner()}
		}
	}
	return d.Device.Grow(b, size)
}

// The set that a decision adds finds no memory: the run says so and trains on without it,
// exactly and within its budget.
func TestSetsWithoutMemory(t *testing.T) {
	var said strings.Builder
	c := rowBudget()
	c.Log = slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelWarn}))
	steady(t, func() {
		inner, err := cpuDevice()
		if err != nil {
			t.Error(err)
			return
		}
		dev := &withoutSets{Device: inner, grown: map[*device.Buffer]int{}}
		err = run(dev, c, func(l *loop, rng *rand.Rand) error {
			err := l.train(3, rng)
			if f := l.rt.Decision(l.key()).Forecast; f.Sets != 1 || !slices.Equal(l.rt.stash.Sets(), []int{1}) {
				t.Errorf("%d sets are forecast, and workspaces have %d", f.Sets, l.rt.stash.Sets())
			}
			if peak := l.dev.Memory().Kind[memory.Device].Peak; peak > l.Budget {
				t.Errorf("the device held %v of a budget of %v", peak, l.Budget)
			}
			return err
		})
		if err := errors.Join(err, dev.Close()); err != nil {
			t.Error(err)
		}
		if dev.tries == 0 || strings.Count(said.String(), "no memory for more sets") != dev.tries {
			t.Errorf("%d tries; it says %s", dev.tries, &said)
		}
	})
}

// What one key was given stays when another key follows it, even if the times of the first
// key turn out shorter.
func TestSetsStayForOtherKeys(t *testing.T) {
	for _, other := range []bool{false, true} {
		must(t, rowBudget(), func(l *loop, rng *rand.Rand) error {
			given := func() string {
				return fmt.Sprintf("%v, %d pages", l.rt.stash.Sets(), l.rt.stash.Store().Pages(stash.Device))
			}
			quick := l.work
			l.work = 30 * quick // everything hides
			err := l.train(1, rng)
			if other {
				err = errors.Join(err, l.one(memory.Key{Microbatches: l.pipeline.Microbatches, Shape: "long"}, rng))
			}
			before := given()
			l.work = quick
			err = errors.Join(err, l.train(2, rng))
			if after := given(); (after != before) == other {
				t.Errorf("another key: %v; first %s, then %s", other, before, after)
			}
			if d := l.rt.Decision(l.key()); other && !d.Final { // nothing can change it any more
				t.Error("a decision that other keys follow is not final")
			}
			return err
		})
	}
}

// A step that is recorded again may have other sets than the first: those that a decision
// added are not part of its base, and the solver may give them back.
func TestSetsOfAStepRecordedAgain(t *testing.T) {
	must(t, rowBudget(), func(l *loop, rng *rand.Rand) error {
		if err := l.train(3, rng); err != nil {
			return err
		}
		first, added := l.rt.Profile(l.key()), l.rt.Decision(l.key()).Forecast.Sets
		l.extra = 3
		if err := l.train(2, rng); err != nil {
			return err
		}
		again, f := l.rt.Profile(l.key()), l.rt.Decision(l.key()).Forecast
		if again == first || !l.knows("extra") || again.Base != first.Base || !slices.Equal(again.Rows.Sets, first.Rows.Sets) {
			t.Errorf("a base of %d with %d sets, and when recorded again %d with %d", first.Base, first.Rows.Sets, again.Base, again.Rows.Sets)
		}
		if added != 1 || !slices.Equal(l.rt.stash.Sets(), []int{1 + f.Sets}) || f.Extent > l.Budget {
			t.Errorf("%d sets were added, then %d, and there are %d; a forecast of %v of %v", added, f.Sets, l.rt.stash.Sets(), f.Extent, l.Budget)
		}
		return nil
	})
}

// A step that is recorded again has all that the first one had: no pages and no added sets
// hold device memory, and activations may take the rest of the budget. What all held before
// stays in the forecast, and the extent of activations is counted anew.
func TestRecordAgain(t *testing.T) {
	must(t, rowBudget(), func(l *loop, rng *rand.Rand) error {
		if err := l.train(3, rng); err != nil {
			return err
		}
		k, p := l.rt.keys[l.key()], l.rt.Profile(l.key())
		held, early := l.rt.holds(p), k.early
		if !k.known || slices.Equal(l.rt.stash.Sets(), []int{1}) || l.rt.off.Config().Device >= l.Budget-p.Base {
			t.Errorf("known is %v, with %d sets and %v for activations", k.known, l.rt.stash.Sets(), l.rt.off.Config().Device)
		}
		k.early = 0
		plans := l.rt.gen
		if err := l.rt.recordAgain(k, p); err != nil {
			return err
		}
		if l.rt.gen == plans {
			t.Error("graphs of the plan before stay valid")
		}
		if k.known || k.early != held || k.extent != 0 {
			t.Errorf("known is %v; %v of %v that were held are remembered, and an extent of %v", k.known, k.early, held, k.extent)
		}
		k.early = max(k.early, early)
		pages, sets := l.rt.stash.Store().Pages(stash.Device), l.rt.stash.Sets()
		if n := l.rt.off.Config().Device; n != l.Budget-p.Base || pages != 0 || !slices.Equal(sets, []int{1}) {
			t.Errorf("%d device pages, %d sets, and %v of %v for activations", pages, sets, n, l.Budget-p.Base)
		}
		err := l.train(3, rng)
		if peak, f := l.dev.Memory().Kind[memory.Device].Peak, l.rt.Forecast(l.key()); f == nil || peak > f.Extent || f.Extent > l.Budget {
			t.Errorf("the device held %v of a budget of %v, with a forecast of %+v", peak, l.Budget, f)
		}
		return err
	})
}

// SPEC S5.5: if the times of two later steps show that recomputing is cheaper than copying,
// a step is recorded again. Rows are in host pages in that step, and results and budget
// hold throughout.
func TestRowsWhenAStepIsRecordedAgain(t *testing.T) {
	if testing.Short() {
		t.Skip("solves many times")
	}
	c := rowBudget()
	c.Links = memory.Links{Out: 2e6, In: 2e6}
	must(t, c, func(l *loop, rng *rand.Rand) error {
		quick := l.work
		l.work = 300 * quick // everything hides
		err := l.train(1, rng)
		if d := l.rt.Decision(l.key()); d == nil || l.rt.stash.Store().Pages(stash.Device) == 0 {
			t.Error("nothing was decided, or no rows are in device pages")
		}
		l.work = quick
		err = errors.Join(err, l.train(2, rng))
		if d := l.rt.Decision(l.key()); d != nil || l.rt.stash.Store().Pages(stash.Device) != 0 || !slices.Equal(l.rt.stash.Sets(), []int{1}) {
			t.Errorf("the next step is not recorded: decided is %v, %d device pages, sets %v", d != nil, l.rt.stash.Store().Pages(stash.Device), l.rt.stash.Sets())
		}
		err = errors.Join(err, l.train(4, rng))
		d := l.rt.Decision(l.key())
		if d == nil || !slices.ContainsFunc(d.Policy.Units(), func(u memory.Unit) bool { return d.Policy[u] == memory.Recompute }) {
			t.Errorf("nothing is recomputed: %+v", d)
		}
		if peak := l.dev.Memory().Kind[memory.Device].Peak; peak > l.Budget {
			t.Errorf("the device held %v of a budget of %v", peak, l.Budget)
		}
		return err
	})
}
