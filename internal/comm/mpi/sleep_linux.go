// This file owns how those who poll sleep on Linux. A short sleep is one of the thread: Go's
// timers may be a millisecond late. A thread that sleeps long would keep one of Go's
// processors from the model until Go notices, so a long sleep is one of the goroutine, unless
// it has the thread for itself.

package mpi

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// sleeper is something that one goroutine sleeps on and others wake it by.
type sleeper struct {
	state atomic.Uint32
	fd    uintptr       // wakes a thread
	woken chan struct{} // wakes a goroutine
	alone bool          // the goroutine has its thread for itself
}

const (
	awake uint32 = iota
	threadSleeps
	goroutineSleeps
)

// longSleep is the shortest sleep of a goroutine.
const longSleep = 2 * time.Millisecond

func newSleeper() (*sleeper, error) {
	fd, _, e := syscall.Syscall(syscall.SYS_EVENTFD2, 0, syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if e != 0 {
		return nil, fmt.Errorf("comm: eventfd: %w", e)
	}
	return &sleeper{fd: fd, woken: make(chan struct{}, 1)}, nil
}

// claim gives the calling goroutine its thread for itself, whose sleeps then end in time: the
// kernel may add 50 microseconds otherwise.
func (s *sleeper) claim() {
	if s.alone {
		return
	}
	s.alone = true
	runtime.LockOSThread()   // never unlocked: the thread ends with the goroutine
	const setTimerSlack = 29 // PR_SET_TIMERSLACK
	_, _, _ = syscall.Syscall(syscall.SYS_PRCTL, setTimerSlack, 1000, 0)
}

// sleep sleeps for some time, or until wake is called, or not at all if more says so.
func (s *sleeper) sleep(d time.Duration, more func() bool) {
	how := threadSleeps
	if d >= longSleep && !s.alone {
		how = goroutineSleeps
	}
	s.state.Store(how)
	defer s.state.Store(awake)
	if more() {
		return
	}
	if how == goroutineSleeps {
		select {
		case <-s.woken:
		case <-time.After(d):
		}
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
	switch s.state.Swap(awake) {
	case threadSleeps:
		one := [8]byte{1, 1, 1, 1, 1, 1, 1} // a number above zero in either order of bytes
		_, _ = syscall.Write(int(s.fd), one[:])
	case goroutineSleeps:
		select {
		case s.woken <- struct{}{}:
		default:
		}
	}
}

func (s *sleeper) close() { _ = syscall.Close(int(s.fd)) }

// yield lets other threads of the machine run. This thread keeps its processor of Go, which it
// will need at once.
func yield() { _, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }
