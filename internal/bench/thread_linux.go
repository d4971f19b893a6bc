// This file owns the clock of a thread.

package bench

import (
	"syscall"
	"time"
	"unsafe"
)

// threadTime returns the number of the calling thread and its processor time.
func threadTime() (thread int, used time.Duration) {
	const threadCPUTime = 3 // CLOCK_THREAD_CPUTIME_ID
	var t syscall.Timespec
	if _, _, errno := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, threadCPUTime, uintptr(unsafe.Pointer(&t)), 0); errno != 0 {
		panic("bench: the clock of the thread cannot be read: " + errno.Error())
	}
	return syscall.Gettid(), time.Duration(t.Nano())
}
