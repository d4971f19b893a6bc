// This file owns what is known of steps: a recorded step becomes a profile, the profile
// becomes choices, and the choices become a plan.

package engine

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/capture"
	"github.com/stowage-dev/stowage/internal/offload"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// learned holds what is known of the steps under one key.
type learned struct {
	known    bool             // policy and plan are made
	first    *policy.Decision // it recomputes something: the next step is recorded under it
	policy   memory.Policy
	plan     *residency.Plan
	decision *policy.Decision
	profile  *policy.Profile
	largest  *policy.Profile // without times: the largest step, if nothing is decided
	extent   memory.Bytes    // the extent of activations that steps took or plans foresee
	early    memory.Bytes    // what all held together before a decision gave some of it back
	facts    map[memory.Unit]policy.Facts
	redone   map[memory.Unit]bool // recomputed in the recorded step
	passes   []pass
	spans    []span
	stats    offload.Stats // of the step issued last
	issued   bool          // the step under way was issued, and not only replayed
	recorded bool
	// looks counts the steps that were timed again, and timed reports whether the step that was
	// issued last is one. Calibrated reports whether times are final, and quicker whether they
	// are shorter than those that the plan was made from.
	looks                      int
	timed, calibrated, quicker bool

	limit       memory.Bytes // the limit that the plan was made under
	anew        int          // how many times a first step was recorded anew
	noRecompute bool         // it was tried, and there is no room for it
}

// begin forgets what an earlier recording found.
func (l *learned) begin() {
	*l = learned{first: l.first, anew: l.anew, noRecompute: l.noRecompute, stats: l.stats, extent: l.extent, early: l.early}
}

// span holds the calls of a scope in a recorded step; later steps capture the scope.
type span struct{ from, to int }

// pass is the forward pass of a group in a step that is timed, with the stamps at both ends.
type pass struct {
	id       memory.GroupID
	from, to int
}

// stamp takes the time of compute in a step that is timed, and returns the number of the
// stamp. It returns -1 if there is none.
func (s *Step) stamp() int {
	if !s.timed || s.r.cfg.Compute.Capturing() {
		return -1
	}
	r := s.r
	if r.stamped == len(r.stamps) {
		e, err := r.cfg.Device.NewEvent(device.Timing)
		if err != nil {
			return -1 // the solver then does not recompute the group
		}
		r.stamps = append(r.stamps, e)
	}
	r.cfg.Compute.Record(r.stamps[r.stamped])
	r.stamped++
	return r.stamped - 1
}

// saw notes whether a group can be offloaded.
func (l *learned) saw(g *Group) {
	l.note(g.id, func(f *policy.Facts) {
		for _, t := range g.tensors {
			f.CanOffload = f.CanOffload || !t.Stay
		}
	})
}

// canRecompute notes a group whose forward pass can run again. The time that this takes is
// known when the step is over.
func (l *learned) canRecompute(id memory.GroupID) {
	l.note(id, func(f *policy.Facts) { f.Recompute = max(f.Recompute, time.Nanosecond) })
}

// redo notes a group that a recorded step recomputes.
func (l *learned) redo(id memory.GroupID) {
	if l.known {
		return
	}
	if l.redone == nil {
		l.redone = map[memory.Unit]bool{}
	}
	l.redone[id.Unit()] = true
}

func (l *learned) note(id memory.GroupID, change func(*policy.Facts)) {
	if l.known {
		return
	}
	if l.facts == nil {
		l.facts = map[memory.Unit]policy.Facts{}
	}
	f := l.facts[id.Unit()]
	change(&f)
	l.facts[id.Unit()] = f
}

// learn makes the plan for a key after its first step. If a later step departed from the
// plan, learn forgets the plan, and the next step is recorded. It waits for the step that
// it learns from.
func (r *Runtime) learn(key memory.Key, l *learned) error {
	if l.known {
		if l.stats.Departed || l.plan == nil && r.limit() > 0 && l.stats.Evicted > 0 {
			r.cfg.Log.Warn("stowage: a step departed from its plan; the next step is recorded again", "microbatches", key.Microbatches, "shape", key.Shape)
			*l = learned{stats: l.stats, extent: l.extent, early: l.early}
			r.gen++ // a graph that was captured from it
			return nil
		}
		if l.timed {
			return r.calibrate(l)
		}
		if !r.moves() && r.scopes == nil && l.stats.Extent > l.extent {
			l.largest, l.extent = &policy.Profile{Tape: *r.off.Tape(), Base: l.profile.Base, Rows: l.profile.Rows}, l.stats.Extent
		}
		return nil
	}
	if !l.recorded { // the caller captured the step
		return nil
	}
	if err := r.off.Times(); err != nil {
		return err
	}
	if err := r.time(l); err != nil {
		return err
	}
	l.extent = max(l.extent, l.stats.Extent)
	p := &policy.Profile{Tape: *r.off.Tape(), Base: r.base(), Units: l.facts, Rows: r.rows(l)}
	r.freeSets(p)
	p.Tape.Ops = scoped(p.Tape.Ops, l.spans)
	d, err := r.decide(p, l)
	if d == nil || err != nil {
		return err
	}
	l.known, l.limit, l.decision, l.profile, l.policy, l.plan = true, r.limit(), d, p, d.Policy, d.Plan
	l.largest, d.Final = p, d.Plan == nil || r.sure(l)
	r.cfg.Log.Info("stowage: decided", "rank", r.cfg.Rank, "budget", d.Budget, "moved", d.Forecast.Counts.OutBytes, "nothing_to_do", d.Nothing)
	r.emit(trace.Event{Kind: trace.Decide, Bytes: int64(d.Forecast.Counts.OutBytes), Offset: int64(d.Forecast.Extent)})
	return r.apply(l, d, p)
}

// scoped returns the calls of a recorded step with the borders of its scopes.
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

// time sets how long recomputing a group takes, from the stamps of a recorded step.
func (r *Runtime) time(l *learned) error {
	shortest, err := r.shortest(l)
	for u, f := range l.facts {
		f.Recompute = shortest[u]
		if l.redone[u] {
			f.Recompute = 0
		}
		l.facts[u] = f
	}
	return err
}

// shortest returns how long the forward passes of units took that can be recomputed. The
// shortest pass of all microbatches counts, because a pass may have waited for memory.
func (r *Runtime) shortest(l *learned) (map[memory.Unit]time.Duration, error) {
	shortest := map[memory.Unit]time.Duration{}
	for _, p := range l.passes {
		u := p.id.Unit()
		if l.facts[u].Recompute == 0 || p.from < 0 || p.to < 0 {
			continue
		}
		d, err := r.stamps[p.to].Since(r.stamps[p.from])
		if err != nil {
			return nil, err
		}
		if least, ok := shortest[u]; !ok || d < least {
			shortest[u] = max(d, 1)
		}
	}
	return shortest, nil
}

// decide makes the choices: those of the user, or those of the solver for a budget. It
// returns nil if another step has to be recorded first.
func (r *Runtime) decide(p *policy.Profile, l *learned) (*policy.Decision, error) {
	cfg := r.off.Config()
	cfg.Device += r.undecidedPages()
	if limit := r.limit(); limit > 0 && r.cfg.ProvideMemory == nil {
		cfg.Device = min(cfg.Device, limit-p.Base)
		if r.decidesPages() {
			cfg.Device = limit - p.Base
		}
	}
	var pol memory.Policy
	var err error
	switch {
	case r.cfg.Policy != nil:
		pol = maps.Clone(r.cfg.Policy)
	case r.cfg.ByHand != nil:
		pol, err = r.cfg.ByHand.Policy(p, r.cfg.Stage)
	case r.cfg.GroupChoices != nil:
		pol = memory.Policy{}
		for u, f := range p.Units {
			if f.CanOffload {
				pol[u] = r.cfg.GroupChoices[u.Name]
			}
		}
	case r.limit() > 0:
		return r.solve(p, l)
	default:
		return &policy.Decision{Nothing: true}, nil
	}
	if err != nil {
		return nil, err
	}
	// The recorded step saved what it recomputed only when that was needed, so its tape
	// shows these choices already.
	for u := range l.redone {
		delete(pol, u)
	}
	// The runtime keeps memory that it took once. So a plan takes little of it before
	// times are sure.
	follow := policy.Follow
	if !r.sure(l) {
		follow = policy.FollowTight
	}
	d, err := r.followRows(p, pol, func(pol memory.Policy) (*policy.Decision, error) { return follow(p, pol, r.links, cfg) })
	if err != nil {
		return nil, memory.OnRank(r.cfg.Rank, fmt.Errorf("the choices that were given cannot be followed: %w", err))
	}
	pol = d.Policy
	d.Rank, d.Budget = r.cfg.Rank, r.cfg.Budget
	if r.cfg.ByHand != nil {
		d.Notes = r.notes(p, l)
	} else if n := d.Late(); n != "" && r.cfg.ProvideMemory != nil && r.cfg.Device.Info().Backend != "cpu" { // where there is a link
		d.Notes = append(d.Notes, n)
	}
	for u := range l.redone {
		pol[u] = memory.Recompute
	}
	for i := range d.Reasons {
		if x := &d.Reasons[i]; l.redone[x.Unit] {
			x.Choice, x.Why = memory.Recompute, "chosen by hand"
		}
	}
	return d, nil
}

// payIn is the number of steps in which a search for better choices must pay, unless its
// effort was given. A step waits for it, and the times that it goes by may be spoilt.
const payIn = 10

// mostAnew is how many times a first step is recorded anew.
const mostAnew = 3

// solve makes the choices for a budget. If the solver recomputes something, solve returns
// nil, and the next step is recorded under that choice, because only that step shows what
// recomputing loads and allocates. The units that it recomputed are then settled, and solve
// decides about the rest. If that step was much shorter than the first, which may have
// loaded code or was disturbed, solve forgets both, and a first step is recorded anew, at
// most mostAnew times.
func (r *Runtime) solve(p *policy.Profile, l *learned) (*policy.Decision, error) {
	r.restrict(p)
	for u := range l.redone {
		p.Units[u] = policy.Facts{}
	}
	first := l.first
	if first != nil && l.anew < mostAnew && r.scopes == nil && float64(p.Tape.Span) < 0.9*float64(first.Before.Compute) {
		l.first = nil // the first step was slow, so it showed too wide windows
		l.anew++
		return nil, nil
	}
	allowed := policy.Allowed{Offload: !r.cfg.NoOffload, Recompute: !r.cfg.NoRecompute && !l.noRecompute && first == nil, Effort: r.cfg.Effort}
	if r.cfg.Effort == 0 {
		allowed.PayIn = payIn
	}
	if l.known && r.scopes != nil {
		allowed.Recompute = false // scopes are warm, and recording would make their graphs stale
	}
	d, err := policy.Solve(p, r.links, r.off.Config(), r.limit(), allowed)
	if err == nil && recomputes(d) {
		d = r.withSpareRoom(p, d, allowed)
	}
	var small *memory.BudgetError
	if errors.As(err, &small) {
		small.Rank = r.cfg.Rank
	}
	switch {
	case err != nil && first != nil:
		l.first, l.noRecompute = nil, true
		return nil, nil
	case err != nil:
		return nil, err
	}
	if r.cfg.ProvideMemory != nil && d.Plan != nil {
		d.Plan.Device = r.limit() // the account itself has no limit
	}
	d.Rank = r.cfg.Rank
	if first == nil {
		if recomputes(d) {
			l.first = d
			return nil, nil
		}
		return d, nil
	}
	for u := range l.redone {
		d.Policy[u] = memory.Recompute
	}
	d.Nothing, d.Before, d.Tried = false, first.Before, d.Tried+first.Tried
	for i, why := range d.Reasons {
		at := slices.IndexFunc(first.Reasons, func(x policy.Reason) bool { return x.Unit == why.Unit })
		if d.Policy[why.Unit] == memory.Recompute && at >= 0 {
			d.Reasons[i] = first.Reasons[at]
		}
	}
	return d, nil
}

// recomputes reports whether a decision recomputes something.
func recomputes(d *policy.Decision) bool {
	return slices.ContainsFunc(d.Policy.Units(), func(u memory.Unit) bool { return d.Policy[u] == memory.Recompute })
}

// withSpareRoom returns a decision to take the place of one that recomputes. It leaves room
// for what a forecast does not know before a step has recomputed something: the tensors that
// the largest recomputed group loads and those that it makes again, or at least one of these.
// A step that finds no room fails, and the recorded step has shown that the budget is enough
// without recomputing. If that does not fit, nothing is recomputed. It returns d if only
// recomputing fits.
func (r *Runtime) withSpareRoom(p *policy.Profile, d *policy.Decision, allowed policy.Allowed) *policy.Decision {
	var largest memory.Bytes
	for _, u := range d.Forecast.Units {
		if u.Choice == memory.Recompute {
			largest = max(largest, u.Bytes)
		}
	}
	e, err := policy.Solve(p, r.links, r.off.Config(), r.limit()-2*largest, allowed)
	if err != nil {
		e, err = policy.Solve(p, r.links, r.off.Config(), r.limit()-largest, allowed)
	}
	if err != nil || !recomputes(e) {
		allowed.Recompute = false
		if e, err = policy.Solve(p, r.links, r.off.Config(), r.limit(), allowed); err != nil {
			return d
		}
	}
	e.Budget = r.limit()
	return e
}

// notes returns remarks on settings made by hand.
func (r *Runtime) notes(p *policy.Profile, l *learned) []string {
	notes := r.cfg.ByHand.Notes(p)
	for _, name := range r.cfg.ByHand.RecomputeModules {
		here, redone := false, false
		for u := range p.Units {
			here, redone = here || u.Name == name, redone || u.Name == name && l.redone[u]
		}
		if here && !redone {
			notes = append(notes, fmt.Sprintf("RecomputeModules: %s cannot be computed again; run its forward passes with Step.Run", name))
		}
	}
	if len(l.redone) > 0 {
		notes = append(notes, "the forecast with everything kept leaves out what is recomputed, because the recorded step did not keep it either")
	}
	return notes
}

// restrict forbids the solver choices that captured scopes do not allow.
func (r *Runtime) restrict(p *policy.Profile) {
	if r.cfg.Scopes == 0 {
		return
	}
	for _, c := range []memory.Choice{memory.Offload, memory.Recompute} {
		choices := map[string]memory.Choice{}
		for u := range p.Units {
			choices[u.Name] = c
		}
		s := capture.Settings{Choices: choices, WarmUp: r.cfg.WarmUp}
		for name, scope := range r.cfg.GroupScopes {
			_ = s.Place(name, scope) // Open has tried it
		}
		for _, g := range capture.Detect(r.cfg.Scopes, s).Groups {
			if g.Placement != capture.Refused && g.Placement != capture.SwitchedOff {
				continue
			}
			for u, f := range p.Units {
				if u.Name != g.Name {
					continue
				}
				if c == memory.Offload {
					f.CanOffload = false
				} else {
					f.Recompute = 0
				}
				p.Units[u] = f
			}
		}
	}
}

// Decision returns what was decided for a key. It returns nil before that: until the end
// of the first step, or of the second if the solver recomputes something. It returns nil
// again while a step is recorded anew.
func (r *Runtime) Decision(key memory.Key) *policy.Decision {
	if l := r.keys[key]; l != nil {
		return l.decision
	}
	return nil
}

// Profile returns the recorded step of a key, from which the decision was made, or nil
// before there is one. Planners use it to decide for several ranks or budgets.
func (r *Runtime) Profile(key memory.Key) *policy.Profile {
	if l := r.keys[key]; l != nil {
		return l.profile
	}
	return nil
}
