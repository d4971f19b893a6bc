// Package startup owns what a program does before anything else: it ends one that may open
// too few files to start, and lets signals at which Go prints its stacks end the program as they
// end those of other languages. Packages that others wrote open files before main, Go's
// runtime prints its stacks if it finds no room for its own, and their variables take the first
// milliseconds. Import it for its effect.
//
// Go initialises packages in the order of their paths as far as imports allow, so this one
// imports the standard library alone and comes before those.
package startup

import (
	"os"
	"os/signal"
	"syscall"
)

// least is the number of files that are opened before main: one, and the two with which the
// runtime waits for others.
const least = 3

// dumps are signals at which Go prints the stacks of the program and exits with 2.
var dumps = []os.Signal{syscall.SIGQUIT, syscall.SIGABRT}

func init() {
	endsQuietly()
	var open []int
	for range least {
		fd, err := syscall.Open("/dev/null", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
		if err == syscall.EMFILE {
			os.Stderr.WriteString("stowage: this process may not open enough files to start (ulimit -n); raise that limit to 64 or more\n")
			os.Exit(1)
		}
		if err == nil {
			open = append(open, fd)
		}
	}
	for _, fd := range open {
		_ = syscall.Close(fd) // nothing was written
	}
}

// endsQuietly ends the program at those signals with 128 plus their number, until something else catches
// them.
func endsQuietly() {
	signals := make(chan os.Signal, 1)
	for _, sig := range dumps {
		if !signal.Ignored(sig) {
			signal.Notify(signals, sig)
		}
	}
	go func() { os.Exit(128 + int((<-signals).(syscall.Signal))) }()
}
