// This file owns how what the machine says becomes work on streams.

package offload

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/trace"
)

// executor is the manager as the machine sees it.
type executor struct{ *Manager }

// Record marks a lane.
func (x executor) Record(l residency.Lane) residency.Mark {
	m := x.Manager
	switch {
	case m.scope != nil && l == residency.Compute:
		m.table = append(m.table, m.scope.record())
	case m.tail != nil && l != residency.Compute:
		m.table = append(m.table, m.tail.record(l))
	default:
		k := m.mark()
		m.lane[l].Record(k)
		m.table = append(m.table, k)
	}
	return residency.Mark(len(m.table))
}

// mark is a mark for this step. A device that has no event for it has failed, and
// the step with it.
func (m *Manager) mark() *order.Mark {
	k, err := m.lanes.Mark()
	if err != nil {
		_ = m.fail(schedule.Group{}, "make an event", err)
		panic(failed{})
	}
	m.plain = append(m.plain, k)
	return k
}

// failed ends a call of the manager from within the machine; m.err says why.
type failed struct{}

// guard turns the end of a call from within into its error.
func (m *Manager) guard(err *error) {
	switch x := recover(); x.(type) {
	case nil:
	case failed:
		*err = m.err
	default:
		panic(x)
	}
}

func (x executor) After(l residency.Lane, k residency.Mark) {
	switch {
	case k == 0:
	case x.scope != nil && l == residency.Compute:
		x.scope.after(x.table[k-1])
	default:
		x.lane[l].After(x.table[k-1])
	}
}

func (x executor) Out(s *residency.Storage) { x.move(residency.Out, x.storages[s.ID]) }
func (x executor) In(s *residency.Storage)  { x.move(residency.In, x.storages[s.ID]) }

// move issues a copy.
func (m *Manager) move(l residency.Lane, s *Storage) {
	here, away := s.here(), m.mem[device.Host].Slice(device.Bytes(s.state.Host), device.Bytes(s.state.Bytes))
	what := trace.Leave
	dst, src := away, here
	if l == residency.In {
		what, dst, src = trace.Return, here, away
	}
	g := s.group
	m.lane[l].Flush()
	if l == residency.Out {
		m.sums.take(m, l, s, g)
	}
	if m.tail != nil {
		m.tail.copy(l, dst, src)
	} else {
		m.lane[l].Stream.Copy(dst, src)
	}
	if l == residency.In {
		m.sums.take(m, l, s, g)
	} else {
		m.name(g).Moved += device.Bytes(s.state.Bytes)
	}
	m.emit(what, g, s.state, s.state.Bytes)
}

func (x executor) Lend(s *residency.Storage) { x.lend(x.storages[s.ID]) }

func (x executor) Left(s *residency.Storage) {
	if f := x.storages[s.ID].released; f != nil {
		x.left = append(x.left, f)
	}
}

// settle ends a call: work that the caller issues on compute now comes after what
// the machine said, and owners of foreign memory may free it in compute's order. In
// a scope its end does that.
func (m *Manager) settle() {
	if m.scope != nil {
		return
	}
	m.flush()
	left := m.left
	m.left = nil
	for _, f := range left {
		f()
	}
}

// flush issues compute's waits.
func (m *Manager) flush() {
	c := m.lane[residency.Compute]
	idle := c.Waits()
	if idle {
		m.clock.point(m, false)
	}
	c.Flush()
	if idle {
		m.clock.point(m, true)
	}
}
