// This file owns what becomes of a plan that steps no longer keep to.

package engine

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/internal/offload"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// knows reports whether the plan of a loop was made from a step with a group.
func (l *loop) knows(name string) bool {
	p := l.rt.Profile(l.key())
	return p != nil && slices.ContainsFunc(p.Tape.Ops, func(op residency.Op) bool { return op.Kind == residency.OpSave && op.Group.Name == name })
}

// SPEC S4.3: a step that departs from its plan while it is captured makes its graph
// stale: the next step is recorded, and a graph of the new plan takes its place.
func TestDepartureInACapture(t *testing.T) {
	must(t, on(0, Config{Scopes: whole, ByHand: hand("core_attn", "moe_act")}), func(l *loop, rng *rand.Rand) error {
		if err := l.train(2, rng); err != nil { // the warm-up
			return err
		}
		l.extra = 3
		if err := l.train(1, rng); err != nil {
			return err
		}
		if g := l.rt.Summary(l.key()).Graphs; g.Captures != 1 || l.rt.Decision(l.key()) != nil {
			return fmt.Errorf("the step that departed: %+v, and its decision is kept: %v", g, l.rt.Decision(l.key()) != nil)
		}
		if err := l.train(4, rng); err != nil {
			return err
		}
		s := l.rt.Summary(l.key())
		if g := s.Graphs; g.Captures != 2 || g.Closed != 1 || g.Replays == 0 || s.Counts.Departed || !l.knows("extra") {
			return fmt.Errorf("the steps after it: %+v, departed %v, knows the new groups: %v", g, s.Counts.Departed, l.knows("extra"))
		}
		return nil
	})
}

// SPEC S4.6: memory that was taken once is kept, so the forecast of a smaller step that
// is learned after a departure still has it.
func TestForecastAfterADeparture(t *testing.T) {
	must(t, on(0, Config{ByHand: hand("core_attn", "moe_act")}), func(l *loop, rng *rand.Rand) error {
		l.shift = 64 * memory.KiB
		if err := l.train(3, rng); err != nil {
			return err
		}
		large := l.rt.Forecast(l.key()).Extent
		l.shift, l.extra = 0, 3
		if err := l.train(4, rng); err != nil {
			return err
		}
		held, _ := l.rt.Held()
		if f := l.rt.Forecast(l.key()); !l.knows("extra") || f.Extent < large || f.Extent < held || l.rt.Decision(l.key()).Forecast.Extent >= large {
			return fmt.Errorf("the forecast is %v, the decision's %v; %v before, and %v are held", f.Extent, l.rt.Decision(l.key()).Forecast.Extent, large, held)
		}
		return nil
	})
}

// SPEC S4.6: the recorded step takes what it finds of a budget, and the forecast has that,
// also if the decision needs less.
func TestForecastOfTheRecordedStep(t *testing.T) {
	c := on(1, Config{})
	all := extent(t, c)
	less := 0
	for _, share := range []memory.Bytes{50, 70, 90} {
		c.SavedLimit = all * share / 100
		must(t, c, func(l *loop, rng *rand.Rand) error {
			if err := l.train(4, rng); err != nil {
				return err
			}
			held, _ := l.rt.Held()
			p, d := l.rt.Profile(l.key()), l.rt.Decision(l.key())
			took := l.rt.Forecast(l.key()).Extent - p.Base
			if took < held {
				return fmt.Errorf("a forecast of %v, and %v are held", took, held)
			}
			if (d.Forecast.Extent - p.Base) < held {
				less++
			}
			return nil
		})
	}
	if less == 0 {
		t.Error("no decision needed less than the recorded step took")
	}
}

// SPEC S5.5: where everything fits there is no plan, and so none to depart from. A step
// that takes more, and finds no room for it, is learned from all the same.
func TestLargerStepWithoutAPlan(t *testing.T) {
	c := on(0, Config{NoRecompute: true})
	c.SavedLimit = extent(t, c)
	must(t, c, func(l *loop, rng *rand.Rand) error {
		if err := l.train(2, rng); err != nil {
			return err
		}
		if d := l.rt.Decision(l.key()); !d.Nothing || l.rt.keys[l.key()].plan != nil {
			return errors.New("there is a plan where everything fits")
		}
		l.shift = 16 * memory.KiB
		if err := l.train(1, rng); err != nil {
			return err
		}
		if s := l.rt.Summary(l.key()); s.Counts.Evicted == 0 || s.Counts.Departed {
			return fmt.Errorf("the larger step: %+v", s.Counts)
		}
		if err := l.train(3, rng); err != nil {
			return err
		}
		s := l.rt.Summary(l.key())
		if d := l.rt.Decision(l.key()); d == nil || d.Nothing || s.Counts.Evicted > 0 || s.Counts.OutBytes == 0 {
			return fmt.Errorf("nothing was learned from the larger step: %+v", s.Counts)
		}
		return nil
	})
}

// A step that is recorded begins with nothing that an earlier step under its key showed. What was tried is kept, or
// the same would be tried for ever: how often a first step was recorded anew, and that there is no room to recompute.
func TestRecordingForgets(t *testing.T) {
	unit := memory.Unit{Name: "mlp"}
	l := learned{
		known: true, first: &policy.Decision{}, policy: memory.Policy{unit: memory.Offload}, plan: &residency.Plan{}, decision: &policy.Decision{},
		profile: &policy.Profile{}, largest: &policy.Profile{}, extent: 1, early: 2, facts: map[memory.Unit]policy.Facts{unit: {Recompute: time.Second}},
		redone: map[memory.Unit]bool{unit: true}, passes: []pass{{}}, spans: []span{{}}, stats: offload.Stats{Steps: 3}, issued: true, recorded: true,
		looks: 4, timed: true, calibrated: true, quicker: true, limit: 5, anew: 6, noRecompute: true,
	}
	fields := func() (set, zero []string) {
		v := reflect.ValueOf(l)
		for i := range v.NumField() {
			if name := v.Type().Field(i).Name; v.Field(i).IsZero() {
				zero = append(zero, name)
			} else {
				set = append(set, name)
			}
		}
		return set, zero
	}
	if _, zero := fields(); zero != nil {
		t.Fatalf("%q have no value before the step; give them one, and say below whether they are kept", zero)
	}
	before := l
	l.begin()
	kept := []string{"first", "extent", "early", "stats", "anew", "noRecompute"}
	if set, _ := fields(); !slices.Equal(set, kept) {
		t.Errorf("a recorded step begins with %q, want %q", set, kept)
	}
	if l.first != before.first || l.extent != before.extent || l.early != before.early || l.stats.Steps != before.stats.Steps || l.anew != before.anew {
		t.Errorf("a recorded step begins with other values of what is kept: %+v", l)
	}
}
