// This file owns the choices.

package memory

import (
	"fmt"
	"slices"
	"strings"
)

// Choice says what happens to the saved tensors of a unit between the forward and
// the backward pass.
type Choice uint8

const (
	Keep      Choice = iota // they stay in device memory
	Stash                   // their live rows go to pages of the stash
	Offload                 // they are copied to host memory and back
	Recompute               // they are dropped and computed again
	// Choices is the number of choices.
	Choices = iota
)

// choiceNames holds a name for each choice; it does not compile without one.
var choiceNames [Choices]string = [...]string{"keep", "stash", "offload", "recompute"}

// String returns the choice's name, such as "offload".
func (c Choice) String() string {
	if c < Choices {
		return choiceNames[c]
	}
	return fmt.Sprintf("Choice(%d)", uint8(c))
}

// MarshalText returns the choice's name. It returns an error if c is not a choice.
func (c Choice) MarshalText() ([]byte, error) {
	if c >= Choices {
		return nil, fmt.Errorf("memory: %v is not a choice", c)
	}
	return []byte(choiceNames[c]), nil
}

// UnmarshalText reads a choice's name.
func (c *Choice) UnmarshalText(text []byte) error {
	i := slices.Index(choiceNames[:], string(text))
	if i < 0 {
		return fmt.Errorf("memory: expected one of %s, got %q", strings.Join(choiceNames[:], ", "), text)
	}
	*c = Choice(i)
	return nil
}
