// This file owns wrong command lines: an unknown command, flag or value. Each error is
// one sentence that says what is wrong, and suggests a similar word if there is one.

package main

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/internal/spell"
)

// usageError reports a wrong command line. The exit code is 2, unless a disk is the cause.
type usageError struct {
	text  string
	cause error          // or nil
	cmd   *cobra.Command // whose help to point at; nil for the command that ran
}

func (e *usageError) Error() string { return e.text }
func (e *usageError) Unwrap() error { return e.cause }

// usagef returns a usageError.
func usagef(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	return &usageError{text: err.Error(), cause: errors.Unwrap(err)}
}

// noArgs returns an error if a command that takes only flags has arguments.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("unexpected argument %q", args[0])
	}
	return nil
}

// checkEmpty returns an error if a flag was given an empty value, as by a script whose
// variable is not set. Taken for a missing flag, it would change what the command does.
func checkEmpty(f *pflag.FlagSet) (err error) {
	f.Visit(func(x *pflag.Flag) {
		if err == nil && blank(x.Value.String()) {
			err = usagef("--%s is empty; give a value, or leave the flag out", x.Name)
		}
	})
	return err
}

// blank reports whether a value is a word or list without content. "[]" is how the flag
// parser writes an empty list.
func blank(value string) bool { return value == "[]" || strings.Trim(value, ", \t\n") == "" }

// checkWords returns an error if an argument or the value of a flag is empty.
func checkWords(cmd *cobra.Command, args []string) error {
	for _, a := range args {
		if blank(a) && !cmd.DisableFlagParsing {
			return usagef("an argument is empty; remove it, or see that its variable is set")
		}
	}
	return checkEmpty(cmd.Flags())
}

// octal is a number that the flag parser would read with the base 8.
var octal = regexp.MustCompile(`^[+-]?0[0-9]+$`)

// checkValues returns an error for what the flag parser would take for something else: a
// number that is not written in decimal digits, such as 0x10 or 1_000; a whole number that
// begins with 0, which it reads as C does, so that 010 is 8; a flag where
// the value of another one was left out; and words behind --version.
func checkValues(root *cobra.Command, args []string) error {
	cmd, rest, err := root.Find(args)
	if err != nil {
		return nil // which running the command reports
	}
	if cmd == root && len(args) > 1 && (args[0] == "--version" || args[0] == "-v") {
		return usagef("unexpected argument %q", args[1])
	}
	lookup := func(arg string) (f *pflag.Flag, value string, given bool) {
		name, long := strings.CutPrefix(arg, "--")
		name, value, given = strings.Cut(name, "=")
		if long {
			f = cmd.Flags().Lookup(name)
		}
		return f, value, given
	}
	for i, arg := range rest {
		f, value, given := lookup(arg)
		if arg == "--" {
			break
		}
		if f == nil || !given && (f.NoOptDefVal != "" || i+1 == len(rest)) {
			continue
		}
		if !given {
			value = rest[i+1]
			if next, _, _ := lookup(value); next != nil {
				return &usageError{cmd: cmd, text: fmt.Sprintf("expected a value after --%s, got the flag --%s; give one, or write --%[1]s=%[3]s if you mean that", f.Name, next.Name, value)}
			}
		}
		if err := notDecimal(f, value); err != nil {
			return &usageError{cmd: cmd, text: err.Error()}
		}
		if octal.MatchString(value) && slices.Contains([]string{"int", "int64", "uint64"}, f.Value.Type()) {
			return &usageError{cmd: cmd, text: fmt.Sprintf("--%s %s begins with 0; write it without", f.Name, value)}
		}
	}
	return nil
}

// notDecimal returns an error if a flag takes a number and the value is not one in decimal digits. Those that mean no
// number or none that has an end are left to the checks of ranges, which name them.
func notDecimal(f *pflag.Flag, value string) error {
	switch f.Value.Type() {
	case "int", "int64", "uint64":
		if !input.IsWhole(value) {
			return usagef("--%s expects a whole number such as 8, got %q", f.Name, value)
		}
		negative := strings.HasPrefix(value, "-")
		if _, err := strconv.ParseInt(value, 10, 64); negative && (err != nil || f.Value.Type() == "uint64" && strings.Trim(value, "-0") != "") {
			return usagef("--%s %s is out of range; give a larger number", f.Name, value)
		}
		_, err := strconv.ParseInt(strings.TrimPrefix(value, "+"), 10, 64)
		if f.Value.Type() == "uint64" {
			_, err = strconv.ParseUint(strings.TrimPrefix(value, "+"), 10, 64)
		}
		if !negative && err != nil {
			return usagef("--%s %s is out of range; give a smaller number", f.Name, value)
		}
	case "float64":
		if x, err := strconv.ParseFloat(value, 64); err == nil && (math.IsNaN(x) || math.IsInf(x, 0)) {
			return nil
		}
		_, ok := input.Number(value)
		if _, err := strconv.ParseFloat(value, 64); !ok && errors.Is(err, strconv.ErrRange) && !strings.ContainsAny(value, "xX_") {
			return usagef("--%s %s is out of range; give a number nearer to 0", f.Name, value)
		}
		if !ok {
			return usagef("--%s expects a number such as 0.5, got %q", f.Name, value)
		}
	}
	return nil
}

// checkTopic returns an error if help was asked for a command that does not exist, as
// in `stowage bench cpy --help`.
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

// chooseCommand returns the error of a command that only holds others.
func chooseCommand(cmd *cobra.Command, args []string) error {
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() && c.Name() != "help" {
			names = append(names, c.Name())
		}
	}
	e := &usageError{cmd: cmd}
	if len(args) == 0 {
		e.text = "expected a command: " + strings.Join(names, ", ")
		return e
	}
	if len(names) == 0 {
		e.text = fmt.Sprintf("%s has no command %q", cmd.CommandPath(), args[0])
		return e
	}
	if slices.Contains(names, args[0]) {
		e.text = fmt.Sprintf("expected the command %s without -- before it", args[0])
		return e
	}
	e.text = fmt.Sprintf("unknown command %q", args[0])
	if near := spell.Nearest(args[0], names); near != "" {
		e.text += fmt.Sprintf(" (did you mean %q?)", near)
	} else {
		e.text += "; choose from " + strings.Join(names, ", ")
	}
	return e
}

// flagError turns an error of the flag parser into a plain sentence.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		name := unknown.GetSpecifiedName()
		if unknown.GetSpecifiedShortnames() != "" {
			return usagef("unknown flag -%s", name)
		}
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if near := spell.Nearest(name, names); near != "" {
			return usagef("unknown flag --%s (did you mean --%s?)", name, near)
		}
		return usagef("unknown flag --%s", name)
	}
	var missing *pflag.ValueRequiredError
	if errors.As(err, &missing) {
		return usagef("expected a value after --%s", missing.GetSpecifiedName())
	}
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		f := invalid.GetFlag()
		why := invalid.Unwrap().Error()
		switch f.Value.Type() { // the parser's own words are for programmers
		case "bool":
			return usagef("--%s expects true or false, got %q; write --%[1]s or --%[1]s=false", f.Name, invalid.GetValue())
		case "duration":
			return usagef("--%s expects a time such as 500ms, got %q", f.Name, invalid.GetValue())
		case "int", "int64", "uint64":
			return usagef("--%s expects a whole number such as 8, got %q", f.Name, invalid.GetValue())
		case "float64":
			return usagef("--%s expects a number such as 0.5, got %q", f.Name, invalid.GetValue())
		}
		return usagef("--%s cannot be %q; %s", f.Name, invalid.GetValue(), why)
	}
	return usagef("%w", err)
}
