// This file owns the second look at a step's times: the first step of a key loads
// code and may be disturbed, so the one after it is timed again under its plan.

package stowage

import (
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/residency"
)

// calibrates tells whether the step that is about to be issued is timed again.
func (r *Runtime) calibrates(key Key, l *learned) bool {
	return key.Phase == Train && l.known && l.plan != nil && !r.sure(l) && !r.cfg.Compute.Capturing()
}

// sure tells whether times are not taken again: they were, or the next step is
// captured, in which none can be taken.
func (r *Runtime) sure(l *learned) bool {
	return l.calibrated || r.scopes != nil && r.cfg.WarmUp < 2
}

// calibrate takes the times of the step that was issued last if it was the faster
// one, and makes the plan that stays. It waits for the step. Times are taken whole:
// the shorter of two for every single piece would be less than any step takes.
func (r *Runtime) calibrate(l *learned) error {
	l.calibrated, l.timed = true, false
	if err := r.off.Times(); err != nil {
		return err
	}
	p, faster := *l.profile, false
	if last := r.off.Tape(); last.Span < p.Tape.Span {
		var again residency.Tape
		if again, faster = retimed(p.Tape, *last); faster {
			p.Tape = again
		}
	}
	if !faster && !r.byName() { // the solver would find the same once more
		return nil
	}
	first := l.first
	d, err := r.decide(&p, l)
	if d == nil || err != nil {
		if l.known { // to recompute was not chosen when the step was recorded, and is not now
			l.first = first
		}
		return err
	}
	l.decision, l.profile, l.policy, l.plan = d, &p, d.Policy, d.Plan
	l.takes(d)
	return r.off.Prepare(device.Bytes(d.Forecast.Extent)-r.base(), device.Bytes(d.Forecast.Host))
}

// retimed is a tape with the times of another one, in which scopes have no borders or
// the same. It tells whether they are of the same calls.
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
