// This file owns storages whose rows are counted on the device: their live rows go to
// berths of a shelf, where the backward pass reads them.

package session

import (
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/stash"
)

// shelf is the part of a session that keeps rows.
type shelf struct {
	shelf  *stash.Shelf // made when it is first needed
	order  []*rows      // of this step, or the last one, as they were put
	rowsOf map[uint64]*rows
	turns  []turn                 // of this step
	stays  map[stowage.Key][]bool // by what earlier steps did, for order
	was    []bool                 // what this step, or the last one, goes by
	ran    int                    // how often berths were too small
}

// turn is a storage that is put, or the first time that it is needed again.
type turn struct {
	put bool
	of  *rows
}

// rowAlign is what the kernel that moves rows needs of memory: it takes 16 bytes at a time.
const rowAlign = 16

// rows is a storage with rows.
type rows struct {
	id, bytes uint64
	name      string // of the group that saved it first
	choice    policy.Choice
	berth     *stash.Berth // or nil
	groups    int          // that may need it; with the last one it is left, if it was not before
	back      bool         // it was needed again
}

func (s *Session) beginRows() {
	s.order, s.turns, s.rowsOf, s.was = nil, nil, map[uint64]*rows{}, s.stays[s.key]
	if s.shelf.shelf != nil {
		s.shelf.shelf.Begin()
	}
}

// checkRows looks at a storage with rows that was not saved before.
func (x Storage) checkRows(group string) error {
	switch {
	case x.RowBytes == 0 || x.Bytes%x.RowBytes != 0:
		return fmt.Errorf("stowage: group %q stashes %d bytes as rows of %d; give the bytes of a row, of which the storage has a whole number", group, x.Bytes, x.RowBytes)
	case x.Address%rowAlign != 0 || x.Rows%8 != 0:
		return fmt.Errorf("stowage: group %q stashes rows at %#x, counted at %#x; give memory aligned to %d bytes, and a count at a multiple of 8", group, x.Address, x.Rows, rowAlign)
	}
	return nil
}

// putRows keeps a storage's rows, once.
func (s *Session) putRows(g *group, x Storage) (err error) {
	if r := s.rowsOf[x.ID]; r != nil {
		g.rows = append(g.rows, r)
		r.groups++
		return nil
	}
	r := &rows{id: x.ID, bytes: x.Bytes, name: g.id.Name, choice: policy.Keep, groups: 1}
	stays := x.Stay || device.Bytes(x.Bytes) < s.cfg.Least
	if learned := s.was; len(s.order) < len(learned) {
		stays = stays || learned[len(s.order)]
	}
	if !stays {
		if err := s.shelve(r, x); err != nil {
			return err
		}
	}
	s.order, s.turns = append(s.order, r), append(s.turns, turn{true, r})
	s.rowsOf[x.ID], g.rows = r, append(g.rows, r)
	return nil
}

// shelve gives rows a berth.
func (s *Session) shelve(r *rows, x Storage) (err error) {
	if s.shelf.shelf == nil {
		if s.captured {
			return Wrong{errors.New("stowage: rows are stashed for the first time in a captured step; run the same step before the capture")}
		}
		if s.shelf.shelf, err = stash.NewShelf(s.dev, s.compute, s.cfg.Live); err != nil {
			return err
		}
	}
	mem := s.dev.Import(device.Accel, uintptr(x.Address), device.Bytes(x.Bytes), "borrowed").All()
	count := s.dev.Import(device.Accel, uintptr(x.Rows), 8, "row count").All()
	r.berth, err = s.shelf.shelf.Put(mem, count, device.Bytes(x.RowBytes), stash.Rows(x.Bytes/x.RowBytes))
	if err == nil && r.berth != nil && r.berth.Holds() {
		r.choice = policy.Stash
		s.left = append(s.left, r.id)
	}
	return err
}

// getRows notes that a group's rows are needed.
func (s *Session) getRows(g *group) {
	for _, r := range g.rows {
		if !r.back {
			r.back = true
			s.turns = append(s.turns, turn{false, r})
		}
	}
}

// Rows tells where the rows of a storage are, if they are not where they were saved.
func (s *Session) Rows(id uint64) (address uint64, err error) {
	err = s.guard(func() error {
		switch r := s.rowsOf[id]; {
		case r == nil:
			return Wrong{fmt.Errorf("stowage: storage %d has no rows in this step, or was released", id)}
		case r.choice == policy.Stash:
			address = uint64(r.berth.Addr())
		}
		return nil
	})
	return address, err
}

// dropRows says that a group needs its rows no more.
func (s *Session) dropRows(g *group) {
	for _, r := range g.rows {
		if r.groups--; r.groups > 0 {
			continue
		}
		if r.berth != nil {
			r.berth.Leave()
		}
		if r.choice != policy.Stash {
			s.left = append(s.left, r.id)
		}
		delete(s.rowsOf, r.id)
	}
	g.rows = nil
}

// endRows leaves all memory that rows still have, and learns from the step.
func (s *Session) endRows(failed bool) {
	for _, r := range s.order {
		if r.groups > 0 && r.choice != policy.Stash {
			s.left = append(s.left, r.id)
		}
	}
	if !failed && len(s.order) > 0 {
		s.stays[s.key] = worthless(s.turns)
	}
	s.turns = nil
}

// worthless tells, of storages in the order in which they are put, which are not worth a
// berth: those that are needed again at once, before any other is put. A backward pass
// has a gradient as large as the largest storage in any case: as long as the last ones
// together are no more than that, and gone by then, they may stay where they are.
func worthless(turns []turn) (stays []bool) {
	var most, held uint64
	var live []int // numbers of those that are not back
	number := map[*rows]int{}
	for _, t := range turns {
		most = max(most, t.of.bytes)
	}
	turning := false
	for _, t := range turns {
		if t.put {
			number[t.of] = len(stays)
			live, stays = append(live, len(stays)), append(stays, false)
			turning, held = true, 0
			continue
		}
		last := len(live) - 1
		if i, ok := number[t.of]; !ok || last < 0 || live[last] != i {
			turning = false // not what was put last
			continue
		}
		held += t.of.bytes
		turning = turning && held <= most
		stays[live[last]] = turning
		live = live[:last]
	}
	return stays
}

// Check waits for a stream and looks whether the steps since the last check had room for
// all rows, and makes room for those that had none yet. If rows were lost, they can be run,
// or replayed, again.
func (s *Session) Check(stream uint64) error {
	return s.guard(func() error {
		switch {
		case s.step != nil:
			return Wrong{errors.New("stowage: rows are checked inside of a step; end it first")}
		case s.shelf.shelf == nil:
			return nil
		}
		if err := s.steer(stream); err != nil {
			return Wrong{err}
		}
		if s.compute.Capturing() {
			return Wrong{errors.New("stowage: rows are checked while the stream is captured; check after the replay")}
		}
		stays := map[*stash.Berth]bool{}
		for i, x := range s.stays[s.key] {
			if x && i < len(s.order) && s.order[i].berth != nil {
				stays[s.order[i].berth] = true
			}
		}
		missed, err := s.shelf.shelf.Settle(func(b *stash.Berth) bool { return stays[b] })
		switch {
		case errors.As(err, new(*stash.TooManyRows)):
			return Wrong{err}
		case err != nil:
			return err
		case missed.Asked > 0:
			s.stays[s.key] = s.was // run again, tensors have the berths that were made larger
			s.ran++
			return &Overflow{Asked: missed.Asked, Had: missed.Had}
		}
		return nil
	})
}
