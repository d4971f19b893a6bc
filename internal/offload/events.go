// This file owns the trace: what the manager decided, in the order of issue.

package offload

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// event returns an event with what all events have in common. The clock is read once for
// decisions between which compute was given no work; these are a nanosecond apart.
func (m *Manager) event(what trace.Kind, g memory.GroupID) trace.Event {
	if n := m.lane[residency.Compute].Stream.Issued(); n == m.first {
		m.time++
	} else {
		m.first, m.time = n, device.Now()
	}
	return trace.Event{
		Kind: what, Rank: m.cfg.Rank, Step: m.step, Time: m.time, First: m.first,
		Name: g.Name, Chunk: g.Chunk, Layer: g.Layer, Microbatch: g.Microbatch, Offset: residency.None, InUse: m.inUse,
	}
}

// Trace traces an event of another package among the manager's own, with their order and
// step.
func (m *Manager) Trace(e trace.Event) {
	x := m.event(e.Kind, memory.GroupID{Name: e.Name, Chunk: e.Chunk, Layer: e.Layer, Microbatch: e.Microbatch})
	x.Bytes = e.Bytes
	m.send(x)
}

// send emits an event. Events of a scope are held back, because they belong to the graph
// that is issued when the scope ends.
func (m *Manager) send(e trace.Event) {
	if m.scope != nil {
		m.held = append(m.held, e)
		return
	}
	m.cfg.Trace.Emit(e)
}

// sendHeld emits the events of a scope, whose graph compute was given last.
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

// emit traces an event of a group, or of one of its storages if s is not nil.
func (m *Manager) emit(what trace.Kind, g memory.GroupID, s *residency.Storage, bytes int64) {
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

// offset returns a storage's place in the device's pool. Borrowed memory has none.
func (m *Manager) offset(s *residency.Storage) int64 {
	if m.cfg.ProvideMemory != nil {
		return residency.None
	}
	return int64(s.Device)
}

// watch traces that a storage got a place or gave it back. The first place on the device
// that is given back after an eviction belongs to the evicted storage: borrowed memory
// whose copy is over is returned before it.
func (m *Manager) watch(s *residency.Storage, host, taken bool) {
	var g memory.GroupID
	if s.ID < len(m.storages) {
		g = m.storages[s.ID].group
	}
	tier, bytes, off := memory.Device, s.Bytes, m.offset(s)
	switch {
	case host:
		tier, bytes, off = memory.Host, m.machine.Host().Round(s.Bytes), int64(s.Host)
	case s.Device != residency.None:
		bytes = m.machine.Device().Round(s.Bytes)
	}
	what := trace.Free
	if taken {
		what = trace.Alloc
		m.inUse[tier] += int64(bytes)
		m.most[tier] = max(m.most[tier], m.inUse[tier])
	} else {
		if !host && m.machine.Counts().Evicted > m.evicted {
			m.evicted++
			m.emit(trace.Evict, g, s, int64(s.Bytes))
		}
		m.inUse[tier] -= int64(bytes)
	}
	e := m.event(what, g)
	e.Storage, e.Tier, e.Offset, e.Bytes = s.ID+1, tier, off, int64(bytes)
	m.send(e)
}

// traceSave traces a group that was saved, and before it those of its storages that no
// other group saved before.
func (m *Manager) traceSave(g memory.GroupID, items []residency.Item, bytes int64) {
	if m.cfg.Trace == nil {
		return
	}
	for _, it := range items {
		if s := m.storages[it.ID]; s.group == g {
			m.emit(trace.Save, g, s.state, int64(s.state.Bytes))
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
	e := m.event(trace.End, memory.GroupID{})
	e.Bytes, e.Offset = m.most[memory.Device], m.most[memory.Host]
	m.send(e)
}
