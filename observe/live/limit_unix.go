//go:build unix

// This file owns the limit of open files on Unix.

package live

import "syscall"

// openFiles returns how many files the process may open, or 0 if that is not known.
func openFiles() uint64 {
	var l syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l) != nil {
		return 0
	}
	return uint64(l.Cur)
}
