// This file owns workspaces: the few sets of worst-case buffers in which all
// layers compute, and the events that keep one use of a set from running into
// the next.

package stash

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/schedule"
)

// Workspace is a number of sets of one layout. A set's life cycle:
//
//  1. free: nobody needs its bytes; idle marks the last work that touched them.
//  2. forward: Forward leased it to a group, whose forward pass fills it.
//  3. leaving: Saved issued the stash, and the set is free again once that is
//     done; or kept: the group's backward pass comes next, so it stays.
//  4. returning: a restore into it was issued ahead of need.
//  5. backward: Backward leased it to the group; Done makes it free.
type Workspace struct {
	m       *Manager
	name    string
	layout  *Layout
	buf     *device.Buffer
	sets    []*Set
	limit   Rows
	records map[schedule.Group]*Record
}

type setState uint8

const (
	setFree setState = iota
	setForward
	setKept
	setReturning
	setBackward
)

// Set is one set of buffers, leased for the forward or the backward pass of one
// group.
type Set struct {
	w     *Workspace
	mem   device.Range
	state setState
	group schedule.Group
	used  uint64 // when it was last leased; the longest idle goes first

	produced *mark // on compute: the forward pass is done
	ready    *mark // on in: the restore is done
	released *mark // on compute: the backward pass is done
	idle     *mark // what the next user comes after, or nil
}

// Tensor is the memory of tensor i of the layout.
func (s *Set) Tensor(i int) device.Range { return s.w.layout.Tensor(s.mem, i) }

// Counts are the row counts, which the forward pass writes.
func (s *Set) Counts() device.Range { return s.w.layout.Counts(s.mem) }

// Group is whose set it is.
func (s *Set) Group() schedule.Group { return s.group }

// NewWorkspace allocates sets for a group of tensors. Two sets let a layer
// compute while the last one's rows are copied out; a third lets a restore come
// ahead of need besides. Limit is the number of rows that no routing exceeds;
// zero stands for the tensors' own MaxRows. Where they are smaller, a step that
// needs more is rerun with sets that have room.
func (m *Manager) NewWorkspace(name string, sets int, limit Rows, tensors ...Tensor) (*Workspace, error) {
	if sets < 1 {
		return nil, fmt.Errorf("stash: workspace %q with %d sets; give at least 1", name, sets)
	}
	l, err := NewLayout(tensors...)
	if err != nil {
		return nil, err
	}
	w := &Workspace{m: m, name: name, layout: l, limit: limit, records: map[schedule.Group]*Record{}}
	widest, err := NewLayout(l.grown(limit)...)
	if err != nil {
		return nil, err
	}
	if w.buf, err = m.dev.Reserve(device.Accel, widest.Size*device.Bytes(sets), "workspace "+name); err != nil {
		return nil, err
	}
	m.spaces = append(m.spaces, w)
	for range sets {
		s := &Set{w: w}
		for _, k := range []**mark{&s.produced, &s.ready, &s.released} {
			if *k, err = m.mark(); err != nil {
				return nil, err
			}
		}
		w.sets = append(w.sets, s)
	}
	return w, w.place(l)
}

// grown are the tensors with room for at least so many rows.
func (l *Layout) grown(rows Rows) []Tensor {
	ts := append([]Tensor(nil), l.Tensors...)
	for i := range ts {
		ts[i].MaxRows = max(ts[i].MaxRows, rows)
	}
	return ts
}

// place lays the sets out anew. Records of the old layout are forgotten.
func (w *Workspace) place(l *Layout) error {
	size := l.Size * device.Bytes(len(w.sets))
	if size > w.buf.Max() {
		return fmt.Errorf("workspace %q needs %v for %d sets and has room for at most %d rows; raise its limit", w.name, size, len(w.sets), w.limit)
	}
	if err := w.m.dev.Grow(w.buf, size); err != nil {
		return err
	}
	w.layout = l
	clear(w.records)
	for i, s := range w.sets {
		s.mem = w.buf.Slice(device.Bytes(i)*l.Size, l.Size)
	}
	return nil
}

// resize gives the sets room for so many rows and forgets the records.
func (w *Workspace) resize(rows Rows) error {
	l, err := NewLayout(w.layout.grown(rows)...)
	if err != nil {
		return err
	}
	return w.place(l)
}

// Forward leases a set for a group's forward pass: what is issued on the
// compute stream from now on may write it.
func (w *Workspace) Forward(g schedule.Group) *Set {
	s := w.take()
	w.m.compute.after(s.idle)
	w.m.compute.flush()
	s.state, s.group = setForward, g
	return s
}

// Saved says that the forward pass has been issued: the live rows must be there
// again when Backward asks for them. The set may not be used until then.
func (s *Set) Saved() {
	s.must(setForward)
	m := s.w.m
	if m.phase != Train {
		panic(fmt.Sprintf("stash: %v is saved in a phase without backward passes; call Drop", s.group))
	}
	r := s.w.record(s.group)
	keep := m.keep(s.group)
	if keep && r != nil {
		// Nobody else would see that it received more rows than fit.
		m.store.Note(m.compute.stream, r, s.mem)
	}
	m.compute.record(s.produced)
	if keep {
		s.state = setKept
	} else {
		s.stash(s.produced)
	}
	m.home[s.group] = s.w
	m.passed(schedule.Event{Group: s.group})
}

// Drop ends a lease whose contents nobody needs, as in evaluation.
func (s *Set) Drop() {
	s.must(setForward)
	s.free()
}

// Backward leases the set that holds a saved group's rows; work issued on the
// compute stream from now on finds them there.
func (w *Workspace) Backward(g schedule.Group) *Set {
	s := w.holding(g)
	if s == nil {
		s = w.restore(g)
	}
	if s.state == setReturning {
		w.m.compute.after(s.ready)
		w.m.compute.flush()
	}
	s.state = setBackward
	return s
}

// Done says that the backward pass has been issued.
func (s *Set) Done() {
	s.must(setBackward)
	s.free()
	s.w.m.passed(schedule.Event{Group: s.group, Load: true})
}

// free makes a set available once what compute was given so far is done.
func (s *Set) free() {
	s.w.m.compute.record(s.released)
	s.idle, s.state = s.released, setFree
}

func (s *Set) must(want setState) {
	if s.state != want {
		panic(fmt.Sprintf("stash: the set of %v is used out of turn: Forward, then Saved or Drop; Backward, then Done", s.group))
	}
}

// take finds a free set, the one idle for longest. If none is free, one that
// waits for its backward pass makes room.
func (w *Workspace) take() *Set {
	var best *Set
	for _, x := range w.sets {
		if x.state == setFree && (best == nil || x.used < best.used) {
			best = x
		}
	}
	if best == nil {
		best = w.evict()
	}
	w.m.leases++
	best.used = w.m.leases
	return best
}

// evict stashes a group that was kept or brought back early.
func (w *Workspace) evict() *Set {
	for _, x := range w.sets {
		switch x.state {
		case setKept:
			x.stash(x.produced)
			return x
		case setReturning:
			x.stash(x.ready)
			return x
		}
	}
	panic(fmt.Sprintf("stash: all %d sets of workspace %q are in use by passes that were not ended; give it more sets", len(w.sets), w.name))
}

// holding is the set in which a group's rows are, if they are in one.
func (w *Workspace) holding(g schedule.Group) *Set {
	for _, s := range w.sets {
		if s.group == g && (s.state == setKept || s.state == setReturning) {
			return s
		}
	}
	return nil
}

// stash issues the copy into pages once a mark has been passed.
func (s *Set) stash(after *mark) {
	m := s.w.m
	s.idle, s.state = after, setFree
	r := s.w.records[s.group]
	if r == nil {
		return
	}
	m.out.after(after)
	m.out.flush()
	m.pushed(s.group)
	m.store.Stash(m.out.stream, r, s.mem)
	m.out.record(r.stashed)
	s.idle = r.stashed
}

// restore issues the copy back into a set.
func (w *Workspace) restore(g schedule.Group) *Set {
	m, r := w.m, w.records[g]
	if _, saved := m.recording.Saved(g); !saved {
		panic(fmt.Sprintf("stash: %v is needed and was not saved in this step", g))
	}
	s := w.take()
	s.state, s.group = setReturning, g
	m.in.after(s.idle)
	if r != nil {
		m.in.after(r.stashed)
	}
	m.in.flush()
	if r != nil && m.popped(g) {
		m.store.Restore(m.in.stream, r, s.mem)
	}
	m.in.record(s.ready)
	return s
}

// record is the group's record, made on the compute stream when the group is
// first saved. Without memory for it there is none: the step goes on to its end,
// where Settle returns the error.
func (w *Workspace) record(g schedule.Group) *Record {
	if r := w.records[g]; r != nil {
		return r
	}
	m := w.m
	r, err := m.store.AddRecord(m.compute.stream, w.layout, g)
	if err == nil {
		r.stashed, err = m.mark()
	}
	if err != nil {
		m.err = err
		return nil
	}
	w.records[g] = r
	return r
}
