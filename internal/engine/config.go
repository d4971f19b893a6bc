// This file owns the configuration, its checks, and the choices that it makes.

package engine

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/capture"
	"github.com/stowage-dev/stowage/internal/offload"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Config configures a runtime. Device and Compute are required. A Config with nothing
// else keeps everything in device memory.
type Config struct {
	Device  device.Device
	Compute device.Stream // on which the training loop issues its work

	// Budget is the device memory that this rank may hold at its peak, whoever holds it,
	// as the device's ledger counts it. Zero means no budget. What others hold when the
	// first step begins counts, and so do workspaces, page tables and pages. With Policy,
	// ByHand or GroupChoices beside it the runtime follows those choices and evicts what
	// still finds no room.
	Budget memory.Bytes
	// SavedLimit limits the device memory of saved tensors, borrowed ones included, with
	// the workspaces and pages of their rows. Zero means no limit. Set at most one of
	// Budget and SavedLimit.
	SavedLimit memory.Bytes
	// HostLimit is the pinned host memory that the runtime may use. Zero means all that
	// the device offers.
	HostLimit memory.Bytes

	// Policy makes the choice for every unit, ByHand by the settings of Megatron-LM, and
	// GroupChoices, with Keep or Offload, for all groups of a name. At most one of them
	// may be set. Begin ByHand with policy.Defaults: the zero value offloads nothing. A
	// unit is recomputed only if its forward pass goes through Step.Run; else it is kept.
	Policy       memory.Policy
	ByHand       *policy.ByHand
	GroupChoices map[string]memory.Choice
	// NoRecompute and NoOffload forbid the solver these choices. The recorded step may
	// still offload what finds no room, because its choices are not made yet.
	NoRecompute, NoOffload bool
	// Effort is the part of its usual search that the solver may take. Zero means all, as far
	// as that can pay within a few steps.
	Effort float64

	// Scopes are captured as graphs after WarmUp eager steps. Zero means two, of which the
	// second is timed without the loading of code. GroupScopes says in which scope the
	// groups of a name lie that memory.Modules does not have.
	Scopes      memory.Scopes
	WarmUp      int
	GroupScopes map[string]memory.Scope

	// Stash configures the stash for rows that are counted on the device. Nil means no
	// stash. The runtime sets its Rank, Reduce and Log.
	Stash *stash.ManagerConfig

	// ProvideMemory returns memory that a borrowed storage is reloaded into. It is for
	// loops whose memory belongs to somebody else: steps then allocate no device memory
	// of their own, and SavedLimit limits what they borrow at once.
	ProvideMemory func(*offload.Storage) (device.Range, error)

	// Links holds the rates between device and host memory. If it is zero and anything may
	// be offloaded, Open measures them.
	Links memory.Links
	// Window is the number of offloads that may be under way before the runtime waits for
	// the memory that they free. Zero means the default.
	Window int
	// MinBytes is the size below which a storage is never offloaded.
	MinBytes memory.Bytes

	// Together captures scopes with the other ranks that take part in their work. Nil means
	// that this rank captures what it issues alone.
	Together Together

	Rank   int // in errors, summaries and traces
	Stage  int // of the pipeline; ByHand.DeltaBytes uses it
	Reduce func(stash.Outcome) (stash.Outcome, error)
	Log    *slog.Logger // nil means no log
	Trace  trace.Sink   // nil means no trace
}

// Together is what ranks need that capture a scope together.
type Together interface {
	// Shares reports whether other ranks take part in the work of a scope.
	Shares(scope memory.Scope) bool
	// Agree returns the least of what the ranks that share a scope would do next.
	Agree(scope memory.Scope, next capture.Next) (capture.Next, error)
	// Capture makes a graph of what the bodies of these ranks issue on their compute
	// streams, without executing it. An error is as [capture.Together] wants it.
	Capture(scope memory.Scope, s device.Stream, body func() error) (Graph, error)
}

// Graph is what Together captures.
type Graph = offload.Graph

// shares reports whether other ranks take part in the work of a scope.
func (c *Config) shares(scope memory.Scope) bool {
	return c.Together != nil && c.Together.Shares(scope)
}

// check returns an error if settings are invalid or contradict each other.
func (r *Runtime) check() error {
	c := &r.cfg
	if err := c.checkSigns(); err != nil {
		return err
	}
	switch {
	case c.Budget > 0 && (c.SavedLimit > 0 || c.ProvideMemory != nil):
		return &memory.SettingError{Setting: "Budget", Asked: c.Budget.String(), Problem: "cannot be combined with SavedLimit or ProvideMemory", Remedy: "set SavedLimit alone to limit saved tensors"}
	case c.Policy != nil && c.ByHand != nil, c.GroupChoices != nil && r.byUnit():
		return &memory.SettingError{Setting: "Policy", Problem: "cannot be combined with ByHand or GroupChoices, because each of them makes the choices", Remedy: "give one of them"}
	case c.ProvideMemory != nil && (c.Stash != nil || c.Scopes != 0):
		return &memory.SettingError{Setting: "ProvideMemory", Problem: "cannot be combined with Stash or Scopes: the caller of a loop with borrowed memory keeps rows in pages and captures graphs itself", Remedy: "leave Stash and Scopes out"}
	}
	for name, x := range c.GroupChoices {
		if x != memory.Keep && x != memory.Offload {
			return &memory.SettingError{Setting: "GroupChoices", Asked: fmt.Sprintf("%s of %s", x, name), Problem: "cannot be chosen for all groups of a name", Remedy: "choose keep or offload"}
		}
	}
	if c.ByHand != nil {
		if err := c.ByHand.Check(slices.Sorted(maps.Keys(c.GroupScopes))...); err != nil {
			return err
		}
	}
	if name := r.stashesByHand(); name != "" && c.Stash == nil {
		return noRows(name)
	}
	// A policy may give units of one name several choices: each must be possible.
	// The report describes all of them.
	for c := memory.Keep; c < memory.Choices; c++ {
		if err := r.detect(r.given(c)); err != nil {
			return err
		}
	}
	return nil
}

// given returns the choices that are known before a step is recorded, by name. If the
// choices for one name differ, which counts before the others.
func (r *Runtime) given(which memory.Choice) map[string]memory.Choice {
	choices := map[string]memory.Choice{}
	for u, c := range r.cfg.Policy {
		if have := choices[u.Name]; have != which {
			choices[u.Name] = max(have, c)
		}
		if c == which && c != memory.Keep {
			choices[u.Name] = c
		}
	}
	for name, x := range r.cfg.GroupChoices {
		choices[name] = x
	}
	if h := r.cfg.ByHand; h != nil {
		for _, m := range h.OffloadModules {
			choices[m] = memory.Offload
		}
		for _, m := range h.RecomputeModules {
			choices[m] = memory.Recompute
		}
		for _, m := range h.StashModules {
			choices[m] = memory.Stash
		}
	}
	return choices
}

// detect finds out what captured scopes mean for choices. It returns an error if they
// make a choice impossible. Its findings join those of earlier calls.
func (r *Runtime) detect(choices map[string]memory.Choice) error {
	s := capture.Settings{Choices: choices, WarmUp: r.cfg.WarmUp}
	if h := r.cfg.ByHand; h != nil {
		s.Delay = h.Delay
	}
	for name, scope := range r.cfg.GroupScopes {
		if err := s.Place(name, scope); err != nil {
			return err
		}
	}
	r.report = capture.Detect(r.cfg.Scopes, s).Join(r.report)
	return r.report.Err()
}

// checkSigns returns an error if a size or a number is negative.
func (c *Config) checkSigns() error {
	for _, x := range []struct {
		name string
		n    int64
	}{
		{"Budget", int64(c.Budget)}, {"SavedLimit", int64(c.SavedLimit)}, {"HostLimit", int64(c.HostLimit)},
		{"Window", int64(c.Window)}, {"WarmUp", int64(c.WarmUp)}, {"MinBytes", int64(c.MinBytes)},
	} {
		if x.n < 0 {
			return &memory.SettingError{Setting: x.name, Asked: fmt.Sprint(x.n), Problem: "must not be negative", Remedy: "leave it out for the default"}
		}
	}
	return nil
}

// choiceByName returns the user's choice for a group, before the first step is over.
func (r *Runtime) choiceByName(id memory.GroupID) memory.Choice {
	switch {
	case r.cfg.Policy != nil:
		return r.cfg.Policy[id.Unit()]
	case r.cfg.GroupChoices != nil:
		return r.cfg.GroupChoices[id.Name]
	}
	return r.given(memory.Keep)[id.Name]
}

// byName reports whether the user makes the choices.
func (r *Runtime) byName() bool { return r.byUnit() || r.cfg.GroupChoices != nil }

// byUnit reports whether the user makes the choices unit by unit.
func (r *Runtime) byUnit() bool { return r.cfg.ByHand != nil || r.cfg.Policy != nil }
