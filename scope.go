// This file owns captured scopes in the middle of a step.

package stowage

import (
	"errors"
	"maps"
	"slices"

	"github.com/stowage-dev/stowage/capture"
	"github.com/stowage-dev/stowage/offload"
)

// Pass is which pass of which layer a scope is.
type Pass struct {
	Chunk, Layer, Microbatch int
	Backward                 bool
}

// Scope runs a part of the step that is captured as a graph of its own if the
// runtime captures that scope: body is called while it warms up and when it is
// captured; later steps replay it. The tensors that body returns are made in it, and
// those that later work uses; a replay returns the same views. Everything else that
// later work needs must go through saved groups. What is entered or loaded in a
// scope is left or done in it.
func (s *Step) Scope(scope capture.Scope, p Pass, body func() ([]*Tensor, error)) (out []*Tensor, err error) {
	s.must()
	r := s.r
	if r.scopes == nil || r.whole() || !r.report.Captured.Has(scope) {
		return body()
	}
	run := func() (err error) {
		if s.plan != nil && !s.record { // storages lie where they will in the graph
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
		Phase: capture.Phase(s.key.Phase), Microbatches: s.key.Microbatches, Shape: s.key.Shape,
		Scope: scope, Chunk: p.Chunk, Layer: p.Layer, Microbatch: p.Microbatch, Backward: p.Backward,
	}
	if s.record && !r.warming(key) || r.redone[key] && r.scopes.Status(back(key)).State == capture.StateRefused {
		err = run()
		return out, err
	}
	r.outputs, r.scope = &out, &key
	defer func() { r.outputs, r.scope = nil, nil }()
	err = r.scopes.Run(key, run)
	return out, err
}

// pair sees to it that forward passes with groups to recompute are replayed only if
// their backward passes are: a replay leaves nothing to call again. A step that
// failed between the two has captured only the first.
func (r *Runtime) pair(key Key) {
	for k := range r.redone {
		mine := k.Phase == capture.Phase(key.Phase) && k.Microbatches == key.Microbatches && k.Shape == key.Shape
		if st := r.scopes.Status(back(k)).State; mine && st != capture.StateCaptured && st != capture.StateRefused && r.scopes.Status(k).State == capture.StateCaptured {
			r.gen++
			return
		}
	}
}

// back is the backward pass of a forward one.
func back(k capture.Key) capture.Key { k.Backward = true; return k }

// scopeRecorder captures scopes through the manager of saved tensors, which issues
// a scope as it captures it.
type scopeRecorder struct{ r *Runtime }

// Capture captures and issues a scope.
func (x scopeRecorder) Capture(body func() error) (capture.Captured, error) {
	r := x.r
	var options []offload.ScopeOption
	if r.cfg.ByHand != nil && r.cfg.ByHand.Delay {
		options = append(options, offload.Delay)
	}
	before := maps.Clone(r.step.again)
	sc, err := r.off.Capture(body, options...)
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
			err := errors.New("stowage: a captured scope hands on a tensor that was not made in it; keep that tensor outside of the scope")
			return nil, errors.Join(err, sc.Close())
		}
		c.outputs = append(c.outputs, output{*t, i})
	}
	return c, nil
}

// capturedScope is a scope and the tensors that it hands on.
type capturedScope struct {
	r       *Runtime
	scope   *offload.Scope
	outputs []output
	again   []GroupID // whose forward passes are in it, to be recomputed
}

// output is a tensor of the scope.
type output struct {
	tensor Tensor
	index  int // of its storage among those made in the scope
}

// Replay issues the scope.
func (c *capturedScope) Replay() error {
	if err := c.scope.Replay(); err != nil {
		var moved *offload.Moved
		if errors.As(err, &moved) {
			return movedScope{moved}
		}
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

// Close ends it.
func (c *capturedScope) Close() error { return c.scope.Close() }

// movedScope tells the life cycle that nothing was issued.
type movedScope struct{ cause *offload.Moved }

func (e movedScope) Error() string { return e.cause.Error() }
func (e movedScope) Unwrap() error { return e.cause }

// Moved says so.
func (movedScope) Moved() bool { return true }
