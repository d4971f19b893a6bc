// This file owns tapes: the calls of a step, to be made again under another plan.

package residency

import (
	"fmt"
	"time"

	"github.com/stowage-dev/stowage/schedule"
)

// OpKind is which call an entry of a tape is.
type OpKind uint8

const (
	OpTake OpKind = iota
	OpForeign
	OpGive
	OpSave
	OpLoad
	OpRelease
	OpBeginScope
	OpEndScope
)

// Op is one call. ID numbers storages in the order in which they were made.
type Op struct {
	Kind  OpKind
	ID    int   // Take, Foreign, Give
	Bytes int64 // Take, Foreign
	Group schedule.Group
	Items []Item // Save
	// At is how much of compute's own work, without any waiting, comes before the
	// call.
	At time.Duration
}

// Tape is a step, from its beginning. Span is all of compute's own work.
type Tape struct {
	Ops  []Op
	Span time.Duration
}

// Schedule is the order of saves and loads.
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

// Run makes the calls on a machine; before is told of each beforehand.
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
	case OpForeign:
		_, err = m.Foreign(op.Bytes)
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
	default:
		panic(fmt.Sprintf("residency: a tape with a call of kind %d", op.Kind))
	}
	return err
}
