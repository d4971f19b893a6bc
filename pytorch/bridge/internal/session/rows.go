// This file owns storages whose rows are counted on the device. Their live rows are
// copied to berths, where the backward pass reads them.

package session

import (
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// rowState is the part of a session that handles rows.
type rowState struct {
	berths    *stash.Berths         // nil until the first row is stashed
	order     []*rows               // of this step or the last one, in the order of saving
	rowsOf    map[uint64]*rows      // by the number of the storage
	turns     []turn                // of this step
	stays     map[memory.Key][]bool // by position in order, learned from earlier steps
	following []bool                // the element of stays that this step or the last one follows
	overflows int                   // how often berths were too small
}

// turn is the moment at which a storage is saved, or is first needed again.
type turn struct {
	saved bool
	of    *rows
}

// rowAlign is the alignment that the kernel needs, which copies 16 bytes at a time.
const rowAlign = 16

// rows is one storage with rows.
type rows struct {
	id, bytes uint64
	name      string // of the group that saved it first
	choice    memory.Choice
	berth     *stash.Berth // or nil
	groups    int          // that may need it; its memory is returned after the last one at the latest
	loaded    bool         // it was needed again
	waits     bool         // it is in place only because its rows were not counted yet
}

func (s *Session) beginRows() {
	s.order, s.turns, s.rowsOf, s.following = nil, nil, map[uint64]*rows{}, s.stays[s.key]
	if s.berths != nil {
		s.berths.Begin()
	}
}

// checkRows returns an error if the sizes or addresses of a storage with rows are wrong.
func (x Storage) checkRows(group string) error {
	switch {
	case x.RowBytes == 0 || x.Bytes%x.RowBytes != 0:
		return fmt.Errorf("stowage: group %q saves %d bytes as rows of %d; give the bytes of a row so that the storage has a whole number of rows", group, x.Bytes, x.RowBytes)
	case x.Address%rowAlign != 0 || x.Rows%8 != 0:
		return fmt.Errorf("stowage: group %q saves rows at %#x, counted at %#x; give memory aligned to %d bytes and a count at a multiple of 8", group, x.Address, x.Rows, rowAlign)
	}
	return nil
}

// saveRows saves a storage with rows; a storage that was saved before is only counted.
func (s *Session) saveRows(g *group, x Storage) (err error) {
	if r := s.rowsOf[x.ID]; r != nil {
		g.rows = append(g.rows, r)
		r.groups++
		return nil
	}
	r := &rows{id: x.ID, bytes: x.Bytes, name: g.id.Name, choice: memory.Keep, groups: 1}
	stays := x.Stay || memory.Bytes(x.Bytes) < s.cfg.Least
	if i := len(s.order); i < len(s.following) {
		stays = stays || s.following[i]
	}
	if !stays {
		if err := s.stashRows(r, x); err != nil {
			return err
		}
		r.waits = r.choice != memory.Stash
	}
	s.order, s.turns = append(s.order, r), append(s.turns, turn{true, r})
	s.rowsOf[x.ID], g.rows = r, append(g.rows, r)
	return nil
}

// stashRows copies live rows to a berth.
func (s *Session) stashRows(r *rows, x Storage) (err error) {
	if s.berths == nil {
		if s.captured {
			return Wrong{errors.New("stowage: a captured step is the first that stashes rows; run the same step before the capture")}
		}
		if s.berths, err = stash.NewBerths(s.dev.Device, s.compute, s.cfg.Live); err != nil {
			return err
		}
	}
	mem := s.dev.Borrow(memory.Device, uintptr(x.Address), memory.Bytes(x.Bytes), "borrowed").All()
	count := s.dev.Borrow(memory.Device, uintptr(x.Rows), 8, "row count").All()
	r.berth, err = s.berths.Save(mem, count, memory.Bytes(x.RowBytes), stash.Rows(x.Bytes/x.RowBytes))
	if err == nil && r.berth != nil && r.berth.Holds() {
		r.choice = memory.Stash
		s.returned = append(s.returned, r.id)
	}
	return err
}

// loadRows notes that a group's rows are needed.
func (s *Session) loadRows(g *group) {
	for _, r := range g.rows {
		if !r.loaded {
			r.loaded = true
			s.turns = append(s.turns, turn{false, r})
		}
	}
}

// waitingRows returns the borrowed memory of storages that will have berths once their
// rows are counted.
func (s *Session) waitingRows() (n memory.Bytes) {
	for _, r := range s.order {
		if r.waits && r.groups > 0 {
			n += memory.Bytes(r.bytes)
		}
	}
	return n
}

// Rows returns the address of a storage's berth, or zero if its rows are where they were
// saved.
func (s *Session) Rows(id uint64) (address uint64, err error) {
	err = s.guard(func() error {
		switch r := s.rowsOf[id]; {
		case r == nil:
			return Wrong{fmt.Errorf("stowage: storage %d has no rows in this step, or was released", id)}
		case r.choice == memory.Stash:
			address = uint64(r.berth.Addr())
		}
		return nil
	})
	return address, err
}

// releaseRows releases the rows of a group.
func (s *Session) releaseRows(g *group) {
	for _, r := range g.rows {
		if r.groups--; r.groups > 0 {
			continue
		}
		if r.berth != nil {
			r.berth.Release()
		}
		if r.choice != memory.Stash {
			s.returned = append(s.returned, r.id)
		}
		delete(s.rowsOf, r.id)
	}
}

// endRows returns all memory that rows still borrow, and learns from the step.
func (s *Session) endRows(failed bool) {
	for _, r := range s.order {
		if r.groups > 0 && r.choice != memory.Stash {
			s.returned = append(s.returned, r.id)
		}
	}
	if !failed && len(s.order) > 0 {
		s.stays[s.key] = notWorthBerths(s.turns)
	}
}

// notWorthBerths reports, for storages in the order of saving, which are not worth a
// berth: those that are needed again at once, before any other is saved. A backward pass
// has a gradient as large as the largest storage in any case. The last storages may stay
// in place as long as they take no more than that together and are gone by then.
func notWorthBerths(turns []turn) (stays []bool) {
	var most, held uint64
	var live []int // numbers of those that are not back
	number := map[*rows]int{}
	for _, t := range turns {
		most = max(most, t.of.bytes)
	}
	turning := false
	for _, t := range turns {
		if t.saved {
			number[t.of] = len(stays)
			live, stays = append(live, len(stays)), append(stays, false)
			turning, held = true, 0
			continue
		}
		last := len(live) - 1
		if i, ok := number[t.of]; !ok || last < 0 || live[last] != i {
			turning = false // not what was saved last
			continue
		}
		held += t.of.bytes
		turning = turning && held <= most
		stays[live[last]] = turning
		live = live[:last]
	}
	return stays
}

// Check waits for a stream, makes berths for rows that have none yet, and returns an
// Overflow if the steps since the last check had more rows than room. They can then be
// run or replayed again.
func (s *Session) Check(stream uint64) error {
	return s.guard(func() error {
		switch {
		case s.step != nil:
			return Wrong{errors.New("stowage: rows cannot be checked inside of a step; end it first")}
		case s.berths == nil:
			return nil
		}
		if err := s.useStream(stream); err != nil {
			return Wrong{err}
		}
		if s.compute.Capturing() {
			return Wrong{errors.New("stowage: rows cannot be checked while the stream is captured; check after the replay")}
		}
		stays := map[*stash.Berth]bool{}
		for i, x := range s.stays[s.key] {
			if x && i < len(s.order) && s.order[i].berth != nil {
				stays[s.order[i].berth] = true
			}
		}
		missed, err := s.berths.Settle(func(b *stash.Berth) bool { return stays[b] })
		switch {
		case errors.As(err, new(*stash.TooManyRows)):
			return Wrong{err}
		case err != nil:
			return err
		case missed.Asked > 0:
			s.stays[s.key] = s.following // so that the rerun gives tensors the berths that grew
			s.overflows++
			return &Overflow{Asked: missed.Asked, Had: missed.Had}
		}
		return nil
	})
}
