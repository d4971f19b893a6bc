// This file owns scopes: compute's work of a part of a step as a graph of its own.

package offload

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/trace"
)

// Scope is a part of a step that was captured. Its compute work is one graph; what
// it makes the copy streams do is issued around it:
//
//  1. copies in that the scope needs, and compute's waits for them and for whoever
//     had the bytes before that it takes;
//  2. the graph, which records external events where compute is marked;
//  3. copies out, and copies in ahead of need, as a graph of each copy stream, in
//     which each waits for the event inside compute's that it needs: they begin in
//     the middle of it, not at its end.
//
// A delayed scope has no events inside: its copies come after the whole of it.
type Scope struct {
	m        *Manager
	entry    uint64         // the digest of the step before the scope
	foreign  []device.Range // before it: graphs hold the caller's own handles
	delay    bool
	calls    []call
	graph    device.Graph
	events   []device.Event // recorded inside the graph, in order
	copies   [residency.Lanes]copies
	made     int        // in which step it was captured
	step     int        // in which it was issued last
	storages []*Storage // made in it, then
}

// ScopeOption is an option of Capture.
type ScopeOption uint8

// Delay holds a scope's copies back until its graph was issued, and comes after all
// of it.
const Delay ScopeOption = 1

// Moved says that a scope cannot be replayed, because the step was not issued like
// the one it was captured in: storages may lie elsewhere. Nothing was issued.
type Moved struct{ Rank, Captured, Step int }

func (e *Moved) Error() string {
	return fmt.Sprintf("offload: rank %d: a scope captured in step %d cannot be replayed in step %d, whose calls, plan or memory differ before it; capture it again",
		e.Rank, e.Captured, e.Step)
}

// Capture makes a graph of the work that body issues on compute, with the calls of
// the manager that it makes, and issues it. If it fails the step has failed, and is
// ended without its results.
func (m *Manager) Capture(body func() error, options ...ScopeOption) (*Scope, error) {
	m.must("capture a scope")
	c := m.lane[residency.Compute].Stream
	switch {
	case m.scope != nil || m.eager:
		panic("offload: a scope is captured inside of a scope")
	case m.cfg.Lend != nil:
		panic("offload: a scope is captured where memory is lent, which is elsewhere at every replay; capture the step whole")
	case c.Capturing():
		return nil, m.fail(schedule.Group{}, "capture a scope",
			&device.CaptureError{Stream: c.Name(), Why: "the whole step is being captured", Do: "issue the scope's work without capturing it"})
	}
	s := &Scope{m: m, made: m.step, entry: m.digest.sum, foreign: slices.Clone(m.foreign)}
	for _, o := range options {
		s.delay = s.delay || o == Delay
	}
	run := m.enter(s, false)
	c.BeginCapture()
	err := body()
	graph, failed := c.EndCapture()
	s.graph = graph
	if err = cmp.Or(err, m.err, failed); err != nil {
		m.scope = nil
		err = m.fail(schedule.Group{}, "capture a scope", err)
		return nil, errors.Join(err, s.Close())
	}
	m.emit(trace.Capture, schedule.Group{}, nil, int64(graph.Nodes()))
	if err := run.issue(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Replay does what the scope did in the step that it was captured in: it makes the
// same calls and issues the graph. A *Moved says that it must be captured again.
func (s *Scope) Replay() error {
	m := s.m
	m.must("replay a scope")
	switch {
	case s.graph == nil:
		panic("offload: a closed scope is replayed")
	case m.scope != nil || m.eager:
		panic("offload: a scope is replayed inside of a scope")
	case m.digest.sum != s.entry || !slices.Equal(m.foreign, s.foreign):
		return &Moved{m.cfg.Rank, s.made, m.step}
	}
	run := m.enter(s, true)
	for _, c := range s.calls {
		if err := cmp.Or(c.again(m), m.err); err != nil {
			m.scope = nil
			return m.fail(schedule.Group{}, "replay a scope", err)
		}
	}
	m.emit(trace.Replay, schedule.Group{}, nil, int64(s.graph.Nodes()))
	return run.issue()
}

// Storages are those that the scope made, in the step in which it was issued last.
func (s *Scope) Storages() []*Storage { return s.storages }

// Close ends the scope once what was issued of it is done. In the step in which it
// was issued, where later work may have to wait for its events, the host waits for
// that.
func (s *Scope) Close() (first error) {
	if s.m.open && s.step == s.m.step {
		first = s.m.lanes.Sync()
	}
	parts := append(s.copies[:], copies{graph: s.graph, events: s.events})
	for _, c := range parts {
		if c.graph != nil {
			first = cmp.Or(first, c.graph.Close())
		}
		for _, e := range c.events {
			first = cmp.Or(first, e.Close())
		}
	}
	s.graph, s.events, s.copies = nil, nil, [residency.Lanes]copies{}
	return first
}

// call is a call of the manager inside of a scope.
type call interface{ again(m *Manager) error }

type (
	alloc    struct{ n device.Bytes }
	imported struct{ r device.Range }
	free     struct{ id int }
	load     struct{ g schedule.Group }
	release  struct{ g schedule.Group }
	save     struct {
		g  schedule.Group
		ts []Tensor // without storages
		of []int    // their numbers
	}
)

func (c alloc) again(m *Manager) error    { _, err := m.Alloc(c.n); return err }
func (c imported) again(m *Manager) error { m.Import(c.r, nil); return nil }
func (c free) again(m *Manager) error     { m.storages[c.id].Free(); return nil }
func (c load) again(m *Manager) error     { return m.Load(c.g) }
func (c release) again(m *Manager) error  { m.Release(c.g); return nil }

func (c save) again(m *Manager) error {
	ts := append([]Tensor(nil), c.ts...)
	for i := range ts {
		ts[i].Storage = m.storages[c.of[i]]
	}
	_, err := m.Save(c.g, ts...)
	return err
}

func saveAgain(g schedule.Group, ts []Tensor) save {
	c := save{g: g, ts: append([]Tensor(nil), ts...)}
	for i := range c.ts {
		c.of = append(c.of, ts[i].Storage.state.ID)
		c.ts[i].Storage = nil
	}
	return c
}
