// This file owns the runtime: what lives from Open to Close.

package engine

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/capture"
	"github.com/stowage-dev/stowage/internal/offload"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// Runtime manages the memory of one rank's training loop. One goroutine drives it.
type Runtime struct {
	cfg     Config
	off     *offload.Manager // made by the first step
	stash   *stash.Manager   // nil without one
	scopes  *capture.Scopes
	report  *capture.Report
	links   memory.Links
	keys    map[memory.Key]*learned
	gen     int // of plans
	step    *Step
	closed  bool
	events  tracer
	outputs *[]*Tensor           // of the scope under way
	scope   *capture.Key         // that it is, or nil
	redone  map[capture.Key]bool // captured forward passes with groups to recompute
	states  []stash.State        // without a stash: what a rerun must find as it was
	stamps  []device.Event       // of a recorded step
	stamped int
}

// Open makes a runtime. It returns an error if settings are invalid, with what to change.
func Open(cfg Config) (*Runtime, error) {
	if cfg.Device == nil || cfg.Compute == nil {
		return nil, &memory.SettingError{Setting: "Device and Compute", Problem: "are required", Remedy: "give the device and the stream on which the training loop works"}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.WarmUp = cmp.Or(cfg.WarmUp, 2)
	r := &Runtime{cfg: cfg, links: cfg.Links, keys: map[memory.Key]*learned{}, redone: map[capture.Key]bool{}, events: tracer{sink: cfg.Trace, rank: cfg.Rank, compute: cfg.Compute, whole: cfg.Scopes.Has(memory.FullIteration)}}
	if err := r.check(); err != nil {
		return nil, err
	}
	if err := r.make(); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// make makes what lives as long as the runtime, except for the manager of saved tensors.
func (r *Runtime) make() (err error) {
	c := &r.cfg
	if c.Stash != nil {
		s := *c.Stash
		s.Rank, s.Reduce, s.Log = c.Rank, c.Reduce, c.Log
		if c.Trace != nil {
			s.Emit = r.emit
		}
		r.configureRows(&s)
		if r.stash, err = stash.NewManager(c.Device, c.Compute, s); err != nil {
			return err
		}
	}
	if r.moves() && r.links == (memory.Links{}) {
		if r.links, err = MeasureLinks(c.Device); err != nil {
			return fmt.Errorf("stowage: measuring the links to host memory: %w", err)
		}
	}
	if c.Scopes == 0 {
		return nil
	}
	var rec capture.Recorder = scopeRecorder{r}
	config := capture.Config{WarmUp: c.WarmUp, Log: c.Log, Emit: r.emit, Generation: r.generation}
	config.Agree = func(k capture.Key, next capture.Next) (capture.Next, error) {
		if !c.shares(k.Scope) {
			return next, nil
		}
		return c.Together.Agree(k.Scope, next)
	}
	switch whole := c.Scopes.Has(memory.FullIteration); {
	case whole && c.shares(memory.FullIteration):
		rec = capture.Together(func(body func() error) (capture.Captured, error) {
			return c.Together.Capture(memory.FullIteration, c.Compute, body)
		})
	case whole:
		rec = capture.OnStream(c.Compute)
	}
	r.scopes = capture.New(rec, config)
	return nil
}

// moves reports whether anything may be offloaded.
func (r *Runtime) moves() bool {
	return r.limit() > 0 || len(r.cfg.Policy) > 0 || len(r.cfg.GroupChoices) > 0 || r.cfg.ByHand != nil
}

// generation returns another number when graphs that were captured before must not be
// replayed.
func (r *Runtime) generation() int {
	if r.stash == nil {
		return r.gen
	}
	return r.gen + r.stash.Generation()
}

// start makes the manager of saved tensors before the first step. The manager gets what
// the budget leaves beside workspaces and pages.
func (r *Runtime) start() (err error) {
	if r.off != nil {
		return nil
	}
	c := offload.Config{Host: r.cfg.HostLimit, Window: r.cfg.Window, Least: r.cfg.MinBytes, Rank: r.cfg.Rank, ProvideMemory: r.cfg.ProvideMemory}
	if r.cfg.Trace != nil {
		c.Trace = &r.events
	}
	if err := r.checkRows(); err != nil {
		return err
	}
	if limit := r.limit(); limit > 0 {
		base := r.base() + r.undecidedPages()
		if c.Device = limit - base; c.Device <= 0 {
			return &memory.BudgetError{Rank: r.cfg.Rank, Budget: limit, Need: base + 1, Held: base}
		}
	}
	if h := r.cfg.ByHand; h != nil {
		x := h.Config(residency.Config{})
		c.Cap, c.Least = x.Cap, x.Least
	}
	r.off, err = offload.New(r.cfg.Device, r.cfg.Compute, c)
	return err
}

// base returns the device memory that counts beside activations and device pages of
// rows: workspaces as large as they may become, and under a budget what others hold
// now, and page tables.
func (r *Runtime) base() (n memory.Bytes) {
	if r.stash != nil {
		n, _ = r.stash.Most()
	}
	if r.cfg.Budget == 0 {
		return n
	}
	n += r.cfg.Device.Memory().Kind[memory.Device].Current
	held, _ := r.Held()
	n -= held
	if r.stash != nil {
		spaces, pages := r.stash.Held()
		n += r.stash.Unseen() - spaces - pages
	}
	return n
}

// NewWorkspace makes sets of worst-case buffers for groups whose rows are counted on the
// device: see package stash. It returns an error without a stash, and panics after the
// first step.
func (r *Runtime) NewWorkspace(name string, sets int, limit stash.Rows, tensors ...stash.Tensor) (*stash.Workspace, error) {
	switch {
	case r.stash == nil:
		return nil, &memory.SettingError{Setting: "Stash", Problem: "is required for a workspace", Remedy: "set Config.Stash"}
	case r.off != nil:
		panic("stowage: a workspace is made after the first step")
	}
	return r.stash.NewWorkspace(name, sets, limit, tensors...)
}

// Protect registers a state that a rerun of a step must find as it was.
func (r *Runtime) Protect(s stash.State) {
	if r.stash != nil {
		r.stash.Protect(s)
	} else {
		r.states = append(r.states, s)
	}
}

// Links returns the rates that plans are made with.
func (r *Runtime) Links() memory.Links { return r.links }

// Scopes returns what the captured scopes mean for the choices.
func (r *Runtime) Scopes() *capture.Report { return r.report }

// Close waits for the issued work and frees everything. It panics inside of a step and
// when it is called twice.
func (r *Runtime) Close() (err error) {
	if r.step != nil || r.closed {
		panic("stowage: Close inside of a step, or for the second time")
	}
	r.closed = true
	if r.scopes != nil {
		err = errors.Join(err, r.scopes.Close())
	}
	if r.off != nil {
		err = errors.Join(err, r.off.Close())
	}
	if r.stash != nil {
		err = errors.Join(err, r.stash.Close())
	}
	for _, e := range r.stamps {
		err = errors.Join(err, e.Close())
	}
	return err
}
