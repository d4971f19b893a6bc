// This file owns the errors that name a setting or a rank.

package memory

import (
	"errors"
	"fmt"
	"strings"
)

// SettingError reports a setting that cannot be used. Setting is the name of a field
// of the API, such as "OffloadModules"; a command translates it into the flag that
// the user typed.
type SettingError struct {
	Setting string
	Asked   string // what was given, or "" if nothing was
	Problem string // what is wrong with it
	Remedy  string // what to do
	// Err is the error that the setting caused, if that says problem and remedy. Problem
	// and Remedy are then not used.
	Err error
}

// Error returns the setting, the problem and the remedy as one sentence.
func (e *SettingError) Error() string { return e.Named(e.Setting) }

// Named returns what Error returns, with the setting under another name, such as that
// of a flag.
func (e *SettingError) Named(name string) string {
	switch {
	case e.Asked == "":
	case e.Asked == strings.Join(strings.Fields(e.Asked), " "):
		name += " " + e.Asked
	default: // blanks that would not be seen
		name += fmt.Sprintf(" %q", e.Asked)
	}
	switch {
	case e.Err != nil:
		return fmt.Sprintf("%s: %v", name, e.Err)
	case e.Remedy == "":
		return name + " " + e.Problem
	}
	return fmt.Sprintf("%s %s; %s", name, e.Problem, e.Remedy)
}

// Unwrap returns the error that the setting caused, or nil.
func (e *SettingError) Unwrap() error { return e.Err }

// RankError says which rank an error comes from.
type RankError struct {
	Rank int
	Err  error
}

// Error returns the rank followed by the error.
func (e *RankError) Error() string { return fmt.Sprintf("rank %d: %v", e.Rank, e.Err) }

// Unwrap returns the error of the rank.
func (e *RankError) Unwrap() error { return e.Err }

// OnRank wraps an error with its rank. It returns nil if err is nil, and err itself
// if it names a rank already.
func OnRank(rank int, err error) error {
	var known *RankError
	if err == nil || errors.As(err, &known) {
		return err
	}
	return &RankError{rank, err}
}

// BudgetError reports a budget that a step cannot keep to.
type BudgetError struct {
	Rank   int
	Budget Bytes
	Need   Bytes // the smallest budget that would do, as far as is known
	// Held is what the budget has to hold beside activations (weights, gradients,
	// optimiser, tables), if that alone exceeds it; else zero.
	Held Bytes
	// HostFull reports whether more host memory would lower Need.
	HostFull bool
}

// Error says what the budget lacks and what to do.
func (e *BudgetError) Error() string {
	if e.Held > 0 {
		return fmt.Sprintf("rank %d: a budget of %v is smaller than the %v that weights, optimiser and tables hold; raise the budget or shard the parameters", e.Rank, e.Budget, e.Held)
	}
	remedy := fmt.Sprintf("raise it to %v", e.Need)
	if e.HostFull {
		remedy += ", allow more host memory"
	}
	return fmt.Sprintf("rank %d: a budget of %v is too small: the step needs %v even with everything offloaded or recomputed that can be; %s, or use smaller microbatches", e.Rank, e.Budget, e.Need, remedy)
}
