// This file owns what ends the processes that a test started, elsewhere.

//go:build unix && !linux

package leak

import "syscall"

// Child returns what gives a command a group of processes of its own.
func Child(syscall.Signal) *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
