// This file owns the trace: what the manager decided, in the order of issue.

package offload

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/trace"
)

// event is an event of the step as far as all of them are alike. The clock is read once
// for all decisions that compute was given nothing in between: they count nanoseconds.
func (m *Manager) event(what trace.What, g schedule.Group) trace.Event {
	if n := m.lane[residency.Compute].Stream.Issued(); n == m.first {
		m.time++
	} else {
		m.first, m.time = n, device.Now()
	}
	return trace.Event{
		What: what, Rank: m.cfg.Rank, Step: m.step, Time: m.time, First: m.first,
		Name: g.Name, Chunk: g.Chunk, Layer: g.Layer, Microbatch: g.Microbatch, Offset: residency.None, InUse: m.inUse,
	}
}

// Trace traces an event of somebody else's in the order, and with the step, of the
// manager's own.
func (m *Manager) Trace(e trace.Event) {
	x := m.event(e.What, schedule.Group{Name: e.Name, Chunk: e.Chunk, Layer: e.Layer, Microbatch: e.Microbatch})
	x.Bytes = e.Bytes
	m.send(x)
}

// send hands an event on. What a scope decides belongs to its graph, which is issued
// when all of it is known.
func (m *Manager) send(e trace.Event) {
	if m.scope != nil {
		m.held = append(m.held, e)
		return
	}
	m.cfg.Trace.Emit(e)
}

// sendHeld hands on what a scope has decided, whose graph compute was given last.
func (m *Manager) sendHeld() {
	if len(m.held) == 0 {
		return
	}
	graph := m.lane[residency.Compute].Stream.Issued() - 1
	for _, e := range m.held {
		e.First = graph
		m.cfg.Trace.Emit(e)
	}
	m.held = m.held[:0]
}

// emit traces an event of a group or, where there is one, of a storage of it.
func (m *Manager) emit(what trace.What, g schedule.Group, s *residency.Storage, bytes int64) {
	if m.cfg.Trace == nil {
		return
	}
	e := m.event(what, g)
	e.Bytes = bytes
	if s != nil {
		e.Storage, e.Offset = s.ID+1, m.offset(s)
	}
	m.send(e)
}

// offset is a storage's place in the device's pool; what is borrowed has none.
func (m *Manager) offset(s *residency.Storage) int64 {
	if m.cfg.Lend != nil {
		return residency.None
	}
	return s.Device
}

// watch traces that a storage got a place or gave one back. The first place on the device
// that is given back behind an eviction is the evicted storage's: borrowed memory that was
// being copied before is given back before it.
func (m *Manager) watch(s *residency.Storage, host, taken bool) {
	var g schedule.Group
	if s.ID < len(m.storages) {
		g = m.storages[s.ID].group
	}
	tier, bytes, off := trace.Device, s.Bytes, m.offset(s)
	switch {
	case host:
		tier, bytes, off = trace.Host, m.machine.Host().Round(s.Bytes), s.Host
	case s.Device != residency.None:
		bytes = m.machine.Device().Round(s.Bytes)
	}
	what := trace.Free
	if taken {
		what = trace.Alloc
		m.inUse[tier] += bytes
		m.most[tier] = max(m.most[tier], m.inUse[tier])
	} else {
		if !host && m.machine.Counts().Evicted > m.evicted {
			m.evicted++
			m.emit(trace.Evict, g, s, s.Bytes)
		}
		m.inUse[tier] -= bytes
	}
	e := m.event(what, g)
	e.Storage, e.Tier, e.Offset, e.Bytes = s.ID+1, tier, off, bytes
	m.send(e)
}

// traceSave traces a group that was saved, and before it the storages that are its
// own: those that no group saved before it.
func (m *Manager) traceSave(g schedule.Group, items []residency.Item, bytes int64) {
	if m.cfg.Trace == nil {
		return
	}
	for _, it := range items {
		if s := m.storages[it.ID]; s.group == g {
			m.emit(trace.Save, g, s.state, s.state.Bytes)
		}
	}
	m.emit(trace.Save, g, nil, bytes)
}

// traceEnd traces the end of the step, whose storages are forgotten.
func (m *Manager) traceEnd() {
	if m.cfg.Trace == nil {
		return
	}
	m.sendHeld() // of a scope that failed
	m.inUse = [2]int64{}
	e := m.event(trace.End, schedule.Group{})
	e.Bytes, e.Offset = m.most[trace.Device], m.most[trace.Host]
	m.send(e)
}
