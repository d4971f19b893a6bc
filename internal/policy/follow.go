// This file owns plans for policies that a user made.

package policy

import (
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// windows holds the numbers of copies in flight that are tried. Groups differ a
// hundredfold in size, so several small copies may be needed to hide a large one.
var windows = []int{1, 2, 4, 6, 8, 16}

// depths holds the limits that are tried on reloads ahead of need, in largest groups. If
// copies are the bottleneck, a small limit is enough. If copies hide, deadlines without a
// limit (zero) are best.
var depths = []int{2, 4, 8, 0}

// worth is the share of step time that less memory may cost: a hundredth if copies hide.
// If they do not, compute waits in any case, and the user wants the memory. Then it is up
// to mostWorth.
const (
	worth     = 0.01
	mostWorth = 0.03
	// tightWorth is worth while times are uncertain.
	tightWorth = 0.25
)

// Follow returns the plan for a policy that a user made, with forecasts with and without
// it. It offloads every group of the offloaded units, hidden or not. The exception is a
// group whose backward pass comes next, before it could be reloaded. If cfg has no window,
// Follow chooses a window and an extent, with which the step takes the least memory that
// hardly makes it longer.
func Follow(p *Profile, pol memory.Policy, l memory.Links, cfg residency.Config) (*Decision, error) {
	return follow(p, pol, l, cfg, worth)
}

// FollowTight is like Follow, but weighs memory more. Use it while times are uncertain.
func FollowTight(p *Profile, pol memory.Policy, l memory.Links, cfg residency.Config) (*Decision, error) {
	return follow(p, pol, l, cfg, tightWorth)
}

func follow(p *Profile, pol memory.Policy, l memory.Links, cfg residency.Config, worth float64) (*Decision, error) {
	if err := l.Check(); err != nil {
		return nil, err
	}
	if err := p.Check(pol); err != nil {
		return nil, err
	}
	s := p.step(pol)
	out := s.leaving(cfg)
	for i, g := range s.groups {
		// Nothing is saved or loaded in between. There may be work that the recorded step
		// does not show.
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
		if f.Choice == memory.Keep {
			return "not named"
		}
		return "chosen by hand"
	})
	return d, nil
}

// Late returns a note if many of the offloads of choices made by hand are too late to
// lower the peak, and "" if they save the memory that they should.
func (d *Decision) Late() string {
	moved, saved := d.Forecast.Counts.OutBytes, d.Before.Peak-d.Forecast.Peak
	if 4*saved >= 3*moved {
		return ""
	}
	return fmt.Sprintf("offloading %s lowers the peak by only %s because the link is too slow; offload fewer modules or set a budget", size(moved), size(max(saved, 0)))
}

// follower searches for the window and the extent of a plan.
type follower struct {
	*step
	plans []*residency.Plan // by depth
	links memory.Links
	cfg   residency.Config
	worth float64
	tried int
}

func (f *follower) try(like *residency.Plan, window int, limit memory.Bytes) *trial {
	f.tried++
	plan := *like
	plan.Window, plan.Device, plan.Strict = window, limit, true
	return f.step.try(&plan, f.links, f.cfg)
}

// least returns the trial with the smallest extent among the fast ones.
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
	top := func(t *trial) memory.Bytes { return t.machine.Device().Top() }
	most := fastest * (1 + min(f.worth+(fastest/f.tape.Span.Seconds()-1)/4, max(f.worth, mostWorth)))
	fast := func(t *trial) bool { return t.err == nil && t.end <= most }
	best := trials[0]
	for _, t := range trials {
		if fast(t) && (!fast(best) || top(t) < top(best)) {
			best = t
		}
	}
	if best.err != nil || best.machine.Counts().Evicted > 0 {
		return best // no window fits the memory
	}
	low, high := best.machine.Device().Peak(), top(best) // the extent is between them
	if f.cfg.Borrowed {
		low = 0 // copies in flight count, and compute can wait for them
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
