// This file owns the variables that a caller gives for a file's environment, and which of
// them the file uses.

package megatron

import (
	"fmt"
	"maps"
	"slices"

	"github.com/stowage-dev/stowage/internal/spell"
)

// environ is the environment of a file.
type environ struct {
	given map[string]string
	// read has the names that the file reads: true if it got the given value, false if the
	// variable was not set.
	read map[string]bool
}

// look notes that a file reads a variable, which has a value or is not set.
func (e *environ) look(name, value string, set bool) {
	if len(e.given) == 0 {
		return
	}
	if given, ok := e.given[name]; ok && set && given == value {
		e.read[name] = true
	} else if _, seen := e.read[name]; !seen && !set {
		e.read[name] = false
	}
}

// write adds a note to the arguments for each given variable that changes nothing.
func (e *environ) write(args map[string]any) {
	var notes, missing []string
	for name, used := range e.read {
		if !used {
			missing = append(missing, name)
		}
	}
	slices.Sort(missing)
	for _, name := range slices.Sorted(maps.Keys(e.given)) {
		if e.read[name] {
			continue
		}
		text := fmt.Sprintf("the variable %s changes nothing: the file does not use it, or sets it itself", name)
		if near := spell.Nearest(name, missing); near != "" {
			text += fmt.Sprintf(" (did you mean %s?)", near)
		}
		notes = append(notes, text)
	}
	if len(notes) > 0 {
		args[unusedKey] = notes
	}
}
