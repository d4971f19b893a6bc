// This file owns the tests of a limit on saved tensors that changes between steps.

package engine

import (
	"errors"
	"math/rand/v2"
	"slices"
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

// SPEC S8.1: a lower limit under which recomputing is cheaper than copying is kept to, and a
// step is recorded to learn what recomputing takes.
func TestLowerLimitThatRecomputes(t *testing.T) {
	c := loopConfig{pipeline: pipelines[0].Pipeline, layers: 4, scale: 32, work: time.Millisecond, dry: true}
	c.pipeline.Microbatches = 1
	all := extent(t, on(0, Config{}).like(c))
	c.SavedLimit, c.Links = all, memory.Links{Out: 4e6, In: 4e6}
	must(t, c, func(l *loop, rng *rand.Rand) error {
		err := l.train(2, rng)
		limit := all * 65 / 100 / 256 * 256
		l.rt.SetSavedLimit(limit)
		err = errors.Join(err, l.train(3, rng))
		d, s := l.rt.Decision(l.key()), l.rt.Summary(l.key())
		if d == nil || d.Budget != limit || s.Extent > limit || s.Counts.Departed || !slices.ContainsFunc(d.Policy.Units(), func(u memory.Unit) bool { return d.Policy[u] == memory.Recompute }) {
			t.Errorf("decided: %+v; %v of %v taken", d, s.Extent, limit)
		}
		return err
	})
}
