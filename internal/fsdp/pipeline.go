// Package fsdp shards the parameters of a model over ranks (ZeRO-3). It gathers them
// one FSDP unit at a time, into pools whose addresses never change.
//
// Each rank keeps a shard of every bucket. A step gathers a unit's parameters ahead of
// their use and releases them after it. It reduces and scatters gradients while the
// next units compute. Both happen on streams of their own, ordered by events: the host
// waits for nothing inside a step, and streams wait if a pool is full.
//
// In this package, "unit" always means an FSDP unit.
//
// This file owns the pipeline, step.go steps, track.go the order of their uses, pool.go
// the pools, layout.go the layout of parameters, and shard.go what a rank keeps.
package fsdp

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/memory"
)

// RankGroup is a group of ranks that share parameters: each rank keeps one shard.
type RankGroup struct {
	Name string    // "dense", "experts"
	Comm comm.Comm // this rank's end of the group; the caller closes it
	Op   comm.Op   // how the ranks' gradients are combined: comm.Sum or comm.Mean
}

// Config configures a pipeline. Units, the shapes of their parameters and all settings
// must be the same on every rank of a group.
type Config struct {
	Rank   int // for errors and the names of memory
	Groups []RankGroup
	// Units are in the order of the forward pass. The pools are sized for that order
	// at first.
	Units []FSDPUnit
	// Pool is the kind of both pools. Fallback says where pools with slots place
	// units that have none. Dynamic memory cannot be captured, and cannot be
	// allocated after Device.Freeze.
	Pool     bucket.PoolKind
	Fallback bucket.Fallback
	// Prefetch is how many uses ahead of the present one a unit is gathered. Behind
	// is how many units' gradients may wait for their reduction.
	Prefetch, Behind int
	// GradComm is the type in which gradients are written, reduced and scattered, and
	// so the type of the gradients' pool. MainGrads is the type in which they are
	// accumulated. Both must be BF16 or FP32.
	GradComm, MainGrads bucket.Type
	// Log receives a message for debugging if a bucket changes its place. It may be nil.
	Log *slog.Logger
}

// owner returns the name that memory of this rank has in the ledger.
func (c *Config) owner(what string) string { return fmt.Sprintf("rank %d %s", c.Rank, what) }

// Pipeline is one rank's end of a sharded model. One goroutine drives it. The streams
// that the caller passes to it must stay open until it is closed.
//
// New reserves the addresses of the pools and allocates what a plain step needs: all
// units forward, then back. If the recorded order of a key needs more, the pipeline
// grows the pools in place. So addresses never change, and a frozen device can still
// record new keys.
type Pipeline struct {
	dev    device.Device
	cfg    Config
	layout *layout
	shards shards

	lanes  *lanes
	in     *order.Lane // gathers
	out    *order.Lane // reductions
	params region
	grads  region
	begun  *order.Mark // what precedes the step on its stream
	zeroed *order.Mark // the main gradients are zero
	forget []func()    // end what communicators were told of memory

	programs map[memory.Key]*program
	now      *program
	main     *order.Lane // of the step's stream
	serial   uint64
	open     bool
	err      error // why the step failed
}

// region is the memory that the pools of all programs share: one region for
// parameters, one for gradients.
type region struct {
	buf  *device.Buffer // nil if all memory is dynamic
	spec bucket.Spec    // without an order
	what string         // what lies in it
	name string         // its owner in the ledger
}

// New makes a rank's pipeline. It allocates the rank's shards, filled with zeros, and
// its pools. It returns an error if the configuration is invalid or memory runs out.
func New(dev device.Device, cfg Config) (*Pipeline, error) {
	if !supported(cfg.GradComm) || !supported(cfg.MainGrads) {
		return nil, fmt.Errorf("fsdp: expected fsdp.BF16 or fsdp.FP32 for Config.GradComm and Config.MainGrads, got %q and %q", cfg.GradComm.Name, cfg.MainGrads.Name)
	}
	if cfg.Pool == bucket.Max && (cfg.Prefetch == 0 || cfg.Behind == 0) {
		return nil, fmt.Errorf("fsdp: the max pool needs two buffers, but Prefetch is %d and Behind is %d; set both to at least 1, or choose another pool", cfg.Prefetch, cfg.Behind)
	}
	for i, g := range cfg.Groups {
		if g.Comm == nil || g.Op > comm.Mean {
			return nil, fmt.Errorf("fsdp: group %d of Config.Groups (%q) needs a communicator, and comm.Sum or comm.Mean as its operation", i, g.Name)
		}
	}
	l, err := newLayout(cfg.Units, cfg.Groups)
	if err != nil {
		return nil, err
	}
	if l.elements == 0 {
		return nil, errors.New("fsdp: Config.Units has no parameters; list at least one")
	}
	p := &Pipeline{dev: dev, cfg: cfg, layout: l, lanes: newLanes(dev), programs: map[memory.Key]*program{}}
	if err := p.allocate(); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// allocate makes the streams, marks, shards and pools of the pipeline.
func (p *Pipeline) allocate() error {
	for _, x := range []struct {
		l    **order.Lane
		name string
	}{{&p.in, "gather"}, {&p.out, "reduce"}} {
		s, err := p.dev.NewStream(x.name)
		if err != nil {
			return err
		}
		*x.l = p.lanes.Lane(s)
	}
	for _, k := range []**order.Mark{&p.begun, &p.zeroed} {
		var err error
		if *k, err = p.lanes.Mark(); err != nil {
			return err
		}
	}
	if err := p.shards.allocate(p.dev, p.layout, &p.cfg); err != nil {
		return err
	}
	p.shards.zero(p.in.Stream)
	if err := p.in.Stream.Sync(); err != nil {
		return err
	}
	p.params = region{what: "gathered parameters", name: p.cfg.owner("gathered parameters"), spec: p.layout.spec(nil)}
	p.params.spec.Prefetch = p.cfg.Prefetch
	p.grads = region{what: "gradients", name: p.cfg.owner("gradients"), spec: p.layout.spec(&p.cfg.GradComm)}
	p.grads.spec.Behind = p.cfg.Behind
	forward, back := p.plainOrder()
	if err := p.reserve(&p.params, append(forward, back...)); err != nil {
		return err
	}
	if err := p.reserve(&p.grads, back); err != nil {
		return err
	}
	p.register()
	return nil
}

// register tells communicators of what gathers read and write, which lies in the same places
// on all ranks. The gradients' pool is left out, because each rank's part of a sum is at another
// place in it; and so is what a pool grows by later, because ranks would wait for each other in a step.
func (p *Pipeline) register() {
	if p.params.buf == nil {
		return
	}
	all := []device.Range{p.params.buf.All()}
	if p.shards.params != nil {
		all = append(all, p.shards.params.All())
	}
	narrow := memory.Bytes(p.layout.narrow) * FP32.Size
	all = append(all, p.shards.weights.Slice(narrow, p.shards.weights.Size()-narrow))
	for _, r := range all {
		for _, g := range p.cfg.Groups {
			p.forget = append(p.forget, comm.Register(r, g.Comm))
		}
	}
}

// plainOrder returns the order of a step that uses all units forward and then back.
func (p *Pipeline) plainOrder() (forward, back []bucket.OrderEntry) {
	for u := range p.layout.units {
		forward = append(forward, bucket.OrderEntry{Unit: u}, bucket.OrderEntry{Unit: u, Release: true})
		last := len(p.layout.units) - 1 - u
		back = append(back, bucket.OrderEntry{Unit: last}, bucket.OrderEntry{Unit: last, Release: true})
	}
	return forward, back
}

// reserve reserves the addresses of a region and allocates what an order needs.
func (p *Pipeline) reserve(r *region, order []bucket.OrderEntry) error {
	plan, err := p.plan(r, order)
	if err != nil || plan.Kind == bucket.Dynamic {
		return err
	}
	if r.buf, err = p.dev.Reserve(memory.Device, p.dev.Info().Capacity[memory.Device], r.name); err != nil {
		return fmt.Errorf("fsdp: %s: %w", r.name, err)
	}
	return p.grow(r, plan)
}

// plan plans the pool of a region for an order.
func (p *Pipeline) plan(r *region, order []bucket.OrderEntry) (*bucket.PoolPlan, error) {
	spec := r.spec
	spec.Order = order
	plan, err := bucket.NewPoolPlan(p.cfg.Pool, spec, bucket.Options{Fallback: p.cfg.Fallback, Memory: p.dev.Info().Capacity[memory.Device]})
	if err != nil {
		return nil, fmt.Errorf("fsdp: %s: %w", r.name, err)
	}
	return plan, nil
}

// grow enlarges a region to the size of a plan.
func (p *Pipeline) grow(r *region, plan *bucket.PoolPlan) error {
	if r.buf == nil {
		return nil
	}
	err := p.dev.Grow(r.buf, plan.Bytes-plan.Dynamic)
	var oom *device.OutOfMemory
	if errors.As(err, &oom) {
		return fmt.Errorf("fsdp: the %s pool %q needs %v, and every pool for this order needs at least %v; lower Prefetch or Behind, choose another pool, or shard over more ranks: %w",
			plan.Kind, r.name, plan.Bytes, plan.LowerBound, err)
	}
	return err
}

// mustBeBetweenSteps panics inside a step.
func (p *Pipeline) mustBeBetweenSteps(what string) {
	if p.open {
		panic("fsdp: " + what + " is called inside a step; call it after End")
	}
}

// Close waits for all streams that the pipeline has seen and frees its memory. It may
// be called in the middle of a step.
func (p *Pipeline) Close() error {
	first := p.lanes.Sync()
	p.open = false
	if p.in == nil {
		return first
	}
	s := p.in.Stream
	if p.now != nil { // a step is under way, perhaps one that records its key
		p.programs[p.now.key] = p.now
	}
	for _, g := range p.programs {
		g.params.pool.reset(s)
		g.grads.pool.reset(s)
	}
	for _, forget := range p.forget {
		forget()
	}
	for _, r := range []region{p.params, p.grads} {
		if r.buf != nil {
			s.Free(r.buf)
		}
	}
	p.shards.free(s)
	if err := p.lanes.close(s); first == nil {
		first = err
	}
	for _, l := range []*order.Lane{p.in, p.out} {
		if l != nil {
			if err := l.Stream.Close(); first == nil {
				first = err
			}
		}
	}
	return first
}
