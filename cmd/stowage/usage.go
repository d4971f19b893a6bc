// This file owns errors of usage: an unknown command, flag or value. Each is
// one sentence that says what was wrong and, where something similar exists,
// what was probably meant.

package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/internal/spell"
)

// usageError is a wrong command line; the exit code is 2.
type usageError struct {
	text string
	cmd  *cobra.Command // whose help to point at, if not that of the one that ran
}

func (e *usageError) Error() string { return e.text }

func usagef(format string, args ...any) error {
	return &usageError{text: fmt.Sprintf(format, args...)}
}

// noArgs is for commands that take flags only.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("unexpected argument %q", args[0])
	}
	return nil
}

// checkTopic refuses help for a command that does not exist: the words that the
// parser left over, as in `stowage bench cpy --help`.
func checkTopic(cmd *cobra.Command) error {
	rest := cmd.Flags().Args()
	switch {
	case len(rest) == 0:
		return nil
	case cmd.HasSubCommands():
		return chooseCommand(cmd, rest)
	}
	return cmd.ValidateArgs(rest)
}

// chooseCommand is for commands that only hold others.
func chooseCommand(cmd *cobra.Command, args []string) error {
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() && c.Name() != "help" {
			names = append(names, c.Name())
		}
	}
	e := &usageError{cmd: cmd}
	if len(args) == 0 {
		e.text = "say which command: " + strings.Join(names, ", ")
		return e
	}
	e.text = fmt.Sprintf("unknown command %q", args[0])
	if near := nearest(args[0], names); near != "" {
		e.text += fmt.Sprintf(" (did you mean %q?)", near)
	} else {
		e.text += ", choose from " + strings.Join(names, ", ")
	}
	return e
}

// flagError turns what the flag parser says into a sentence of ours.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		name := unknown.GetSpecifiedName()
		if unknown.GetSpecifiedShortnames() != "" {
			return usagef("unknown flag -%s", name)
		}
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, "--"+f.Name) })
		if near := nearest("--"+name, names); near != "" {
			return usagef("unknown flag --%s (did you mean %s?)", name, near)
		}
		return usagef("unknown flag --%s", name)
	}
	var missing *pflag.ValueRequiredError
	if errors.As(err, &missing) {
		return usagef("flag --%s needs a value", missing.GetSpecifiedName())
	}
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		f := invalid.GetFlag()
		why := invalid.Unwrap().Error()
		switch f.Value.Type() { // the standard library's words are for programmers
		case "bool":
			why = fmt.Sprintf("write --%s or --%[1]s=false", f.Name)
		case "duration":
			why = "write a number with ms, s or m, such as 500ms"
		case "int", "int64":
			why = "write a whole number, such as 8"
		case "float64":
			why = "write a number, such as 0.5"
		}
		return usagef("--%s cannot be %q; %s", f.Name, invalid.GetValue(), why)
	}
	return usagef("%v", err)
}

// nearest is the known word that was probably meant, or nothing: one that the
// given word begins, or one that differs in less than half of its letters.
func nearest(word string, known []string) string {
	best, least := "", len(word)/2+1
	for _, k := range known {
		if len(word) > 1 && strings.HasPrefix(k, word) {
			return k
		}
		if d := spell.Distance(word, k); d < least {
			best, least = k, d
		}
	}
	return best
}
