// Package stowage decides where every saved activation of a training step lives:
// in device memory, in pages, in pinned host memory, or nowhere until it is
// computed again. A training loop opens a [Runtime] on its device and compute
// stream, runs its steps through it, and saves and loads its tensors by the names
// of their groups. The runtime records the first step, chooses under a budget (or
// takes the choices it is given), and from then on moves what has to move on
// streams of its own, while compute goes on.
//
// Results do not depend on any of it: with the same inputs, a step computes the
// same bits whatever the policy.
//
// This file owns the configuration and the runtime, step.go what a step may do,
// group.go groups and their tensors, learn.go how a recorded step becomes a plan,
// scope.go captured scopes, links.go the measurement of links, summary.go the
// table of what happened, events.go the trace of it.
package stowage

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"github.com/stowage-dev/stowage/capture"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/offload"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/stash"
	"github.com/stowage-dev/stowage/trace"
)

// GroupID names the saved tensors of one module of one layer of one microbatch.
type GroupID = schedule.Group

// Key tells plans apart: a plan holds for one phase, number of microbatches and
// shape of the inputs. A step under another key never disturbs it.
type Key = stash.Key

// Phases of a step. In one that evaluates nothing is saved.
const (
	Train    = stash.Train
	Evaluate = stash.Evaluate
)

// Config configures a runtime. Device and Compute are needed; everything else may
// be left out: then everything stays on the device.
type Config struct {
	Device  device.Device
	Compute device.Stream // on which the training loop issues its work

	// Budget is the device memory that saved activations, workspaces and pages may
	// take together; zero is no budget. The runtime chooses what to do about it, or,
	// with Policy or ByHand beside it, moves what finds no room under those choices.
	Budget device.Bytes
	// Host is the pinned memory that may be used; zero stands for all there is.
	Host device.Bytes
	// Policy and ByHand are choices made by the user, exact ones or the field's
	// settings; give at most one of them. ByHand begins with policy.Defaults(): in a
	// zero ByHand the fraction that leaves is 0. It takes the names of modules that
	// the field has; groups with other names are for Policy. What is to be
	// recomputed must go through Step.Run, or it is kept.
	Policy policy.Policy
	ByHand *policy.ByHand
	// Names are choices by the names of groups, whatever those are: keep or offload.
	Names map[string]policy.Choice
	// NoRecompute and NoOffload keep the solver from either. The recorded step moves
	// what it must all the same: its choices are not made yet.
	NoRecompute, NoOffload bool

	// Scopes are captured as graphs after WarmUp eager steps; zero stands for two, of
	// which the second takes times that no loading of code disturbs.
	// Places says in which scope groups lie that the field has no name for.
	Scopes capture.Set
	WarmUp int
	Places map[string]capture.Scope

	// Stash configures the paged store for groups whose rows are counted on the
	// device; nil is none. Its Rank, Reduce and Log are those below.
	Stash *stash.ManagerConfig

	// Lend is for loops whose memory is somebody else's: it lends memory for a storage
	// that was borrowed, when that comes back. Steps take no device memory of their own
	// then; a budget limits what is borrowed at a time, as far as storages can leave.
	Lend func(*offload.Storage) (device.Range, error)

	// Links are the rates between device and host; zero has Open measure them if
	// anything may be moved.
	Links policy.Links
	// Window is how many copies out may be under way before the memory they free is
	// taken; zero stands for the default.
	Window int
	// Least is the size below which a storage never leaves.
	Least device.Bytes

	Rank   int // in messages, summaries and traces
	Stage  int // of the pipeline, for amounts that differ by its ranks
	Reduce func(stash.Verdict) (stash.Verdict, error)
	Log    *slog.Logger // nil is silent
	Trace  trace.Sink   // nil is none
}

// Runtime is the memory of one rank's training loop. One goroutine drives it.
type Runtime struct {
	cfg     Config
	off     *offload.Manager // made by the first step
	stash   *stash.Manager   // nil without one
	scopes  *capture.Scopes
	report  *capture.Report
	links   policy.Links
	keys    map[Key]*learned
	gen     int // of plans
	step    *Step
	closed  bool
	events  tracer
	outputs *[]*Tensor           // of the scope under way
	scope   *capture.Key         // that it is, or nil
	redone  map[capture.Key]bool // captured forward passes with groups to recompute
	stamps  []device.Event       // of a recorded step
	stamped int
}

// Open makes a runtime. Bad settings are refused here, with what to change.
func Open(cfg Config) (*Runtime, error) {
	if cfg.Device == nil || cfg.Compute == nil {
		return nil, errors.New("stowage: give a Device and the Compute stream that the training loop works on")
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.WarmUp = cmp.Or(cfg.WarmUp, 2)
	r := &Runtime{cfg: cfg, links: cfg.Links, keys: map[Key]*learned{}, redone: map[capture.Key]bool{}, events: tracer{sink: cfg.Trace, rank: cfg.Rank, compute: cfg.Compute, whole: cfg.Scopes.Has(capture.FullIteration)}}
	if err := r.check(); err != nil {
		return nil, err
	}
	if err := r.make(); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// check refuses settings that contradict each other.
func (r *Runtime) check() error {
	c := &r.cfg
	switch {
	case c.Budget < 0 || c.Host < 0 || c.Window < 0 || c.WarmUp < 0:
		return fmt.Errorf("stowage: a budget of %d bytes, %d bytes of host memory, a window of %d copies and %d warm-up steps; none may be negative",
			int64(c.Budget), int64(c.Host), c.Window, c.WarmUp)
	case c.Policy != nil && c.ByHand != nil, c.Names != nil && r.byUnit():
		return errors.New("stowage: Policy, ByHand and Names all make the choices; give one of them")
	case c.Lend != nil && (c.Stash != nil || c.Scopes != 0):
		return errors.New("stowage: with Lend the caller keeps rows in pages and captures graphs; leave Stash and Scopes out")
	}
	for name, x := range c.Names {
		if x != policy.Keep && x != policy.Offload {
			return fmt.Errorf("stowage: %s of %s by name; choose keep or offload", x, name)
		}
	}
	if c.ByHand != nil {
		if err := c.ByHand.Check(slices.Sorted(maps.Keys(c.Places))...); err != nil {
			return err
		}
	}
	// A policy may give units of one name several choices: each must be possible.
	for c := policy.Keep; c <= policy.Recompute; c++ {
		if err := r.detect(r.given(c)); err != nil {
			return err
		}
	}
	return nil
}

// given are the choices that are known before a step was recorded, by name; where
// they differ under one name, the one that is asked for counts.
func (r *Runtime) given(which policy.Choice) map[string]capture.Choice {
	choices := map[string]capture.Choice{}
	for u, c := range r.cfg.Policy {
		if have := choices[u.Name]; have != capture.Choice(which) {
			choices[u.Name] = max(have, capture.Choice(c))
		}
		if c == which && c != policy.Keep {
			choices[u.Name] = capture.Choice(c)
		}
	}
	for name, x := range r.cfg.Names {
		choices[name] = capture.Choice(x)
	}
	if h := r.cfg.ByHand; h != nil {
		for _, m := range h.OffloadModules {
			choices[m] = capture.Offload
		}
		for _, m := range h.RecomputeModules {
			choices[m] = capture.Recompute
		}
		for _, m := range h.StashModules {
			choices[m] = capture.Stash
		}
	}
	return choices
}

// detect finds what captured scopes mean for choices, and refuses what cannot be.
func (r *Runtime) detect(choices map[string]capture.Choice) error {
	s := capture.Settings{Choices: choices, WarmUp: r.cfg.WarmUp}
	if h := r.cfg.ByHand; h != nil {
		s.Delay = h.Delay
	}
	for name, scope := range r.cfg.Places {
		if err := s.Place(name, scope); err != nil {
			return err
		}
	}
	r.report = capture.Detect(r.cfg.Scopes, s)
	return r.report.Err()
}

func (r *Runtime) make() (err error) {
	c := &r.cfg
	if c.Stash != nil {
		s := *c.Stash
		s.Rank, s.Reduce, s.Log = c.Rank, c.Reduce, c.Log
		if c.Trace != nil {
			s.Emit = r.emit
		}
		if r.stash, err = stash.NewManager(c.Device, c.Compute, s); err != nil {
			return err
		}
	}
	if r.moves() && r.links == (policy.Links{}) {
		if r.links, err = MeasureLinks(c.Device); err != nil {
			return fmt.Errorf("stowage: measuring the links to host memory: %w", err)
		}
	}
	if c.Scopes == 0 {
		return nil
	}
	var rec capture.Recorder = scopeRecorder{r}
	if c.Scopes.Has(capture.FullIteration) {
		rec = capture.OnStream(c.Compute)
	}
	r.scopes = capture.New(rec, capture.Config{WarmUp: c.WarmUp, Log: c.Log, Emit: r.emit, Generation: r.generation})
	return nil
}

// moves tells whether anything may leave the device.
func (r *Runtime) moves() bool {
	return r.cfg.Budget > 0 || len(r.cfg.Policy) > 0 || len(r.cfg.Names) > 0 || r.cfg.ByHand != nil
}

// generation changes when graphs captured before must not be replayed.
func (r *Runtime) generation() int {
	if r.stash == nil {
		return r.gen
	}
	return r.gen + r.stash.Generation()
}

// start makes the manager of saved tensors, which gets what the budget leaves
// beside workspaces and pages.
func (r *Runtime) start() (err error) {
	if r.off != nil {
		return nil
	}
	c := offload.Config{Host: r.cfg.Host, Window: r.cfg.Window, Least: r.cfg.Least, Rank: r.cfg.Rank, Lend: r.cfg.Lend}
	if r.cfg.Trace != nil {
		c.Trace = &r.events
	}
	if r.cfg.Budget > 0 {
		if c.Device = r.cfg.Budget - r.base(); c.Device <= 0 {
			return fmt.Errorf("stowage: rank %d: workspaces and pages may take %v of a budget of %v; raise the budget, or give the stash less", r.cfg.Rank, r.base(), r.cfg.Budget)
		}
	}
	if h := r.cfg.ByHand; h != nil {
		x := h.Config(residency.Config{})
		c.Cap, c.Least = x.Cap, device.Bytes(x.Least)
	}
	r.off, err = offload.New(r.cfg.Device, r.cfg.Compute, c)
	return err
}

// base is the device memory that counts against the budget beside saved tensors.
func (r *Runtime) base() device.Bytes {
	if r.stash == nil {
		return 0
	}
	return r.stash.Most()
}

// NewWorkspace makes sets of worst-case buffers for a group whose rows are counted
// on the device; they are stashed (see package stash). It is called before the
// first step.
func (r *Runtime) NewWorkspace(name string, sets int, limit stash.Rows, tensors ...stash.Tensor) (*stash.Workspace, error) {
	switch {
	case r.stash == nil:
		return nil, errors.New("stowage: a workspace needs a stash; set Config.Stash")
	case r.off != nil:
		panic("stowage: a workspace is made after the first step")
	}
	return r.stash.NewWorkspace(name, sets, limit, tensors...)
}

// Protect registers what a rerun of a step must find as it was.
func (r *Runtime) Protect(s stash.State) {
	if r.stash != nil { // without a stash no step is rerun
		r.stash.Protect(s)
	}
}

// Links are the rates that plans are made with.
func (r *Runtime) Links() policy.Links { return r.links }

// Scopes says what the captured scopes mean for the choices.
func (r *Runtime) Scopes() *capture.Report { return r.report }

// Close frees everything once the work issued is done. It is called once, and not
// inside of a step.
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
