// This file owns the solver: the choices with the least predicted step time under a
// budget.

package policy

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/residency"
)

// Allowed are the choices besides keep that a solver may make.
type Allowed struct{ Stash, Offload, Recompute bool }

func (a Allowed) may(c Choice) bool {
	return [choices]bool{Keep: true, Stash: a.Stash, Offload: a.Offload, Recompute: a.Recompute}[c]
}

// Decision is what a solver found.
type Decision struct {
	Rank     int             `json:"rank"`
	Budget   int64           `json:"budget"`
	Nothing  bool            `json:"nothing"` // to do: all fits
	Policy   Policy          `json:"policy"`
	Plan     *residency.Plan `json:"-"`
	Before   Forecast        `json:"-"` // everything kept
	Forecast Forecast        `json:"forecast"`
	Reasons  []Reason        `json:"reasons"`
	Tried    int             `json:"tried"`
	Notes    []string        `json:"notes,omitempty"` // what the user may want to know besides
}

// BelowFloor is a budget that no choice meets.
type BelowFloor struct {
	Budget, Floor int64
	HostFull      bool // groups stayed because the host heap was full
}

func (e *BelowFloor) Error() string {
	what := "raise the budget to that"
	if e.HostFull {
		what += ", give more host memory"
	}
	return fmt.Sprintf("policy: a budget of %d bytes is below the floor of %d, which this step needs with everything moved or recomputed that may be; %s, or make microbatches smaller", e.Budget, e.Floor, what)
}

// Solve finds the choices with the least predicted step time whose extent, with
// the profile's Base, is at most the budget. The device bytes of cfg do not
// matter. Memory is not estimated: every candidate runs on a machine whose heap
// has the budget and no more, and one that does not fit there is none.
//
// The candidates: of the units that may be recomputed, in the order of time per
// byte, the first k; of the others that may be offloaded, in the order of their
// windows, as few as fit; for several k. The best of them is then improved by
// changing single units and by letting pairs change places, until that gains
// nothing or enough has been tried.
//
// If cfg has no window, the plan has the best of a few. Large ones come first: a
// budget is there to be used, and memory that was freed long ago is not waited for.
func Solve(p *Profile, l Links, cfg residency.Config, budget int64, allowed Allowed) (best *Decision, err error) {
	return solveAny(p, l, cfg, budget, allowed, 1)
}

// budgetWindows are the windows that a solver tries. The last leaves the fewest
// holes: it counts where the budget is tight, and for the floor.
var budgetWindows = []int{8, 16, residency.DefaultWindow, 1}

func solveAny(p *Profile, l Links, cfg residency.Config, budget int64, allowed Allowed, effort float64) (best *Decision, err error) {
	if cfg.Window > 0 {
		return solve(p, l, cfg, budget, allowed, effort)
	}
	tried := 0
	for _, cfg.Window = range budgetWindows {
		d, failed := solve(p, l, cfg, budget, allowed, effort)
		if failed != nil {
			err = failed
			continue
		}
		tried += d.Tried
		if d.Plan != nil {
			d.Plan.Window = cfg.Window
		}
		if best == nil || d.Forecast.Step < best.Forecast.Step {
			best = d
		}
		if best.Forecast.Step <= best.Before.Step+best.Before.Step/1000 || cfg.Window == residency.DefaultWindow {
			break // nothing is left to gain
		}
	}
	if best == nil {
		return nil, err
	}
	best.Tried = tried
	return best, nil
}

func solve(p *Profile, l Links, cfg residency.Config, budget int64, allowed Allowed, effort float64) (*Decision, error) {
	if err := l.Check(); err != nil {
		return nil, err
	}
	cfg.Device = noLimit
	v := &solver{p: p, l: l, cfg: cfg, allowed: allowed, steps: map[string]*step{}, seen: map[string]bool{}}
	before := v.step(nil).try(nil, l, cfg)
	if before.err != nil {
		panic("policy: a step without a limit finds no room: " + before.err.Error())
	}
	v.cfg.Device, v.least = max(budget-p.Base, 0), 1.0005*before.end
	v.prepare(before)
	best := v.step(nil).try(nil, l, v.cfg)
	d := &Decision{Budget: budget, Before: before.forecast(), Nothing: best.err == nil && best.machine.Counts().Evicted == 0}
	if !d.Nothing {
		v.most = int(effort * float64(min(max(600_000/(len(p.Tape.Ops)+1), 100), 1500)))
		if best = v.search(); best == nil {
			return nil, v.floor(budget)
		}
	}
	d.Policy, d.Plan, d.Forecast, d.Tried = Policy{}, best.plan, best.forecast(), v.tried
	for i := range d.Forecast.Units {
		u := &d.Forecast.Units[i]
		if u.Choice == Offload && u.Moved == 0 { // all its groups stay: see Plan
			u.Choice = Keep
		}
		if u.Choice != Keep {
			d.Policy[u.Unit] = u.Choice
		}
	}
	d.explain(func(f UnitForecast) string { return why(f, p.Units[f.Unit], l, d.Nothing, allowed) })
	return d, nil
}

// noLimit is more than any step takes, and far from where sums of bytes end.
const noLimit = 1 << 60

// solver is a search for one budget.
type solver struct {
	p       *Profile
	l       Links
	cfg     residency.Config // with the budget
	allowed Allowed
	units   []Unit // that have a choice, in the order of saving
	offs    []Unit // that may be offloaded, the widest window first
	recs    []Unit // that may be recomputed, the cheapest byte first
	steps   map[string]*step
	seen    map[string]bool
	tried   int
	most    int
	least   float64 // a time that is as good as that of a step where everything is kept
	full    bool    // the host was, in a candidate
}

func (v *solver) can(u Unit, c Choice) bool { return v.allowed.may(c) && v.p.Units[u].can(c) }

func (v *solver) prepare(before *trial) {
	windows, price := map[Unit]float64{}, map[Unit]float64{}
	for _, f := range before.forecast().Units {
		u := f.Unit
		windows[u] = f.Window.Seconds()
		price[u] = v.p.Units[u].Recompute.Seconds() / float64(max(f.Bytes, 1))
		if v.can(u, Stash) || v.can(u, Offload) || v.can(u, Recompute) {
			v.units = append(v.units, u)
		}
		if v.can(u, Offload) {
			v.offs = append(v.offs, u)
		}
		if v.can(u, Recompute) {
			v.recs = append(v.recs, u)
		}
	}
	slices.SortStableFunc(v.offs, func(a, b Unit) int { return cmp.Compare(windows[b], windows[a]) })
	slices.SortStableFunc(v.recs, func(a, b Unit) int { return cmp.Compare(price[a], price[b]) })
}

// step is a step under a policy. What is offloaded does not change it.
func (v *solver) step(pol Policy) *step {
	var key strings.Builder
	for _, u := range v.units {
		if c := pol[u]; c == Recompute || c == Stash {
			fmt.Fprintf(&key, "%v %d,", u, c)
		}
	}
	s := v.steps[key.String()]
	if s == nil {
		if len(v.steps) >= 64 {
			clear(v.steps)
		}
		s = v.p.step(pol)
		v.steps[key.String()] = s
	}
	c := *s
	c.pol = pol
	return &c
}

// try is a candidate, or nil where it does not fit.
func (v *solver) try(pol Policy) *trial {
	v.tried++
	t := v.step(pol).best(v.l, v.cfg, safety)
	v.full = v.full || t.machine.Counts().HostFull > 0
	if t.err != nil || t.forced() {
		return nil
	}
	return t
}

// spent says that enough was tried: nothing is left to gain, or the candidates, each
// of which runs the whole tape, have taken long enough.
func (v *solver) spent(best *trial) bool { return v.tried >= v.most || best.end <= v.least }

// pick is the better of two candidates.
func (v *solver) pick(a, b *trial) *trial {
	if a == nil || b != nil && better(b, a, v.l) {
		return b
	}
	return a
}

// defaults stashes what may be stashed: pages hold live rows instead of the worst
// case, and copies within the device are hidden.
func (v *solver) defaults() Policy {
	pol := Policy{}
	for _, u := range v.units {
		if v.can(u, Stash) {
			pol[u] = Stash
		}
	}
	return pol
}

// mix recomputes the first k units and offloads the first n of the others.
func (v *solver) mix(pol Policy, k, n int) Policy {
	q := Policy{}
	for u, c := range pol {
		q[u] = c
	}
	for _, u := range v.recs[:k] {
		q[u] = Recompute
	}
	for _, u := range v.offs {
		if n > 0 && q[u] == Keep {
			q[u] = Offload
			n--
		}
	}
	return q
}

// extremes are the policies that leave the least on the device.
func (v *solver) extremes() []Policy {
	all := len(v.units)
	list := []Policy{v.mix(v.defaults(), 0, all), v.mix(v.defaults(), len(v.recs), all), v.mix(nil, len(v.recs), all), v.mix(nil, 0, all)}
	for _, i := range []int{0, 3} { // what cannot be moved is recomputed
		for _, u := range v.recs {
			if list[i][u] == Keep {
				list[i][u] = Recompute
			}
		}
	}
	return list
}

func (v *solver) search() *trial {
	var best *trial
	for _, pol := range v.extremes() {
		best = v.pick(best, v.try(pol))
	}
	if best == nil {
		return nil
	}
	for _, k := range ladder(len(v.recs)) {
		best = v.pick(best, v.fewest(k))
	}
	best = v.improve(best)
	for _, safe := range []float64{1, 1.6, 2.5} {
		if t := best.step.best(v.l, v.cfg, safe); t.err == nil && !t.forced() {
			best = v.pick(best, t)
		}
	}
	return best
}

// ladder are some of the numbers from 0 to n, with both.
func ladder(n int) []int {
	ks := []int{0}
	for i := 1; i <= 8; i++ {
		if k := n * i / 8; k > ks[len(ks)-1] {
			ks = append(ks, k)
		}
	}
	return ks
}

// fewest recomputes k units and offloads as few others as fit.
func (v *solver) fewest(k int) *trial {
	base := v.defaults()
	lo, hi := 0, len(v.offs)
	best := v.try(v.mix(base, k, hi))
	if best == nil {
		return nil
	}
	for lo < hi {
		mid := (lo + hi) / 2
		if t := v.try(v.mix(base, k, mid)); t != nil {
			hi, best = mid, v.pick(best, t)
		} else {
			lo = mid + 1
		}
	}
	return best
}

// floor is the error for a budget that nothing fits: between it and a limit that
// is enough it looks for the least that is.
func (v *solver) floor(budget int64) error {
	fits := func(limit int64) bool {
		v.cfg.Device = limit
		return slices.ContainsFunc(v.extremes(), func(pol Policy) bool { return v.try(pol) != nil })
	}
	lo := v.cfg.Device
	hi := max(lo, v.cfg.Align)
	for !fits(hi) {
		if lo = hi; hi > math.MaxInt64/4 {
			panic("policy: a step fits no limit")
		}
		hi *= 2
	}
	for hi-lo > max(v.cfg.Align, hi>>12) {
		if mid := lo + (hi-lo)/2; fits(mid) {
			hi = mid
		} else {
			lo = mid
		}
	}
	return &BelowFloor{Budget: budget, Floor: hi + v.p.Base, HostFull: v.full}
}
