// This file owns the calls of a step.

package session

import (
	"errors"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/offload"
)

// Storage is one storage that a group saves.
type Storage struct {
	ID, Address, Bytes, Rows, RowBytes uint64
	Stay                               bool
}

// group is a group of this step.
type group struct {
	id     stowage.GroupID
	saved  []*stowage.Tensor // what the runtime has of it
	loaded *stowage.Loaded   // or nil
	rows   []*rows
}

// Begin begins a step of a key on a stream.
func (s *Session) Begin(key string, stream uint64) error {
	return s.guard(func() error {
		if s.step != nil {
			return Wrong{errors.New("stowage: a step is begun inside of a step; end that first")}
		}
		if err := s.steer(stream); err != nil {
			return Wrong{err}
		}
		s.captured = s.compute.Capturing()
		s.key = stowage.Key{Phase: stowage.Train, Shape: key}
		if s.captured && s.rt.Decision(s.key) == nil {
			s.captured = false
			return Wrong{fmt.Errorf("stowage: the first step of key %q is captured; run it once before the capture", key)}
		}
		var err error
		begin := func() { err = s.begin() }
		if s.captured && s.gpu != nil {
			s.gpu.Relaxed(begin)
		} else {
			begin()
		}
		return err
	})
}

func (s *Session) begin() (err error) {
	if s.step, err = s.rt.Begin(s.key); err != nil {
		s.captured = false
		return err
	}
	s.steps++
	s.names, s.groups, s.last, s.left = map[string]int{}, map[uint64]*group{}, 0, s.left[:0]
	s.storages, s.ids = map[uint64]*offload.Storage{}, map[*offload.Storage]uint64{}
	s.beginRows()
	return nil
}

// End ends the step, or gives it up. Everything that was lent and borrowed is left.
func (s *Session) End(failed bool) (left []uint64, err error) {
	err = s.guard(func() error {
		if s.step == nil {
			return Wrong{errors.New("stowage: no step is under way; begin one first")}
		}
		var why error
		if failed {
			why = errGivenUp
		}
		err := s.end(why)
		if errors.Is(err, errGivenUp) {
			err = nil
		}
		return err
	})
	return s.take(), err
}

var errGivenUp = errors.New("stowage: the step was given up")

func (s *Session) end(why error) error {
	s.endRows(why != nil)
	err := s.step.End(why)
	s.step, s.groups, s.storages, s.ids = nil, nil, nil, nil
	s.captured = false
	return s.settle(err)
}

// settle makes what the host does next come after the streams' work, where the host is
// the one who computes.
func (s *Session) settle(err error) error {
	if s.gpu != nil {
		return err
	}
	return errors.Join(err, s.compute.Sync())
}

// take is what the caller may free. It is good until the next call.
func (s *Session) take() []uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := s.left
	s.left = nil
	return left
}

// Save says that a group's forward pass has been issued, and what it saved.
func (s *Session) Save(name string, all []Storage) (n uint64, left []uint64, err error) {
	err = s.guard(func() error {
		if s.step == nil {
			return Wrong{fmt.Errorf("stowage: group %q is saved outside of a step; begin one first", name)}
		}
		for _, x := range all {
			if x.ID == 0 || x.Bytes == 0 || x.Address == 0 {
				return Wrong{fmt.Errorf("stowage: group %q saves storage %d of %d bytes at %#x; give an id, an address and a size", name, x.ID, x.Bytes, x.Address)}
			}
			if x.Rows != 0 && s.fresh(x.ID) {
				if err := x.checkRows(name); err != nil {
					return Wrong{err}
				}
			}
		}
		g := &group{id: stowage.GroupID{Name: name, Layer: s.names[name]}}
		var mine []*offload.Storage
		for _, x := range all {
			switch t, fresh, err := s.tensor(g, x); {
			case err != nil:
				return s.settle(err) // the counts of those before may be read still
			case t != nil:
				g.saved = append(g.saved, t)
				if fresh {
					mine = append(mine, t.Storage)
				}
			}
		}
		if len(g.saved) > 0 {
			pass := s.step.Enter(g.id)
			pass.Save(g.saved...)
			if err := pass.Leave(); err != nil {
				return s.settle(err)
			}
			for _, st := range mine {
				st.Free() // the caller holds it for us alone
			}
		}
		s.names[name]++
		s.last++ // numbers of released groups are not given again
		n = s.last
		s.groups[n] = g
		if s.gpu == nil {
			s.step.Drain() // the host is the one who computes: it waits for the copy in any case
		}
		if len(g.rows) > 0 {
			return s.settle(nil)
		}
		return nil
	})
	return n, s.take(), err
}

// fresh tells whether nobody has a storage of a number: it was not saved yet, or all
// groups that saved it were released, and it was left.
func (s *Session) fresh(id uint64) bool {
	st := s.storages[id]
	return s.rowsOf[id] == nil && (st == nil || st.Over())
}

// tensor is a storage for the runtime, and whether it is seen for the first time, or
// nothing if its rows are on the shelf.
func (s *Session) tensor(g *group, x Storage) (t *stowage.Tensor, fresh bool, err error) {
	fresh = s.fresh(x.ID)
	switch {
	case fresh && x.Rows != 0 || s.rowsOf[x.ID] != nil:
		return nil, false, s.putRows(g, x)
	case fresh:
		mem := s.dev.Import(device.Accel, uintptr(x.Address), device.Bytes(x.Bytes), "borrowed")
		t, err := s.step.Borrow(mem.All(), func() { s.left = append(s.left, x.ID) })
		if err != nil {
			return nil, false, err
		}
		s.storages[x.ID], s.ids[t.Storage] = t.Storage, x.ID
		if x.Stay {
			t = t.Stays()
		}
		return t, true, nil
	}
	t = s.step.Again(s.storages[x.ID])
	if x.Stay {
		t = t.Stays()
	}
	return t, false, nil
}

// borrow asks the caller for memory that a storage comes back to.
func (s *Session) borrow(st *offload.Storage) (device.Range, error) {
	at := s.lend(s.ids[st], uint64(st.Size()))
	if at == 0 {
		return device.Range{}, fmt.Errorf("stowage: no memory was lent for %v that come back; lower the budget, or offload less", st.Size())
	}
	return s.dev.Import(device.Accel, uintptr(at), st.Size(), "lent").All(), nil
}

// Load makes a group's storages usable by work that the caller issues from now on, and
// tells which of them a copy still reads, or may.
func (s *Session) Load(n uint64) (held, left []uint64, err error) {
	err = s.guard(func() error {
		g, err := s.find(n)
		if err != nil {
			return err
		}
		if len(g.saved) > 0 && g.loaded == nil {
			if g.loaded, err = s.step.Load(g.id); err != nil {
				return err
			}
		}
		if len(g.saved) > 0 {
			for i := range g.loaded.Len() {
				if st := g.loaded.Tensor(i).Storage; st.Busy() {
					held = append(held, s.ids[st])
				}
			}
		}
		s.getRows(g)
		return s.settle(nil)
	})
	return held, s.take(), err
}

func (s *Session) find(n uint64) (*group, error) {
	switch g := s.groups[n]; {
	case s.step == nil:
		return nil, Wrong{fmt.Errorf("stowage: group %d is asked for outside of a step; run the backward pass inside of the step that saved it", n)}
	case g == nil:
		return nil, Wrong{fmt.Errorf("stowage: group %d is not one of this step, or was released", n)}
	default:
		return g, nil
	}
}

// here tells whether loading the group would copy nothing.
func (g *group) here() bool {
	away := func(t *stowage.Tensor) bool { return !t.Storage.Here() }
	return len(g.saved) > 0 && !slices.ContainsFunc(g.saved, away)
}

// Release says that nobody needs a group any more. One that was never loaded is given
// back if all of it is on the device; otherwise its place on the host is, at the end.
func (s *Session) Release(n uint64) (left []uint64, err error) {
	err = s.guard(func() error {
		g, err := s.find(n)
		if err != nil {
			return err
		}
		if g.loaded == nil && g.here() {
			if g.loaded, err = s.step.Load(g.id); err != nil {
				return err
			}
		}
		if g.loaded != nil {
			g.loaded.Done()
		}
		if g.loaded != nil || len(g.saved) == 0 {
			delete(s.groups, n)
		}
		s.dropRows(g)
		return nil
	})
	return s.take(), err
}
