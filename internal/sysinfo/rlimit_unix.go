//go:build unix

// This file owns asking a Unix system for limits.

package sysinfo

import (
	"os"
	"syscall"

	"github.com/stowage-dev/stowage/memory"
)

var pageBytes = int64(os.Getpagesize())

// rlimits returns the limits that are set.
func rlimits() (out []column) {
	for _, l := range []struct {
		resource int
		column   int
		command  string
	}{{syscall.RLIMIT_AS, 0, "ulimit -v"}, {syscall.RLIMIT_DATA, 5, "ulimit -d"}} {
		var r syscall.Rlimit
		if syscall.Getrlimit(l.resource, &r) == nil && uint64(r.Cur) < 1<<62 {
			out = append(out, column{Rlimit{Command: l.command, Limit: memory.Bytes(r.Cur)}, l.column})
		}
	}
	return out
}
