// This file owns tapes: the calls of a step, which can be run again under another plan.

package residency

import (
	"fmt"
	"time"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// OpKind says which call an entry of a tape is.
type OpKind uint8

const (
	OpTake OpKind = iota
	OpBorrow
	OpGive
	OpSave
	OpLoad
	OpRelease
	OpBeginScope
	OpEndScope
	// The calls for rows that the stash holds. A machine ignores them: their memory is
	// not in its heaps.
	OpRowLease  // compute takes a set of buffers for a forward pass
	OpRowSave   // the forward pass is done, and its rows go to pages
	OpRowReturn // compute needs the rows again
	OpRowDone   // the backward pass is done
)

// Op is one call. ID numbers storages in the order in which they were made.
type Op struct {
	Kind  OpKind
	ID    int          // Take, Borrow, Give: the storage; RowLease: the workspace
	Bytes memory.Bytes // Take, Borrow
	Group memory.GroupID
	Items []Item // Save
	// At is the time of compute's own work before the call, without waiting.
	At time.Duration
}

// Tape holds the calls of a step. Span is the time of compute's own work in it.
type Tape struct {
	Ops  []Op
	Span time.Duration
}

// Schedule returns the order of saves and loads.
func (t *Tape) Schedule() *schedule.Schedule {
	s := &schedule.Schedule{}
	for _, op := range t.Ops {
		switch op.Kind {
		case OpSave:
			s.Save(op.Group)
		case OpLoad:
			s.Load(op.Group)
		}
	}
	return s
}

// Run makes the calls on a machine. It calls before with each of them first.
func (t *Tape) Run(m *Machine, before func(Op)) error {
	for _, op := range t.Ops {
		before(op)
		if err := m.do(op); err != nil {
			return err
		}
	}
	return nil
}

func (m *Machine) do(op Op) (err error) {
	switch op.Kind {
	case OpTake:
		_, err = m.Take(op.Bytes)
	case OpBorrow:
		_, err = m.Borrow(op.Bytes)
	case OpGive:
		m.Give(op.ID)
	case OpSave:
		m.Save(op.Group, op.Items...)
	case OpLoad:
		err = m.Load(op.Group)
	case OpRelease:
		m.Release(op.Group)
	case OpBeginScope:
		m.BeginScope()
	case OpEndScope:
		m.EndScope()
	case OpRowLease, OpRowSave, OpRowReturn, OpRowDone:
	default:
		panic(fmt.Sprintf("residency: a tape with a call of kind %d", op.Kind))
	}
	return err
}
