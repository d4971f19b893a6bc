// This file owns steps: parameters gathered ahead of their use, gradients reduced
// behind it.

package fsdp

import (
	"fmt"

	"github.com/stowage-dev/stowage/bucket"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
)

// Step is one step of a pipeline. Its life cycle:
//
//  1. open: Begin returned it. Use and Grad lease memory, Done ends a lease.
//  2. over: End. Using it, or a lease of it, afterwards panics.
//
// The first step under a key gathers on demand and records the order of its
// uses; later ones follow that order, with gathers issued ahead. Inside of a
// step that follows, nothing is allocated. All of it may be captured, together
// with the optimiser: one capture for all ranks, which the other ranks' streams
// join by an event.
type Step struct {
	p      *Pipeline
	serial uint64
}

// Begin opens a step. What was issued on the stream before, such as the
// optimiser, comes before the step, and what is issued on it after End comes
// after. A step on another stream than the last one's is the caller's to order: it
// makes that stream wait for the last one's. In training the main gradients begin
// as zero.
func (p *Pipeline) Begin(key Key, s device.Stream) Step {
	p.between("Begin")
	g := p.programs[key]
	if g == nil {
		g = p.newProgram(key)
	}
	p.now, p.open, p.err, p.main = g, true, nil, p.lanes.Lane(s)
	p.serial++
	p.main.Record(p.begun)
	if key.Phase == Train {
		p.out.After(p.begun)
		p.out.Flush()
		p.out.Stream.Fill(p.shards.grads.All(), 0)
		p.out.Record(p.zeroed)
	}
	return Step{p, p.serial}
}

// must panics unless the step is open.
func (s Step) must() *Pipeline {
	if !s.p.open || s.p.serial != s.serial {
		panic("fsdp: a step is used after its end; begin another")
	}
	return s.p
}

// fail makes err the reason why the step cannot go on.
func (p *Pipeline) fail(err error) error {
	if p.err == nil {
		p.err = fmt.Errorf("fsdp: rank %d: %w", p.cfg.Rank, err)
	}
	return p.err
}

// Use is a unit's gathered parameters, for work on one stream. Done ends it.
type Use struct {
	step  Step
	lane  *order.Lane
	lease lease
	unit  int
}

// Use gives a stream the parameters of a unit: work issued on it from now on may
// read them. The error is one of a step that departs from its order, or of
// memory that ran out; the step cannot go on then, and must be ended.
func (s Step) Use(unit int, on device.Stream) (Use, error) {
	p := s.must()
	if p.err != nil {
		return Use{}, p.err
	}
	t, l := &p.now.params, p.lane(on)
	i, err := t.begin(unit, p.now.key)
	if err != nil {
		return Use{}, p.fail(err)
	}
	if t.frozen {
		for _, g := range t.due[i] {
			if err := p.gather(t, g); err != nil {
				return Use{}, p.fail(err)
			}
		}
	} else {
		if err := p.record(t, i, unit); err != nil {
			return Use{}, p.fail(err)
		}
		if err := p.gather(t, i); err != nil {
			return Use{}, p.fail(err)
		}
	}
	if !t.kept[i] {
		l.After(t.ready[i])
		l.Flush()
	} else if t.leases[i], err = t.pool.get(i, l); err != nil { // after the use before
		return Use{}, p.fail(err)
	}
	return Use{s, l, t.leases[i], unit}, nil
}

// lane is that of a stream that is about to work in the step.
func (p *Pipeline) lane(s device.Stream) *order.Lane {
	l := p.lanes.Lane(s)
	l.After(p.begun)
	return l
}

// gather issues the gather of a use once those that had its bytes are done.
func (p *Pipeline) gather(t *track, use int) error {
	p.in.After(p.begun)
	lease, err := t.pool.get(use, p.in)
	if err != nil {
		return err
	}
	unit := t.pool.uses[use].unit
	for b, k := range p.layout.blocks[unit] {
		p.cfg.Groups[k.group].Comm.AllGather(p.in.Stream, lease.bucket(b), p.shards.of[unit][b].Params)
	}
	p.in.Record(t.ready[use])
	t.leases[use] = lease
	return nil
}

// Param is the memory of a parameter.
func (u Use) Param(i int) device.Range {
	l := u.step.must().layout
	return l.param(u.lease, u.unit, i, l.units[u.unit].Params[i].Type)
}

// param is where a parameter lies in the buckets of a lease.
func (l *layout) param(x lease, unit, i int, t bucket.Type) device.Range {
	at, n := l.spots[unit][i], l.units[unit].Params[i].Elements()
	return x.bucket(at.block).Slice(device.Bytes(at.first*t.Size), device.Bytes(n*t.Size))
}

// Done says that the work with the parameters has been issued.
func (u Use) Done() {
	p := u.step.must()
	u.lease.put(u.lane)
	if err := p.now.params.end(u.unit, p.now.key); err != nil && p.err == nil {
		_ = p.fail(err)
	}
}

// Grad is memory for a unit's gradients, written by work on one stream. Done ends
// it.
type Grad struct {
	step  Step
	lane  *order.Lane
	lease lease
	unit  int
	use   int
}

// Grad gives a stream memory for the gradients of a unit, in the type
// Config.GradComm. It is all zero: an expert without rows and an embedding of
// which few rows were used have nothing to write, and padding is reduced with
// the rest. A unit may have gradients several times in a step, also of several
// microbatches; they are added up in the order of Done. The error is as of Use.
func (s Step) Grad(unit int, on device.Stream) (Grad, error) {
	p := s.must()
	if p.err != nil {
		return Grad{}, p.err
	}
	if p.now.key.Phase != Train {
		panic("fsdp: gradients in a step that is no training; give Begin a key for one")
	}
	t, l := &p.now.grads, p.lane(on)
	i, err := t.begin(unit, p.now.key)
	if err != nil {
		return Grad{}, p.fail(err)
	}
	if !t.frozen {
		if err := p.record(t, i, unit); err != nil {
			return Grad{}, p.fail(err)
		}
	}
	if t.leases[i], err = t.pool.get(i, l); err != nil {
		return Grad{}, p.fail(err)
	}
	for b := range p.layout.blocks[unit] {
		l.Stream.Fill(t.leases[i].bucket(b), 0)
	}
	return Grad{s, l, t.leases[i], unit, i}, nil
}

// Param is the memory of a parameter's gradient.
func (g Grad) Param(i int) device.Range {
	p := g.step.must()
	return p.layout.param(g.lease, g.unit, i, p.cfg.GradComm)
}

// Done says that the gradients' work has been issued: they are reduced over the
// ranks of each group, and this rank's part is added to the main gradients.
func (g Grad) Done() {
	p := g.step.must()
	g.lease.must()
	t := &p.now.grads
	g.lane.Record(t.ready[g.use])
	p.out.After(t.ready[g.use])
	p.out.Flush()
	for b, k := range p.layout.blocks[g.unit] {
		// The reduction leaves this rank's part in its place.
		to, all, n := p.cfg.Groups[k.group], g.lease.bucket(b), device.Bytes(k.shard*p.cfg.GradComm.Size)
		part := all.Slice(n*device.Bytes(to.Comm.Rank()), n)
		to.Comm.ReduceScatter(p.out.Stream, part, all, reduced(p.cfg.GradComm), to.Op)
		p.shards.add(p.out.Stream, p.shards.of[g.unit][b].Grads, part, &p.cfg)
	}
	g.lease.put(p.out)
	if err := t.end(g.unit, p.now.key); err != nil && p.err == nil {
		_ = p.fail(err)
	}
}

// End ends the step: what is issued on its stream from now on comes after all of
// it. The first step under a key makes the plans that later ones follow; an
// error then says what they lack. A step that could not go on, or that ends in
// the middle, returns why, and leaves the order of its key as it was.
func (s Step) End() error {
	p, g := s.must(), s.p.now
	for _, l := range p.lanes.Lanes() {
		p.main.Join(l)
	}
	p.main.Flush()
	p.lanes.Settle() // the next step comes after main, or after its replays
	p.open, p.now = false, nil
	for _, t := range []*track{&g.params, &g.grads} {
		if err := t.whole(g.key); err != nil && p.err == nil {
			_ = p.fail(err)
		}
	}
	for _, x := range p.cfg.Groups {
		if err := x.Comm.Err(); err != nil {
			_ = p.fail(err)
		}
	}
	if p.err != nil {
		return p.abandon(g)
	}
	if g.params.frozen {
		g.params.rewind()
		g.grads.rewind()
		return nil
	}
	return p.keep(g)
}

// abandon puts the pools in order after a step that could not go on. The host
// waits, because what still holds memory has no mark at its end.
func (p *Pipeline) abandon(g *program) error {
	if err := p.lanes.Sync(); err != nil {
		p.err = fmt.Errorf("%w; and then: %w", p.err, err)
	}
	for _, t := range []*track{&g.params, &g.grads} {
		t.pool.reset(p.main.Stream)
		t.rewind()
	}
	if !g.params.frozen {
		p.drop(g)
	}
	return p.err
}
