// This file owns the scope under way. It collects what compute has to wait for until the
// graph is issued.

package offload

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// scoped is a scope under way. The machine offloads nothing before the scope ends, and
// reloads what the scope needs into bytes that were free before it. So every mark that
// compute must be ordered after lies before the scope, or belongs to a copy in that is
// issued before the graph. Compute waits for all of them before the graph begins.
type scoped struct {
	m       *Manager
	s       *Scope
	replays bool          // the graph exists already
	first   int           // the number of the first storage that it makes
	ops     int           // the number of calls before it
	marks   []*order.Mark // of compute, inside
	own     map[*order.Mark]bool
	before  []*order.Mark // what compute waits for
}

// enter begins a scope.
func (m *Manager) enter(s *Scope, replays bool) *scoped {
	run := &scoped{m: m, s: s, replays: replays, first: len(m.storages), ops: len(m.tape.Ops), own: map[*order.Mark]bool{}}
	m.call(residency.Op{Kind: residency.OpBeginScope})
	m.machine.BeginScope()
	m.scope = run
	return run
}

// leave ends the scope: what was saved in it is offloaded now.
func (r *scoped) leave() error {
	m := r.m
	m.call(residency.Op{Kind: residency.OpEndScope})
	m.tail = r.tail()
	m.machine.EndScope()
	if err := m.tail.issue(); err != nil {
		return err
	}
	m.tail = nil
	m.settle()
	return nil
}

// Eager issues body's work eagerly, and lays out storages as if body were a captured
// scope: the machine offloads nothing before body ends. So storages lie where they lie
// when body is captured, and later scopes can be replayed. Use it in warm-up steps.
// Inside of a scope Eager only calls body.
func (m *Manager) Eager(body func() error) (err error) {
	m.must("begin a scope")
	if m.scope != nil || m.eager {
		return body()
	}
	m.call(residency.Op{Kind: residency.OpBeginScope})
	m.machine.BeginScope()
	m.eager = true
	defer func() { m.eager = false }()
	err = body()
	defer m.guard(&err)
	m.call(residency.Op{Kind: residency.OpEndScope})
	m.machine.EndScope()
	m.settle()
	return err
}

// made notes a call, unless a replay makes it.
func (r *scoped) made(c call) {
	if !r.replays {
		r.s.calls = append(r.s.calls, c)
	}
}

// record marks compute inside of the scope. A delayed scope has one mark, at its end.
func (r *scoped) record() *order.Mark {
	i := len(r.marks)
	if r.s.delay && i > 0 {
		return r.marks[0]
	}
	var k *order.Mark
	switch {
	case r.s.delay:
		k = r.m.mark()
	case r.replays:
		k = order.External(r.s.events[i])
	default:
		e, err := r.m.dev.NewEvent(device.External)
		if err != nil {
			_ = r.m.fail(memory.GroupID{}, "make an event", err)
			panic(failed{})
		}
		r.s.events = append(r.s.events, e)
		r.m.lane[residency.Compute].Stream.Record(e)
		k = order.External(e)
	}
	r.marks, r.own[k] = append(r.marks, k), true
	return k
}

// after orders compute after a mark.
func (r *scoped) after(k *order.Mark) {
	if !r.own[k] {
		r.before = append(r.before, k)
	}
}

// issue issues the scope and ends it.
func (r *scoped) issue() (err error) {
	m, c := r.m, r.m.lane[residency.Compute]
	m.scope = nil
	defer func() { m.tail = nil }()
	defer m.guard(&err)
	m.clock.hold(r.ops)
	m.clock.point(m, false)
	for _, k := range r.before {
		c.After(k)
	}
	m.flush()
	m.clock.hold(noCall)
	if err := r.s.graph.Replay(); err != nil {
		return m.fail(memory.GroupID{}, "replay a scope", err)
	}
	m.sendHeld()
	for _, k := range r.marks {
		if r.s.delay {
			c.Record(k)
		} else {
			c.Recorded(k)
		}
	}
	m.clock.point(m, false)
	r.s.step, r.s.storages = m.step, m.storages[r.first:len(m.storages):len(m.storages)]
	return r.leave()
}
