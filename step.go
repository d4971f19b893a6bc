// This file owns what the body of a step may do: groups, tensors and scopes.

package stowage

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/memory"
)

// Step is a step under way. A Step, and everything that comes from it, may be used
// until its body returns; later uses panic.
type Step struct{ s *engine.Step }

// Compute returns the stream on which the step's work is issued.
func (s *Step) Compute() device.Stream { return s.s.Compute() }

// New allocates a tensor of n bytes for compute to write. The caller holds it until
// [Tensor.Free]; groups that save it hold it for as long as they need it.
//
// New returns an error if there is no room and nothing can be offloaded to make some.
func (s *Step) New(n memory.Bytes) (*Tensor, error) {
	t, err := s.s.New(n)
	if err != nil {
		return nil, err
	}
	return &Tensor{t}, nil
}

// BeginGroup begins the forward pass of a group. [Group.End] ends it. Groups do not
// nest.
func (s *Step) BeginGroup(id memory.GroupID) *Group { return &Group{s.s.BeginGroup(id)} }

// Run runs the forward pass of a group that can be recomputed: it begins the group,
// calls forward and ends the group.
//
// If the choice for the group is to recompute, its tensors are dropped, and
// [Step.Load] calls forward again. Forward must then save the same tensors; it gets its
// inputs by loading the groups that hold them (see [Group.Recomputing]). The runtime
// frees what forward allocated the second time.
func (s *Step) Run(id memory.GroupID, forward func(*Group) error) error {
	return s.s.Run(id, func(g *engine.Group) error { return forward(&Group{g}) })
}

// Load makes the tensors of a saved group available to work that is issued from now on.
// [Loaded.Done] ends that, and the group with it. Load panics if the group was not
// saved or is done.
//
// A forward pass that recomputes another group may load a group before that group's own
// backward pass does. It calls Done as well; the group then stays in device memory
// until its own backward pass is done.
func (s *Step) Load(id memory.GroupID) (*Loaded, error) {
	l, err := s.s.Load(id)
	if err != nil {
		return nil, err
	}
	return &Loaded{l}, nil
}

// Pass identifies a pass of a layer for [Step.Scope].
type Pass struct {
	Chunk, Layer, Microbatch int
	Backward                 bool
}

// Scope runs a part of the step. If the runtime captures the scope, it calls body
// during the warm-up and for the capture, and later steps replay the graph. Else it
// only calls body.
//
// Body returns the tensors that it made and that later work uses; a replay returns
// tensors at the same place. Everything else that later work needs must go through
// saved groups. A group that begins in a scope ends in it, and a group that is loaded in
// a scope is done in it. Scopes do not nest.
func (s *Step) Scope(scope memory.Scope, pass Pass, body func() ([]*Tensor, error)) ([]*Tensor, error) {
	made, err := s.s.Scope(scope, engine.Pass(pass), func() ([]*engine.Tensor, error) {
		list, err := body()
		out := make([]*engine.Tensor, len(list))
		for i, t := range list {
			out[i] = t.t
		}
		return out, err
	})
	out := make([]*Tensor, len(made))
	for i, t := range made {
		out[i] = &Tensor{t}
	}
	return out, err
}

// Group is the forward pass of a group.
type Group struct{ g *engine.Group }

// Save says that the backward pass needs the tensors. Tensors may be views of one
// storage, and several groups may save the same storage: its bytes are kept or copied
// once. After Save the caller may free the tensors, and compute must not write them.
func (g *Group) Save(tensors ...*Tensor) {
	for _, t := range tensors {
		g.g.Save(t.t)
	}
}

// Recomputing reports whether the forward pass runs for the second time. It must then
// load its inputs.
func (g *Group) Recomputing() bool { return g.g.Recomputing() }

// End ends the forward pass, whose work must all have been issued. The runtime then
// keeps or offloads what the group saved.
func (g *Group) End() error { return g.g.End() }

// Loaded holds the tensors of a group for its backward pass.
type Loaded struct{ l *engine.Loaded }

// Len returns the number of tensors that the group saved.
func (l *Loaded) Len() int { return l.l.Len() }

// Tensor returns the i-th tensor that the group saved.
func (l *Loaded) Tensor(i int) *Tensor { return &Tensor{l.l.Tensor(i)} }

// Range returns the bytes of the i-th tensor. It is short for Tensor(i).Range().
func (l *Loaded) Range(i int) device.Range { return l.l.Range(i) }

// Done says that all work which needs the group has been issued. It panics if it is
// called more often than Load.
func (l *Loaded) Done() { l.l.Done() }

// Tensor is a view of a storage: an offset, an element size, a shape and strides.
type Tensor struct{ t *engine.Tensor }

// Range returns the bytes from the tensor's first element to its last, where they lie
// now. It panics if the tensor is offloaded: load a group that saved it first.
func (t *Tensor) Range() device.Range { return t.t.Range() }

// Shape returns the number of elements in each dimension. The caller must not change
// it.
func (t *Tensor) Shape() []int { return t.t.Shape }

// View returns another view of the same storage. Offset and element are in bytes,
// strides in elements. Nil strides mean contiguous elements.
func (t *Tensor) View(offset, element memory.Bytes, shape, strides []int) *Tensor {
	return &Tensor{t.t.View(offset, element, shape, strides)}
}

// KeepOnDevice returns the same tensor with the wish that groups which save it do not
// offload it. Use it for parameters and for tensors that the loop holds in any case.
func (t *Tensor) KeepOnDevice() *Tensor { return &Tensor{t.t.KeepOnDevice()} }

// Free says that the caller no longer needs the storage. Groups that saved it still
// hold it.
func (t *Tensor) Free() { t.t.Free() }
