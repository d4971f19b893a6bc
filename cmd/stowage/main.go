// Command stowage trains, plans and measures with Stowage. `stowage help` lists its
// commands.
//
// This file owns the start and the end of the program. root.go owns the tree of
// commands, errors.go the words of errors, usage.go wrong command lines, output.go
// where output goes; each command has a file of its own.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/plaintext"
	_ "github.com/stowage-dev/stowage/internal/startup" // first: ends a program that cannot start, and signals end it quietly
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/memory"
)

// Exit codes.
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitInterrupted = 130 // by Ctrl-C; other signals have 128 plus their number, as in shells
)

// leastAddresses is the least limit on addresses under which the program starts: Go reserves
// most of a gigabyte, and libraries and threads add to it. Beyond a limit Go prints its
// stacks.
const leastAddresses = 2 * memory.GiB

func main() {
	for _, l := range sysinfo.Rlimits() {
		if l.Limit < leastAddresses {
			fmt.Fprintf(os.Stderr, "stowage: %v; that is too little to start, run it without this limit\n", l)
			os.Exit(exitFailure)
		}
	}
	if n := parallel.Threads(); n < runtime.GOMAXPROCS(0) {
		runtime.GOMAXPROCS(n) // Go's collector would start as many threads as it is told
	}
	os.Exit(execute(os.Args[1:], os.Stdout, os.Stderr))
}

// execute runs the program and returns its exit code. Tests call it with arguments and
// output of their own.
func execute(args []string, stdout, stderr io.Writer) int {
	// Names from files and arguments must not command the terminal.
	ascii := plaintext.WantsASCII(os.Getenv)
	out, said := newOutput(stdout, ascii), plaintext.NewWriter(stderr, ascii)
	root := newRoot()
	if len(args) == 1 && strings.HasPrefix(args[0], cobra.ShellCompRequestCmd) {
		args = []string{args[0], ""} // the first word of a command line, of which nothing is typed yet
	}
	root.SetArgs(append([]string{}, args...)) // nil would mean os.Args
	root.SetOut(out)
	root.SetErr(said)
	var noTopic error
	help := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		if noTopic = checkTopic(cmd); noTopic == nil {
			out.flush()
			out.help = true
			help(cmd, args)
		}
	})
	cmd, err := root, checkValues(root, args)
	if err == nil {
		cmd, err = root.ExecuteC()
	}
	if err == nil {
		err = noTopic
	}
	out.flush()
	if err == nil && out.err != nil {
		err = out.err
	}
	if err == nil {
		return exitOK
	}
	var silent *silentError
	if !errors.As(err, &silent) {
		complain(said, cmd, err, args)
	}
	return exitCode(err)
}

// complain says why a command failed.
func complain(w io.Writer, cmd *cobra.Command, err error, args []string) {
	text := describe(cmd, err)
	if exitCode(err) == exitUsage {
		var usage *usageError
		if errors.As(err, &usage) && usage.cmd != nil {
			cmd = usage.cmd
		}
		text += fmt.Sprintf("; see `%s --help`", cmd.CommandPath())
	}
	say(w, "stowage: "+readable(withBreaks(oneLine(text), args))+"\n")
}
