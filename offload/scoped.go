// This file owns a scope under way: what compute has to wait for is kept until the
// graph is there.

package offload

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
)

// scoped is a scope under way. The machine lets nothing leave before its end, and
// brings back what it needs into bytes that were free before it. So every mark that
// compute has to come after lies before the scope, or is that of a copy in which is
// issued before its graph: compute waits for all of them at the graph's beginning.
type scoped struct {
	m       *Manager
	s       *Scope
	replays bool          // the graph is there already
	first   int           // storage that it makes
	ops     int           // of the tape before it
	marks   []*order.Mark // of compute, inside
	own     map[*order.Mark]bool
	before  []*order.Mark // what compute waits for
}

// enter opens a scope.
func (m *Manager) enter(s *Scope, replays bool) *scoped {
	run := &scoped{m: m, s: s, replays: replays, first: len(m.storages), ops: len(m.tape.Ops), own: map[*order.Mark]bool{}}
	m.call(residency.Op{Kind: residency.OpBeginScope})
	m.machine.BeginScope()
	m.scope = run
	return run
}

// leave closes it: what was saved in it goes out now.
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

// Eager issues body's work as it comes, in a step that is else like one in which it
// is a captured scope: the machine lets nothing leave before its end. So storages
// lie where they lie when it is captured, and scopes behind it can be replayed. It
// is for steps that warm up; inside of a scope body is simply part of that.
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
	m.must("end a scope")
	m.call(residency.Op{Kind: residency.OpEndScope})
	m.machine.EndScope()
	m.settle()
	return err
}

// made notes a call, unless it is one that is made again.
func (r *scoped) made(c call) {
	if !r.replays {
		r.s.calls = append(r.s.calls, c)
	}
}

// record marks compute inside of the scope. A delayed one has one mark, at its end.
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
			_ = r.m.fail(schedule.Group{}, "make an event", err)
			panic(failed{})
		}
		r.s.events = append(r.s.events, e)
		r.m.lane[residency.Compute].Stream.Record(e)
		k = order.External(e)
	}
	r.marks, r.own[k] = append(r.marks, k), true
	return k
}

// after makes compute come after a mark.
func (r *scoped) after(k *order.Mark) {
	if !r.own[k] {
		r.before = append(r.before, k)
	}
}

// issue issues the scope and closes it.
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
	m.clock.hold(0)
	c.Stream.Replay(r.s.graph)
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
