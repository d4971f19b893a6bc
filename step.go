// This file owns steps: how one is run, and what its body may do.

package stowage

import (
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/capture"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/offload"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/stash"
	"github.com/stowage-dev/stowage/trace"
)

// Step is one step under way. It and everything got from it are dead when its body
// returns.
type Step struct {
	r       *Runtime
	key     Key
	learned *learned
	plan    *residency.Plan
	loads   map[GroupID]*Loaded
	again   map[GroupID]func(*Group) error // of recomputed groups
	lost    map[GroupID]bool               // recomputed groups whose forward pass was replayed
	group   *Group                         // entered, or nil
	passes  []pass                         // forward passes of a recorded step
	spans   []span                         // scopes of a recorded step
	record  bool
}

// Step runs one training step: body issues all of its work on the compute stream.
// The first step under a key is recorded, and a plan is made from it; later ones
// follow the plan. If FullIteration is captured, body is called for the warm-up and
// for the capture only, and replays do what it issued then.
//
// If the choice is to recompute something, the second step is recorded too, since
// only then is known what recomputing loads and takes.
//
// With a stash the step is a transaction: one that overflowed is undone and run
// again with room. The error then names rank, group, and what to do.
func (r *Runtime) Step(key Key, body func(*Step) error) error {
	switch {
	case r.closed:
		panic("stowage: a step after Close")
	case r.step != nil:
		panic("stowage: a step inside of a step")
	}
	if err := r.start(); err != nil {
		return err
	}
	l := r.keys[key]
	if l == nil {
		l = &learned{}
		r.keys[key] = l
	}
	r.events.key = key
	issue := func(attempt int) error {
		if attempt > 0 {
			r.emit(trace.Event{What: trace.Rerun})
		}
		k := capture.Key{Phase: capture.Phase(key.Phase), Microbatches: key.Microbatches, Shape: key.Shape, Scope: capture.FullIteration}
		if !r.whole() || r.records(key, l) && !r.warming(k) {
			return r.issue(key, l, body)
		}
		return r.scopes.Run(k, func() error { return r.issue(key, l, body) })
	}
	var err error
	if r.stash == nil {
		err = issue(0)
	} else {
		err = r.stash.Transact(key, issue)
	}
	if err == nil && l.issued && key.Phase == Train {
		err = r.learn(key, l)
	}
	l.issued = false
	return err
}

// records tells whether a step is to be recorded.
func (r *Runtime) records(key Key, l *learned) bool {
	return key.Phase == Train && !l.known && !r.cfg.Compute.Capturing()
}

// warming tells whether a call of a captured scope will be an eager one, and count.
// Recorded steps are never captured.
func (r *Runtime) warming(k capture.Key) bool {
	st := r.scopes.Status(k)
	return st.State == capture.StateWarming && st.Eager < r.cfg.WarmUp
}

// whole tells whether steps are captured whole.
func (r *Runtime) whole() bool {
	return r.scopes != nil && r.cfg.Scopes.Has(capture.FullIteration) && r.report.Captured.Has(capture.FullIteration)
}

// issue issues a step once.
func (r *Runtime) issue(key Key, l *learned, body func(*Step) error) (err error) {
	if r.stash != nil {
		r.stash.Begin(key)
		defer r.stash.Finish()
	}
	s := r.open(key, l)
	defer func() { err = s.close(err) }()
	return body(s)
}

// open begins a step.
func (r *Runtime) open(key Key, l *learned) *Step {
	s := &Step{r: r, key: key, learned: l, loads: map[GroupID]*Loaded{}, again: map[GroupID]func(*Group) error{}, lost: map[GroupID]bool{}}
	s.plan, s.record = l.plan, r.records(key, l)
	l.recorded, l.timed = false, false // an earlier try may have been, and this one be captured
	r.pair(key)
	switch {
	case s.record:
		l.begin()
		r.stamped = 0
		s.plan = r.provisional(l)
		r.off.BeginProfile(s.plan)
	case r.calibrates(key, l):
		l.timed = true
		r.off.BeginProfile(s.plan)
	case key.Phase == Train:
		r.off.Begin(s.plan)
	default:
		r.off.Begin(nil)
	}
	r.step = s
	return s
}

// close ends a step that failed with err, or did not.
func (s *Step) close(err error) error {
	r, l := s.r, s.learned
	r.step = nil
	if end := r.off.End(); end != nil && !errors.Is(err, end) { // body has mostly seen it
		err = errors.Join(err, end)
	}
	l.stats, l.issued = r.off.Last(), err == nil
	switch {
	case !s.record:
	case err == nil:
		l.passes, l.spans, l.recorded = s.passes, s.spans, true
	case l.first != nil: // without room to recompute
		*l = learned{stats: l.stats, extent: l.extent, noRecompute: true}
	}
	return err
}

// Begin and End are Step for loops that cannot give a body, without a stash and without
// captured scopes: what Step's body would do lies between them. A step that failed is
// ended with why, which comes back, and nothing is learned from it.
func (r *Runtime) Begin(key Key) (*Step, error) {
	switch {
	case r.closed || r.step != nil:
		panic("stowage: a step after Close, or inside of a step")
	case r.stash != nil || r.scopes != nil:
		panic("stowage: Begin with a stash or captured scopes; use Step")
	}
	if err := r.start(); err != nil {
		return nil, err
	}
	l := r.keys[key]
	if l == nil {
		l = &learned{}
		r.keys[key] = l
	}
	return r.open(key, l), nil
}

// End ends a step that Begin began.
func (s *Step) End(failed error) error {
	s.must()
	err, l := s.close(failed), s.learned
	if err == nil && s.key.Phase == Train {
		err = s.r.learn(s.key, l)
	}
	l.issued = false
	return err
}

// provisional is the plan of a step that is not known yet: groups leave by name as
// they come, so that the first step is not larger than those after it.
func (r *Runtime) provisional(l *learned) *residency.Plan {
	switch {
	case l.first != nil:
		return l.first.Plan
	case r.byName():
		return &residency.Plan{Leave: map[GroupID]bool{}, Window: 1} // little memory: it is not given back
	case r.cfg.Lend != nil && r.cfg.Budget > 0:
		return &residency.Plan{Device: int64(r.cfg.Budget)}
	}
	return nil
}

// New takes memory for compute to write. It is the caller's until Free; groups
// that save it have it for as long as they need it.
func (s *Step) New(n device.Bytes) (*Tensor, error) {
	s.must()
	st, err := s.r.off.Alloc(n)
	if err != nil {
		return nil, err
	}
	t := &Tensor{offload.Tensor{Storage: st, Element: 1, Shape: []int{int(n)}}, s}
	if s.group != nil {
		s.group.made = append(s.group.made, st)
	}
	return t, nil
}

// Import makes a tensor of memory that the caller has, as other languages do.
// Released, which may be nil, is called on the host once the memory may be freed
// in compute's order.
func (s *Step) Import(r device.Range, released func()) *Tensor {
	s.must()
	st := s.r.off.Import(r, released)
	if s.group != nil {
		s.group.made = append(s.group.made, st)
	}
	return &Tensor{offload.Tensor{Storage: st, Element: 1, Shape: []int{int(r.Len)}}, s}
}

// Borrow is Import for a runtime with Config.Lend.
func (s *Step) Borrow(r device.Range, released func()) (*Tensor, error) {
	s.must()
	st, err := s.r.off.Borrow(r, released)
	if err != nil {
		return nil, err
	}
	return &Tensor{offload.Tensor{Storage: st, Element: 1, Shape: []int{int(r.Len)}}, s}, nil
}

// Drain lets go of all borrowed memory that is being copied to the host.
func (s *Step) Drain() { s.must(); s.r.off.Drain() }

// Again is the tensor of a storage that was borrowed in this step.
func (s *Step) Again(st *offload.Storage) *Tensor {
	s.must()
	return &Tensor{offload.Tensor{Storage: st, Element: 1, Shape: []int{int(st.Size())}}, s}
}

// Lease leases a set of a workspace's buffers for a group's forward pass, and
// Return the set with its rows for the backward pass: see stash.Set.
func (s *Step) Lease(w *stash.Workspace, id GroupID) *stash.Set { s.must(); return w.Forward(id) }

// Return is the set that holds a group's rows.
func (s *Step) Return(w *stash.Workspace, id GroupID) *stash.Set { s.must(); return w.Backward(id) }

// Compute is the stream that the step's work is issued on.
func (s *Step) Compute() device.Stream { return s.r.cfg.Compute }

func (s *Step) must() {
	if s.r.step != s {
		panic("stowage: a step is used after its body returned")
	}
}

// Load makes the tensors of a saved group usable by work that is issued from now
// on; Done ends that, and with the last Done the group is over. A pass that
// recomputes another group may load it before: that, too, ends with Done, but the
// group stays on the device until its own load is done.
func (s *Step) Load(id GroupID) (*Loaded, error) {
	s.must()
	own := s.group == nil || !s.group.again
	if l := s.loads[id]; l != nil {
		l.uses++
		l.own = l.own || own
		return l, nil
	}
	var made []*offload.Storage
	if forward := s.again[id]; forward != nil {
		var err error
		if made, err = s.recompute(id, forward); err != nil {
			return nil, err
		}
	}
	saved := s.r.off.Saved(id)
	switch {
	case saved == nil && s.lost[id]:
		s.r.gen++ // then forward and backward passes are captured anew, in one step
		return nil, fmt.Errorf("stowage: rank %d: %v is recomputed, and its forward pass was replayed while its backward pass could not be; run the step again", s.r.cfg.Rank, id)
	case saved == nil:
		panic(fmt.Sprintf("stowage: %v is loaded but not saved, or was done", id))
	}
	if err := s.r.off.Load(id); err != nil {
		return nil, err
	}
	l := &Loaded{s: s, id: id, saved: saved, uses: 1, own: own}
	s.loads[id] = l
	for _, st := range made {
		st.Free()
	}
	return l, nil
}
