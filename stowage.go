// Package stowage decides where the saved tensors of a training step live: in device
// memory, in pages of a stash, in pinned host memory, or nowhere until they are
// computed again.
//
// A training loop opens a [Runtime] on its device and compute stream and runs every
// step through [Runtime.Step]. Inside of a step it names what it saves: a forward pass
// saves tensors in a [Group], and the backward pass loads the group by the same name.
//
//	rt, err := stowage.Open(stowage.Config{Device: dev, Compute: compute, Budget: 4 * memory.GiB})
//	if err != nil {
//		return err
//	}
//	defer rt.Close()
//	err = rt.Step(memory.Key{Microbatches: 1}, func(s *stowage.Step) error {
//		for layer := range layers {
//			if err := forward(s, layer); err != nil { // BeginGroup, New, Save, End
//				return err
//			}
//		}
//		for layer := layers - 1; layer >= 0; layer-- {
//			if err := backward(s, layer); err != nil { // Load, Done
//				return err
//			}
//		}
//		return nil
//	})
//
// The runtime records the first step under a [memory.Key]. It then chooses, for every
// module of every layer, whether to keep, stash, offload or recompute what the module
// saves, and later steps follow that plan. The choices come from one of four sources:
//
//   - Config.Budget: the solver finds the choices with the shortest predicted step that
//     fits into the budget.
//   - Config.Policy: the caller makes the choice for every unit.
//   - Config.ByHand: the caller uses the settings of Megatron-LM.
//   - Config.GroupChoices: the caller makes the choice for all groups of a name.
//
// Without any of them everything stays in device memory.
//
// Copies run on streams of the runtime's own while compute goes on. Results do not
// depend on the choices: with the same inputs, a step computes the same bits under
// every policy.
//
// The words that this documentation uses are defined in package
// [github.com/stowage-dev/stowage/memory].
//
// # Errors and panics
//
// Operating conditions are errors: a budget that no choice can meet
// (*[memory.BudgetError]), a stash that overflows although it cannot grow
// (*[OverflowError]), a device that fails. Mistakes of the calling program panic: a
// group that is loaded but was never saved, a tensor that is used after its step, a
// step inside of a step.
//
// A Runtime and everything that comes from it belong to one goroutine.
package stowage

import (
	"errors"
	"log/slog"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Config configures a [Runtime]. Device and Compute are required. A Config with
// nothing else keeps everything in device memory.
type Config struct {
	// Device is the device of this rank.
	Device device.Device
	// Compute is the stream on which the training loop issues its work.
	Compute device.Stream

	// Budget is the device memory that this rank may hold at its peak, whoever holds
	// it, as the device's ledger counts it. Zero means no budget. If Policy, ByHand or
	// GroupChoices is set too, the runtime follows those choices and evicts what still
	// does not fit.
	Budget memory.Bytes
	// SavedLimit limits the device memory of saved tensors, with the workspaces and pages
	// of their rows. Use it in place of Budget if the device's ledger does not count what
	// others hold. Zero means no limit.
	SavedLimit memory.Bytes
	// HostLimit is the pinned host memory that the runtime may use. Zero means all that
	// the device offers.
	HostLimit memory.Bytes

	// Policy makes the choice for every unit. At most one of Policy, ByHand and
	// GroupChoices may be set. A unit is recomputed only if its forward pass goes
	// through [Step.Run]; else it is kept.
	Policy memory.Policy
	// ByHand holds settings by module, as Megatron-LM has them. Begin with
	// [DefaultModuleSettings]: the zero value offloads nothing.
	ByHand *ModuleSettings
	// GroupChoices makes the choice, Keep or Offload, for all groups of a name. The names
	// may be any that the training loop uses.
	GroupChoices map[string]memory.Choice
	// NoOffload and NoRecompute forbid the solver these choices. The recorded step may
	// still offload what does not fit, because its choices are not made yet.
	NoOffload, NoRecompute bool

	// Scopes are the parts of a step that are captured as graphs.
	Scopes memory.Scopes
	// WarmUp is the number of steps that run eagerly before a capture. Zero means two:
	// the first loads code, so only the second shows how long a step takes.
	WarmUp int
	// GroupScopes says in which scope the groups of a name lie, for names that
	// [memory.Modules] does not have.
	GroupScopes map[string]memory.Scope

	// Stash configures the stash for rows that are counted on the device. Nil means no
	// stash; then [Runtime.NewWorkspace] returns an error.
	Stash *StashConfig

	// Links holds the rates between device and host memory. If it is zero and anything
	// may be offloaded, Open measures them with [MeasureLinks].
	Links memory.Links
	// Window is the number of offloads that may be under way before the runtime waits
	// for the memory that they free. Zero means the default.
	Window int
	// MinBytes is the size below which a storage is never offloaded.
	MinBytes memory.Bytes

	// Rank identifies this rank in errors, summaries and traces.
	Rank int
	// Stage is this rank's stage of the pipeline. ModuleSettings.DeltaBytes uses it.
	Stage int
	// Reduce combines the outcome of a step on this rank with those of all other ranks,
	// and returns the same outcome on each: [Outcome.Worse] of all. Ranks that train
	// together with a stash need it, so that all of them rerun the same steps. Nil means
	// a single rank.
	Reduce func(Outcome) (Outcome, error)

	// Log receives decisions and warnings. Nil means no log.
	Log *slog.Logger
	// Trace receives an event for everything that the runtime does. Nil means no trace.
	Trace trace.Sink
}

// engine returns the configuration of the engine.
func (c *Config) engine() engine.Config {
	e := engine.Config{
		Device: c.Device, Compute: c.Compute, Budget: c.Budget, SavedLimit: c.SavedLimit, HostLimit: c.HostLimit,
		Policy: c.Policy, GroupChoices: c.GroupChoices, NoOffload: c.NoOffload, NoRecompute: c.NoRecompute,
		Scopes: c.Scopes, WarmUp: c.WarmUp, GroupScopes: c.GroupScopes,
		Links: c.Links, Window: c.Window, MinBytes: c.MinBytes, Rank: c.Rank, Stage: c.Stage, Log: c.Log, Trace: c.Trace,
	}
	if c.ByHand != nil {
		h := c.ByHand.policy()
		e.ByHand = &h
	}
	if c.Stash != nil {
		e.Stash = c.Stash.manager()
	}
	if c.Reduce != nil {
		e.Reduce = reducer(c.Reduce)
	}
	return e
}

// Runtime manages the memory of one rank's training loop.
type Runtime struct{ rt *engine.Runtime }

// Open makes a runtime. It returns an error if settings are invalid or contradict each
// other, or if the device has no memory for the stash.
func Open(cfg Config) (*Runtime, error) {
	rt, err := engine.Open(cfg.engine())
	if err != nil {
		return nil, err
	}
	return &Runtime{rt}, nil
}

// Step runs one training step. Body issues all work of the step on the compute stream;
// Step returns body's error.
//
// The first step under a key is recorded. If the runtime chooses to recompute
// something, it records the second step too, because only that step shows what
// recomputing needs. Later steps follow the plan. If a later step saves or loads in
// another order, it still computes the same results, and the next step is recorded
// anew.
//
// If the scope [memory.FullIteration] is captured, Step calls body only for the warm-up
// and for the capture. Later steps replay the work that body issued then.
//
// With a stash a step is a transaction: if its rows overflow, the runtime restores the
// protected states (see [Runtime.Protect]), makes room and calls body again. Step
// returns an [*OverflowError] if there is no room to make.
func (r *Runtime) Step(key memory.Key, body func(*Step) error) error {
	err := r.rt.Step(key, func(s *engine.Step) error { return body(&Step{s}) })
	var over *stash.Overflow
	if errors.As(err, &over) {
		return &OverflowError{Rank: over.Rank, Problem: over.Why, Err: err}
	}
	return err
}

// Summary returns what the steps under a key did. It has no groups before the first
// step.
func (r *Runtime) Summary(key memory.Key) memory.Summary { return r.rt.Summary(key) }

// Links returns the rates that plans are made with.
func (r *Runtime) Links() memory.Links { return r.rt.Links() }

// CaptureReport returns, in lines of text, which groups the captured scopes hold, and
// which settings they switch off.
func (r *Runtime) CaptureReport() string { return r.rt.Scopes().String() }

// Held returns the device and host memory that the runtime holds for saved tensors. It
// keeps this memory from step to step.
func (r *Runtime) Held() (dev, host memory.Bytes) { return r.rt.Held() }

// Close waits for all work and frees what the runtime holds. It panics inside of a step
// and when it is called twice.
func (r *Runtime) Close() error { return r.rt.Close() }

// MeasureLinks copies between device and host memory, in each direction alone and in
// both at once, and returns the rates. It uses up to 64 MiB of each kind of memory while
// it measures.
func MeasureLinks(dev device.Device) (memory.Links, error) { return engine.MeasureLinks(dev) }

// Observe returns an observer that sends what the streams of a rank's device do, and
// who allocates memory, to a sink. Set it in the options that open the device.
func Observe(sink trace.Sink, rank int) device.Observer { return engine.Observe(sink, rank) }
