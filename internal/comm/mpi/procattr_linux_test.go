// This file owns what ends a launcher with the test that started it, on Linux.

package mpi

import "syscall"

// procAttr gives the launcher a group of its own, which can be killed as one, and ends it
// if the test is killed.
func procAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}
