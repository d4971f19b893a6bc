//go:build linux || darwin

// This file owns the signal that a program gets when it goes on.

package live

import (
	"os"
	"os/signal"
	"syscall"
)

// continued returns a channel that receives when the program goes on after a stop.
func continued() (<-chan os.Signal, func()) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGCONT)
	return c, func() { signal.Stop(c) }
}
