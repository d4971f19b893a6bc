// This file owns learning: a recorded step becomes a profile, the profile choices,
// the choices a plan.

package stowage

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/stowage-dev/stowage/capture"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/offload"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/trace"
)

// learned is what is known of the steps under one key.
type learned struct {
	known    bool             // policy and plan are made
	first    *policy.Decision // to recompute: the next step is recorded under it
	policy   policy.Policy
	plan     *residency.Plan
	decision *policy.Decision
	profile  *policy.Profile
	largest  *policy.Profile // without times: where nothing is decided, the step that took most,
	extent   device.Bytes    // that steps took or were planned to take: it is not given back
	facts    map[policy.Unit]policy.Facts
	redone   map[policy.Unit]bool // recomputed in the recorded step
	passes   []pass
	spans    []span
	stats    offload.Stats // of the step issued last
	issued   bool          // by the step under way, and not only replayed
	recorded bool
	// calibrated: times were taken a second time; timed: by the step issued last.
	calibrated, timed bool

	noRecompute bool // it was tried, and there is no room for it
}

// begin forgets what an earlier recording found.
func (l *learned) begin() {
	*l = learned{first: l.first, noRecompute: l.noRecompute, stats: l.stats, extent: l.extent}
}

// span is the calls of a scope that will be captured, in a recorded step.
type span struct{ from, to int }

// pass is a forward pass of a group in a recorded step, by the stamps at both ends.
type pass struct {
	id       GroupID
	from, to int
}

// stamp takes compute's time in a recorded step, and is the number of the stamp.
func (s *Step) stamp() int {
	if !s.record || s.r.cfg.Compute.Capturing() {
		return -1
	}
	r := s.r
	if r.stamped == len(r.stamps) {
		e, err := r.cfg.Device.NewEvent(device.Timing)
		if err != nil {
			return -1 // then the group cannot be recomputed, for all that is known
		}
		r.stamps = append(r.stamps, e)
	}
	r.cfg.Compute.Record(r.stamps[r.stamped])
	r.stamped++
	return r.stamped - 1
}

// saw notes what can be done with a group.
func (l *learned) saw(g *Group) {
	l.note(g.id, func(f *policy.Facts) {
		for _, t := range g.tensors {
			f.CanOffload = f.CanOffload || !t.Stay
		}
	})
}

// canRecompute notes a group whose forward pass can run again. How long that takes
// is learned when the step is over.
func (l *learned) canRecompute(id GroupID) {
	l.note(id, func(f *policy.Facts) { f.Recompute = max(f.Recompute, time.Nanosecond) })
}

// redo notes a group that is recomputed in a step that is recorded.
func (l *learned) redo(id GroupID) {
	if l.known {
		return
	}
	if l.redone == nil {
		l.redone = map[policy.Unit]bool{}
	}
	l.redone[policy.UnitOf(id)] = true
}

func (l *learned) note(id GroupID, change func(*policy.Facts)) {
	if l.known {
		return
	}
	if l.facts == nil {
		l.facts = map[policy.Unit]policy.Facts{}
	}
	f := l.facts[policy.UnitOf(id)]
	change(&f)
	l.facts[policy.UnitOf(id)] = f
}

// learn makes the plan for a key, once its first step is over, and again when a step
// departed from it. It waits for the step that it learns from.
func (r *Runtime) learn(key Key, l *learned) error {
	if l.known {
		if l.stats.Departed || l.plan == nil && r.cfg.Budget > 0 && l.stats.Evicted > 0 {
			r.cfg.Log.Warn("stowage: a step departed from its plan; the next one is recorded anew", "microbatches", key.Microbatches, "shape", key.Shape)
			*l = learned{stats: l.stats, extent: l.extent}
			r.gen++ // a graph that was captured from it
			return nil
		}
		if l.timed {
			return r.calibrate(l)
		}
		if !r.moves() && r.scopes == nil && l.stats.Extent > l.extent {
			l.largest, l.extent = &policy.Profile{Tape: *r.off.Tape(), Base: l.profile.Base}, l.stats.Extent
		}
		return nil
	}
	if !l.recorded { // it was captured by the caller
		return nil
	}
	if err := r.off.Times(); err != nil {
		return err
	}
	if err := r.time(l); err != nil {
		return err
	}
	l.extent = max(l.extent, l.stats.Extent)
	p := &policy.Profile{Tape: *r.off.Tape(), Base: int64(r.base()), Units: l.facts}
	p.Tape.Ops = scoped(p.Tape.Ops, l.spans)
	d, err := r.decide(p, l)
	if d == nil || err != nil {
		return err
	}
	l.known, l.decision, l.profile, l.policy, l.plan = true, d, p, d.Policy, d.Plan
	l.largest = p
	l.takes(d)
	r.cfg.Log.Info("stowage: decided", "rank", r.cfg.Rank, "budget", device.Bytes(d.Budget), "moved", device.Bytes(d.Forecast.Counts.OutBytes), "nothing_to_do", d.Nothing)
	r.emit(trace.Event{What: trace.Decide, Bytes: d.Forecast.Counts.OutBytes, Offset: d.Forecast.Extent})
	return r.off.Prepare(device.Bytes(d.Forecast.Extent)-r.base(), device.Bytes(d.Forecast.Host))
}

// takes notes the memory that a decision has prepared.
func (l *learned) takes(d *policy.Decision) {
	l.extent = max(l.extent, device.Bytes(d.Forecast.Extent-l.profile.Base))
}

// scoped is the calls of a recorded step as they are when its scopes are graphs.
func scoped(ops []residency.Op, spans []span) (out []residency.Op) {
	at := 0
	for _, sp := range spans {
		begin, end := residency.Op{Kind: residency.OpBeginScope}, residency.Op{Kind: residency.OpEndScope}
		if sp.from == sp.to {
			continue
		}
		begin.At, end.At = ops[sp.from].At, ops[min(sp.to, len(ops)-1)].At
		out = append(append(out, ops[at:sp.from]...), begin)
		out = append(append(out, ops[sp.from:sp.to]...), end)
		at = sp.to
	}
	return append(out, ops[at:]...)
}

// time turns the stamps of a recorded step into the cost of recomputing its groups:
// the least of all microbatches, since a pass may have waited for memory.
func (r *Runtime) time(l *learned) error {
	shortest := map[policy.Unit]time.Duration{}
	for _, p := range l.passes {
		u := policy.UnitOf(p.id)
		if l.facts[u].Recompute == 0 || p.from < 0 || p.to < 0 {
			continue
		}
		d, err := r.stamps[p.to].Since(r.stamps[p.from])
		if err != nil {
			return err
		}
		if least, ok := shortest[u]; !ok || d < least {
			shortest[u] = max(d, 1)
		}
	}
	for u, f := range l.facts {
		f.Recompute = shortest[u]
		if l.redone[u] {
			f.Recompute = 0
		}
		l.facts[u] = f
	}
	return nil
}

// decide makes the choices: the user's, or those that a budget asks for. None says
// that another step is to be recorded.
func (r *Runtime) decide(p *policy.Profile, l *learned) (*policy.Decision, error) {
	cfg := r.off.Config()
	var pol policy.Policy
	var err error
	switch {
	case r.cfg.Policy != nil:
		pol = maps.Clone(r.cfg.Policy)
	case r.cfg.ByHand != nil:
		pol, err = r.cfg.ByHand.Policy(p, r.cfg.Stage)
	case r.cfg.Names != nil:
		pol = policy.Policy{}
		for u, f := range p.Units {
			if f.CanOffload {
				pol[u] = r.cfg.Names[u.Name]
			}
		}
	case r.cfg.Budget > 0:
		return r.solve(p, l)
	default:
		return &policy.Decision{Nothing: true}, nil
	}
	if err != nil {
		return nil, err
	}
	// What was recomputed in the recorded step was saved there when it was needed:
	// its tape is the one under this choice already.
	for u := range l.redone {
		delete(pol, u)
	}
	// Memory that was taken once is not given back: before times are sure, a plan
	// takes little of it.
	follow := policy.Follow
	if !r.sure(l) {
		follow = policy.FollowTight
	}
	d, err := follow(p, pol, r.links, cfg)
	if err != nil {
		return nil, fmt.Errorf("stowage: rank %d: the choices that were given cannot be followed: %w", r.cfg.Rank, err)
	}
	d.Rank, d.Budget = r.cfg.Rank, int64(r.cfg.Budget)
	if r.cfg.ByHand != nil {
		d.Notes = r.notes(p, l)
	} else if n := d.Late(); n != "" && r.cfg.Lend != nil && r.cfg.Device.Info().Backend != "cpu" { // where there is a link
		d.Notes = append(d.Notes, n)
	}
	for u := range l.redone {
		pol[u] = policy.Recompute
	}
	for i := range d.Reasons {
		if x := &d.Reasons[i]; l.redone[x.Unit] {
			x.Choice, x.Why = policy.Recompute, "chosen by hand"
		}
	}
	return d, nil
}

// solve makes the choices for a budget. A step that recomputes is not known before
// it was recorded: what it loads again, and what it takes on the way. Then the
// units that it recomputed are settled, and the rest is decided once more.
func (r *Runtime) solve(p *policy.Profile, l *learned) (*policy.Decision, error) {
	r.restrict(p)
	for u := range l.redone {
		p.Units[u] = policy.Facts{}
	}
	allowed := policy.Allowed{Offload: !r.cfg.NoOffload, Recompute: !r.cfg.NoRecompute && !l.noRecompute && l.first == nil}
	d, err := policy.Solve(p, r.links, r.off.Config(), int64(r.cfg.Budget), allowed)
	first := l.first
	switch {
	case err != nil && first != nil:
		*l = learned{stats: l.stats, extent: l.extent, noRecompute: true}
		return nil, nil
	case err != nil:
		return nil, err
	}
	if r.cfg.Lend != nil && d.Plan != nil {
		d.Plan.Device = int64(r.cfg.Budget) // the account itself has no limit
	}
	d.Rank = r.cfg.Rank
	redo := func(u policy.Unit) bool { return d.Policy[u] == policy.Recompute }
	if first == nil {
		if slices.ContainsFunc(d.Policy.Units(), redo) {
			l.first = d
			return nil, nil
		}
		return d, nil
	}
	for u := range l.redone {
		d.Policy[u] = policy.Recompute
	}
	d.Nothing, d.Before, d.Tried = false, first.Before, d.Tried+first.Tried
	for i, why := range d.Reasons {
		at := slices.IndexFunc(first.Reasons, func(x policy.Reason) bool { return x.Unit == why.Unit })
		if redo(why.Unit) && at >= 0 {
			d.Reasons[i] = first.Reasons[at]
		}
	}
	return d, nil
}

// notes are what the user may want to know of settings made by hand.
func (r *Runtime) notes(p *policy.Profile, l *learned) []string {
	notes := r.cfg.ByHand.Notes(p)
	for _, name := range r.cfg.ByHand.RecomputeModules {
		here, redone := false, false
		for u := range p.Units {
			here, redone = here || u.Name == name, redone || u.Name == name && l.redone[u]
		}
		if here && !redone {
			notes = append(notes, fmt.Sprintf("recompute-modules names %s, whose groups cannot be computed again; run their forward passes with Step.Run", name))
		}
	}
	if len(l.redone) > 0 {
		notes = append(notes, "the memory with everything kept does not have what is recomputed, which was not kept in the recorded step either")
	}
	return notes
}

// restrict takes the solver's choices away that captured scopes do not allow.
func (r *Runtime) restrict(p *policy.Profile) {
	if r.cfg.Scopes == 0 {
		return
	}
	for _, c := range []capture.Choice{capture.Offload, capture.Recompute} {
		choices := map[string]capture.Choice{}
		for u := range p.Units {
			choices[u.Name] = c
		}
		s := capture.Settings{Choices: choices, WarmUp: r.cfg.WarmUp}
		for name, scope := range r.cfg.Places {
			_ = s.Place(name, scope) // Open has tried it
		}
		for _, g := range capture.Detect(r.cfg.Scopes, s).Groups {
			if g.Verdict != capture.Refused && g.Verdict != capture.SwitchedOff {
				continue
			}
			for u, f := range p.Units {
				if u.Name != g.Name {
					continue
				}
				if c == capture.Offload {
					f.CanOffload = false
				} else {
					f.Recompute = 0
				}
				p.Units[u] = f
			}
		}
	}
}

// choiceByName is the user's choice for a group before its first step is over.
func (r *Runtime) choiceByName(id GroupID) policy.Choice {
	switch {
	case r.cfg.Policy != nil:
		return r.cfg.Policy[policy.UnitOf(id)]
	case r.cfg.Names != nil:
		return r.cfg.Names[id.Name]
	}
	return policy.Choice(r.given(policy.Keep)[id.Name])
}

// byName tells whether the user makes the choices, byUnit whether unit by unit.
func (r *Runtime) byName() bool { return r.byUnit() || r.cfg.Names != nil }
func (r *Runtime) byUnit() bool { return r.cfg.ByHand != nil || r.cfg.Policy != nil }

// Decision is what was decided for a key, or nil before it is: when the first step
// is over, or the second, if the budget asks for something to be recomputed.
func (r *Runtime) Decision(key Key) *policy.Decision {
	if l := r.keys[key]; l != nil {
		return l.decision
	}
	return nil
}

// Profile is the recorded step of a key, or nil before it is over: what the decision
// was made from, for planners that decide for several ranks or budgets.
func (r *Runtime) Profile(key Key) *policy.Profile {
	if l := r.keys[key]; l != nil {
		return l.profile
	}
	return nil
}
