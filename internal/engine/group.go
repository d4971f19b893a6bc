// This file owns groups: what a forward pass saves, and how the backward pass loads it.

package engine

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/offload"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Tensor is a view of a storage: an offset, an element size, a shape and strides. It
// belongs to one step.
type Tensor struct {
	offload.Tensor
	s *Step
}

// View returns another view of the same storage. Offset and element are in bytes,
// strides in elements. Nil strides mean contiguous elements.
func (t *Tensor) View(offset, element memory.Bytes, shape, strides []int) *Tensor {
	u := *t
	u.Offset, u.Element, u.Shape, u.Strides = offset, element, shape, strides
	return &u
}

// KeepOnDevice returns the same tensor, which groups that save it do not offload.
func (t *Tensor) KeepOnDevice() *Tensor {
	u := *t
	u.Stay = true
	return &u
}

// Free says that the caller itself no longer needs the storage. Groups that saved it
// still hold it, the group under way included.
func (t *Tensor) Free() {
	if g := t.s.group; g != nil {
		if slices.ContainsFunc(g.tensors, func(x offload.Tensor) bool { return x.Storage == t.Storage }) {
			g.freed = append(g.freed, t.Storage)
			return
		}
		g.made = slices.DeleteFunc(g.made, func(x *offload.Storage) bool { return x == t.Storage })
	}
	t.Storage.Free()
}

// Group is the forward pass of a group under way.
type Group struct {
	s       *Step
	id      memory.GroupID
	tensors []offload.Tensor
	made    []*offload.Storage // by New and Borrow while the group is under way
	freed   []*offload.Storage // after they were saved; the storages are freed when the group ends
	again   bool               // the forward pass is recomputed
	from    int                // the stamp of its beginning
	open    bool
}

// BeginGroup begins the forward pass of a group; End ends it. It panics inside of
// another group.
func (s *Step) BeginGroup(id memory.GroupID) *Group {
	s.must()
	if s.group != nil {
		panic(fmt.Sprintf("stowage: %v begins inside of %v; end that group first", id, s.group.id))
	}
	g := &Group{s: s, id: id, open: true, from: s.stamp()}
	s.group = g
	return g
}

// Save says that the backward pass needs the tensors. The caller may free them
// afterwards.
func (g *Group) Save(ts ...*Tensor) {
	g.must()
	for _, t := range ts {
		g.tensors = append(g.tensors, t.Tensor)
	}
}

// Recomputing reports whether the forward pass runs for the second time. It must then
// load its inputs.
func (g *Group) Recomputing() bool { return g.again }

func (g *Group) must() {
	if !g.open {
		panic(fmt.Sprintf("stowage: %v is used after its End", g.id))
	}
}

// End ends the forward pass, whose work must all have been issued. What the group saved
// is kept or offloaded, as the policy says.
func (g *Group) End() error {
	g.end()
	return g.commit()
}

func (g *Group) end() {
	g.must()
	g.open, g.s.group = false, nil
	if g.s.timed {
		g.s.passes = append(g.s.passes, pass{g.id, g.from, g.s.stamp()})
	}
}

// commit saves the tensors of the group.
func (g *Group) commit() error {
	s := g.s
	defer g.free()
	if s.key.Phase != memory.Train || len(g.tensors) == 0 {
		return nil
	}
	s.learned.saw(g)
	if s.record && s.r.byName() {
		s.plan.Offload[g.id] = s.r.choiceByName(g.id) == memory.Offload
	}
	_, err := s.r.off.Save(g.id, g.tensors...)
	return err
}

// free frees the storages that the caller freed after it had saved them.
func (g *Group) free() {
	for _, st := range g.freed {
		st.Free()
	}
	g.freed = nil
}

// Run runs the forward pass of a group that can be recomputed: it begins the group, calls
// forward and ends the group. If the choice is to recompute, Run saves nothing, and Load
// calls forward again. Forward must then save the same tensors; it gets its inputs by
// loading the groups that hold them (see Recomputing). The runtime frees what forward
// allocated the second time.
func (s *Step) Run(id memory.GroupID, forward func(*Group) error) error {
	g := s.BeginGroup(id)
	if err := forward(g); err != nil {
		g.open, s.group = false, nil
		return err
	}
	s.learned.canRecompute(id)
	if s.key.Phase == memory.Train && s.chosen(id) == memory.Recompute {
		g.end()
		s.learned.saw(g)
		s.learned.redo(id)
		g.free()
		s.again[id] = forward
		return nil
	}
	return g.End()
}

// chosen returns the choice for a group.
func (s *Step) chosen(id memory.GroupID) memory.Choice {
	switch l := s.learned; {
	case l.known:
		return l.policy[id.Unit()]
	case l.first != nil:
		return l.first.Policy[id.Unit()]
	}
	return s.r.choiceByName(id)
}

// recompute runs a group's forward pass again and saves what it made. It returns the
// storages to free once the group is loaded.
func (s *Step) recompute(id memory.GroupID, forward func(*Group) error) ([]*offload.Storage, error) {
	delete(s.again, id)
	outer := s.group
	g := &Group{s: s, id: id, open: true, again: true}
	s.group = g
	err := forward(g)
	s.group, g.open = outer, false
	if err != nil {
		return nil, err
	}
	s.r.emit(trace.Event{Kind: trace.Recompute, Name: id.Name, Chunk: id.Chunk, Layer: id.Layer, Microbatch: id.Microbatch})
	_, err = s.r.off.Save(id, g.tensors...)
	// All storages that forward made are freed once, after the load, whether forward
	// freed them or not.
	return g.made, err
}

// Loaded holds the tensors of a group for its backward pass.
type Loaded struct {
	s     *Step
	id    memory.GroupID
	saved []*offload.Saved
	uses  int
	own   bool // loaded by the backward pass, not by one that recomputes
}

// Len returns the number of tensors.
func (l *Loaded) Len() int { return len(l.saved) }

// Tensor returns the i-th tensor that the group saved.
func (l *Loaded) Tensor(i int) *Tensor { return &Tensor{l.saved[i].Tensor(), l.s} }

// Range returns the bytes of the i-th tensor.
func (l *Loaded) Range(i int) device.Range { return l.saved[i].Tensor().Range() }

// Done says that all work which needs the group has been issued. It panics if it is called
// more often than Load.
func (l *Loaded) Done() {
	if l.uses == 0 {
		panic(fmt.Sprintf("stowage: %v is done more often than loaded", l.id))
	}
	if l.uses--; l.uses == 0 && l.own {
		delete(l.s.loads, l.id)
		l.s.r.off.Release(l.id)
	}
}
