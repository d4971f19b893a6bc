// This file owns the order of uses under one key: recorded in the first step,
// followed in all later ones.

package fsdp

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/bucket"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
)

// Phase says what a step is for.
type Phase uint8

const (
	Train Phase = iota
	Evaluate
)

// Key tells orders apart: an order holds for one phase, number of microbatches
// and shape of the inputs. A step under another key never disturbs it.
type Key struct {
	Phase        Phase
	Microbatches int
	Shape        string
}

func (k Key) String() string {
	phase := "training"
	if k.Phase == Evaluate {
		phase = "evaluation"
	}
	return fmt.Sprintf("%s, %d microbatches, shape %q", phase, k.Microbatches, k.Shape)
}

// Order is the order of a step's uses of parameters and of gradients.
type Order struct {
	Params, Grads []bucket.Event
}

// program is what is known of the steps under one key.
type program struct {
	key           Key
	params, grads track
}

// track is the order of one pool's uses.
type track struct {
	r      *region
	pool   *pool
	frozen bool
	order  []bucket.Event
	at     int   // events of this step
	begun  int   // uses of this step
	under  []int // by unit: one more than its use under way, or zero

	// By use: when its first half is done (it was gathered, or the gradients are
	// there), whether the use before left it gathered, whose gathers are due when
	// it begins, and the bytes it holds.
	ready  []*order.Mark
	kept   []bool
	due    [][]int
	leases []lease
}

// begin takes up the next use, which must be one of a unit. A step that departs
// from its order gets an error.
func (t *track) begin(unit int, key Key) (use int, err error) {
	if unit < 0 || unit >= len(t.under) {
		panic(fmt.Sprintf("fsdp: unit %d is used, of %d", unit, len(t.under)))
	}
	if t.under[unit] != 0 {
		panic(fmt.Sprintf("fsdp: unit %q is used again before its use is done", t.r.spec.Units[unit].Name))
	}
	if err := t.pass(bucket.Event{Unit: unit}, key); err != nil {
		return 0, err
	}
	use = t.begun
	t.begun++
	t.under[unit] = use + 1
	return use, nil
}

// end takes up the release of a unit.
func (t *track) end(unit int, key Key) error {
	t.under[unit] = 0
	return t.pass(bucket.Event{Unit: unit, Release: true}, key)
}

func (t *track) pass(e bucket.Event, key Key) error {
	if !t.frozen {
		t.order = append(t.order, e)
	} else if t.at == len(t.order) || t.order[t.at] != e {
		want := "is at its end"
		if t.at < len(t.order) {
			want = "has " + t.describe(t.order[t.at])
		}
		return fmt.Errorf("%s at event %d of %s, where the recorded order of this key (%v) %s; begin a step of another order under another key",
			t.describe(e), t.at, t.r.name, key, want)
	}
	t.at++
	return nil
}

func (t *track) describe(e bucket.Event) string {
	what := "the use of"
	if e.Release {
		what = "the release of"
	}
	return fmt.Sprintf("%s unit %q", what, t.r.spec.Units[e.Unit].Name)
}

// whole tells whether the step has come to its end.
func (t *track) whole(key Key) error {
	for unit, use := range t.under {
		if use != 0 {
			return fmt.Errorf("unit %q is still in use (%s) when the step ends; call Done", t.r.spec.Units[unit].Name, t.r.name)
		}
	}
	if t.frozen && t.at < len(t.order) {
		return fmt.Errorf("the step ends at event %d of %s, where the recorded order of this key (%v) has %s; begin a step of another order under another key",
			t.at, t.r.name, key, t.describe(t.order[t.at]))
	}
	return nil
}

func (t *track) rewind() {
	t.at, t.begun = 0, 0
	clear(t.under)
}

// record gives a use of a step that is being recorded its memory: the lowest
// place that no held use has.
func (p *Pipeline) record(t *track, use, unit int) error {
	spec, size := t.r.spec, int64(0)
	places := make([]bucket.Place, len(spec.Units[unit].Buckets))
	for b, of := range spec.Units[unit].Buckets {
		places[b] = bucket.Place{Offset: size, Bytes: spec.Bytes(of), Dynamic: t.r.buf == nil}
		size += places[b].Bytes
	}
	var former []int
	if t.r.buf != nil {
		base := t.pool.room(size)
		if n := device.Bytes(base + size); n > t.r.buf.Size() {
			if n > t.r.buf.Max() {
				return fmt.Errorf("%s take %v while their order is recorded, and the device has %v; divide units into smaller ones", t.r.name, n, t.r.buf.Max())
			}
			if err := p.dev.Grow(t.r.buf, n); err != nil {
				return fmt.Errorf("%s take %v while their order is recorded; divide units into smaller ones, or shard over more ranks: %w", t.r.name, n, err)
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
	return t.extend(p.lanes)
}

// extend makes room for what is kept of a use.
func (t *track) extend(ls *lanes) error {
	k, err := ls.Mark()
	if err != nil {
		return err
	}
	t.ready, t.kept, t.leases = append(t.ready, k), append(t.kept, false), append(t.leases, lease{})
	return nil
}

// room is the lowest offset at which so many bytes are free of held uses.
func (p *pool) room(size int64) (at int64) {
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

// overlapping are the uses that had some of the bytes.
func (p *pool) overlapping(from, to int64) (uses []int) {
	for i, u := range p.uses {
		if lo, hi := u.extent(); lo < to && from < hi {
			uses = append(uses, i)
		}
	}
	return uses
}

// extent is the bytes from a use's first bucket to its last: in a step that is
// recorded they lie one behind the other.
func (u *poolUse) extent() (lo, hi int64) {
	if len(u.places) == 0 {
		return 0, 0
	}
	last := u.places[len(u.places)-1]
	return u.places[0].Offset, last.Offset + last.Bytes
}

// Follow fixes the order of the steps under a key before the first of them, as a
// run before this one recorded it; then nothing is recorded.
func (p *Pipeline) Follow(key Key, o Order) error {
	p.between("Follow")
	if p.programs[key] != nil {
		return fmt.Errorf("fsdp: rank %d: the order of the key (%v) is known; use another key", p.cfg.Rank, key)
	}
	g := p.newProgram(key)
	g.params.order, g.grads.order = slices.Clone(o.Params), slices.Clone(o.Grads)
	return p.keep(g)
}

// Order is the recorded order of the steps under a key, if there is one.
func (p *Pipeline) Order(key Key) (o Order, known bool) {
	if g := p.programs[key]; g != nil {
		return Order{slices.Clone(g.params.order), slices.Clone(g.grads.order)}, true
	}
	return Order{}, false
}

// Plans are the pools of the steps under a key, if its order is known.
func (p *Pipeline) Plans(key Key) (params, grads *bucket.Plan, known bool) {
	if g := p.programs[key]; g != nil {
		return g.params.pool.plan, g.grads.pool.plan, true
	}
	return nil, nil, false
}

func (p *Pipeline) newProgram(key Key) *program {
	g := &program{key: key}
	for _, x := range []struct {
		t *track
		r *region
	}{{&g.params, &p.params}, {&g.grads, &p.grads}} {
		x.t.r, x.t.under = x.r, make([]int, len(p.layout.units))
		x.t.pool = &pool{name: x.r.name, lanes: p.lanes, buf: x.r.buf}
	}
	return g
}

// keep makes the plans of a recorded order, and keeps them under the key. If
// there is no memory for them, nothing is kept.
func (p *Pipeline) keep(g *program) error {
	for _, t := range []*track{&g.params, &g.grads} {
		if err := p.freeze(t); err != nil {
			p.drop(g)
			return err
		}
	}
	p.programs[g.key] = g
	return nil
}

// drop gives back what a program has of the device beside memory.
func (p *Pipeline) drop(g *program) {
	for _, t := range []*track{&g.params, &g.grads} {
		t.pool.retire()
		for _, k := range t.ready {
			p.lanes.Drop(k)
		}
		t.ready = nil
	}
}

// freeze replaces the pool of a recorded step by one that is planned.
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
	t.pool.retire()
	t.pool, t.frozen = pool, true
	t.due = make([][]int, len(plan.Uses))
	for i, u := range plan.Uses {
		if i == len(t.ready) {
			if err := t.extend(p.lanes); err != nil {
				return err
			}
		}
		if t.kept[i] = u.Kept; !u.Kept {
			t.due[u.Gather] = append(t.due[u.Gather], i)
		}
	}
	t.rewind()
	return nil
}
