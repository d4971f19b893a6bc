// This file owns workspaces: the few sets of worst-case buffers in which all
// layers compute, and who may use which of them when.

package stash

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/trace"
)

// Workspace is a number of slots, each with the buffers of one layout. The life
// cycle of a slot:
//
//  1. free: nobody needs its bytes; idle marks the last work that touched them.
//  2. forward: Forward leased it to a group, whose forward pass fills it.
//  3. leaving: Saved issued the stash, and the slot is free again once that is
//     done; or kept: the group's backward pass is near, so it stays.
//  4. returning: a restore into it was issued ahead of need.
//  5. backward: Backward leased it to the group; Done makes it free.
type Workspace struct {
	m       *Manager
	name    string
	layout  *Layout
	widest  *Layout // with as many rows as the limit allows
	buf     *device.Buffer
	slots   []*slot
	limit   Rows
	records map[schedule.Group]*Record
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
	group schedule.Group
	lease uint64 // counts the manager's leases; the longest idle slot goes first

	produced *order.Mark // on compute: the forward pass is done
	ready    *order.Mark // on in: the restore is done
	released *order.Mark // on compute: the backward pass is done
	idle     *order.Mark // what the next user comes after, or nil
}

// Set is a lease of one set of buffers, for the forward or the backward pass of
// one group. Saved, Drop or Done ends it; using it afterwards panics.
type Set struct {
	slot  *slot
	lease uint64
}

// Tensor is the memory of tensor i of the layout.
func (s *Set) Tensor(i int) device.Range { return s.slot.w.layout.Tensor(s.slot.mem, i) }

// Counts are the row counts, which the forward pass writes.
func (s *Set) Counts() device.Range { return s.slot.w.layout.Counts(s.slot.mem) }

// Group is whose set it is.
func (s *Set) Group() schedule.Group { return s.slot.group }

// must panics unless the lease is the slot's present one and in a given state.
func (s *Set) must(want slotState) *slot {
	if s.slot.lease != s.lease || s.slot.state != want || !s.slot.w.m.open {
		panic(fmt.Sprintf("stash: a set of workspace %q is used out of turn: Forward, then Saved or Drop; Backward, then Done; all inside of a step", s.slot.w.name))
	}
	return s.slot
}

// NewWorkspace allocates sets for a group of tensors. Two sets let a layer
// compute while the last one's rows are copied out; a third lets a restore come
// ahead of need besides. Limit is the number of rows that no routing exceeds;
// zero stands for the tensors' own MaxRows. Where they are smaller, a step that
// needs more is rerun with sets that have room.
func (m *Manager) NewWorkspace(name string, sets int, limit Rows, tensors ...Tensor) (*Workspace, error) {
	if sets < 1 || limit < 0 {
		return nil, fmt.Errorf("stash: workspace %q with %d sets and a limit of %d rows; give at least one set, and a limit or zero", name, sets, limit)
	}
	l, err := NewLayout(tensors...)
	if err != nil {
		return nil, err
	}
	w := &Workspace{m: m, name: name, layout: l, limit: limit, records: map[schedule.Group]*Record{}}
	for range sets {
		s := &slot{w: w}
		for _, k := range []**order.Mark{&s.produced, &s.ready, &s.released} {
			if *k, err = m.lanes.Mark(); err != nil {
				return nil, err
			}
		}
		w.slots = append(w.slots, s)
	}
	if w.widest, err = NewLayout(l.atLeast(limit)...); err != nil {
		return nil, err
	}
	if w.buf, err = m.dev.Reserve(device.Accel, w.widest.Size*device.Bytes(sets), "workspace "+name); err != nil {
		return nil, err
	}
	if err := w.place(l); err != nil {
		m.compute.Stream.Free(w.buf)
		return nil, err
	}
	m.spaces = append(m.spaces, w)
	return w, nil
}

// atLeast are the tensors with room for at least so many rows.
func (l *Layout) atLeast(rows Rows) []Tensor {
	ts := append([]Tensor(nil), l.Tensors...)
	for i := range ts {
		ts[i].MaxRows = max(ts[i].MaxRows, rows)
	}
	return ts
}

// place lays the slots out. Their row counts begin as zero, so that nothing ever
// takes what lies there for one.
func (w *Workspace) place(l *Layout) error {
	if err := w.m.dev.Grow(w.buf, l.Size*device.Bytes(len(w.slots))); err != nil {
		return err
	}
	w.layout = l
	for i, s := range w.slots {
		s.mem = w.buf.Slice(device.Bytes(i)*l.Size, l.Size)
		w.m.compute.Stream.Fill(l.Counts(s.mem), 0)
	}
	return nil
}

// larger is the layout with room for what tensors asked for, or nil if they have
// it. A little more than was asked is given, as far as the limit goes, so that
// rows that creep up do not move the sets in every step.
func (w *Workspace) larger(asked []Rows) (*Layout, error) {
	ts, moved := append([]Tensor(nil), w.layout.Tensors...), false
	for i := range ts {
		most := w.widest.Tensors[i].MaxRows
		if asked[i] <= ts[i].MaxRows {
			continue
		}
		if asked[i] > most {
			return nil, fmt.Errorf("tensor %q of workspace %q needs room for %d rows and its limit is %d; raise the limit",
				ts[i].Name, w.name, asked[i], most)
		}
		ts[i].MaxRows, moved = min(asked[i]+asked[i]/8, most), true
	}
	if !moved {
		return nil, nil
	}
	return NewLayout(ts...)
}

// move lays the slots out anew; records keep their memory and get the new layout.
func (w *Workspace) move(l *Layout) error {
	if err := w.place(l); err != nil {
		return err
	}
	for _, r := range w.records {
		w.m.store.rewrite(w.m.prep, r, l)
	}
	w.m.prepared()
	return nil
}

// Forward leases a set for a group's forward pass: what is issued on the
// compute stream from now on may write it.
func (w *Workspace) Forward(g schedule.Group) *Set {
	w.m.mustBeOpen()
	if w.m.recording.Out(g) {
		panic(fmt.Sprintf("stash: %v is saved and was not needed yet; a second forward pass before that must go by another name", g))
	}
	s := w.take()
	if s == nil {
		s = w.evict()
	}
	w.m.compute.After(s.idle)
	w.m.compute.Flush()
	s.state, s.group = slotForward, g
	return s.leased()
}

func (s *slot) leased() *Set {
	s.w.m.leases++
	s.lease = s.w.m.leases
	return &Set{s, s.lease}
}

// Saved says that the forward pass has been issued: the live rows must be there
// again when Backward asks for them.
func (x *Set) Saved() {
	s := x.must(slotForward)
	m := s.w.m
	if m.phase != Train {
		panic(fmt.Sprintf("stash: %v is saved in a phase without backward passes; call Drop", s.group))
	}
	m.recording.Save(s.group) // panics if it was saved before
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

// Drop ends a lease whose contents nobody needs, as in evaluation.
func (x *Set) Drop() {
	s := x.must(slotForward)
	s.note(s.w.record(s.group))
	s.free()
}

// note looks at the row counts of a set that is not stashed: nobody else would
// see that it received more rows than fit.
func (s *slot) note(r *Record) {
	if r != nil {
		s.w.m.store.Note(s.w.m.compute.Stream, r, s.mem)
	}
}

// Backward leases the set that holds a saved group's rows; work issued on the
// compute stream from now on finds them there.
func (w *Workspace) Backward(g schedule.Group) *Set {
	m := w.m
	m.mustBeOpen()
	if m.home[g] != w {
		panic(fmt.Sprintf("stash: %v was not saved in workspace %q", g, w.name))
	}
	m.recording.Load(g) // panics if it was not saved in this step, or was loaded
	s := w.holding(g)
	if s == nil {
		if s = w.take(); s == nil {
			s = w.evict()
		}
		s.restore(g)
	}
	if s.state == slotReturning {
		m.compute.After(s.ready)
		m.compute.Flush()
	}
	s.state = slotBackward
	x := s.leased()
	m.passed(schedule.Event{Group: g, Load: true})
	return x
}

// Done says that the backward pass has been issued.
func (x *Set) Done() { x.must(slotBackward).free() }

// free makes a slot available once what compute was given so far is done.
func (s *slot) free() {
	s.w.m.compute.Record(s.released)
	s.idle, s.state = s.released, slotFree
}

// take finds a free slot, the one idle for longest, or nil.
func (w *Workspace) take() *slot {
	var best *slot
	for _, x := range w.slots {
		if x.state == slotFree && (best == nil || x.lease < best.lease) {
			best = x
		}
	}
	return best
}

// evict stashes a group that stayed or was brought back early, to make room.
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

// holding is the slot in which a group's rows wait, if they are in one.
func (w *Workspace) holding(g schedule.Group) *slot {
	for _, s := range w.slots {
		if s.group == g && (s.state == slotKept || s.state == slotReturning) {
			return s
		}
	}
	return nil
}

// stash issues the copy into pages once a mark has been passed.
func (s *slot) stash(after *order.Mark) {
	m := s.w.m
	s.idle, s.state = after, slotFree
	r := s.w.records[s.group]
	if r == nil {
		return
	}
	m.out.After(after)
	m.out.Flush()
	m.pushed(s.group)
	m.store.Stash(m.out.Stream, r, s.mem)
	m.emit(trace.Stash, s.group)
	m.out.Record(r.stashed)
	s.idle = r.stashed
}

// restore issues the copy back into a free slot.
func (s *slot) restore(g schedule.Group) {
	m, r := s.w.m, s.w.records[g]
	m.in.After(s.idle)
	if r != nil {
		m.in.After(r.stashed)
	}
	m.in.Flush()
	if r != nil && m.popped(g) {
		m.store.Restore(m.in.Stream, r, s.mem)
		m.emit(trace.Restore, g)
	}
	m.in.Record(s.ready)
	s.state, s.group = slotReturning, g
	m.leases++
	s.lease = m.leases
}

// record is the group's record, made when the group is first seen. Without memory for it there is none: the step goes on to its end,
// which returns the error.
func (w *Workspace) record(g schedule.Group) (r *Record) {
	m := w.m
	defer func() {
		if r != nil {
			m.used[g] = r
		}
	}()
	if r := w.records[g]; r != nil {
		return r
	}
	r, err := m.store.AddRecord(m.prep, w.layout, w.widest, g)
	if err == nil {
		r.stashed, err = m.lanes.Mark()
	}
	if err != nil {
		m.err = err
		return nil
	}
	m.prepared()
	w.records[g] = r
	return r
}
