// This file owns the measure of what the linear model costs: how much slower its answer is
// than the best over full forecasts.

package search

import (
	"math"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/cost"
)

// full returns the time of the fastest policy by predicting each in full, with the least
// fraction that fits on every rank.
func (p *problem) full(t *testing.T) cost.Seconds {
	best := cost.Seconds(math.Inf(1))
	for _, c := range p.whole() {
		if err := p.refine(c); err != nil {
			t.Fatal(err)
		}
		if !c.failed {
			best = min(best, p.walked(c))
		}
	}
	for _, rec := range p.allowed(p.rec, memory.Recompute) {
		for _, off := range p.allowed(p.off, memory.Offload) {
			if p.clashBetween(rec, off) != "" {
				continue
			}
			c := p.newChoice(rec, off)
			if p.least(t, c) {
				p.settle(c)
				best = min(best, p.walked(c))
			}
		}
	}
	return best
}

// least halves the interval of every rank's fraction at once.
func (p *problem) least(t *testing.T, c *choice) bool {
	lo, hi := make([]int, p.ranks()), make([]int, p.ranks())
	measure := func(fractions []int) []memory.Bytes {
		for r, n := range fractions {
			c.setFraction(r, n)
		}
		heights, err := p.measure(c)
		if err != nil {
			t.Fatal(err)
		}
		return heights
	}
	for r := range hi {
		if c.off != 0 {
			hi[r] = parts
		}
	}
	if !p.fits(measure(hi)) {
		return false
	}
	for range 7 {
		mid := make([]int, p.ranks())
		for r := range mid {
			mid[r] = (lo[r] + hi[r]) / 2
		}
		for r, h := range measure(mid) {
			if h <= p.budget {
				hi[r] = mid[r]
			} else {
				lo[r] = min(mid[r]+1, hi[r])
			}
		}
	}
	return p.fits(measure(hi))
}

// SPEC S6.1: the answer is within one per cent of the best.
func TestGap(t *testing.T) {
	for _, c := range []struct {
		pp, vpp int
		share   float64
		link    float64
	}{{1, 1, 0.75, 60e9}, {2, 1, 0.6, 40e9}, {4, 2, 0.7, 25e9}, {4, 1, 0.7, 4e9}} {
		s := tiny(t)
		s.Layout.PP, s.Layout.VPP = c.pp, c.vpp
		s.Offload.MinElements = 17 << 20 // leaves so few modules that all policies can be predicted
		g := *s.Hardware
		g.HostOut, g.HostIn, g.HostBoth = c.link, c.link, 1.8*c.link
		s.Hardware = &g
		o := Options{Budget: memory.Bytes(c.share * float64(peakOf(t, s)))}
		r, err := Policy(s, o)
		if err != nil {
			t.Fatal(err)
		}
		p, err := newProblem(s, o)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.calibrate(); err != nil {
			t.Fatal(err)
		}
		best := p.full(t)
		gap := float64(r.After.Step.Total/best) - 1
		t.Logf("PP %d VPP %d: %.4f s, the best %.4f s, %.2f %% apart; without a policy %.4f s; recompute %v, offload %v", c.pp, c.vpp, r.After.Step.Total, best, 100*gap, r.Before.Step.Total, r.Setup.Recompute, r.Setup.Offload.Modules)
		if gap > 0.01 {
			t.Errorf("PP %d VPP %d: the answer takes %.2f %% longer than the best", c.pp, c.vpp, 100*gap)
		}
	}
}
