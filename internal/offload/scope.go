// This file owns captured scopes: the work of compute in a part of a step, as a graph.

package offload

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Scope is a captured part of a step. The work of compute is one graph. The work of the
// copy streams is issued around it, in this order:
//
//  1. copies in that the scope needs, and compute's waits for them and for the earlier
//     users of the bytes that the scope takes;
//  2. the graph, which records external events where compute is marked;
//  3. copies out and prefetches, as one graph for each copy stream. Each copy waits for
//     the event in compute's graph that it needs, so copies begin in the middle of that
//     graph and not at its end.
//
// A delayed scope has no events inside: its copies begin after the whole graph.
type Scope struct {
	m        *Manager
	entry    uint64         // the digest of the step before the scope
	borrowed []device.Range // borrowed before the scope; the graph holds their handles
	delay    bool
	calls    []call
	graph    Graph
	events   []device.Event // recorded inside the graph, in order
	copies   [residency.Lanes]copies
	made     int        // the step in which it was captured
	step     int        // the step in which it was issued last
	storages []*Storage // that it made in that step
}

// Graph is captured work of compute.
type Graph interface {
	Nodes() int
	Replay() error // issues the graph on compute
	Close() error
}

// Recorder makes a graph of what body issues on compute, without executing it. If body
// fails, it returns body's error.
type Recorder func(compute device.Stream, body func() error) (Graph, error)

// alone is the recorder of a rank that captures what it issues itself.
func alone(s device.Stream, body func() error) (Graph, error) {
	s.BeginCapture()
	err := body()
	g, failed := s.EndCapture()
	if err = cmp.Or(err, failed); err == nil {
		return ownGraph{s, g}, nil
	}
	if g != nil {
		err = errors.Join(err, g.Close())
	}
	return nil, err
}

// ownGraph is a graph of alone.
type ownGraph struct {
	s device.Stream
	device.Graph
}

func (g ownGraph) Replay() error { g.s.Replay(g.Graph); return nil }

// ScopeOption is an option of Capture.
type ScopeOption uint8

// Delay makes a scope's copies begin after its whole graph.
const Delay ScopeOption = 1

// Moved reports a scope that cannot be replayed, because the step was issued in another
// way than the step in which the scope was captured, so storages may lie elsewhere.
// Nothing was issued.
type Moved struct{ Rank, Captured, Step int }

// Error says which step the scope was captured in, and what to do.
func (e *Moved) Error() string {
	return fmt.Sprintf("offload: rank %d: a scope captured in step %d cannot be replayed in step %d, whose calls, plan or memory differ before it; capture it again",
		e.Rank, e.Captured, e.Step)
}

// Capture makes a graph of the work that body issues on compute, with the calls that body
// makes to the manager, and issues it. If Capture fails, the step has failed: end it and
// discard its results.
func (m *Manager) Capture(body func() error, options ...ScopeOption) (*Scope, error) {
	return m.CaptureWith(alone, body, options...)
}

// CaptureWith is Capture with a graph that record makes, such as one of several ranks.
func (m *Manager) CaptureWith(record Recorder, body func() error, options ...ScopeOption) (*Scope, error) {
	m.must("capture a scope")
	c := m.lane[residency.Compute].Stream
	switch {
	case m.scope != nil || m.eager:
		panic("offload: a scope is captured inside of a scope")
	case m.cfg.ProvideMemory != nil:
		panic("offload: a scope cannot be captured with ProvideMemory, because memory that is provided lies elsewhere at every replay; capture the whole step")
	case c.Capturing():
		return nil, m.fail(memory.GroupID{}, "capture a scope",
			&device.CaptureError{Stream: c.Name(), Why: "the whole step is being captured", Do: "issue the scope's work without capturing it"})
	}
	s := &Scope{m: m, made: m.step, entry: m.digest.sum, borrowed: slices.Clone(m.borrowed)}
	for _, o := range options {
		s.delay = s.delay || o == Delay
	}
	run := m.enter(s, false)
	graph, err := record(c, func() error { return cmp.Or(body(), m.err) })
	s.graph = graph
	if err != nil {
		m.scope = nil
		err = m.fail(memory.GroupID{}, "capture a scope", err)
		return nil, errors.Join(err, s.Close())
	}
	m.emit(trace.Capture, memory.GroupID{}, nil, int64(graph.Nodes()))
	if err := run.issue(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Check returns a *Moved if the scope must be captured again.
func (s *Scope) Check() error {
	m := s.m
	if m.digest.sum != s.entry || !slices.Equal(m.borrowed, s.borrowed) {
		return &Moved{m.cfg.Rank, s.made, m.step}
	}
	return nil
}

// Replay makes the same calls as in the step in which the scope was captured, and issues
// the graph. It returns a *Moved if the scope must be captured again.
func (s *Scope) Replay() error {
	m := s.m
	m.must("replay a scope")
	switch {
	case s.graph == nil:
		panic("offload: a closed scope is replayed")
	case m.scope != nil || m.eager:
		panic("offload: a scope is replayed inside of a scope")
	}
	if err := s.Check(); err != nil {
		return err
	}
	run := m.enter(s, true)
	for _, c := range s.calls {
		if err := cmp.Or(c.again(m), m.err); err != nil {
			m.scope = nil
			return m.fail(memory.GroupID{}, "replay a scope", err)
		}
	}
	m.emit(trace.Replay, memory.GroupID{}, nil, int64(s.graph.Nodes()))
	return run.issue()
}

// Storages returns the storages that the scope made in the step in which it was issued
// last.
func (s *Scope) Storages() []*Storage { return s.storages }

// Close frees the scope after its issued work is done. In the step in which the scope was
// issued Close waits on the host, because later work may depend on the scope's events.
func (s *Scope) Close() (first error) {
	if s.m.open && s.step == s.m.step {
		first = s.m.lanes.Sync()
	}
	events := s.events
	for _, c := range s.copies {
		if c.graph != nil {
			first = cmp.Or(first, c.graph.Close())
		}
		events = append(events, c.events...)
	}
	if s.graph != nil {
		first = cmp.Or(first, s.graph.Close())
	}
	for _, e := range events {
		first = cmp.Or(first, e.Close())
	}
	s.graph, s.events, s.copies = nil, nil, [residency.Lanes]copies{}
	return first
}

// call is a call to the manager inside of a scope, which a replay makes again.
type call interface{ again(m *Manager) error }

type (
	alloc   struct{ n memory.Bytes }
	borrow  struct{ r device.Range }
	free    struct{ id int }
	load    struct{ g memory.GroupID }
	release struct{ g memory.GroupID }
	save    struct {
		g  memory.GroupID
		ts []Tensor // without storages
		of []int    // their numbers
	}
)

func (c alloc) again(m *Manager) error   { _, err := m.Alloc(c.n); return err }
func (c borrow) again(m *Manager) error  { _, err := m.Borrow(c.r, nil); return err }
func (c free) again(m *Manager) error    { m.storages[c.id].Free(); return nil }
func (c load) again(m *Manager) error    { return m.Load(c.g) }
func (c release) again(m *Manager) error { m.Release(c.g); return nil }

func (c save) again(m *Manager) error {
	ts := append([]Tensor(nil), c.ts...)
	for i := range ts {
		ts[i].Storage = m.storages[c.of[i]]
	}
	_, err := m.Save(c.g, ts...)
	return err
}

func saveAgain(g memory.GroupID, ts []Tensor) save {
	c := save{g: g, ts: append([]Tensor(nil), ts...)}
	for i := range c.ts {
		c.of = append(c.of, ts[i].Storage.state.ID)
		c.ts[i].Storage = nil
	}
	return c
}
