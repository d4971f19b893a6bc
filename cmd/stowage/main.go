// Command stowage trains, plans and measures with Stowage. Type `stowage help`
// for what it can do.
//
// This file owns the way in and out: arguments, exit codes and the last word on
// an error. root.go owns the tree of commands, usage.go the errors of usage,
// output.go where output goes; each command has a file of its own.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/cmd/stowage/internal/trainrun"
)

// Exit codes: scripts tell a wrong command line from work that failed.
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitInterrupted = 130 // as shells have it: 128 and the signal's number
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// run is the whole program with its surroundings as arguments, so that tests
// call it in-process.
func run(args []string, stdout, stderr io.Writer) int {
	out := &output{w: stdout}
	root := newRoot()
	root.SetArgs(append([]string{}, args...)) // nil would stand for os.Args
	root.SetOut(out)
	root.SetErr(stderr)
	var noTopic error
	help := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		if noTopic = checkTopic(cmd); noTopic == nil {
			help(cmd, args)
		}
	})
	cmd, err := root.ExecuteC()
	if err == nil {
		err = noTopic
	}
	if err == nil && out.err != nil {
		err = out.err
	}
	if err == nil {
		return exitOK
	}
	var usage *usageError
	if errors.As(err, &usage) {
		if usage.cmd == nil {
			usage.cmd = cmd
		}
		fmt.Fprintf(stderr, "stowage: %s; see `%s --help`\n", oneLine(err), usage.cmd.CommandPath())
		return exitUsage
	}
	fmt.Fprintf(stderr, "stowage: %s\n", oneLine(err))
	var stopped trainrun.Interrupted
	if errors.As(err, &stopped) {
		return exitInterrupted
	}
	return exitFailure
}

// oneLine keeps the promise of one sentence for errors that came joined.
func oneLine(err error) string {
	return strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "; ")
}
