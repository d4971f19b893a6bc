// This file owns steps: they gather parameters ahead of their use and reduce gradients
// behind it.

package fsdp

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/memory"
)

// Step is one step of a pipeline. Its life cycle:
//
//  1. open: Begin returned it. Use and Grad lease memory, and Done ends a lease.
//  2. over: End was called. Using the step, or a lease of it, panics.
//
// The first step under a key gathers on demand and records the order of its uses. Later
// steps follow that order and gather ahead; they allocate nothing. A step that follows
// may be captured, together with the optimiser. One capture serves all ranks: the
// streams of the other ranks join it by an event.
type Step struct {
	p      *Pipeline
	serial uint64
}

// Begin opens a step. Work issued on the stream before Begin, such as the optimiser,
// comes before the step, and work issued after End comes after it. If a step uses
// another stream than the step before, the caller must make that stream wait for the
// earlier one. Begin sets the main gradients to zero if the key's phase is Train. It
// panics inside a step.
func (p *Pipeline) Begin(key memory.Key, s device.Stream) Step {
	p.mustBeBetweenSteps("Begin")
	g := p.programs[key]
	if g == nil {
		g = p.newProgram(key)
	}
	p.now, p.open, p.err, p.main = g, true, nil, p.lanes.Lane(s)
	p.serial++
	p.main.Record(p.begun)
	if key.Phase == memory.Train {
		p.out.After(p.begun)
		p.out.Flush()
		p.out.Stream.Fill(p.shards.grads.All(), 0)
		p.out.Record(p.zeroed)
	}
	return Step{p, p.serial}
}

// mustBeOpen returns the pipeline of a step. It panics if the step has ended.
func (s Step) mustBeOpen() *Pipeline {
	if !s.p.open || s.p.serial != s.serial {
		panic("fsdp: a step is used after its end; begin another step")
	}
	return s.p
}

// fail records why the step cannot go on and returns that error.
func (p *Pipeline) fail(err error) error {
	if p.err == nil {
		p.err = fmt.Errorf("fsdp: rank %d: %w", p.cfg.Rank, err)
	}
	return p.err
}

// Use is the gathered parameters of a unit, for work on one stream. Done ends it.
type Use struct {
	step  Step
	lane  *order.Lane
	lease lease
	unit  int
}

// Use gives a stream the parameters of a unit. Work issued on the stream from now on may
// read them. Use returns an error if the step departs from its recorded order or memory
// runs out. The step cannot go on then; call End.
func (s Step) Use(unit int, on device.Stream) (Use, error) {
	p := s.mustBeOpen()
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
	} else if t.leases[i], err = t.pool.acquire(i, l); err != nil { // ordered after the use before
		return Use{}, p.fail(err)
	}
	return Use{s, l, t.leases[i], unit}, nil
}

// lane returns the lane of a stream that begins to work in the step.
func (p *Pipeline) lane(s device.Stream) *order.Lane {
	l := p.lanes.Lane(s)
	l.After(p.begun)
	return l
}

// gather issues the gather of a use, ordered after the uses that had its bytes before.
func (p *Pipeline) gather(t *track, use int) error {
	p.in.After(p.begun)
	lease, err := t.pool.acquire(use, p.in)
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

// Param returns the memory of parameter i of the unit.
func (u Use) Param(i int) device.Range {
	l := u.step.mustBeOpen().layout
	return l.param(u.lease, u.unit, i, l.units[u.unit].Params[i].Type)
}

// param returns the memory of a parameter in the buckets of a lease.
func (l *layout) param(x lease, unit, i int, t bucket.Type) device.Range {
	at, n := l.spots[unit][i], l.units[unit].Params[i].Elements()
	return x.bucket(at.block).Slice(memory.Bytes(at.first)*t.Size, memory.Bytes(n)*t.Size)
}

// Done ends the use. All work with the parameters must have been issued.
func (u Use) Done() {
	p := u.step.mustBeOpen()
	u.lease.release(u.lane)
	if err := p.now.params.end(u.unit, p.now.key); err != nil && p.err == nil {
		_ = p.fail(err)
	}
}

// Grad is memory for the gradients of a unit, written by work on one stream. Done ends
// it.
type Grad struct {
	step  Step
	lane  *order.Lane
	lease lease
	unit  int
	use   int
}

// Grad gives a stream memory for the gradients of a unit, in the type Config.GradComm.
// The memory is filled with zeros: an expert without rows writes nothing, an embedding
// writes few rows, and padding is reduced with the rest. A unit may have gradients
// several times in a step. They are added up in the order of the calls of Done. Grad
// returns an error in the cases in which Use does. It panics if the key's phase is not
// Train.
func (s Step) Grad(unit int, on device.Stream) (Grad, error) {
	p := s.mustBeOpen()
	if p.err != nil {
		return Grad{}, p.err
	}
	if p.now.key.Phase != memory.Train {
		panic("fsdp: Grad is called in a step that does not train; give Begin a key with the phase Train")
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
	if t.leases[i], err = t.pool.acquire(i, l); err != nil {
		return Grad{}, p.fail(err)
	}
	for b := range p.layout.blocks[unit] {
		l.Stream.Fill(t.leases[i].bucket(b), 0)
	}
	return Grad{s, l, t.leases[i], unit, i}, nil
}

// Param returns the memory of the gradient of parameter i of the unit.
func (g Grad) Param(i int) device.Range {
	p := g.step.mustBeOpen()
	return p.layout.param(g.lease, g.unit, i, p.cfg.GradComm)
}

// Done ends the gradients. All work that writes them must have been issued. Done reduces
// them over the ranks of each group and adds this rank's part to the main gradients.
func (g Grad) Done() {
	p := g.step.mustBeOpen()
	t := &p.now.grads
	g.lane.Record(t.ready[g.use])
	p.out.After(t.ready[g.use])
	p.out.Flush()
	for b, k := range p.layout.blocks[g.unit] {
		// The reduction writes this rank's part in place.
		to, all, n := p.cfg.Groups[k.group], g.lease.bucket(b), memory.Bytes(k.shard)*p.cfg.GradComm.Size
		part := all.Slice(n*memory.Bytes(to.Comm.Rank()), n)
		to.Comm.ReduceScatter(p.out.Stream, part, all, commType(p.cfg.GradComm), to.Op)
		p.shards.add(p.out.Stream, p.shards.of[g.unit][b].Grads, part, &p.cfg)
	}
	g.lease.release(p.out)
	if err := t.end(g.unit, p.now.key); err != nil && p.err == nil {
		_ = p.fail(err)
	}
}

// End ends the step. Work issued on its stream from now on comes after all of it. The
// first step under a key plans the pools that later steps use; End returns an error if
// that fails. End also returns an error if the step failed or ended before its recorded
// order did. The order of the key stays as it was then.
func (s Step) End() error {
	p, g := s.mustBeOpen(), s.p.now
	for _, l := range p.lanes.Lanes() {
		p.main.Join(l)
	}
	p.main.Flush()
	p.lanes.Settle() // the next step is ordered after main, or after its replays
	p.open, p.now = false, nil
	for _, t := range []*track{&g.params, &g.grads} {
		if err := t.checkComplete(g.key); err != nil && p.err == nil {
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
	return p.planProgram(g)
}

// abandon makes the pools idle after a step that failed. The host waits for the device,
// because uses that still hold memory have no mark at their end.
func (p *Pipeline) abandon(g *program) error {
	if err := p.lanes.Sync(); err != nil {
		p.err = fmt.Errorf("%w; then the device failed: %w", p.err, err)
	}
	for _, t := range []*track{&g.params, &g.grads} {
		t.pool.reset(p.main.Stream)
		t.rewind()
	}
	if !g.params.frozen {
		p.dropProgram(g)
	}
	return p.err
}
