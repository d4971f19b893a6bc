// This file owns the errors of a run: those that the user can correct, and those of the
// machine.

package run

import (
	"errors"
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train"
)

// InputError reports that a run was refused because of what the user gave: a setting, a
// file or a budget. An error of the machine, such as a device without free memory, is no
// InputError.
type InputError struct{ Err error }

// Error returns the text of the cause.
func (e *InputError) Error() string { return e.Err.Error() }

// Unwrap returns the cause: often a *memory.SettingError, *memory.ModuleError or
// *memory.BudgetError.
func (e *InputError) Unwrap() error { return e.Err }

// PolicyError says under which policy of a comparison an error occurred.
type PolicyError struct {
	Policy string
	Err    error
}

// Error returns the policy followed by the error.
func (e *PolicyError) Error() string { return fmt.Sprintf("policy %s: %v", e.Policy, e.Err) }

// Unwrap returns the error.
func (e *PolicyError) Unwrap() error { return e.Err }

// InterruptedError reports that a run ended early because its context was cancelled.
// Folder is the folder that the run was saved to, or "" if it has none. A comparison is
// never saved: it leaves the folder as it was.
type InterruptedError struct {
	Folder     string
	Comparison bool
}

// Error says whether the run was saved.
func (e *InterruptedError) Error() string {
	switch {
	case e.Comparison:
		return "the comparison was interrupted and not saved"
	case e.Folder == "":
		return "the run was interrupted and not saved, because it has no folder"
	}
	return "the run was interrupted and saved in " + e.Folder
}

// isInput reports whether the user can correct an error.
func isInput(err error) bool {
	var e *InputError
	return errors.As(err, &e)
}

// refuse returns an InputError about a setting.
func refuse(setting, asked, problem, remedy string) error {
	return &InputError{&memory.SettingError{Setting: setting, Asked: asked, Problem: problem, Remedy: remedy}}
}

// blame returns an InputError that names the setting which caused an error.
func blame(setting string, err error) error {
	return &InputError{&memory.SettingError{Setting: setting, Err: err}}
}

// fromMachine reports whether an error says that the machine lacks something.
func fromMachine(err error) bool {
	var unsupported *device.Unsupported
	var full *device.OutOfMemory
	var driver *device.DriverError
	return errors.As(err, &unsupported) || errors.As(err, &full) || errors.As(err, &driver)
}

// beforeStart returns an error from before the first step. The user can correct all of
// them but those of the machine.
func beforeStart(err error) error {
	if fromMachine(err) || isInput(err) {
		return err
	}
	return &InputError{err}
}

// open opens a trainer.
func open(c train.Config) (*train.Trainer, error) {
	t, err := train.New(c)
	if err != nil {
		return nil, beforeStart(err)
	}
	return t, nil
}

// step runs a step under a budget, or under none if it is zero. fresh marks the first
// step of a trainer: groups get their names and budgets are first used there, so the
// user can correct what it refuses.
func step(t *train.Trainer, budget memory.Bytes, fresh bool) (train.Metrics, error) {
	m, err := t.Step()
	if err == nil {
		return m, checkFinite(m)
	}
	if err = checkBudget(err, budget); fresh {
		err = beforeStart(err)
	}
	return m, err
}

// checkFinite returns an error if training diverged. The trainer looks at the loss
// alone, which can stay finite for one step longer than the gradients.
func checkFinite(m train.Metrics) error {
	for _, x := range []float64{m.Loss, m.Aux, m.Norm} {
		if math.IsNaN(x) || math.IsInf(x, 0) {
			remedy := "start again with a lower learning rate"
			if m.Step == 0 { // no rate has changed anything yet
				remedy = "the first parameters are too large for this model, or the factor of the router loss"
			}
			return fmt.Errorf("training diverged in step %d: the loss is %.4g, the router loss %.4g, the gradient norm %.4g; %s", m.Step+1, m.Loss, m.Aux, m.Norm, remedy)
		}
	}
	return nil
}

// checkBudget returns the error of a step under a budget. If the budget was too small,
// the result is an InputError that names it.
func checkBudget(err error, budget memory.Bytes) error {
	if budget == 0 || fromMachine(err) {
		return err
	}
	var known *memory.BudgetError
	var full *residency.Full
	var over *stash.Overflow
	small := &memory.SettingError{Setting: "Budget", Asked: budget.Short(), Remedy: "raise it, or use smaller microbatches"}
	switch {
	case errors.As(err, &known):
		return &InputError{err}
	case errors.As(err, &full):
		small.Problem = fmt.Sprintf("is too small: %s do not fit in the %s that it leaves for activations, of which %s are in use and at most %s are free in one run",
			full.Asked.Short(), full.Limit.Short(), full.Live.Short(), full.Run.Short())
	case errors.As(err, &over):
		small.Problem = "is too small for the rows of experts: " + over.Why
	default:
		return err
	}
	return &InputError{sameRank(err, small)}
}

// sameRank wraps an error with the rank that another one names, if it does.
func sameRank(as, err error) error {
	var at *memory.RankError
	if errors.As(as, &at) {
		return memory.OnRank(at.Rank, err)
	}
	return err
}
