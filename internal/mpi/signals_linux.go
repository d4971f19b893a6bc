// This file owns the signals that a library would take, on Linux.

package mpi

import (
	"syscall"
	"unsafe"

	"github.com/ebitengine/purego"
)

// action is what the kernel does at a signal: a handler, flags, a restorer and a mask. No
// architecture has more.
type action [8]uint64

// actions are those of all signals, by number.
type actions [65]action

// eachSignal calls rt_sigaction for every signal that can be caught.
func eachSignal(do func(number, masksize uintptr)) {
	for n := uintptr(1); n <= 64; n++ {
		if n != uintptr(syscall.SIGKILL) && n != uintptr(syscall.SIGSTOP) {
			do(n, 8)
		}
	}
}

// signalActions returns what the kernel does at each signal now.
func signalActions() *actions {
	a := new(actions)
	eachSignal(func(n, size uintptr) {
		_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, n, 0, uintptr(unsafe.Pointer(&a[n])), size, 0, 0)
	})
	return a
}

// restore makes the kernel do what it did. Handlers of libraries run on whatever stack a
// thread has and call the ones before them, and those of Go end the program then.
func (a *actions) restore() {
	now := signalActions()
	eachSignal(func(n, size uintptr) {
		if now[n] != a[n] {
			_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, n, uintptr(unsafe.Pointer(&a[n])), 0, size, 0, 0)
		}
	})
}

// delayAborts makes a thread that calls abort sleep before the process ends. UCX aborts if it
// reads memory of a process that was killed, before anybody can say who that was; and Go would
// print all its stacks. The handler is the C library's sleep, which is called with the number of
// the signal and takes it for seconds: 6. A signal from outside only makes a thread sleep, so the
// handler is for the first one alone, and a second one ends the process.
func delayAborts() {
	const handler, flags, mask = 0, 1, 3 // beside the restorer, which stays
	const once = 0x80000000              // SA_RESETHAND
	sleep, err := purego.Dlsym(purego.RTLD_DEFAULT, "sleep")
	if err != nil {
		return
	}
	abort := signalActions()[syscall.SIGABRT]
	abort[handler], abort[mask] = uint64(sleep), ^uint64(0) // other signals would end the sleep
	abort[flags] |= once
	_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(syscall.SIGABRT), uintptr(unsafe.Pointer(&abort)), 0, 8, 0, 0)
}
