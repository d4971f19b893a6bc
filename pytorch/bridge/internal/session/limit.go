// This file owns the saved limit: how the caller changes it, and what it is compared with.

package session

import (
	"errors"

	"github.com/stowage-dev/stowage/memory"
)

// Usage is what a session holds.
type Usage struct {
	Saved     memory.Bytes // borrowed memory of saved tensors, what is being copied out included
	Rows      memory.Bytes // borrowed memory of storages with rows that wait for their first berth
	Own       memory.Bytes // device memory that the runtime itself took
	Limit     memory.Bytes // on saved tensors, or zero
	Least     memory.Bytes // that the last TooSmall would have accepted
	Recording bool         // the step under way follows no plan
}

// SetLimit changes the saved limit for the plan that is made at the end of the step under
// way, and for all later steps. A recorded step keeps to a lower limit at once.
func (s *Session) SetLimit(limit memory.Bytes) error {
	return s.guard(func() error {
		switch {
		case s.rt.SavedLimit() == 0:
			return Wrong{errors.New("stowage: the runtime was opened without saved_limit; open it with one to change it")}
		case limit <= 0:
			return Wrong{errors.New("stowage: expected a positive limit on saved tensors, got none")}
		}
		s.rt.SetSavedLimit(limit)
		return nil
	})
}

// Usage returns what the session holds now.
func (s *Session) Usage() (u Usage, err error) {
	err = s.guard(func() error {
		u = Usage{Own: s.dev.Memory().Kind[memory.Device].Current, Limit: s.rt.SavedLimit(), Least: s.least}
		if s.step != nil {
			u.Saved, u.Rows, u.Recording = s.step.SavedBytes(), s.waitingRows(), s.rt.Decision(s.key) == nil
		}
		return nil
	})
	return u, err
}
