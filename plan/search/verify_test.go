// This file owns the tests of refined choices: what they say of themselves is what a forecast says.

package search

import (
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
)

// A refined choice has the heights and shares of a fresh forecast of its fractions, on every
// rank, and needs the host memory that it needs alone, whatever was refined before it.
func TestRefinedChoices(t *testing.T) {
	s := small(t)
	clean, err := plan.Predict(withoutPolicy(s))
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 2))
	refined, trimmed, idle := 0, 0, 0
	for _, share := range []float64{0.97, 0.9, 0.8} {
		p, err := newProblem(s, Options{Budget: memory.Bytes(share * float64(reserves(clean)))})
		if err != nil {
			t.Fatal(err)
		}
		offs, recs := p.allowed(p.off, memory.Offload), p.allowed(p.rec, memory.Recompute)
		for range 12 {
			rec, off := recs[r.IntN(len(recs))], offs[r.IntN(len(offs))]
			if p.clashBetween(rec, off) != "" {
				continue
			}
			c := p.newChoice(rec, off)
			for k := range c.fractions {
				c.setFraction(k, r.IntN(parts+1))
			}
			asked := append([]int(nil), c.fractions...)
			if err := p.refine(c); err != nil {
				t.Fatal(err)
			}
			if c.failed {
				continue
			}
			refined++
			for k, n := range c.fractions {
				m, err := p.measureRank(c, k, n)
				if err != nil {
					t.Fatal(err)
				}
				if c.heights[k] != m.height || c.shares[k] != m.share {
					t.Errorf("rank %d of %x, %x with %d: %d and %g, want %d and %g", k, rec, off, n, c.heights[k], c.shares[k], m.height, m.share)
				}
				if n < asked[k] {
					trimmed++
				}
			}
			if _, err := p.crowds(c); err != nil {
				t.Fatal(err)
			}
			for k, n := range c.fractions {
				want := p.clean.Ranks[k].Host
				if n > 0 {
					m, err := p.measureRank(c, k, n)
					if err != nil {
						t.Fatal(err)
					}
					want = m.host
				} else {
					idle++
				}
				if p.pinned[k] != want {
					t.Errorf("rank %d of %x, %x with %d pins %d, want %d", k, rec, off, n, p.pinned[k], want)
				}
			}
		}
	}
	if refined < 8 || trimmed < 4 || idle < 4 {
		t.Errorf("%d choices with %d fewer and %d idle ranks: the test sees too little", refined, trimmed, idle)
	}
}
