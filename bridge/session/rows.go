// This file owns storages whose rows are counted on the device: their live rows are put
// on a shelf of pages behind the forward pass and come back, one ahead, in the backward
// pass.

package session

import (
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/stash"
)

// shelf is the part of a session that keeps rows.
type shelf struct {
	shelf    *stash.Shelf // made when it is first needed
	counting bool         // there are no pages yet: this step tells how many it takes
	used     bool         // by the step under way
	order    []*rows      // of this step, or the last one
	ran      int          // how often pages ran out
	rowsOf   map[uint64]*rows
}

// place is where the rows of a storage are:
//
//  1. leaving: its stash was issued, and its memory is the caller's first.
//  2. away: that memory is left.
//  3. back: in memory that was lent, or never away.
type place uint8

const (
	leaving place = iota
	away
	back
)

// rowAlign is what the kernels that move rows need of memory: they take 16 bytes at a time.
const rowAlign = 16

// rows is a storage with rows.
type rows struct {
	id, bytes uint64
	name      string // of the group that saved it first
	choice    policy.Choice
	item      *stash.Item
	at        place
	used      bool // compute comes after its return
	dropped   bool // nobody needs it
}

func (s *Session) beginRows() {
	s.order, s.rowsOf, s.used = s.order[:0], map[uint64]*rows{}, false
	if s.shelf.shelf != nil {
		s.shelf.shelf.Begin()
	}
}

// openShelf makes the shelf.
func (s *Session) openShelf() error {
	if s.shelf.shelf != nil {
		return nil
	}
	if s.captured {
		return Wrong{errors.New("stowage: rows are stashed for the first time in a captured step; run the same step before the capture")}
	}
	var p Pages
	if s.cfg.Pages != nil {
		p = *s.cfg.Pages
	}
	x, err := stash.NewShelf(s.dev, s.compute, p.store(s.dev.Info().Capacity))
	if err != nil {
		return err
	}
	s.shelf.shelf = x
	x.Begin()
	st := x.Store()
	s.counting = st.Pages(stash.Device)+st.Pages(stash.Host) == 0
	return nil
}

// putRows stashes a storage's rows, once a step.
func (s *Session) putRows(g *group, x Storage) error {
	if r := s.rowsOf[x.ID]; r != nil {
		g.rows, r.dropped = append(g.rows, r), false
		return nil
	}
	if x.RowBytes == 0 || x.Bytes%x.RowBytes != 0 {
		return Wrong{fmt.Errorf("stowage: group %q stashes %d bytes as rows of %d; give the bytes of a row, of which the storage has a whole number", g.id.Name, x.Bytes, x.RowBytes)}
	}
	if x.Address%rowAlign != 0 {
		return Wrong{fmt.Errorf("stowage: group %q stashes rows at %#x; give memory aligned to %d bytes", g.id.Name, x.Address, rowAlign)}
	}
	if err := s.openShelf(); err != nil {
		return err
	}
	h := s.shelf.shelf
	mem := s.dev.Import(device.Accel, uintptr(x.Address), device.Bytes(x.Bytes), "borrowed").All()
	count := s.dev.Import(device.Accel, uintptr(x.Rows), 8, "row count").All()
	item, err := h.Put(mem, count, device.Bytes(x.RowBytes), stash.Rows(x.Bytes/x.RowBytes))
	if err != nil {
		return err
	}
	// One stash is under way while the next layer computes: the memory of the one before
	// is left.
	s.letRows()
	r := &rows{id: x.ID, bytes: x.Bytes, name: g.id.Name, choice: policy.Stash, item: item}
	if s.counting {
		r.at, r.choice = back, policy.Keep
	}
	s.order = append(s.order, r)
	s.rowsOf[x.ID], s.used = r, true
	g.rows = append(g.rows, r)
	return nil
}

// letRows leaves the memory of all stashes so far.
func (s *Session) letRows() {
	for _, r := range s.order {
		if r.at == leaving {
			s.shelf.shelf.Away(r.item)
			r.at = away
			s.left = append(s.left, r.id)
		}
	}
}

// getRows brings a group's rows back, and begins with those that are needed next: what
// was put last comes back first.
func (s *Session) getRows(g *group) error {
	for _, r := range g.rows {
		if r.at == leaving { // it is still where it was
			s.shelf.shelf.Away(r.item)
			r.at, r.used = back, true
		}
	}
	for _, r := range g.rows {
		if err := s.fetch(r); err != nil {
			return err
		}
		if !r.used && !s.counting {
			s.shelf.shelf.Use(r.item)
			r.used = true
		}
	}
	if len(g.rows) == 0 {
		return nil
	}
	for i := len(s.order) - 1; i >= 0; i-- {
		if r := s.order[i]; r.at == away && !r.dropped {
			return s.fetch(r)
		}
	}
	return nil
}

// fetch issues the return of rows that are away.
func (s *Session) fetch(r *rows) error {
	if r.at != away {
		return nil
	}
	mem, err := s.ask(r.id, r.bytes)
	if err != nil {
		return err
	}
	if mem.Addr()%rowAlign != 0 {
		return Wrong{fmt.Errorf("stowage: memory at %#x was lent for rows; lend memory aligned to %d bytes", mem.Addr(), rowAlign)}
	}
	s.shelf.shelf.Get(r.item, mem)
	r.at = back
	return nil
}

// dropRows says that nobody needs a group's rows.
func (s *Session) dropRows(g *group) {
	for _, r := range g.rows {
		r.dropped = true
	}
}

// endRows leaves all memory that rows have.
func (s *Session) endRows() {
	if s.shelf.shelf == nil {
		return
	}
	s.shelf.shelf.End()
	for _, r := range s.order {
		if r.at != away {
			s.left = append(s.left, r.id)
		}
	}
}

// sizeRows gives the shelf pages after the step that counted.
func (s *Session) sizeRows() error {
	if !s.counting || !s.used {
		return nil
	}
	need, _, err := s.shelf.shelf.Need()
	if err != nil {
		return wrongRows(err)
	}
	s.counting = false
	return s.growRows(need)
}

// wrongRows tells counts that no number of pages would do for from what failed.
func wrongRows(err error) error {
	if errors.As(err, new(*stash.TooManyRows)) {
		return Wrong{err}
	}
	return err
}

// spare is what the pages have beyond what a step needed: rows differ from step to step.
const spare = 16

// growRows gives the shelf pages for a step that needs so many: of the device as far as
// there are any, then of the host.
func (s *Session) growRows(need schedule.Pages) error {
	st, want, have := s.shelf.shelf.Store(), max(need+need/spare, 1), schedule.Pages(0)
	var full *device.OutOfMemory
	for _, tier := range []int{stash.Device, stash.Host} {
		if err := st.Grow(s.compute, tier, min(want-have, st.Max(tier))); err != nil && !errors.As(err, &full) {
			return err
		}
		have += st.Pages(tier)
	}
	switch {
	case have >= need:
		s.shelf.shelf.Begin() // what the step before has found is not the next one's
		return nil
	case full != nil:
		return fmt.Errorf("stowage: rows need %d pages of %v, and there are %d: %w", need, st.Page(), have, full)
	}
	return fmt.Errorf("stowage: rows need %d pages of %v, and there may be %d; raise pages.device_max or pages.host_max", need, st.Page(), have)
}

// Check waits for a stream and looks whether the steps on it found pages for all rows.
// If not there are more now, and the last one can be run, or replayed, again.
func (s *Session) Check(stream uint64) error {
	return s.guard(func() error {
		switch {
		case s.step != nil:
			return Wrong{errors.New("stowage: pages are checked inside of a step; end it first")}
		case s.shelf.shelf == nil || s.counting:
			return nil
		}
		if err := s.steer(stream); err != nil {
			return Wrong{err}
		}
		st := s.shelf.shelf.Store()
		had := st.Pages(stash.Device) + st.Pages(stash.Host)
		need, ok, err := s.shelf.shelf.Need()
		if ok || err != nil {
			return wrongRows(err)
		}
		if err := s.growRows(need); err != nil {
			return err
		}
		s.ran++
		return &Overflow{Asked: device.Bytes(need) * st.Page(), Had: device.Bytes(had) * st.Page()}
	})
}
