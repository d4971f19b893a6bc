// This file owns the clock of a thread.

package bench

import (
	"time"

	"golang.org/x/sys/unix"
)

// threadTime returns the number of the calling thread and its processor time.
func threadTime() (thread int, used time.Duration) {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic("bench: the clock of the thread cannot be read: " + err.Error())
	}
	return unix.Gettid(), time.Duration(t.Nano())
}
