// This file owns the parts of a step that are captured.

package engine

import (
	"errors"
	"maps"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/capture"
	"github.com/stowage-dev/stowage/internal/offload"
	"github.com/stowage-dev/stowage/memory"
)

// Pass identifies a pass of a layer.
type Pass struct {
	Chunk, Layer, Microbatch int
	Backward                 bool
}

// Scope runs a part of the step. If the runtime captures the scope, it calls body during
// the warm-up and for the capture, and later steps replay the graph. Body returns the
// tensors that it made and that later work uses; a replay returns the same views.
// Everything else that later work needs must go through saved groups. A group that begins
// or is loaded in a scope ends or is done in it. A scope inside of a captured one is a part
// of it.
func (s *Step) Scope(scope memory.Scope, p Pass, body func() ([]*Tensor, error)) (out []*Tensor, err error) {
	s.must()
	r := s.r
	if !s.Captures(scope) {
		return body()
	}
	run := func() (err error) {
		if s.plan != nil && !s.record { // storages lie where they lie in the graph
			return r.off.Eager(func() (err error) { out, err = body(); return err })
		}
		from := r.off.Calls()
		out, err = body()
		if s.record {
			s.spans = append(s.spans, span{from, r.off.Calls()})
		}
		return err
	}
	key := capture.Key{
		Key: s.key, Scope: scope, Chunk: p.Chunk, Layer: p.Layer, Microbatch: p.Microbatch, Backward: p.Backward,
	}
	r.outputs, r.scope = &out, &key
	defer func() { r.outputs, r.scope = nil, nil }()
	if s.record && !r.warming(key) || r.redone[key] && r.scopes.Status(back(key)).State == capture.StateRefused {
		err = r.scopes.RunEagerly(key, run)
		return out, err
	}
	err = r.scopes.Run(key, run)
	return out, err
}

// Captures reports whether the runtime captures a scope that begins here as a graph of its
// own. A scope inside of another is a part of it.
func (s *Step) Captures(scope memory.Scope) bool {
	r := s.r
	return r.scopes != nil && !r.whole() && r.report.Captured.Has(scope) && r.scope == nil
}

// pair invalidates graphs of forward passes with recomputed groups if their backward
// passes were not captured: a replayed forward pass leaves no function to call again. That
// happens if a step fails between the two captures.
func (r *Runtime) pair(key memory.Key) {
	for k := range r.redone {
		if st := r.scopes.Status(back(k)).State; k.Key == key && st != capture.StateCaptured && st != capture.StateRefused && r.scopes.Status(k).State == capture.StateCaptured {
			r.gen++
			return
		}
	}
}

// back returns the key of the backward pass of a forward pass.
func back(k capture.Key) capture.Key { k.Backward = true; return k }

// scopeRecorder captures scopes with the manager of saved tensors, which issues a scope
// when it captures it.
type scopeRecorder struct{ r *Runtime }

// Capture captures and issues a scope.
func (x scopeRecorder) Capture(body func() error) (capture.Captured, error) {
	r := x.r
	var options []offload.ScopeOption
	if r.cfg.ByHand != nil && r.cfg.ByHand.Delay {
		options = append(options, offload.Delay)
	}
	before := maps.Clone(r.step.again)
	scope, record := r.scope.Scope, r.off.Capture
	if r.cfg.shares(scope) {
		record = func(body func() error, options ...offload.ScopeOption) (*offload.Scope, error) {
			return r.off.CaptureWith(func(s device.Stream, body func() error) (offload.Graph, error) {
				return r.cfg.Together.Capture(scope, s, body)
			}, body, options...)
		}
	}
	sc, err := record(body, options...)
	if err != nil {
		return nil, err
	}
	c := &capturedScope{r: r, scope: sc}
	for id := range r.step.again {
		if before[id] == nil {
			c.again = append(c.again, id)
		}
	}
	if r.redone[*r.scope] = len(c.again) > 0; len(c.again) == 0 {
		delete(r.redone, *r.scope)
	}
	for _, t := range *r.outputs {
		i := slices.Index(sc.Storages(), t.Storage)
		if i < 0 {
			err := errors.New("stowage: a captured scope returns a tensor that it did not make; use that tensor outside of the scope without returning it")
			return nil, errors.Join(err, sc.Close())
		}
		c.outputs = append(c.outputs, output{*t, i})
	}
	return c, nil
}

// capturedScope is a scope with the tensors that it returns.
type capturedScope struct {
	r       *Runtime
	scope   *offload.Scope
	outputs []output
	again   []memory.GroupID // recomputed groups whose forward passes it holds
}

// output is a tensor that the scope returns.
type output struct {
	tensor Tensor
	index  int // of its storage among those that the scope made
}

// Check returns an error if the scope must be captured again.
func (c *capturedScope) Check() error {
	var moved *offload.Moved
	if errors.As(c.scope.Check(), &moved) {
		return movedScope{moved}
	}
	return nil
}

// Replay issues the scope.
func (c *capturedScope) Replay() error {
	if err := c.scope.Replay(); err != nil {
		return err
	}
	made := c.scope.Storages()
	out := make([]*Tensor, len(c.outputs))
	for i, o := range c.outputs {
		t := o.tensor
		t.Storage, t.s = made[o.index], c.r.step
		out[i] = &t
	}
	*c.r.outputs = out
	for _, id := range c.again {
		c.r.step.lost[id] = true
	}
	return nil
}

// Close frees the scope.
func (c *capturedScope) Close() error { return c.scope.Close() }

// movedScope tells package capture that nothing was issued.
type movedScope struct{ cause *offload.Moved }

func (e movedScope) Error() string { return e.cause.Error() }
func (e movedScope) Unwrap() error { return e.cause }

// Moved reports true: the scope can be captured again.
func (movedScope) Moved() bool { return true }
