// This file owns the order of uses under one key. The first step records it and all
// later steps follow it.

package fsdp

import (
	"fmt"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/memory"
)

// program holds the recorded order and the pools of the steps under one key.
type program struct {
	key           memory.Key
	params, grads track
}

// track follows the uses of one pool through a step.
type track struct {
	r      *region
	pool   *pool
	frozen bool // the order is recorded and planned
	order  []bucket.OrderEntry
	at     int   // entries of the order that this step has passed
	begun  int   // uses that this step has begun
	inUse  []int // by unit: one more than its use under way, or zero

	// By use:
	ready  []*order.Mark // its parameters are gathered, or its gradients are written
	kept   []bool        // the use before left its parameters gathered
	due    [][]int       // the uses that are gathered when it begins
	leases []lease       // the bytes it holds
}

// begin begins a use of a unit and returns its index. It returns an error if the step
// departs from the recorded order.
func (t *track) begin(unit int, key memory.Key) (use int, err error) {
	if unit < 0 || unit >= len(t.inUse) {
		panic(fmt.Sprintf("fsdp: FSDP unit %d is used, but there are only %d", unit, len(t.inUse)))
	}
	if t.inUse[unit] != 0 {
		panic(fmt.Sprintf("fsdp: FSDP unit %q is used again before its use is done; call Done first", t.r.spec.Units[unit].Name))
	}
	if err := t.advance(bucket.OrderEntry{Unit: unit}, key); err != nil {
		return 0, err
	}
	use = t.begun
	t.begun++
	t.inUse[unit] = use + 1
	return use, nil
}

// end ends the use of a unit. It returns an error if the step departs from the
// recorded order.
func (t *track) end(unit int, key memory.Key) error {
	t.inUse[unit] = 0
	return t.advance(bucket.OrderEntry{Unit: unit, Release: true}, key)
}

// advance records an entry, or compares it with the recorded order.
func (t *track) advance(e bucket.OrderEntry, key memory.Key) error {
	if !t.frozen {
		t.order = append(t.order, e)
	} else if t.at == len(t.order) || t.order[t.at] != e {
		want := "the end of the step"
		if t.at < len(t.order) {
			want = t.describe(t.order[t.at])
		}
		return fmt.Errorf("%s: expected %s at entry %d of the order recorded for this key (%v), got %s; run steps of another order under another key",
			t.r.what, want, t.at, key, t.describe(e))
	}
	t.at++
	return nil
}

func (t *track) describe(e bucket.OrderEntry) string {
	what := "the use of"
	if e.Release {
		what = "the release of"
	}
	return fmt.Sprintf("%s FSDP unit %q", what, t.r.spec.Units[e.Unit].Name)
}

// checkComplete returns an error if a unit is still in use or the recorded order goes
// on.
func (t *track) checkComplete(key memory.Key) error {
	for unit, use := range t.inUse {
		if use != 0 {
			return fmt.Errorf("FSDP unit %q is still in use (%s) at the end of the step; call Done first", t.r.spec.Units[unit].Name, t.r.what)
		}
	}
	if t.at < len(t.order) {
		return fmt.Errorf("%s: expected %s at entry %d of the order recorded for this key (%v), got the end of the step; run steps of another order under another key",
			t.r.what, t.describe(t.order[t.at]), t.at, key)
	}
	return nil
}

// rewind goes back to the beginning of the order.
func (t *track) rewind() {
	t.at, t.begun = 0, 0
	clear(t.inUse)
}

// record adds a use to a step that is being recorded. It places the use at the lowest
// offset that no held use overlaps.
func (p *Pipeline) record(t *track, use, unit int) error {
	spec, size := t.r.spec, memory.Bytes(0)
	places := make([]bucket.Place, len(spec.Units[unit].Buckets))
	for b, of := range spec.Units[unit].Buckets {
		places[b] = bucket.Place{Offset: size, Bytes: spec.Bytes(of), Dynamic: t.r.buf == nil}
		size += places[b].Bytes
	}
	var former []int
	if t.r.buf != nil {
		base := t.pool.lowestFree(size)
		if n := base + size; n > t.r.buf.Size() {
			if n > t.r.buf.Max() {
				return fmt.Errorf("%s need %v while the order is recorded, but the device has only %v; divide FSDP units into smaller ones", t.r.what, n, t.r.buf.Max())
			}
			if err := p.dev.Grow(t.r.buf, n); err != nil {
				return fmt.Errorf("%s need %v while the order is recorded; divide FSDP units into smaller ones, or shard over more ranks: %w", t.r.what, n, err)
			}
		}
		for b := range places {
			places[b].Offset += base
		}
		former = t.pool.overlapping(base, base+size)
	}
	if err := t.pool.add(unit, spec, places); err != nil {
		return err
	}
	t.pool.uses[use].former = former
	return t.addUse(p.lanes)
}

// addUse adds the state of one use.
func (t *track) addUse(ls *lanes) error {
	k, err := ls.Mark()
	if err != nil {
		return err
	}
	t.ready, t.kept, t.leases = append(t.ready, k), append(t.kept, false), append(t.leases, lease{})
	return nil
}

// lowestFree returns the lowest offset at which size bytes overlap no held use.
func (p *pool) lowestFree(size memory.Bytes) (at memory.Bytes) {
	for again := true; again; {
		again = false
		for _, u := range p.uses {
			if lo, hi := u.extent(); u.held && lo < at+size && at < hi {
				at, again = hi, true
			}
		}
	}
	return at
}

// overlapping returns the uses that lie in some of the bytes.
func (p *pool) overlapping(from, to memory.Bytes) (uses []int) {
	for i, u := range p.uses {
		if lo, hi := u.extent(); lo < to && from < hi {
			uses = append(uses, i)
		}
	}
	return uses
}

// extent returns the bytes from a use's first bucket to its last. The buckets of a use
// lie one behind the other while the order is recorded.
func (u *poolUse) extent() (lo, hi memory.Bytes) {
	if len(u.places) == 0 {
		return 0, 0
	}
	last := u.places[len(u.places)-1]
	return u.places[0].Offset, last.Offset + last.Bytes
}

// newProgram makes an empty program that records.
func (p *Pipeline) newProgram(key memory.Key) *program {
	g := &program{key: key}
	for _, x := range []struct {
		t *track
		r *region
	}{{&g.params, &p.params}, {&g.grads, &p.grads}} {
		x.t.r, x.t.inUse = x.r, make([]int, len(p.layout.units))
		x.t.pool = &pool{name: x.r.name, lanes: p.lanes, buf: x.r.buf}
	}
	return g
}

// planProgram plans the pools of a recorded order and keeps them under its key. It keeps
// nothing if a plan fails or there is no memory for it.
func (p *Pipeline) planProgram(g *program) error {
	for _, t := range []*track{&g.params, &g.grads} {
		if err := p.freeze(t); err != nil {
			p.dropProgram(g)
			return err
		}
	}
	p.programs[g.key] = g
	return nil
}

// dropProgram gives back the marks of a program.
func (p *Pipeline) dropProgram(g *program) {
	for _, t := range []*track{&g.params, &g.grads} {
		t.pool.dropMarks()
		for _, k := range t.ready {
			p.lanes.Drop(k)
		}
	}
}

// freeze replaces the pool of a recorded step by a planned one.
func (p *Pipeline) freeze(t *track) error {
	plan, err := p.plan(t.r, t.order)
	if err != nil {
		return err
	}
	if err := p.grow(t.r, plan); err != nil {
		return err
	}
	pool, err := newPool(p.lanes, t.r.buf, plan, t.r.name, p.cfg.Log)
	if err != nil {
		return err
	}
	t.pool.dropMarks()
	t.pool, t.frozen = pool, true
	t.due = make([][]int, len(plan.Uses))
	for i, u := range plan.Uses {
		if t.kept[i] = u.Kept; !u.Kept {
			t.due[u.Gather] = append(t.due[u.Gather], i)
		}
	}
	t.rewind()
	return nil
}
