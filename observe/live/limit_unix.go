//go:build unix

// This file owns the limit of open files on Unix.

package live

import "golang.org/x/sys/unix"

// openFiles returns how many files the process may open, or 0 if that is not known.
func openFiles() uint64 {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		return 0
	}
	return uint64(l.Cur)
}
