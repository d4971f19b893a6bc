// This file owns workspaces: the few sets of worst-case buffers that all layers share, and
// the order in which groups use them.

package stash

import (
	"fmt"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// WorkspaceOwner begins the owner of a workspace's memory. The workspace's name follows.
const WorkspaceOwner = "workspace "

// Workspace has a number of slots, each with one set of the buffers of a layout. The life
// cycle of a slot:
//
//  1. free: No group needs its bytes. idle marks the last work that used them.
//  2. forward: Forward leased it to a group, whose forward pass fills it.
//  3. leaving: Saved issued the stash, and the slot is free after it. Or kept: the group
//     stays in the slot, because its backward pass is near.
//  4. returning: A restore into it was issued ahead of need.
//  5. backward: Backward leased it to the group. Done makes it free.
type Workspace struct {
	m       *Manager
	name    string
	layout  *Layout
	widest  *Layout // the layout with as many rows as the limit allows
	buf     *device.Buffer
	slots   []*slot
	least   int // the number of slots that it was made with
	limit   Rows
	index   int // the index among the manager's workspaces
	records map[place]*Record
}

// place identifies a group in one of the stores.
type place struct {
	store *Store
	group memory.GroupID
}

type slotState uint8

const (
	slotFree slotState = iota
	slotForward
	slotKept
	slotReturning
	slotBackward
)

type slot struct {
	w     *Workspace
	mem   device.Range
	state slotState
	group memory.GroupID
	lease uint64 // the number of its last lease; the slot with the lowest is leased first

	produced *order.Mark // on compute: the forward pass is done
	ready    *order.Mark // on in: the restore is done
	released *order.Mark // on compute: the backward pass is done
	idle     *order.Mark // the work that the next user must wait for, or nil
}

// Set is a lease of one set for the forward or the backward pass of one group. Saved, Drop
// or Done ends the lease. Later calls that end it again panic.
type Set struct {
	slot  *slot
	lease uint64
}

// Tensor returns the memory of tensor i of the layout.
func (s *Set) Tensor(i int) device.Range { return s.slot.w.layout.Tensor(s.slot.mem, i) }

// Counts returns the memory of the row counts, which the forward pass writes.
func (s *Set) Counts() device.Range { return s.slot.w.layout.Counts(s.slot.mem) }

// Group returns the group that leases the set.
func (s *Set) Group() memory.GroupID { return s.slot.group }

// requireState panics unless the lease is the slot's current one and the slot is in a
// given state.
func (s *Set) requireState(want slotState) *slot {
	if s.slot.lease != s.lease || s.slot.state != want || !s.slot.w.m.open {
		panic(fmt.Sprintf("stash: a set of workspace %q is used out of order; call Forward, then Saved or Drop, and Backward, then Done, all inside one step", s.slot.w.name))
	}
	return s.slot
}

// NewWorkspace allocates sets for a group of tensors. With two sets a layer can compute
// while the rows of the layer before it are copied out. With a third set, rows can also be
// restored ahead of need. limit is the most rows that routing can send; zero selects the
// tensors' own MaxRows. If MaxRows is smaller, a step that needs more rows is rerun with
// larger sets.
func (m *Manager) NewWorkspace(name string, sets int, limit Rows, tensors ...Tensor) (*Workspace, error) {
	if sets < 1 || limit < 0 {
		return nil, fmt.Errorf("stash: workspace %q has %d sets and a limit of %d rows; give at least one set, and a limit of zero or more", name, sets, limit)
	}
	l, err := NewLayout(tensors...)
	if err != nil {
		return nil, err
	}
	w := &Workspace{m: m, name: name, layout: l, limit: limit, least: sets, index: len(m.spaces), records: map[place]*Record{}}
	if w.widest, err = NewLayout(l.atLeast(limit)...); err != nil {
		return nil, err
	}
	if err := w.addSlots(sets); err != nil {
		return nil, err
	}
	if err := w.reserve(); err != nil {
		return nil, err
	}
	if err := w.place(l); err != nil {
		m.compute.Stream.Free(w.buf)
		return nil, err
	}
	m.spaces = append(m.spaces, w)
	return w, nil
}

// addSlots adds slots without memory up to n of them.
func (w *Workspace) addSlots(n int) (err error) {
	for len(w.slots) < n {
		s := &slot{w: w}
		for _, k := range []**order.Mark{&s.produced, &s.ready, &s.released} {
			if *k, err = w.m.lanes.Mark(); err != nil {
				return err
			}
		}
		w.slots = append(w.slots, s)
	}
	return nil
}

// reserve gives the workspace addresses for all sets that it may ever have.
func (w *Workspace) reserve() (err error) {
	w.buf, err = w.m.dev.Reserve(memory.Device, w.widest.Size*memory.Bytes(w.least+w.m.cfg.MoreSets), WorkspaceOwner+w.name)
	return err
}

// setSlots gives the workspace n slots. No work may be in flight. A workspace that gets
// smaller gets new memory. A workspace that cannot get larger stays as it is.
func (w *Workspace) setSlots(n int) error {
	had := len(w.slots)
	if n < had {
		old := w.buf
		w.slots, w.buf = w.slots[:n], nil
		w.m.compute.Stream.Free(old)
		if err := w.m.compute.Stream.Sync(); err != nil {
			return err
		}
		if err := w.reserve(); err != nil {
			return err
		}
	}
	err := w.addSlots(n)
	if err == nil {
		err = w.place(w.layout)
	}
	if err != nil {
		w.slots = w.slots[:min(had, n)]
	}
	return err
}

// atLeast returns the tensors with room for at least the given rows.
func (l *Layout) atLeast(rows Rows) []Tensor {
	ts := append([]Tensor(nil), l.Tensors...)
	for i := range ts {
		ts[i].MaxRows = max(ts[i].MaxRows, rows)
	}
	return ts
}

// place gives the slots their memory. Their row counts begin as zero, so that no kernel
// reads an undefined count.
func (w *Workspace) place(l *Layout) error {
	if err := w.m.dev.Grow(w.buf, l.Size*memory.Bytes(len(w.slots))); err != nil {
		return err
	}
	w.layout = l
	for i, s := range w.slots {
		s.mem = w.buf.Slice(memory.Bytes(i)*l.Size, l.Size)
		w.m.compute.Stream.Fill(l.Counts(s.mem), 0)
	}
	return nil
}

// larger returns a layout with room for the rows that tensors asked for, or nil if the
// workspace has it. It adds a little more, up to the limit, so that slowly rising counts
// do not move the sets in every step.
func (w *Workspace) larger(asked []Rows) (*Layout, error) {
	ts, moved := append([]Tensor(nil), w.layout.Tensors...), false
	for i := range ts {
		most := w.widest.Tensors[i].MaxRows
		if asked[i] <= ts[i].MaxRows {
			continue
		}
		if asked[i] > most {
			return nil, fmt.Errorf("tensor %q of workspace %q needs %d rows and its limit is %d; raise the limit",
				ts[i].Name, w.name, asked[i], most)
		}
		ts[i].MaxRows, moved = min(asked[i]+asked[i]/8, most), true
	}
	if !moved {
		return nil, nil
	}
	return NewLayout(ts...)
}

// move gives the slots new memory for a layout. Records keep their memory and get the
// layout.
func (w *Workspace) move(l *Layout) error {
	if err := w.place(l); err != nil {
		return err
	}
	for _, r := range w.records {
		r.store.rewrite(w.m.prep, r, l)
	}
	w.m.prepared()
	return nil
}

// Forward leases a set for a group's forward pass. Work that is issued on the compute
// stream from now on may write it. Forward panics outside a step, if the group is already
// saved, or if all sets are leased.
func (w *Workspace) Forward(g memory.GroupID) *Set {
	w.m.mustBeOpen()
	if w.m.recording.Out(g) {
		panic(fmt.Sprintf("stash: %v has a forward pass while its saved rows still wait for a backward pass; give the second group another name", g))
	}
	w.m.called(Leased, g, w.index)
	s := w.freeSlot()
	if s == nil {
		s = w.evict()
	}
	w.m.compute.After(s.idle)
	w.m.waitWatched()
	s.state, s.group = slotForward, g
	return s.leased()
}

func (s *slot) leased() *Set {
	s.w.m.leases++
	s.lease = s.w.m.leases
	return &Set{s, s.lease}
}

// Saved ends the lease after the forward pass was issued. Backward returns the live rows
// later in the step. Saved panics in a phase without backward passes.
func (x *Set) Saved() {
	s := x.requireState(slotForward)
	m := s.w.m
	if m.phase != memory.Train {
		panic(fmt.Sprintf("stash: %v was saved in a phase without backward passes; call Drop", s.group))
	}
	m.recording.Save(s.group) // panics if it was saved before
	m.called(Stashed, s.group, s.w.index)
	r := s.w.record(s.group)
	keep := m.keep(s.group)
	if keep {
		s.note(r)
	}
	m.compute.Record(s.produced)
	m.home[s.group] = s.w
	if keep {
		s.state = slotKept
	} else {
		s.stash(s.produced)
	}
	m.passed(schedule.Event{Group: s.group})
}

// Drop ends a lease whose contents are no longer needed, as in evaluation.
func (x *Set) Drop() {
	s := x.requireState(slotForward)
	s.note(s.w.record(s.group))
	s.free()
}

// note checks the row counts of a set that is not stashed. Without it, nothing would
// notice that the set is over capacity.
func (s *slot) note(r *Record) {
	if r != nil {
		r.store.Note(s.w.m.compute.Stream, r, s.mem)
	}
}

// Backward leases a set with a saved group's rows. Work that is issued on the compute
// stream from now on can read them. Backward panics if the group was not saved in this
// step.
func (w *Workspace) Backward(g memory.GroupID) *Set {
	m := w.m
	m.mustBeOpen()
	if m.home[g] != w {
		panic(fmt.Sprintf("stash: %v was not saved in workspace %q", g, w.name))
	}
	m.recording.Load(g) // panics if it was not saved in this step, or was loaded
	m.called(Returned, g, w.index)
	s := w.holding(g)
	if s == nil {
		if s = w.freeSlot(); s == nil {
			s = w.evict()
		}
		s.restore(g)
	}
	if s.state == slotReturning {
		m.compute.After(s.ready)
		m.waitWatched()
	}
	s.state = slotBackward
	x := s.leased()
	m.passed(schedule.Event{Group: g, Load: true})
	return x
}

// Done ends the lease after the backward pass was issued.
func (x *Set) Done() {
	s := x.requireState(slotBackward)
	s.w.m.called(Done, s.group, s.w.index)
	s.free()
}

// called tells the watcher about a call.
func (m *Manager) called(c Call, g memory.GroupID, space int) {
	if m.cfg.Watch != nil {
		m.cfg.Watch.Called(c, g, space)
	}
}

// waitWatched issues compute's waits and tells the watcher.
func (m *Manager) waitWatched() {
	m.compute.Flush()
	if m.cfg.Watch != nil {
		m.cfg.Watch.Waited()
	}
}

// free makes a slot available after the work issued on compute so far.
func (s *slot) free() {
	s.w.m.compute.Record(s.released)
	s.idle, s.state = s.released, slotFree
}

// freeSlot returns the free slot that was idle for the longest time, or nil.
func (w *Workspace) freeSlot() *slot {
	var best *slot
	for _, x := range w.slots {
		if x.state == slotFree && (best == nil || x.lease < best.lease) {
			best = x
		}
	}
	return best
}

// evict stashes a group that stayed in its slot or was restored early, and returns the
// slot. It panics if there is none.
func (w *Workspace) evict() *slot {
	for _, x := range w.slots {
		switch x.state {
		case slotKept:
			x.stash(x.produced)
			return x
		case slotReturning:
			x.stash(x.ready)
			return x
		}
	}
	panic(fmt.Sprintf("stash: all %d sets of workspace %q are leased; end a pass before the next, or give it more sets", len(w.slots), w.name))
}

// holding returns the slot that holds a group's rows, or nil.
func (w *Workspace) holding(g memory.GroupID) *slot {
	for _, s := range w.slots {
		if s.group == g && (s.state == slotKept || s.state == slotReturning) {
			return s
		}
	}
	return nil
}

// stash issues the copy into pages after a mark.
func (s *slot) stash(after *order.Mark) {
	m := s.w.m
	again := s.state == slotReturning
	s.idle, s.state = after, slotFree
	r := m.used[s.group]
	if r == nil {
		return
	}
	m.out.After(after)
	m.out.Flush()
	if again {
		s.recount(r)
	}
	m.pushed(s.group)
	r.store.Stash(m.out.Stream, r, s.mem)
	m.emit(trace.Stash, s.group)
	m.out.Record(r.stashed)
	s.idle = r.stashed
}

// recount gives a restored set the row counts that its group was stashed with. A restore
// writes at most the rows that the buffers hold; a second stash would then report fewer
// than the group asked for, and a rerun would be given too little.
func (s *slot) recount(r *Record) {
	for i, t := range r.layout.Tensors {
		asked := kernels.StashRecordSize(i, 0) + memory.Bytes(unsafe.Offsetof(kernels.StashTensor{}.Asked))
		s.w.m.out.Stream.Copy(s.mem.Slice(memory.Bytes(8*t.Count), 8), r.mem.Slice(asked, 8))
	}
}

// restore issues the copy back into a free slot.
func (s *slot) restore(g memory.GroupID) {
	m, r := s.w.m, s.w.m.used[g]
	m.in.After(s.idle)
	if r != nil {
		m.in.After(r.stashed)
	}
	m.in.Flush()
	if r != nil && m.popped(g) {
		r.store.Restore(m.in.Stream, r, s.mem)
		m.emit(trace.Restore, g)
	}
	m.in.Record(s.ready)
	s.state, s.group = slotReturning, g
	m.leases++
	s.lease = m.leases
}

// record returns the group's record and creates it when the group is first seen. It
// returns nil if memory is short; the step then continues to its end, which returns the
// error.
func (w *Workspace) record(g memory.GroupID) (r *Record) {
	m := w.m
	defer func() {
		if r != nil {
			m.used[g] = r
		}
	}()
	st := m.storeOf(g)
	if r := w.records[place{st, g}]; r != nil {
		return r
	}
	r, err := st.AddRecord(m.prep, w.layout, w.widest, g)
	if err == nil {
		r.stashed, err = m.lanes.Mark()
	}
	if err != nil {
		m.err = err
		return nil
	}
	m.prepared()
	w.records[place{st, g}] = r
	return r
}
