// This file owns the variables that a caller gives for a file's environment, and which of
// them the file uses.

package megatron

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/spell"
)

// environ is the environment of a file.
type environ struct {
	given map[string]string
	// read has the names that the file reads: true if it got the given value, false if the
	// variable was not set.
	read map[string]bool
	// wrong has the given variables that the file computes with although they are no numbers.
	wrong []string
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

// doubt notes which given variables can be why something cannot be computed: they, or copies
// of them, stand in it and are no whole numbers.
func (e *environ) doubt(vars map[string][]string, names []string) {
	for name, value := range e.given {
		if wholeNumber.MatchString(value) || slices.Contains(e.wrong, name) {
			continue
		}
		if slices.ContainsFunc(names, func(n string) bool { return slices.Equal(vars[n], []string{value}) }) {
			e.wrong = append(e.wrong, name)
		}
	}
}

// write adds to the arguments the given variables that the file uses, those that it cannot
// compute with, and a note for each one that changes nothing.
func (e *environ) write(args map[string]any) {
	var given []string
	for _, name := range slices.Sorted(maps.Keys(e.given)) {
		if e.read[name] {
			given = append(given, name+"="+e.given[name])
		}
	}
	if len(given) > 0 {
		args[givenKey] = given
	}
	if slices.Sort(e.wrong); len(e.wrong) > 0 {
		args[wrongKey] = e.wrong
	}
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

// isGiven reports whether the caller gave a variable that the file uses.
func (r *reader) isGiven(name string) bool {
	return slices.ContainsFunc(r.args[givenKey].words, func(pair string) bool { return strings.HasPrefix(pair, name+"=") })
}

// blame returns an error about the given variable that is behind an error: one that the file
// computes with, or one that is the value of the flag that the error begins with.
func (r *reader) blame(err error) error {
	value := func(name string) string {
		for _, pair := range r.args[givenKey].words {
			if n, v, _ := strings.Cut(pair, "="); n == name {
				return v
			}
		}
		return ""
	}
	if wrong := r.args[wrongKey].words; len(wrong) > 0 {
		text := fmt.Sprintf("the variable %s is %.40q, and the file computes with it, so it must be a whole number", wrong[0], value(wrong[0]))
		return &Refused{Kind: environment, NoJob: true, Text: text, Variables: wrong[:1]}
	}
	flag, _, _ := strings.Cut(strings.TrimPrefix(err.Error(), "--"), " ")
	for _, pair := range r.args[givenKey].words {
		name, value, _ := strings.Cut(pair, "=")
		if v, there := r.args[flag]; there && (v.open == "" && strings.Join(v.words, " ") == value || v.open != "" && v.open == value) {
			return &Refused{Kind: environment, NoJob: true, Text: fmt.Sprintf("the variable %s is wrong: %v", name, err), Variables: []string{name}}
		}
	}
	return err
}
