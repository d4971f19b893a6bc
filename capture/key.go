// This file owns what tells captured instances apart, and their errors.

package capture

import "fmt"

// Phase says what a step is for.
type Phase uint8

const (
	Train Phase = iota
	Evaluate
)

func (p Phase) String() string { return [...]string{"train", "evaluate"}[p] }

// Key names one captured instance. A pass under another key never disturbs it:
// neither evaluation, nor another number of microbatches, nor another shape.
type Key struct {
	// Of the plan that the step follows.
	Phase        Phase
	Microbatches int
	Shape        string
	// Of the pass; a FullIteration has only its scope.
	Scope      Scope
	Chunk      int
	Layer      int
	Microbatch int
	Backward   bool
}

func (k Key) String() string {
	s := fmt.Sprintf("scope %v", k.Scope)
	if k.Scope != FullIteration {
		pass := "forward"
		if k.Backward {
			pass = "backward"
		}
		s += fmt.Sprintf(" of layer %d, chunk %d, microbatch %d, %s", k.Layer, k.Chunk, k.Microbatch, pass)
	}
	s += fmt.Sprintf(" (%v, %d microbatch", k.Phase, k.Microbatches)
	if k.Microbatches != 1 {
		s += "es"
	}
	if k.Shape != "" {
		s += ", shape " + k.Shape
	}
	return s + ")"
}

// Recorder turns the work that a body issues into something that can be done
// again.
//
// Capture calls body once, and the work is both recorded and done once. If it
// fails, the step has failed with it, unless the error has a method Undone() bool
// that gives true: a promise that nothing of what body did remains, upon which body
// is called again, eagerly.
type Recorder interface {
	Capture(body func() error) (Captured, error)
}

// RecorderFunc is a function as a Recorder.
type RecorderFunc func(body func() error) (Captured, error)

// Capture calls f.
func (f RecorderFunc) Capture(body func() error) (Captured, error) { return f(body) }

// Captured is recorded work. An error of Replay that has a method Moved() bool
// which gives true promises that nothing was issued, because addresses that the
// recording holds are no longer those of the step: body is then called eagerly,
// and captured anew at the next call. Close may be called while replays are under
// way.
type Captured interface {
	Replay() error
	Close() error
}

// Failed is a capture, or a replay for another reason than moved addresses, that
// took the step with it.
type Failed struct {
	Key    Key
	Replay bool
	Cause  error
}

func (e *Failed) Error() string {
	what, then := "capture", "the scope then runs eagerly"
	if e.Replay {
		what, then = "replay", "the scope is then captured anew"
	}
	return fmt.Sprintf("the %s of %v failed: %v; undo the step and run it again, %s", what, e.Key, e.Cause, then)
}

func (e *Failed) Unwrap() error { return e.Cause }
