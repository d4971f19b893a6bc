//go:build linux || darwin

// This file owns queries to a terminal: whether a file is one, its size, and whether this
// program is in its foreground.

package live

import (
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// terminal returns the size of a terminal, which may be zero. It returns false if f is
// not a terminal.
func terminal(f *os.File) (width, height int, ok bool) {
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, 0, false
	}
	return int(size.Col), int(size.Row), true
}

// foreground reports whether this program is in the foreground of the terminal. A
// terminal that does not control this program knows no foreground.
func foreground(f *os.File) bool {
	group, err := unix.IoctlGetInt(int(f.Fd()), unix.TIOCGPGRP)
	return err != nil || group == unix.Getpgrp()
}

// continued returns a channel that receives when the program goes on after a stop.
func continued() (<-chan os.Signal, func()) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGCONT)
	return c, func() { signal.Stop(c) }
}
