//go:build amd64 && !purego

// This file owns the request for AMX. Linux saves tiles only of processes that ask for them,
// because a thread that has used them needs 8 KiB more, also on its stack for signals. It
// refuses if such a stack is too small; Go's have 32 KiB.
//
// Tiles belong to a thread, and a goroutine can move to another one. So one call of assembly
// loads the configuration, computes and releases the tiles: Go never moves a goroutine
// inside assembly. A signal there, such as those that preempt goroutines, saves the tiles.

package gemm

import "syscall"

// permitAMX reports whether this process may use AMX. It may not under kernels before 5.16
// and under most sandboxes.
func permitAMX() bool {
	const (
		archReqXcompPerm = 0x1023
		tileData         = 18
	)
	_, _, errno := syscall.RawSyscall(syscall.SYS_ARCH_PRCTL, archReqXcompPerm, tileData, 0)
	return errno == 0
}
