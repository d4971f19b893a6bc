// This file owns what ends the processes that a test started, on Linux.

package leak

import "syscall"

// Child returns what gives a command a group of processes of its own, which can be killed as
// one, and sends it a signal if the test is killed. Linux takes the end of the thread that
// started it for the end of the test: the caller locks its thread as long as the command runs.
func Child(end syscall.Signal) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: end}
}
