// This file owns groups: what their forward passes save, and how it is found again.

package stowage

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/offload"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/trace"
)

// Tensor is a view of a storage: an offset, an element size, a shape and strides.
type Tensor struct {
	offload.Tensor
	s *Step
}

// View is another view of the same storage. Strides are in elements; nil is
// contiguous.
func (t *Tensor) View(offset, element device.Bytes, shape, strides []int) *Tensor {
	u := *t
	u.Offset, u.Element, u.Shape, u.Strides = offset, element, shape, strides
	return &u
}

// Stays is the same tensor, not to be moved.
func (t *Tensor) Stays() *Tensor {
	u := *t
	u.Stay = true
	return &u
}

// Free says that the caller itself needs the storage no more; groups that saved it
// do, the one that is entered included.
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
	id      GroupID
	tensors []offload.Tensor
	made    []*offload.Storage // with New, while it was entered
	freed   []*offload.Storage // and saved before: when it is left
	again   bool
	from    int // the stamp of its beginning
	open    bool
}

// Enter begins the forward pass of a group; Leave ends it. Groups do not nest.
func (s *Step) Enter(id GroupID) *Group {
	s.must()
	if s.group != nil {
		panic(fmt.Sprintf("stowage: %v is entered inside of %v; leave that first", id, s.group.id))
	}
	g := &Group{s: s, id: id, open: true, from: s.stamp()}
	s.group = g
	return g
}

// Save says that a tensor is needed again in the backward pass. It may be freed
// afterwards.
func (g *Group) Save(ts ...*Tensor) {
	g.must()
	for _, t := range ts {
		g.tensors = append(g.tensors, t.Tensor)
	}
}

// Again tells whether this is a forward pass for the second time, whose inputs must
// be loaded.
func (g *Group) Again() bool { return g.again }

func (g *Group) must() {
	if !g.open {
		panic(fmt.Sprintf("stowage: %v is used after it was left", g.id))
	}
}

// Leave ends the forward pass: all of it has been issued. What the group saved
// stays, or leaves by the policy.
func (g *Group) Leave() error {
	g.end()
	return g.commit()
}

func (g *Group) end() {
	g.must()
	g.open, g.s.group = false, nil
	if g.s.record {
		g.s.passes = append(g.s.passes, pass{g.id, g.from, g.s.stamp()})
	}
}

// commit hands what was saved to the manager.
func (g *Group) commit() error {
	s := g.s
	defer g.free()
	if s.key.Phase != Train || len(g.tensors) == 0 {
		return nil
	}
	s.learned.saw(g)
	if s.record && s.r.byName() {
		s.plan.Leave[g.id] = s.r.choiceByName(g.id) == policy.Offload
	}
	_, err := s.r.off.Save(g.id, g.tensors...)
	return err
}

// free frees what was freed while it was saved and not handed over.
func (g *Group) free() {
	for _, st := range g.freed {
		st.Free()
	}
	g.freed = nil
}

// Run is Enter, forward and Leave for a group that can be computed again: if the
// policy says so, nothing is saved, and forward runs once more when the group is
// loaded. It must then save tensors like the first time; its inputs it gets by
// loading the groups that hold them (see Again). What it allocated the second time
// is freed for it.
func (s *Step) Run(id GroupID, forward func(*Group) error) error {
	g := s.Enter(id)
	if err := forward(g); err != nil {
		g.open, s.group = false, nil
		return err
	}
	s.learned.canRecompute(id)
	if s.key.Phase == Train && s.chosen(id) == policy.Recompute {
		g.end()
		s.learned.saw(g)
		s.learned.redo(id)
		g.free()
		s.again[id] = forward
		return nil
	}
	return g.Leave()
}

// chosen is the policy's choice for a group.
func (s *Step) chosen(id GroupID) policy.Choice {
	switch l := s.learned; {
	case l.known:
		return l.policy[policy.UnitOf(id)]
	case l.first != nil:
		return l.first.Policy[policy.UnitOf(id)]
	}
	return s.r.choiceByName(id)
}

// recompute runs a group's forward pass again and saves what it made; the result is
// what is to be freed once the group is loaded.
func (s *Step) recompute(id GroupID, forward func(*Group) error) ([]*offload.Storage, error) {
	delete(s.again, id)
	outer := s.group
	g := &Group{s: s, id: id, open: true, again: true}
	s.group = g
	err := forward(g)
	s.group, g.open = outer, false
	if err != nil {
		return nil, err
	}
	s.r.emit(trace.Event{What: trace.Recompute, Name: id.Name, Chunk: id.Chunk, Layer: id.Layer, Microbatch: id.Microbatch})
	_, err = s.r.off.Save(id, g.tensors...)
	// Whether forward freed what it made or left that to its caller, it is freed
	// once, behind the load.
	return g.made, err
}

// Loaded is the tensors of a group whose backward pass is under way.
type Loaded struct {
	s     *Step
	id    GroupID
	saved []*offload.Saved
	uses  int
	own   bool // loaded by another than a pass that recomputes
}

// Len is the number of tensors.
func (l *Loaded) Len() int { return len(l.saved) }

// Tensor is the i-th tensor that the group saved.
func (l *Loaded) Tensor(i int) *Tensor { return &Tensor{l.saved[i].Tensor(), l.s} }

// Range is where its bytes are.
func (l *Loaded) Range(i int) device.Range { return l.saved[i].Tensor().Range() }

// Done says that all work which needs the group has been issued.
func (l *Loaded) Done() {
	if l.uses == 0 {
		panic(fmt.Sprintf("stowage: %v is done more often than loaded", l.id))
	}
	if l.uses--; l.uses == 0 && l.own {
		delete(l.s.loads, l.id)
		l.s.r.off.Release(l.id)
	}
}
