// This file owns the order of events: which may follow which.

package choose

import (
	"errors"
	"fmt"
	"time"
)

// groupKey names the group of a unit and a microbatch.
type groupKey struct{ unit, microbatch int }

// A group is saved, loaded and released, once each and in this order; it may miss the last
// of these.
type stage uint8

const (
	unsaved stage = iota
	saved
	loaded
	released
)

// checker follows the events of a request. A storage is taken, saved any number of times,
// and given back, in this order. It may miss any of these.
type checker struct {
	r      *Request
	at     time.Duration
	groups map[groupKey]stage
	taken  []bool
	saved  []bool
	given  []bool
	seen   []int // the last save that lists each storage, from 1
	saves  int
	items  int
}

func newChecker(r *Request) *checker {
	n := len(r.Storages)
	return &checker{r: r, groups: make(map[groupKey]stage, len(r.Ops)/3+1), taken: make([]bool, n), saved: make([]bool, n), given: make([]bool, n), seen: make([]int, n)}
}

func (c *checker) op(op *Op) error {
	switch {
	case op.At < c.at:
		return fmt.Errorf("its time of %d ns is before the %d of the op before; give ops in the order of issue", op.At, c.at)
	case op.At > c.r.Span:
		return fmt.Errorf("its time of %d ns is after the end of the step; give a span of at least that", op.At)
	}
	c.at = op.At
	switch op.Kind {
	case "save", "load", "release":
		return c.group(op)
	case "take", "give":
		return c.storage(op)
	}
	return errors.New(`expected "save", "load", "release", "take" or "give"`)
}

// group checks an event of a group.
func (c *checker) group(op *Op) error {
	switch {
	case op.Unit == nil:
		return errors.New("it has no unit; give the number of one")
	case *op.Unit < 0 || *op.Unit >= len(c.r.Units):
		return fmt.Errorf("there is no unit %d; give one of the %d in units, from 0", *op.Unit, len(c.r.Units))
	case op.Microbatch < 0 || op.Microbatch > mostOps:
		return fmt.Errorf("expected a microbatch from 0 to %d, got %d", mostOps, op.Microbatch)
	case op.Storage != nil:
		return errors.New("it names a storage; leave that out, or list it in the storages of a save")
	case op.Kind != "save" && (op.Storages != nil || op.Stay != nil):
		return errors.New("only a save lists storages; leave them out")
	}
	k := groupKey{*op.Unit, op.Microbatch}
	want := map[string]stage{"save": unsaved, "load": saved, "release": loaded}[op.Kind]
	if got := c.groups[k]; got != want {
		return fmt.Errorf("unit %d of microbatch %d %s; each is saved, loaded and released once, in this order: number further uses as microbatches", k.unit, k.microbatch,
			[]string{"was not saved", "was saved and not loaded", "was loaded and not released", "was released"}[got])
	}
	c.groups[k] = want + 1
	if op.Kind == "save" {
		return c.save(op)
	}
	return nil
}

// save checks the storages of a save.
func (c *checker) save(op *Op) error {
	if len(op.Stay) > 0 && len(op.Stay) != len(op.Storages) {
		return fmt.Errorf("stay has %d entries for %d storages; give one for each, or leave stay out", len(op.Stay), len(op.Storages))
	}
	c.saves++
	if c.items += len(op.Storages); c.items > mostItems {
		return fmt.Errorf("the saves list more than %d storages in all; give fewer microbatches", mostItems)
	}
	for _, id := range op.Storages {
		if err := c.known(id); err != nil {
			return err
		}
		switch {
		case c.seen[id] == c.saves:
			return fmt.Errorf("storage %d is listed twice; list it once", id)
		case c.given[id]:
			return fmt.Errorf("storage %d was given back; save it before that, or give it another number", id)
		}
		c.seen[id], c.saved[id] = c.saves, true
	}
	return nil
}

// storage checks an event of a storage.
func (c *checker) storage(op *Op) error {
	switch {
	case op.Storage == nil:
		return errors.New("it has no storage; give the number of one")
	case op.Unit != nil || op.Microbatch != 0 || op.Storages != nil || op.Stay != nil:
		return errors.New("it has keys of a save; leave all out but storage and at")
	}
	id := *op.Storage
	if err := c.known(id); err != nil {
		return err
	}
	switch take := op.Kind == "take"; {
	case take && c.taken[id]:
		return fmt.Errorf("storage %d was taken before; number storages anew in every use", id)
	case take && c.saved[id]:
		return fmt.Errorf("storage %d was saved before; take it before its first save, or leave the take out", id)
	case take:
		c.taken[id] = true
	case c.given[id]:
		return fmt.Errorf("storage %d was given back before; give it once", id)
	case !c.taken[id] && !c.saved[id]:
		return fmt.Errorf("storage %d was neither taken nor saved; take it first", id)
	default:
		c.given[id] = true
	}
	return nil
}

func (c *checker) known(id int) error {
	if id < 0 || id >= len(c.r.Storages) {
		return fmt.Errorf("there is no storage %d; give one of the %d in storages, from 0", id, len(c.r.Storages))
	}
	return nil
}
