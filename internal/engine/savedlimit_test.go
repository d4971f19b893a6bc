// This file owns the tests of a limit on saved tensors that changes between steps.

package engine

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/memory"
)

// SPEC S8.1: a limit that changes between steps holds from the next step on, and the
// plan for it is made from the step that was recorded. A limit that is set inside of the
// recorded step is the one that its plan is made under.
func TestSetSavedLimit(t *testing.T) {
	const groups = 6
	b := newBorrower(t, Config{SavedLimit: 100 * 4096})
	step := func(limit memory.Bytes, moves bool) {
		t.Helper()
		b.r.SetSavedLimit(limit)
		if _, err := b.step(t, groups, nil); err != nil {
			t.Fatal(err)
		}
		st, d := b.r.off.Last(), b.r.Decision(memory.Key{})
		if st.Device > limit || moves != (st.Out > 0) || st.Departed || d.Budget != limit || b.r.SavedLimit() != limit {
			t.Errorf("limit %v: %v were taken, %+v; decided under %v", limit, st.Device, st.Counts, d.Budget)
		}
	}
	for _, n := range []memory.Bytes{100, 3, 4, 1, 100, 3} {
		step(n*4096, n < groups)
	}
	b.r.SetSavedLimit(2048) // the least is one group
	var low *memory.BudgetError
	if _, err := b.r.Begin(memory.Key{}); !errors.As(err, &low) || int64(low.Need) != 4096 {
		t.Errorf("a limit below the least: %v", err)
	}
	step(5*4096, true)

	b = newBorrower(t, Config{SavedLimit: 4096})
	s, err := b.r.Begin(memory.Key{})
	if err != nil {
		t.Fatal(err)
	}
	b.r.SetSavedLimit(8 * 4096)
	if s.SavedBytes() != 0 {
		t.Errorf("%v are saved before anything was", s.SavedBytes())
	}
	if err := s.End(nil); err != nil || b.r.Decision(memory.Key{}).Budget != 8*4096 {
		t.Errorf("%v, %+v", err, b.r.Decision(memory.Key{}))
	}
}

// A step that is recorded keeps to the limit as well, also to one that was set after the runtime was opened, and moves
// only what has no room under it.
func TestRecordedStepKeepsToTheLimit(t *testing.T) {
	const groups = 6
	for n := memory.Bytes(1); n <= groups; n++ {
		for _, opened := range []memory.Bytes{n, 100, 1} {
			b := newBorrower(t, Config{SavedLimit: opened * 4096})
			b.r.SetSavedLimit(n * 4096)
			if _, err := b.step(t, groups, nil); err != nil {
				t.Fatal(err)
			}
			if st := b.r.off.Last(); st.Device != n*4096 || (st.Evicted > 0) != (n < groups) {
				t.Errorf("limit %v, opened with %v: %v were taken, %+v", n*4096, opened*4096, st.Device, st.Counts)
			}
		}
	}
}

// If a lower limit makes the solver recompute something, the next step is recorded under that
// choice, as after a first decision to recompute, and it keeps to the limit already.
func TestLowerLimitRecomputes(t *testing.T) {
	c := loopConfig{pipeline: pipelines[0].Pipeline, layers: 2, scale: 32, work: time.Millisecond, dry: true}
	c.pipeline.Microbatches = 1
	most := extent(t, on(0, Config{}).like(c))
	c.SavedLimit, c.Links = 2*most, memory.Links{Out: 4e6, In: 4e6}
	must(t, c, func(l *loop, rng *rand.Rand) error {
		if err := l.train(3, rng); err != nil {
			return err
		}
		lower := most * 61 / 100 / 256 * 256
		l.rt.cfg.SavedLimit = lower
		for i := range 3 {
			if err := l.train(1, rng); err != nil {
				return err
			}
			if k := l.rt.keys[l.key()]; !k.known || k.limit != lower || !recomputes(k.decision) || k.stats.Device > lower {
				t.Errorf("step %d: %v were taken; the plan is known: %v, was made under %v of %v, and recomputes: %v", i, k.stats.Device, k.known, k.limit, lower, recomputes(k.decision))
			}
		}
		return nil
	})
}
