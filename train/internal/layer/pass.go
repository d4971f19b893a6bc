// Package layer implements the layers of decoder models: what they compute forward and
// backward, and what they save in between. The runtime holds every saved tensor as part of
// a named group. A layer runs work that can be recomputed with Pass.run.
//
// Code that issues a pass does not check errors: if memory runs out, the pass ends at once
// by a panic, which Guard turns into an error again.
//
// This file owns passes: the step they belong to, memory, groups. unit.go owns
// parameters; norm.go, core.go, attention.go, mla.go, mamba.go, dense.go, moe.go, dispatch.go
// and experts.go the parts of layers; head.go the embedding, the output layer and the
// loss; build.go which parts a model has.
package layer

import (
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
)

// Pass is a forward or backward pass of one layer over one microbatch. Closures that
// recompute refer to the forward pass, so each has its own.
type Pass struct {
	Step       *engine.Step
	S          device.Stream // the step's compute stream
	Chunk      int
	Layer      int // of the chunk
	Microbatch int
	Backward   bool
	Evaluate   bool // nothing is saved
	Shape
}

// Shape is what all passes of a run have in common.
type Shape struct {
	Batch, Seq int            // sequences of a microbatch, and their tokens
	Number     kernels.Number // of activations
	// Scale is the factor of every gradient: one over the tokens of a step. So gradients of
	// ranks and microbatches are added and never averaged.
	Scale float32
}

// Tokens returns the number of rows of a microbatch.
func (s Shape) Tokens() int { return s.Batch * s.Seq }

// Mat is a matrix in memory of the step.
type Mat struct {
	nn.Matrix
	t *engine.Tensor
}

// Free ends the pass's use of the matrix. Groups that saved it may still need it.
func (m Mat) Free() { m.t.Free() }

// failure ends a pass.
type failure struct{ err error }

// must ends the pass if there is an error.
func must(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// Guard runs work that may end early, and returns the error that ended it.
func Guard(work func()) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case failure:
			err = p.err
		default:
			panic(p)
		}
	}()
	work()
	return nil
}

// Must is must for other packages' work inside of Guard.
func Must(err error) { must(err) }

// New returns memory for a matrix of activations.
func (p *Pass) New(rows, cols int) Mat { return p.newOf(p.Number, rows, cols) }

func (p *Pass) newOf(t kernels.Number, rows, cols int) Mat {
	x := p.bytes(t.Size() * memory.Bytes(rows*cols))
	return Mat{nn.NewMatrix(x.Range(), t, rows, cols), x}
}

// bytes returns memory for other data: tables, counts, sums.
func (p *Pass) bytes(n memory.Bytes) *engine.Tensor {
	x, err := p.Step.New(n)
	must(err)
	return x
}

// words returns memory for n numbers of four bytes.
func (p *Pass) words(n int) *engine.Tensor { return p.bytes(memory.Bytes(4 * n)) }

// Wrap returns a tensor as a matrix.
func (p *Pass) Wrap(t *engine.Tensor, cols int) Mat {
	return Mat{nn.NewMatrix(t.Range(), p.Number, int(t.Range().Len/p.Number.Size())/cols, cols), t}
}

// id returns the name of a group of this layer and microbatch.
func (p *Pass) id(name string) memory.GroupID {
	return memory.GroupID{Name: name, Chunk: p.Chunk, Layer: p.Layer, Microbatch: p.Microbatch}
}

// save saves tensors as a group that cannot be recomputed.
func (p *Pass) save(name string, ts ...*engine.Tensor) {
	g := p.Step.BeginGroup(p.id(name))
	g.Save(ts...)
	must(g.End())
}

// run computes a group that can be recomputed. forward returns the tensors to save. If
// again is set, it reads its inputs from groups that were saved before.
func (p *Pass) run(name string, forward func(again bool) []*engine.Tensor) {
	must(p.Step.Run(p.id(name), func(g *engine.Group) error {
		return Guard(func() { g.Save(forward(g.Recomputing())...) })
	}))
}

// group is the tensors of a saved group.
type group struct{ *engine.Loaded }

// load makes a saved group usable until its Done.
func (p *Pass) load(name string) group {
	l, err := p.Step.Load(p.id(name))
	must(err)
	return group{l}
}

// mat returns tensor i as a matrix.
func (g group) mat(i int, t kernels.Number, rows, cols int) nn.Matrix {
	return nn.NewMatrix(g.Range(i), t, rows, cols)
}

// scope runs a part of the pass that may be captured as a graph. body returns the tensors
// that later work needs.
func (p *Pass) scope(scope memory.Scope, body func() []*engine.Tensor) []*engine.Tensor {
	at := engine.Pass{Chunk: p.Chunk, Layer: p.Layer, Microbatch: p.Microbatch, Backward: p.Backward}
	out, err := p.Step.Scope(scope, at, func() (out []*engine.Tensor, err error) {
		err = Guard(func() { out = body() })
		return out, err
	})
	must(err)
	return out
}

// within is scope for a part that returns one matrix of a number of columns.
func (p *Pass) within(scope memory.Scope, cols int, body func() Mat) Mat {
	return p.Wrap(p.scope(scope, func() []*engine.Tensor { return []*engine.Tensor{body().t} })[0], cols)
}

// Check returns an error if no pass can have the shape.
func (s Shape) Check() error {
	if s.Batch <= 0 || s.Seq <= 0 {
		return fmt.Errorf("layer: microbatches of %d sequences of %d tokens; both must be at least 1", s.Batch, s.Seq)
	}
	if s.Tokens() > 1<<30 {
		return errors.New("layer: a microbatch has more than 2^30 tokens; give fewer or shorter sequences")
	}
	return nil
}
