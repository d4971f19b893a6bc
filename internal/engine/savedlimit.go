// This file owns the limit on saved tensors: how it changes between steps, and what
// a changed limit means for plans that were made under another one.

package engine

import (
	"github.com/stowage-dev/stowage/memory"
)

// limit returns the saved limit or the budget, whichever is set, or zero. A saved limit
// is for saved tensors with the workspaces and pages of their rows. A budget is also for
// what others hold on the device, which base counts.
func (r *Runtime) limit() memory.Bytes {
	if r.cfg.SavedLimit > 0 {
		return r.cfg.SavedLimit
	}
	return r.cfg.Budget
}

// SavedLimit returns the limit on saved tensors, or zero if there is none.
func (r *Runtime) SavedLimit() memory.Bytes { return r.cfg.SavedLimit }

// SetSavedLimit changes the limit on saved tensors of a runtime that was opened with
// one and whose memory is borrowed. A recorded step that is under way keeps to a lower
// limit from its next call on; a step that follows a plan keeps to its plan. The plan that
// is made at the end of a recorded step, and every later step, keep to the new limit. A
// plan that was made under another limit is made again, from the recorded step, when the
// next step under its key begins; if it recomputes something, that step is recorded anew.
func (r *Runtime) SetSavedLimit(limit memory.Bytes) {
	if limit <= 0 || r.cfg.SavedLimit <= 0 || r.cfg.ProvideMemory == nil {
		panic("stowage: SetSavedLimit without a limit, or on a runtime that was opened without one or owns its memory")
	}
	r.cfg.SavedLimit = limit
	if s := r.step; s != nil && s.record {
		r.off.LowerLimit(limit)
	}
}

// adapt makes the plan of a key again if it was made under another limit. A step that
// is captured keeps the plan of the steps before it.
func (r *Runtime) adapt(key memory.Key, l *learned) error {
	if r.cfg.SavedLimit == 0 || !l.known || l.limit == r.limit() || r.byName() || key.Phase != memory.Train || r.cfg.Compute.Capturing() {
		return nil
	}
	p := *l.profile
	d, err := r.decide(&p, l)
	if err != nil {
		return err
	}
	if d == nil {
		return r.recordAgain(l, &p)
	}
	l.limit, l.decision, l.profile, l.policy, l.plan = r.limit(), d, &p, d.Policy, d.Plan
	r.gen++
	return r.apply(l, d, &p)
}

// SavedBytes returns the device memory that saved tensors take now, those included that
// are being copied to the host.
func (s *Step) SavedBytes() memory.Bytes { s.must(); return s.r.off.Live() }
