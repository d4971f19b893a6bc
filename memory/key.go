// This file owns what tells steps apart.

package memory

import "fmt"

// Phase says what a step is for.
type Phase uint8

const (
	Train    Phase = iota // forward and backward passes
	Evaluate              // forward passes that save nothing
)

// String returns "train" or "evaluate".
func (p Phase) String() string {
	if p > Evaluate {
		return fmt.Sprintf("Phase(%d)", uint8(p))
	}
	return [...]string{"train", "evaluate"}[p]
}

// Key identifies steps that are alike. The first step under a key is recorded, and
// later steps under the key follow what it taught. Steps under different keys never
// affect each other's plans.
type Key struct {
	Phase        Phase
	Microbatches int
	Shape        string // of the inputs, in any form that differs when they differ
}

// String returns the key in words.
func (k Key) String() string {
	s := fmt.Sprintf("%v, %d microbatch", k.Phase, k.Microbatches)
	if k.Microbatches != 1 {
		s += "es"
	}
	if k.Shape != "" {
		s += ", shape " + k.Shape
	}
	return s
}
