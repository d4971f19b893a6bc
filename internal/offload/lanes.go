// This file owns how decisions of the machine become work on streams.

package offload

import (
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// executor is the manager as the machine's executor.
type executor struct{ *Manager }

// Record records a mark on a lane.
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

// mark returns a new mark for this step. The step fails if the device has no event for
// it.
func (m *Manager) mark() *order.Mark {
	k, err := m.lanes.Mark()
	if err != nil {
		_ = m.fail(memory.GroupID{}, "make an event", err)
		panic(failed{})
	}
	m.plain = append(m.plain, k)
	return k
}

// failed is what a call inside of the machine panics with to end a call of the manager;
// m.err says why.
type failed struct{}

// guard recovers from failed and sets the error of the call.
func (m *Manager) guard(err *error) {
	switch x := recover(); x.(type) {
	case nil:
	case failed:
		*err = m.err
	default:
		panic(x)
	}
}

// After orders a lane after a mark.
func (x executor) After(l residency.Lane, k residency.Mark) {
	switch {
	case k == 0:
	case x.scope != nil && l == residency.Compute:
		x.scope.after(x.table[k-1])
	default:
		x.lane[l].After(x.table[k-1])
	}
}

// Out issues a copy to the host.
func (x executor) Out(s *residency.Storage) { x.move(residency.Out, x.storages[s.ID]) }

// In issues a copy back.
func (x executor) In(s *residency.Storage) { x.move(residency.In, x.storages[s.ID]) }

// move issues a copy.
func (m *Manager) move(l residency.Lane, s *Storage) {
	here, away := s.here(), m.mem[memory.Host].Slice(s.state.Host, s.state.Bytes)
	what := trace.Offload
	dst, src := away, here
	if l == residency.In {
		what, dst, src = trace.Reload, here, away
	}
	g := s.group
	m.lane[l].Flush()
	if m.tail != nil {
		m.tail.copy(l, dst, src)
	} else {
		m.lane[l].Stream.Copy(dst, src)
	}
	if l == residency.Out {
		m.name(g).Moved += s.state.Bytes
	}
	m.emit(what, g, s.state, int64(s.state.Bytes))
}

// ProvideMemory asks the caller for memory.
func (x executor) ProvideMemory(s *residency.Storage) { x.provide(x.storages[s.ID]) }

// ReturnMemory remembers to tell the caller that its memory is free.
func (x executor) ReturnMemory(s *residency.Storage) {
	if f := x.storages[s.ID].released; f != nil {
		x.left = append(x.left, f)
	}
}

// settle ends a call: it orders the work that the caller issues on compute next after
// what the machine decided, and tells the owners of borrowed memory what they may free.
// In a scope the scope's end does that.
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
