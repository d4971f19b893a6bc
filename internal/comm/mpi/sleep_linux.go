// This file owns how the thread sleeps on Linux. A timer of Go would need one of Go's
// processors, which are busy with the model; the kernel wakes the thread by itself.

package mpi

import (
	"fmt"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// sleeper is something that one thread sleeps on and others wake it by.
type sleeper struct {
	asleep atomic.Bool
	fd     uintptr
}

func newSleeper() (*sleeper, error) {
	fd, _, e := syscall.Syscall(syscall.SYS_EVENTFD2, 0, syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if e != 0 {
		return nil, fmt.Errorf("comm: eventfd: %w", e)
	}
	return &sleeper{fd: fd}, nil
}

// prepare makes the sleeps of the calling thread end in time: the kernel may add 50
// microseconds otherwise.
func prepare() {
	const setTimerSlack = 29 // PR_SET_TIMERSLACK
	_, _, _ = syscall.Syscall(syscall.SYS_PRCTL, setTimerSlack, 1000, 0)
}

// sleep sleeps for some time, or until wake is called, or not at all if more says so.
func (s *sleeper) sleep(d time.Duration, more func() bool) {
	s.asleep.Store(true)
	defer s.asleep.Store(false)
	if more() {
		return
	}
	p := struct {
		fd              int32
		events, revents int16
	}{fd: int32(s.fd), events: 1} // POLLIN
	ts := syscall.NsecToTimespec(int64(d))
	n, _, _ := syscall.Syscall6(syscall.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&ts)), 0, 0, 0)
	if n == 1 {
		var count [8]byte
		_, _ = syscall.Read(int(s.fd), count[:])
	}
}

// wake ends a sleep.
func (s *sleeper) wake() {
	if s.asleep.Swap(false) {
		one := [8]byte{1, 1, 1, 1, 1, 1, 1} // a number above zero in either order of bytes
		_, _ = syscall.Write(int(s.fd), one[:])
	}
}

func (s *sleeper) close() { _ = syscall.Close(int(s.fd)) }

// yield lets other threads of the machine run.
func yield() { _, _, _ = syscall.Syscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }
