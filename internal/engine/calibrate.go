// This file owns the later looks at a step's times. The first step under a key loads code,
// and any step may be disturbed, so the next ones are timed again under their plan.

package engine

import (
	"maps"
	"slices"

	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// calibrates reports whether the next step is timed again.
func (r *Runtime) calibrates(key memory.Key, l *learned) bool {
	return key.Phase == memory.Train && l.known && l.plan != nil && !r.sure(l) && !r.cfg.Compute.Capturing()
}

// sure reports whether times are final: calibrate has said so, or the next step is captured,
// so that none can be taken.
func (r *Runtime) sure(l *learned) bool {
	return l.calibrated || r.scopes != nil && r.cfg.WarmUp < 2
}

// leastGain is the part of a step by which another must be faster. Times that differ by
// less would lead the solver to the same choices, which it may take long to find.
const leastGain = 100

// likeness is the part of a step by which two steps may differ that took equally long, and
// mostLooks the number of steps after the recorded one that are timed until two are alike.
const (
	likeness  = 10
	mostLooks = 8
)

// calibrate looks at the times of the step that was issued last, and waits for that step.
// A disturbance can only make a step longer, and hardly two steps by the same time. So times
// are final once a step took as long as the shortest before it, and those of the shortest
// count. Calibrate then makes the final plan, if they are shorter than those that the plan
// was made from. It takes either all times of a step or none: the shortest of several times for
// every single piece would add up to less than any step takes.
func (r *Runtime) calibrate(l *learned) error {
	l.timed = false
	l.looks++
	if err := r.off.Times(); err != nil {
		return err
	}
	if now := r.rows(l); now != nil && now.Fixed && !l.profile.Rows.Fixed {
		l.calibrated, l.decision.Final = true, true
		return nil // steps under other keys follow the pages and sets that this one was given
	}
	p, last := *l.profile, r.off.Tape()
	shortest := min(last.Span, p.Tape.Span)
	l.calibrated = max(last.Span, p.Tape.Span) <= shortest+shortest/likeness || l.looks == mostLooks || r.scopes != nil
	if last.Span < p.Tape.Span-p.Tape.Span/leastGain {
		if again, ok := retimed(p.Tape, *last); ok {
			p.Tape, l.quicker = again, true
		}
	}
	if err := r.retime(&p, l); err != nil {
		return err
	}
	l.profile, l.decision.Final = &p, l.calibrated
	if !l.calibrated || !l.quicker && !r.byName() { // the solver would find the same again
		return nil
	}
	d, err := r.decide(&p, l)
	if err != nil {
		return err
	}
	if d == nil {
		return r.recordAgain(l, &p)
	}
	d.Final = true
	l.limit, l.decision, l.policy, l.plan = r.limit(), d, d.Policy, d.Plan
	return r.apply(l, d, &p)
}

// retime shortens how long recomputing takes to what the step that was issued last shows.
func (r *Runtime) retime(p *policy.Profile, l *learned) error {
	shortest, err := r.shortest(l)
	p.Units = maps.Clone(p.Units)
	for u, d := range shortest {
		if f := p.Units[u]; f.Recompute > d {
			f.Recompute = d
			p.Units[u] = f
		}
	}
	return err
}

// recordAgain lets the next step be recorded, under l.first if there is one. The step
// begins as the first one did: rows go to host pages, and leave all device memory to
// activations.
func (r *Runtime) recordAgain(l *learned, p *policy.Profile) error {
	l.begin()
	r.gen++
	if !r.decidesPages() || p.Rows == nil || p.Rows.Fixed {
		return nil
	}
	l.early, l.extent = max(l.early, r.holds(p)), 0
	if err := r.stash.SetMore(0); err != nil {
		return err
	}
	if err := r.stash.SetDevicePages(0); err != nil {
		return err
	}
	_, err := r.off.Limit(r.cfg.Budget - p.Base)
	return err
}

// retimed returns tape a with the times of tape b, in which scopes have no borders or the
// same. It reports whether both have the same calls.
func retimed(a, b residency.Tape) (residency.Tape, bool) {
	border := func(op residency.Op) bool {
		return op.Kind == residency.OpBeginScope || op.Kind == residency.OpEndScope
	}
	ops := slices.DeleteFunc(slices.Clone(b.Ops), border)
	out := residency.Tape{Ops: slices.Clone(a.Ops), Span: b.Span}
	next := 0
	for i, op := range a.Ops {
		if out.Ops[i].At = b.Span; next < len(ops) {
			out.Ops[i].At = ops[next].At
		}
		if border(op) {
			continue
		}
		if next == len(ops) || !same(op, ops[next]) {
			return out, false
		}
		next++
	}
	return out, next == len(ops)
}

func same(a, b residency.Op) bool {
	return a.Kind == b.Kind && a.ID == b.ID && a.Bytes == b.Bytes && a.Group == b.Group && slices.Equal(a.Items, b.Items)
}
