// This file owns steps: how a step is recorded or follows its plan, and what its body may
// do.

package engine

import (
	"errors"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/capture"
	"github.com/stowage-dev/stowage/internal/offload"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Step is a step under way. A Step, and everything that comes from it, may be used until
// its body returns.
type Step struct {
	r       *Runtime
	key     memory.Key
	learned *learned
	plan    *residency.Plan
	loads   map[memory.GroupID]*Loaded
	again   map[memory.GroupID]func(*Group) error // of recomputed groups
	lost    map[memory.GroupID]bool               // recomputed groups whose forward pass was replayed
	group   *Group                                // under way, or nil
	passes  []pass                                // forward passes of a step that is timed
	spans   []span                                // scopes of a recorded step
	record  bool
	timed   bool // it is recorded, or its times are taken again
}

// Step runs one training step. Body issues all of its work on the compute stream. The
// first step under a key is recorded, and a plan is made from it; later steps follow the
// plan. If FullIteration is captured, Step calls body only for the warm-up and for the
// capture, and later steps replay what body issued then.
//
// If the choice is to recompute something, Step records the second step too, because only
// that step shows what recomputing loads and allocates.
//
// With a stash the step is a transaction: if it overflows, Step undoes it and runs it
// again with more room. If that is impossible, the error names the rank, the group, and
// what to do.
func (r *Runtime) Step(key memory.Key, body func(*Step) error) error {
	l, err := r.knowledge(key)
	if err != nil {
		return err
	}
	issue := func(attempt int) error {
		if attempt > 0 {
			r.emit(trace.Event{Kind: trace.Rerun})
		}
		k := capture.Key{Key: key, Scope: memory.FullIteration}
		run := func() error { return r.issue(key, l, body) }
		switch {
		case !r.whole():
			return run()
		case r.records(key, l) && !r.warming(k):
			return r.scopes.RunEagerly(k, run)
		}
		return r.scopes.Run(k, run)
	}
	if r.stash == nil {
		err = r.attempt(l, issue)
	} else {
		err = r.stash.Transact(key, issue)
	}
	return r.conclude(key, l, err)
}

// attempt issues a step of a runtime without a stash. The first step that recomputes
// something may find no room, because free memory lies in pieces. If states are protected,
// the step is undone and recorded again without recomputing. Ranks that depend on each
// other cannot agree on that in the middle of a step, so one of several fails.
func (r *Runtime) attempt(l *learned, issue func(attempt int) error) error {
	s, tries := r.cfg.Compute, l.first != nil && len(r.states) > 0 && r.cfg.Reduce == nil
	for _, x := range r.states {
		if tries {
			x.Save(s)
		}
	}
	err := issue(0)
	var full *residency.Full
	if !tries || !errors.As(err, &full) {
		return err
	}
	r.cfg.Log.Info("stowage: there is no room to recompute; the step runs again without", "rank", r.cfg.Rank, "why", err)
	for _, x := range slices.Backward(r.states) {
		x.Restore(s)
	}
	return issue(1)
}

// Begin begins a step for loops that cannot give a body; End ends it. What Step's body
// would do lies between the two. Begin panics on a runtime with a stash or with captured
// scopes.
func (r *Runtime) Begin(key memory.Key) (*Step, error) {
	if r.stash != nil || r.scopes != nil {
		panic("stowage: Begin with a stash or captured scopes; use Step")
	}
	l, err := r.knowledge(key)
	if err != nil {
		return nil, err
	}
	return r.open(key, l), nil
}

// End ends a step that Begin began. If the step failed, pass its error: End returns it,
// and the runtime learns nothing from the step.
func (s *Step) End(failed error) error {
	s.must()
	return s.r.conclude(s.key, s.learned, s.close(failed))
}

// knowledge returns what is known of the steps under a key, before one begins.
func (r *Runtime) knowledge(key memory.Key) (*learned, error) {
	switch {
	case r.closed:
		panic("stowage: a step after Close")
	case r.step != nil:
		panic("stowage: a step inside of a step")
	}
	if err := r.start(); err != nil {
		return nil, err
	}
	l := r.keys[key]
	if l == nil {
		l = &learned{}
		r.keys[key] = l
	}
	r.events.key = key
	return l, r.adapt(key, l)
}

// conclude learns from a step that was issued without an error.
func (r *Runtime) conclude(key memory.Key, l *learned, err error) error {
	if err == nil && l.issued && key.Phase == memory.Train {
		err = r.learn(key, l)
	}
	l.issued = false
	return err
}

// records reports whether a step is recorded.
func (r *Runtime) records(key memory.Key, l *learned) bool {
	return key.Phase == memory.Train && !l.known && !r.cfg.Compute.Capturing()
}

// warming reports whether the next call of a captured scope is an eager call of its
// warm-up. Recorded steps are never captured.
func (r *Runtime) warming(k capture.Key) bool {
	st := r.scopes.Status(k)
	return st.State == capture.StateWarming && st.Eager < r.cfg.WarmUp
}

// whole reports whether whole steps are captured.
func (r *Runtime) whole() bool {
	return r.scopes != nil && r.cfg.Scopes.Has(memory.FullIteration) && r.report.Captured.Has(memory.FullIteration)
}

// issue issues the work of a step once.
func (r *Runtime) issue(key memory.Key, l *learned, body func(*Step) error) (err error) {
	if r.stash != nil {
		r.stash.Begin(key)
		defer r.stash.Finish()
	}
	s := r.open(key, l)
	defer func() { err = s.close(err) }()
	return body(s)
}

// open begins a step.
func (r *Runtime) open(key memory.Key, l *learned) *Step {
	s := &Step{r: r, key: key, learned: l, loads: map[memory.GroupID]*Loaded{}, again: map[memory.GroupID]func(*Group) error{}, lost: map[memory.GroupID]bool{}}
	s.plan, s.record = l.plan, r.records(key, l)
	l.recorded, l.timed = false, false // an earlier attempt may have set them
	r.pair(key)
	r.stamped = 0
	switch {
	case s.record:
		s.timed = true
		l.begin()
		s.plan = r.provisional(l)
		r.off.BeginProfile(s.plan)
	case r.calibrates(key, l):
		l.timed, s.timed = true, true
		r.off.BeginProfile(s.plan)
	case key.Phase == memory.Train:
		r.off.Begin(s.plan)
	default:
		r.off.Begin(nil)
	}
	r.step = s
	return s
}

// close ends a step. Err is the error of its body.
func (s *Step) close(err error) error {
	r, l := s.r, s.learned
	r.step = nil
	if end := r.off.End(); end != nil && !errors.Is(err, end) { // body has mostly returned it already
		err = errors.Join(err, end)
	}
	l.stats, l.issued = r.off.Last(), err == nil
	switch {
	case !s.record && err == nil && s.timed:
		l.passes = s.passes
	case !s.record:
	case err == nil:
		l.passes, l.spans, l.recorded = s.passes, s.spans, true
	case l.first != nil: // there is no room to recompute
		*l = learned{stats: l.stats, extent: l.extent, early: l.early, noRecompute: true}
	}
	return err
}

// provisional returns the plan of a step that is recorded. If the user makes the choices,
// groups are offloaded by name as they come, so that the first step does not take more
// memory than later ones.
func (r *Runtime) provisional(l *learned) *residency.Plan {
	switch {
	case l.first != nil:
		return l.first.Plan
	case r.byName():
		return &residency.Plan{Offload: map[memory.GroupID]bool{}, Window: 1} // a small window: memory that was taken once is kept
	case r.cfg.ProvideMemory != nil && r.limit() > 0:
		return &residency.Plan{Device: r.limit()}
	}
	return nil
}

// New allocates a tensor of n bytes for compute to write. The caller holds it until Free;
// groups that save it hold it for as long as they need it.
func (s *Step) New(n memory.Bytes) (*Tensor, error) {
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

// Borrow makes a tensor of memory that the caller owns. The runtime calls released,
// which may be nil, on the host once the memory may be freed in compute's order.
func (s *Step) Borrow(r device.Range, released func()) (*Tensor, error) {
	s.must()
	st, err := s.r.off.Borrow(r, released)
	if err != nil {
		return nil, err
	}
	if s.group != nil {
		s.group.made = append(s.group.made, st)
	}
	return &Tensor{offload.Tensor{Storage: st, Element: 1, Shape: []int{int(r.Len)}}, s}, nil
}

// Drain returns all borrowed memory that is being copied to the host: compute waits for
// these copies.
func (s *Step) Drain() { s.must(); s.r.off.Drain() }

// TensorOf returns a tensor of a storage that was borrowed in this step.
func (s *Step) TensorOf(st *offload.Storage) *Tensor {
	s.must()
	return &Tensor{offload.Tensor{Storage: st, Element: 1, Shape: []int{int(st.Size())}}, s}
}

// Lease leases a set of a workspace's buffers for a group's forward pass: see stash.Set.
func (s *Step) Lease(w *stash.Workspace, id memory.GroupID) *stash.Set {
	s.must()
	return w.Forward(id)
}

// Restore leases the set that holds a group's rows, for its backward pass.
func (s *Step) Restore(w *stash.Workspace, id memory.GroupID) *stash.Set {
	s.must()
	return w.Backward(id)
}

// Compute returns the stream on which the step's work is issued.
func (s *Step) Compute() device.Stream { return s.r.cfg.Compute }

func (s *Step) must() {
	if s.r.step != s {
		panic("stowage: a step is used after its body returned")
	}
}

// Load makes the tensors of a saved group available to work that is issued from now on.
// Done ends that, and the group with it. A forward pass that recomputes another group may
// load a group before the group's own backward pass does. It calls Done as well; the
// group then stays in device memory until its own backward pass is done.
func (s *Step) Load(id memory.GroupID) (*Loaded, error) {
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
