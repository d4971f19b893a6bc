// This file owns the calls of a step.

package session

import (
	"errors"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/offload"
	"github.com/stowage-dev/stowage/memory"
)

// Storage is one storage that a group saves.
type Storage struct {
	ID, Address, Bytes, Rows, RowBytes uint64
	Stay                               bool
}

// group is one group of this step.
type group struct {
	id     memory.GroupID
	saved  []*engine.Tensor // its storages without rows
	loaded *engine.Loaded   // or nil
	rows   []*rows
}

// Begin begins a step under a key on a stream. It makes a new plan for the key if the saved
// limit changed.
func (s *Session) Begin(key string, stream uint64) error {
	return s.guard(func() error {
		if s.step != nil {
			return Wrong{errors.New("stowage: a step is under way; end that first")}
		}
		if err := s.useStream(stream); err != nil {
			return Wrong{err}
		}
		s.captured = s.compute.Capturing()
		s.key = memory.Key{Phase: memory.Train, Shape: key}
		if s.captured && s.rt.Decision(s.key) == nil {
			s.captured = false
			return Wrong{fmt.Errorf("stowage: the first step under key %q is captured; run it once before the capture", key)}
		}
		var err error
		begin := func() { err = s.begin() }
		if s.captured {
			s.dev.relaxed(begin)
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
	s.names, s.groups, s.last, s.returned = map[string]int{}, map[uint64]*group{}, 0, s.returned[:0]
	s.storages, s.ids = map[uint64]*offload.Storage{}, map[*offload.Storage]uint64{}
	s.beginRows()
	return nil
}

// End ends the step, or abandons it. All borrowed memory is returned.
func (s *Session) End(failed bool) (returned []uint64, err error) {
	return s.guardReturning(func() error {
		if s.step == nil {
			return Wrong{errors.New("stowage: no step is under way; begin one first")}
		}
		var why error
		if failed {
			why = errAbandoned
		}
		err := s.end(why)
		if errors.Is(err, errAbandoned) {
			err = nil
		}
		return err
	})
}

var errAbandoned = errors.New("stowage: the step was abandoned")

func (s *Session) end(why error) error {
	s.endRows(why != nil)
	err := s.step.End(why)
	s.step, s.groups, s.storages, s.ids = nil, nil, nil, nil
	s.captured = false
	return s.waitOnCPU(err)
}

// waitOnCPU waits for the streams if the host itself computes, so that what it does next
// comes after their work.
func (s *Session) waitOnCPU(err error) error {
	if !s.dev.hostComputes {
		return err
	}
	return errors.Join(err, s.compute.Sync())
}

// Save notes that a group's forward pass has been issued, and what it saved. It returns
// the group's number in this step.
func (s *Session) Save(name string, all []Storage) (n uint64, returned []uint64, err error) {
	returned, err = s.guardReturning(func() error {
		if s.step == nil {
			return Wrong{fmt.Errorf("stowage: group %q is saved outside of a step; begin one first", name)}
		}
		for _, x := range all {
			if x.ID == 0 || x.Bytes == 0 || x.Address == 0 {
				return Wrong{fmt.Errorf("stowage: group %q saves storage %d of %d bytes at %#x; give an id, an address and a size", name, x.ID, x.Bytes, x.Address)}
			}
			if x.Rows != 0 && s.isNew(x.ID) {
				if err := x.checkRows(name); err != nil {
					return Wrong{err}
				}
			}
		}
		g := &group{id: memory.GroupID{Name: name, Layer: s.names[name]}}
		var mine []*offload.Storage
		for _, x := range all {
			switch t, fresh, err := s.tensor(g, x); {
			case err != nil:
				return s.waitOnCPU(err) // row counts of the storages before may still be read
			case t != nil:
				g.saved = append(g.saved, t)
				if fresh {
					mine = append(mine, t.Storage)
				}
			}
		}
		if len(g.saved) > 0 {
			pass := s.step.BeginGroup(g.id)
			pass.Save(g.saved...)
			if err := pass.End(); err != nil {
				return s.waitOnCPU(err)
			}
			for _, st := range mine {
				st.Free() // only groups need it
			}
		}
		s.names[name]++
		s.last++ // numbers of released groups are not used again
		n = s.last
		s.groups[n] = g
		if s.dev.hostComputes {
			s.step.Drain() // the host computes, and waits for the copy in any case
		}
		if len(g.rows) > 0 {
			return s.waitOnCPU(nil)
		}
		return nil
	})
	return n, returned, err
}

// isNew reports whether a number names a new storage: it was not saved in this step, or
// all groups that saved it were released and its memory was returned.
func (s *Session) isNew(id uint64) bool {
	st := s.storages[id]
	return s.rowsOf[id] == nil && (st == nil || st.Over())
}

// tensor returns a storage as the runtime's tensor, and whether it is new. The tensor is
// nil if the storage has rows.
func (s *Session) tensor(g *group, x Storage) (t *engine.Tensor, fresh bool, err error) {
	fresh = s.isNew(x.ID)
	switch {
	case fresh && x.Rows != 0 || s.rowsOf[x.ID] != nil:
		return nil, false, s.saveRows(g, x)
	case fresh:
		mem := s.dev.Borrow(memory.Device, uintptr(x.Address), memory.Bytes(x.Bytes), "borrowed")
		t, err := s.step.Borrow(mem.All(), func() { s.returned = append(s.returned, x.ID) })
		if err != nil {
			return nil, false, err
		}
		s.storages[x.ID], s.ids[t.Storage] = t.Storage, x.ID
		if x.Stay {
			t = t.KeepOnDevice()
		}
		return t, true, nil
	}
	t = s.step.TensorOf(s.storages[x.ID])
	if x.Stay {
		t = t.KeepOnDevice()
	}
	return t, false, nil
}

// provideMemory asks the caller for memory for a storage that is reloaded.
func (s *Session) provideMemory(st *offload.Storage) (device.Range, error) {
	at := s.provide(s.ids[st], uint64(st.Size()))
	if at == 0 {
		return device.Range{}, fmt.Errorf("stowage: the caller provided no memory to reload %v; lower the limit, or offload less", st.Size())
	}
	return s.dev.Borrow(memory.Device, uintptr(at), st.Size(), "borrowed").All(), nil
}

// Load makes a group's storages usable by work that the caller issues from now on. Held
// are those whose memory a copy still reads or may read later.
func (s *Session) Load(n uint64) (held, returned []uint64, err error) {
	returned, err = s.guardReturning(func() error {
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
		s.loadRows(g)
		return s.waitOnCPU(nil)
	})
	return held, returned, err
}

func (s *Session) find(n uint64) (*group, error) {
	switch g := s.groups[n]; {
	case s.step == nil:
		return nil, Wrong{fmt.Errorf("stowage: group %d is used outside of a step; run the backward pass inside of the step that saved it", n)}
	case g == nil:
		return nil, Wrong{fmt.Errorf("stowage: group %d is not one of this step, or was released", n)}
	default:
		return g, nil
	}
}

// onDevice reports whether all storages of a group are in device memory.
func (g *group) onDevice() bool {
	away := func(t *engine.Tensor) bool { return !t.Storage.Here() }
	return len(g.saved) > 0 && !slices.ContainsFunc(g.saved, away)
}

// Release notes that nobody needs a group any more. If the group was never loaded, its
// memory is returned now if all of it is on the device; otherwise its host memory is
// freed when the step ends.
func (s *Session) Release(n uint64) (returned []uint64, err error) {
	return s.guardReturning(func() error {
		g, err := s.find(n)
		if err != nil {
			return err
		}
		if g.loaded == nil && g.onDevice() {
			if g.loaded, err = s.step.Load(g.id); err != nil {
				return err
			}
		}
		if g.loaded != nil {
			g.loaded.Done()
		}
		delete(s.groups, n)
		s.releaseRows(g)
		return nil
	})
}
