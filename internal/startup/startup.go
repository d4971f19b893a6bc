// Package startup ends a program that may open too few files to start. Packages that others
// wrote open files before main, and Go's runtime prints its stacks if it finds no room for
// its own. Import it for its effect.
//
// Go initialises packages in the order of their paths as far as imports allow, so this one
// imports the standard library alone and comes before those.
package startup

import (
	"os"
	"syscall"
)

// least is the number of files that are opened before main: one, and the two with which the
// runtime waits for others.
const least = 3

func init() {
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
