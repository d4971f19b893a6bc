// This file owns the keys of captured instances, the interfaces of what captures them, and
// their errors.

package capture

import (
	"fmt"

	"github.com/stowage-dev/stowage/memory"
)

// Key identifies one captured instance. A pass under another key never disturbs it:
// neither evaluation, nor another number of microbatches, nor another shape.
type Key struct {
	memory.Key // of the plan that the step follows
	// The pass. A FullIteration has only its scope.
	Scope      memory.Scope
	Chunk      int
	Layer      int
	Microbatch int
	Backward   bool
}

// String returns the instance in words.
func (k Key) String() string {
	s := fmt.Sprintf("scope %v", k.Scope)
	if k.Scope != memory.FullIteration {
		pass := "forward"
		if k.Backward {
			pass = "backward"
		}
		s += fmt.Sprintf(" of layer %d, chunk %d, microbatch %d, %s", k.Layer, k.Chunk, k.Microbatch, pass)
	}
	return s + " (" + k.Key.String() + ")"
}

// Recorder captures the work that a body issues, so that it can be replayed.
//
// Capture calls body once; the work is both recorded and done once. An error of Capture
// means that the step has failed, unless the error has a method Undone() bool that
// returns true. That promises that nothing of what body did remains, and [Scopes] then
// calls body again, eagerly.
type Recorder interface {
	Capture(body func() error) (Captured, error)
}

// RecorderFunc makes a Recorder of a function.
type RecorderFunc func(body func() error) (Captured, error)

// Capture calls f.
func (f RecorderFunc) Capture(body func() error) (Captured, error) { return f(body) }

// Captured is recorded work.
//
// If an error of Replay has a method Moved() bool that returns true, nothing was issued,
// because the addresses in the recording are no longer those of the step. [Scopes] then
// calls the body eagerly, and captures it again at the next call. A recording of several
// ranks must say so before they agree to replay it, by a method Check() error. Close may
// be called while replays are under way.
type Captured interface {
	Replay() error
	Close() error
}

// Failed reports a capture or a replay that made the step fail. Moved addresses are no
// such failure.
type Failed struct {
	Key    Key
	Replay bool
	Cause  error
}

// Error says what failed, why, and what to do.
func (e *Failed) Error() string {
	what, then := "capture", "the scope then runs eagerly"
	if e.Replay {
		what, then = "replay", "the scope is then captured again"
	}
	return fmt.Sprintf("the %s of %v failed: %v; undo the step and run it again, %s", what, e.Key, e.Cause, then)
}

// Unwrap returns the cause.
func (e *Failed) Unwrap() error { return e.Cause }
