// This file owns the solver, which finds the choices with the shortest step under a budget.

package policy

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// Allowed holds the choices that a solver may make besides keep and stash, and how long it
// may search.
type Allowed struct {
	Offload, Recompute bool
	// Effort is the part of its usual search that a solver may take; 0 means all of it.
	Effort float64
	// PayIn, unless it is 0, ends a search for improvements once it has taken as long as they
	// could save in so many steps.
	PayIn float64
}

func (a Allowed) may(c memory.Choice) bool {
	return [memory.Choices]bool{memory.Keep: true, memory.Stash: true, memory.Offload: a.Offload, memory.Recompute: a.Recompute}[c]
}

// Decision is the result of a solver: a policy, its plan, its forecast and the reasons.
type Decision struct {
	Rank     int             `json:"rank"`
	Budget   memory.Bytes    `json:"budget"`
	Nothing  bool            `json:"nothing"` // everything fits, so there is nothing to do
	Policy   memory.Policy   `json:"policy"`
	Plan     *residency.Plan `json:"-"`
	Before   Forecast        `json:"-"` // forecast with everything kept
	Forecast Forecast        `json:"forecast"`
	Reasons  []Reason        `json:"reasons"`
	Tried    int             `json:"tried"`
	Notes    []string        `json:"notes,omitempty"` // notes for the user
	Final    bool            `json:"-"`               // no later times change it
}

// Solve returns the choices with the shortest predicted step whose extent, with the
// profile's Base, is at most the budget. It returns an error if no choices fit. It ignores
// the device bytes of cfg. It does not estimate memory: every candidate runs on a machine
// whose heap is limited to the budget, and is dropped if it does not fit.
//
// For several k, Solve recomputes the first k units in the order of time per byte, and
// offloads as few of the others as fit, first those with the longest time between save and
// load. It improves the best of these candidates by changing single units and pairs, until
// that helps no more or enough was tried.
//
// If memory is counted ([residency.Config.Borrowed]), Solve searches the numbers of units of
// each name that are offloaded and recomputed, drops candidates by their bounds before it
// runs them, and searches one of the parts that a step repeats.
//
// If cfg has no window ([residency.Config], about copies out that are under way), Solve
// chooses the best of a few. It tries a large one first: the step may use the whole budget,
// and compute need not wait for memory that was freed long ago.
//
// If rows cross the link, Solve also tries more sets of each workspace, as long as they make
// the step shorter.
func Solve(p *Profile, l memory.Links, cfg residency.Config, budget memory.Bytes, allowed Allowed) (best *Decision, err error) {
	effort := cmp.Or(allowed.Effort, 1)
	best, err = solveAny(p, l, cfg, budget, allowed, effort)
	if err != nil || p.Rows == nil || p.Rows.Fixed {
		return best, err
	}
	if cfg.Window == 0 && best.Plan != nil {
		cfg.Window = best.Plan.Window
	}
	for n := 1; n <= p.Rows.MoreSets && best.Forecast.RowBytes > 0; n++ {
		d, err := solveAny(p.withSets(n), l, cfg, budget, allowed, effort)
		if err != nil {
			break // the sets do not fit
		}
		d.Nothing, d.Before, d.Tried = false, best.Before, d.Tried+best.Tried
		if d.Forecast.paid >= best.Forecast.paid {
			best.Tried = d.Tried
			break
		}
		if best = d; best.Plan != nil && cfg.Window > 0 {
			best.Plan.Window = cfg.Window
		}
	}
	return best, nil
}

// budgetWindows holds the windows that a solver tries, and tightWindow the one that leaves
// the fewest holes, for budgets that fit with no other and for the floor.
var budgetWindows = []int{8, 16, residency.DefaultWindow}

const tightWindow = 1

// solveAny solves with the window of cfg, or with the best of budgetWindows.
func solveAny(p *Profile, l memory.Links, cfg residency.Config, budget memory.Bytes, allowed Allowed, effort float64) (*Decision, error) {
	if cfg.Window > 0 || cfg.Borrowed { // a window matters to a heap with places
		return solve(p, l, cfg, budget, allowed, effort)
	}
	at := func(window int) (*Decision, error) {
		c := cfg
		c.Window = window
		d, err := solve(p, l, c, budget, allowed, effort)
		if err == nil && d.Plan != nil {
			d.Plan.Window = window
		}
		return d, err
	}
	best, err := at(budgetWindows[0])
	if err == nil && best.costsNothing() {
		return best, nil // no window is better
	}
	others := make([]*Decision, len(budgetWindows)-1)
	var all sync.WaitGroup
	for i, window := range budgetWindows[1:] {
		all.Go(func() { others[i], _ = at(window) })
	}
	all.Wait()
	tried := 0
	for _, d := range append(others, best) {
		if d != nil {
			tried += d.Tried
		}
	}
	for _, d := range others {
		if best == nil || d != nil && d.Forecast.paid < best.Forecast.paid {
			best = d
		}
	}
	if best == nil {
		return at(tightWindow)
	}
	best.Tried = tried
	return best, nil
}

// costsNothing reports whether a decision costs no time.
func (d *Decision) costsNothing() bool { return d.Forecast.paid <= 1.001*d.Before.paid }

func solve(p *Profile, l memory.Links, cfg residency.Config, budget memory.Bytes, allowed Allowed, effort float64) (*Decision, error) {
	if err := l.Check(); err != nil {
		return nil, err
	}
	cfg.Device = noLimit
	v := &solver{p: p, l: l, cfg: cfg, allowed: allowed, steps: map[string]*step{}, seen: map[string]bool{}}
	before := v.step(nil).try(nil, l, cfg)
	if before.err != nil {
		panic("policy: a step without a memory limit does not fit: " + before.err.Error())
	}
	v.cfg.Device, v.least = max(budget-p.Base, 0), before.paid(l)
	v.shortest = 1.0005 * v.least
	v.prepare(before)
	if cfg.Borrowed && p.Rows == nil {
		v.bounds = newBounds(p, cfg)
	}
	best := v.step(nil).try(nil, l, v.cfg)
	d := &Decision{Budget: budget, Before: before.forecast(), Nothing: best.err == nil && best.machine.Counts().Evicted == 0}
	if !d.Nothing {
		v.maxTries = v.tries(effort)
		var err error
		if best, err = v.searchParts(budget, effort); err != nil {
			return nil, err
		}
	}
	d.Policy, d.Plan, d.Forecast, d.Tried = memory.Policy{}, best.plan, best.forecast(), v.tried
	d.Forecast.paid, d.Before.paid = best.paid(l), before.paid(l)
	for i := range d.Forecast.Units {
		u := &d.Forecast.Units[i]
		if u.Choice == memory.Offload && u.Moved == 0 { // Plan keeps all its groups
			if u.Choice = memory.Keep; p.Units[u.Unit].Rows {
				u.Choice = memory.Stash
			}
		}
		if u.Choice != memory.Keep {
			d.Policy[u.Unit] = u.Choice
		}
	}
	d.explain(func(f UnitForecast) string { return why(f, p.Units[f.Unit], l, d.Nothing, allowed) })
	return d, nil
}

// boundsPerTry is how many bounds take about as long as the simulations of one candidate.
const boundsPerTry = 50

// tries returns the number of candidates that a search tries, each of which runs the whole
// tape. A search by bounds finds good ones sooner.
func (v *solver) tries(effort float64) int {
	if v.bounds != nil {
		effort /= 3
	}
	return int(effort * float64(min(max(600_000/(len(v.p.Tape.Ops)+1), 100), 1500)))
}

// noLimit is more memory than any step takes, and small enough that sums do not overflow.
const noLimit = 1 << 60

// solver searches for the best policy under one budget.
type solver struct {
	p        *Profile
	l        memory.Links
	cfg      residency.Config // cfg with the budget
	allowed  Allowed
	units    []memory.Unit // units with more than one choice, in the order of saving
	offs     []memory.Unit // units that may be offloaded, with the longest time between save and load first
	recs     []memory.Unit // units that may be recomputed, with the cheapest byte first
	steps    map[string]*step
	seen     map[string]bool
	tried    int
	maxTries int     // candidates after which the search ends
	least    float64 // the step time with everything kept
	shortest float64 // a step time that counts as good as that
	hostFull bool    // a candidate did not fit host memory
	bounds   *bounds // of memory and time, if memory is counted; else nil
	bounded  int     // candidates that were compared with their bounds
	// If split is set, all rows are stashed in so many device pages, and what finds none
	// of them goes to the host.
	split bool
	pages schedule.Pages
}

func (v *solver) can(u memory.Unit, c memory.Choice) bool {
	if v.split && c == memory.Offload && v.p.Units[u].Rows {
		return false // the number of device pages decides for all rows
	}
	return v.allowed.may(c) && v.p.Units[u].can(c)
}

func (v *solver) prepare(before *trial) {
	windows, price := map[memory.Unit]float64{}, map[memory.Unit]float64{}
	for _, f := range before.forecast().Units {
		u := f.Unit
		windows[u] = f.Window.Seconds()
		price[u] = v.p.Units[u].Recompute.Seconds() / float64(max(f.Bytes, 1))
		if v.can(u, memory.Stash) || v.can(u, memory.Offload) || v.can(u, memory.Recompute) {
			v.units = append(v.units, u)
		}
		if v.can(u, memory.Offload) {
			v.offs = append(v.offs, u)
		}
		if v.can(u, memory.Recompute) {
			v.recs = append(v.recs, u)
		}
	}
	slices.SortStableFunc(v.offs, func(a, b memory.Unit) int { return cmp.Compare(windows[b], windows[a]) })
	slices.SortStableFunc(v.recs, func(a, b memory.Unit) int { return cmp.Compare(price[a], price[b]) })
}

// step returns the step under a policy. It does not depend on which units are offloaded.
func (v *solver) step(pol memory.Policy) *step {
	var key strings.Builder
	for _, u := range v.units {
		if c := pol[u]; changesTape(c) {
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
	if c.place(pol); v.split {
		c.pages = v.pages
	}
	return &c
}

// try returns the trial of a policy, or nil if it does not fit.
func (v *solver) try(pol memory.Policy) *trial {
	v.tried++
	t := v.step(pol).best(v.l, v.cfg, safety)
	v.hostFull = v.hostFull || t.machine.Counts().HostFull > 0
	if t.err != nil || t.forced() {
		return nil
	}
	return t
}

// spent reports whether the search should end: best is as good as possible, or enough
// candidates were tried, each of which runs the whole tape.
func (v *solver) spent(best *trial) bool {
	return v.tried+v.bounded/boundsPerTry >= v.maxTries || v.enough(best) || v.dear(best)
}

// secondsPerCall is about how long a candidate takes for each call of the tape, on one
// processor of 2024. Searches do not read a clock, so that they find the same on any machine.
const secondsPerCall = 2e-6

// dear reports whether the search has taken as long as anything better than best could save.
func (v *solver) dear(best *trial) bool {
	took := float64(v.tried) * float64(len(v.p.Tape.Ops)) * secondsPerCall
	return v.allowed.PayIn > 0 && took > v.allowed.PayIn*(best.paid(v.l)-v.least)
}

// enough reports whether no other candidate is worth a search.
func (v *solver) enough(best *trial) bool { return best.paid(v.l) <= v.shortest }

// pick returns the better of two candidates.
func (v *solver) pick(a, b *trial) *trial {
	if a == nil || b != nil && better(b, a, v.l) {
		return b
	}
	return a
}

// defaults returns the policy that keeps everything, with rows in device pages.
func (v *solver) defaults() memory.Policy {
	pol := memory.Policy{}
	for _, u := range v.units {
		if v.can(u, memory.Stash) {
			pol[u] = memory.Stash
		}
	}
	return pol
}

// mix returns pol with the first k units recomputed and the first n of the others
// offloaded.
func (v *solver) mix(pol memory.Policy, k, n int) memory.Policy {
	q := memory.Policy{}
	for u, c := range pol {
		q[u] = c
	}
	for _, u := range v.recs[:k] {
		q[u] = memory.Recompute
	}
	for _, u := range v.offs {
		if n > 0 && (q[u] == memory.Keep || q[u] == memory.Stash) && v.can(u, memory.Offload) {
			q[u] = memory.Offload
			n--
		}
	}
	return q
}

// extremes returns the policies that keep the least memory on the device.
func (v *solver) extremes() []memory.Policy {
	all := len(v.units)
	list := []memory.Policy{v.mix(v.defaults(), 0, all), v.mix(v.defaults(), len(v.recs), all), v.mix(nil, len(v.recs), all), v.mix(nil, 0, all)}
	for _, i := range []int{0, 3} { // recompute the units that cannot be offloaded
		for _, u := range v.recs {
			if list[i][u] == memory.Keep {
				list[i][u] = memory.Recompute
			}
		}
	}
	return list
}

// searchParts searches one of the parts that a step repeats, and uses the choices for all
// of them. It does so only if memory is counted: places that one part leaves behind matter
// to the next. It searches the whole step if there are no such parts.
func (v *solver) searchParts(budget memory.Bytes, effort float64) (*trial, error) {
	if v.bounds != nil {
		if part := v.p.section(); part != nil {
			d, err := solve(part, v.l, v.cfg, budget, v.allowed, effort)
			if err == nil {
				v.tried += d.Tried
				if t := v.try(d.Policy); t != nil {
					return v.saferPlan(t), nil
				}
			}
			var low *memory.BudgetError
			if errors.As(err, &low) {
				limit := v.cfg.Device
				v.cfg.Device = low.Need - v.p.Base
				fits := slices.ContainsFunc(v.extremes(), func(pol memory.Policy) bool { return v.try(pol) != nil })
				if v.cfg.Device = limit; fits {
					return nil, low
				}
			}
		}
	}
	if best := v.search(); best != nil {
		return best, nil
	}
	return nil, v.floor(budget)
}

func (v *solver) search() *trial {
	var best *trial
	for _, pol := range v.extremes() {
		best = v.pick(best, v.try(pol))
	}
	if best == nil {
		return nil
	}
	if v.bounds != nil {
		best = v.regular(best)
	} else {
		for _, k := range ladder(len(v.recs)) {
			best = v.pick(best, v.fewest(k))
		}
	}
	return v.saferPlan(v.splitRows(v.giveBack(v.improve(best))))
}

// saferPlan tries plans that reload later or earlier.
func (v *solver) saferPlan(best *trial) *trial {
	for _, safe := range []float64{1, 1.6, 2.5} {
		if t := best.step.best(v.l, v.cfg, safe); t.err == nil && !t.forced() {
			best = v.pick(best, t)
		}
	}
	return best
}

// giveBack keeps units on the device that need not be offloaded. When the step cannot get
// shorter, the search ends early, with more copies than the budget requires.
func (v *solver) giveBack(best *trial) *trial {
	moved := map[memory.Unit]memory.Bytes{}
	for _, f := range best.forecast().Units {
		moved[f.Unit] = f.Moved
	}
	order := slices.Clone(v.units)
	slices.SortStableFunc(order, func(a, b memory.Unit) int { return cmp.Compare(moved[b], moved[a]) })
	for _, u := range order {
		if best.pol[u] != memory.Offload || v.tried >= v.maxTries {
			continue
		}
		stay := memory.Keep
		if v.p.Units[u].Rows {
			stay = memory.Stash
		}
		best = v.pick(best, v.fresh(v.change(best.pol, u, stay)))
	}
	return best
}

// ladder returns some of the numbers from 0 to n, with both ends.
func ladder(n int) []int {
	ks := []int{0}
	for i := 1; i <= 8; i++ {
		if k := n * i / 8; k > ks[len(ks)-1] {
			ks = append(ks, k)
		}
	}
	return ks
}

// fewest returns the trial that recomputes k units and offloads as few others as fit.
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

// floor returns the error for a budget that no policy fits. It searches for the smallest
// budget that a policy fits.
func (v *solver) floor(budget memory.Bytes) error {
	fits := func(limit memory.Bytes) bool {
		v.cfg.Device = limit
		return slices.ContainsFunc(v.extremes(), func(pol memory.Policy) bool { return v.try(pol) != nil })
	}
	lo := v.cfg.Device
	hi := max(lo, v.cfg.Align)
	for !fits(hi) {
		if lo = hi; hi > math.MaxInt64/4 {
			panic("policy: the step does not fit any limit")
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
	return &memory.BudgetError{Budget: budget, Need: (hi + v.p.Base), HostFull: v.hostFull}
}
