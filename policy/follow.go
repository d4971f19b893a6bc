// This file owns policies that somebody else made: how they are followed.

package policy

import (
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/residency"
)

// windows are the numbers of copies under way that are tried. Groups differ a
// hundredfold in size, so what hides a large one is several small ones.
var windows = []int{1, 2, 4, 6, 8, 16}

// depths are how many of the largest groups may be back ahead of need. Where copies
// are the limit, compute's clock says little about when, and few are enough; where
// they hide, the deadlines say it best, without a limit.
var depths = []int64{2, 4, 8, 0}

// worth is the step time that less memory may cost: a hundredth where copies hide.
// Where they do not, compute waits in any case, and whoever asks for that wants the
// memory: up to mostWorth.
const (
	worth     = 0.01
	mostWorth = 0.03
	// tightWorth is the same while times are not sure.
	tightWorth = 0.25
)

// Follow is the plan for a policy that a user made, what it comes to, and what it
// was without. Every group leaves whose unit does, hidden or not, except where its
// backward pass is the very next thing and comes before it could be back. If cfg has no window, the plan has one, and
// an extent, with which the step takes the least memory that hardly makes it longer.
func Follow(p *Profile, pol Policy, l Links, cfg residency.Config) (*Decision, error) {
	return follow(p, pol, l, cfg, worth)
}

// FollowTight is Follow for times that are not sure: memory counts for more.
func FollowTight(p *Profile, pol Policy, l Links, cfg residency.Config) (*Decision, error) {
	return follow(p, pol, l, cfg, tightWorth)
}

func follow(p *Profile, pol Policy, l Links, cfg residency.Config, worth float64) (*Decision, error) {
	if err := l.Check(); err != nil {
		return nil, err
	}
	if err := p.Check(pol); err != nil {
		return nil, err
	}
	s := p.step(pol)
	out := s.leaving(cfg)
	for i, g := range s.groups {
		// Nothing is saved or loaded between; there may be work all the same, of which the
		// recorded step does not tell.
		next := g.load == g.save+1
		out[i] = out[i] && !(next && g.to-g.from < float64(g.out)/l.Out+float64(g.in)/l.In)
	}
	f := follower{step: s, links: l, cfg: cfg, worth: worth}
	for _, d := range depths {
		f.plans = append(f.plans, s.deep(out, l, safety, d))
	}
	t := f.try(f.plans[0], 0, 0)
	if cfg.Window == 0 {
		t = f.least()
	}
	if t.err != nil {
		return nil, t.err
	}
	d := &Decision{Policy: pol, Plan: t.plan, Tried: f.tried, Forecast: t.forecast()}
	cfg.Device = noLimit
	var err error
	if d.Before, err = Simulate(p, nil, nil, l, cfg); err != nil {
		return nil, err
	}
	d.explain(func(f UnitForecast) string {
		if f.Choice == Keep {
			return "not named"
		}
		return "chosen by hand"
	})
	return d, nil
}

// Late says, of choices made by hand, that much of what leaves does so too late to make
// the peak lower; it is empty where the memory that was asked for is saved.
func (d *Decision) Late() string {
	moved, saved := d.Forecast.Counts.OutBytes, d.Before.Peak-d.Forecast.Peak
	if 4*saved >= 3*moved {
		return ""
	}
	return fmt.Sprintf("%s leave and the peak falls by %s: the link cannot take more before the peak; name less, or give a budget to have the memory at the price of time", size(moved), size(max(saved, 0)))
}

// follower looks for the window and the extent of a plan.
type follower struct {
	*step
	plans []*residency.Plan // by depth
	links Links
	cfg   residency.Config
	worth float64
	tried int
}

func (f *follower) try(like *residency.Plan, window int, limit int64) *trial {
	f.tried++
	plan := *like
	plan.Window, plan.Device, plan.Strict = window, limit, true
	return f.step.try(&plan, f.links, f.cfg)
}

// least is the trial with the least extent of those that are fast.
func (f *follower) least() *trial {
	var trials []*trial
	fastest := math.Inf(1)
	for _, p := range f.plans {
		for _, w := range windows {
			t := f.try(p, w, 0)
			trials = append(trials, t)
			if t.err == nil {
				fastest = min(fastest, t.end)
			}
		}
	}
	top := func(t *trial) int64 { return t.machine.Device().Top() }
	most := fastest * (1 + min(f.worth+(fastest/f.tape.Span.Seconds()-1)/4, max(f.worth, mostWorth)))
	fast := func(t *trial) bool { return t.err == nil && t.end <= most }
	best := trials[0]
	for _, t := range trials {
		if fast(t) && (!fast(best) || top(t) < top(best)) {
			best = t
		}
	}
	if best.err != nil || best.machine.Counts().Evicted > 0 {
		return best // there is less memory than it takes, whatever the window
	}
	low, high := best.machine.Device().Peak(), top(best) // an extent between them does
	if f.cfg.Lend {
		low = 0 // copies that are under way count, and can be waited for
	}
	for range 8 {
		t := f.try(best.plan, best.plan.Window, (low+high)/2)
		if fast(t) && t.machine.Counts().Evicted == 0 && top(t) <= (low+high)/2 {
			best, high = t, top(t)
		} else {
			low = (low + high) / 2
		}
	}
	return best
}
