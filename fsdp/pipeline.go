// Package fsdp shards the parameters of a model over ranks (ZeRO-3) and gathers
// them unit by unit, through pools whose addresses never change.
//
// Each rank keeps a shard of every bucket. A step gathers a unit's parameters
// ahead of its use and releases them after it; gradients are reduced and
// scattered behind. Both happen on streams of their own, ordered by events: the
// host waits for nothing inside of a step, and a pool that is full makes streams
// wait, not fail.
//
// This file owns the pipeline; step.go steps, track.go the order of their uses,
// pool.go the pools, layout.go what lies where, shard.go what a rank keeps.
package fsdp

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/stowage-dev/stowage/bucket"
	"github.com/stowage-dev/stowage/comm"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
)

// Group is the ranks among which parameters are sharded.
type Group struct {
	Name string    // "dense", "experts"
	Comm comm.Comm // this rank's end of it; the caller closes it
	Op   comm.Op   // what becomes of the ranks' gradients
}

// Config configures a pipeline. Units, their parameters' shapes and all settings
// are the same on every rank of a group.
type Config struct {
	Rank   int // in errors
	Groups []Group
	// Units are in the order of a forward pass; the pools begin with room for it.
	Units []Unit
	// Pool is the kind of both pools, and Fallback how those with slots serve
	// what has none. Dynamic memory cannot be captured, nor used after a freeze.
	Pool     bucket.Kind
	Fallback bucket.Fallback
	// Prefetch is how many uses of units are gathered ahead of the present one,
	// and Behind how many units' gradients may wait for their reduction.
	Prefetch, Behind int
	// GradComm is the type in which gradients are written, reduced and scattered;
	// the pool of gradients follows from it. MainGrads is the type in which they
	// are added up. Both must be given: BF16 or FP32.
	GradComm, MainGrads bucket.Type
	// Log takes a warning where a bucket changes its place; nil is silent.
	Log *slog.Logger
}

func (c *Config) owner(what string) string { return fmt.Sprintf("rank %d %s", c.Rank, what) }

// Pipeline is one rank's end of a sharded model. One goroutine drives it. Streams
// that the caller gives it stay open until it is closed.
//
// The memory of the pools is reserved when the pipeline is made, and as much of
// it taken as a plain step needs: all units forward, then back. What the
// recorded order of a key needs more is added in place, so that addresses hold
// for ever and a frozen device is no obstacle.
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
	begun  *order.Mark // by the step's stream
	zeroed *order.Mark // the main gradients, at the beginning of a step

	programs map[Key]*program
	now      *program
	main     *order.Lane // of the step
	serial   uint64
	open     bool
	err      error // why the step cannot go on
}

// region is the memory of all programs' pools of one kind.
type region struct {
	buf  *device.Buffer // nil where all is dynamic
	spec bucket.Spec    // without an order
	name string
}

// New makes a rank's pipeline: it takes the memory of its shards, all zero, and
// of its pools.
func New(dev device.Device, cfg Config) (*Pipeline, error) {
	if !known(cfg.GradComm) || !known(cfg.MainGrads) {
		return nil, fmt.Errorf("fsdp: gradients are communicated as %q and added up as %q; write fsdp.BF16 or fsdp.FP32 for Config.GradComm and Config.MainGrads", cfg.GradComm.Name, cfg.MainGrads.Name)
	}
	if cfg.Pool == bucket.Max && (cfg.Prefetch == 0 || cfg.Behind == 0) {
		return nil, fmt.Errorf("fsdp: the max pool is a double buffer and Prefetch is %d, Behind %d; write Prefetch: 1 and Behind: 1, or choose another pool", cfg.Prefetch, cfg.Behind)
	}
	for i, g := range cfg.Groups {
		if g.Comm == nil || g.Op > comm.Mean {
			return nil, fmt.Errorf("fsdp: group %d, %q, needs a communicator and comm.Sum or comm.Mean", i, g.Name)
		}
	}
	l, err := newLayout(cfg.Units, cfg.Groups)
	if err != nil {
		return nil, err
	}
	if l.elements == 0 {
		return nil, errors.New("fsdp: Config.Units has no parameters; there is nothing to shard")
	}
	p := &Pipeline{dev: dev, cfg: cfg, layout: l, lanes: newLanes(dev), programs: map[Key]*program{}}
	if err := p.take(); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// take takes what the pipeline needs of the device.
func (p *Pipeline) take() error {
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
	if err := p.shards.take(p.dev, p.layout, &p.cfg); err != nil {
		return err
	}
	p.shards.zero(p.in.Stream)
	if err := p.in.Stream.Sync(); err != nil {
		return err
	}
	p.params = region{name: p.cfg.owner("gathered parameters"), spec: p.layout.spec(nil)}
	p.params.spec.Prefetch = p.cfg.Prefetch
	p.grads = region{name: p.cfg.owner("gradients"), spec: p.layout.spec(&p.cfg.GradComm)}
	p.grads.spec.Behind = p.cfg.Behind
	forward, back := p.plain()
	if err := p.reserve(&p.params, append(forward, back...)); err != nil {
		return err
	}
	return p.reserve(&p.grads, back)
}

// plain is the order of a step that goes once through all units and back.
func (p *Pipeline) plain() (forward, back []bucket.Event) {
	for u := range p.layout.units {
		forward = append(forward, bucket.Event{Unit: u}, bucket.Event{Unit: u, Release: true})
		last := len(p.layout.units) - 1 - u
		back = append(back, bucket.Event{Unit: last}, bucket.Event{Unit: last, Release: true})
	}
	return forward, back
}

// reserve makes a region with room for an order.
func (p *Pipeline) reserve(r *region, order []bucket.Event) error {
	plan, err := p.plan(r, order)
	if err != nil || plan.Kind == bucket.Dynamic {
		return err
	}
	if r.buf, err = p.dev.Reserve(device.Accel, p.dev.Info().Capacity[device.Accel], r.name); err != nil {
		return fmt.Errorf("fsdp: %s: %w", r.name, err)
	}
	return p.grow(r, plan)
}

func (p *Pipeline) plan(r *region, order []bucket.Event) (*bucket.Plan, error) {
	spec := r.spec
	spec.Order = order
	plan, err := bucket.New(p.cfg.Pool, spec, bucket.Options{Fallback: p.cfg.Fallback, Memory: int64(p.dev.Info().Capacity[device.Accel])})
	if err != nil {
		return nil, fmt.Errorf("fsdp: %s: %w", r.name, err)
	}
	return plan, nil
}

// grow makes room for a plan.
func (p *Pipeline) grow(r *region, plan *bucket.Plan) error {
	if r.buf == nil {
		return nil
	}
	err := p.dev.Grow(r.buf, device.Bytes(plan.Bytes-plan.Dynamic))
	var oom *device.OutOfMemory
	if errors.As(err, &oom) {
		return fmt.Errorf("fsdp: the %s pool %q takes %v and no pool of this order less than %v; lower Prefetch or Behind, choose another pool, or shard over more ranks: %w",
			plan.Kind, r.name, device.Bytes(plan.Bytes), device.Bytes(plan.LowerBound), err)
	}
	return err
}

// between panics inside of a step.
func (p *Pipeline) between(what string) {
	if p.open {
		panic("fsdp: " + what + " inside of a step; call it after End")
	}
}

// Close waits for the work of all streams that the pipeline knows, also in the
// middle of a step, and frees its memory.
func (p *Pipeline) Close() error {
	first := p.lanes.Sync()
	p.open = false
	if p.in == nil {
		return first
	}
	s := p.in.Stream
	if p.now != nil { // a step that is not over, perhaps of a key without a program
		p.programs[p.now.key] = p.now
	}
	for _, g := range p.programs {
		g.params.pool.reset(s)
		g.grads.pool.reset(s)
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
