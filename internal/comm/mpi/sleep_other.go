// This file owns how those who poll sleep elsewhere than on Linux.

//go:build !linux

package mpi

import (
	"runtime"
	"time"
)

// sleeper is something that one goroutine sleeps on and others wake it by.
type sleeper struct{ woken chan struct{} }

func newSleeper() (*sleeper, error) { return &sleeper{make(chan struct{}, 1)}, nil }

// sleep sleeps for some time, or until wake is called.
func (s *sleeper) sleep(d time.Duration, more func() bool) {
	select {
	case <-s.woken:
	case <-time.After(d):
	}
}

// wake ends a sleep.
func (s *sleeper) wake() {
	select {
	case s.woken <- struct{}{}:
	default:
	}
}

// claim does nothing: all sleeps are those of a goroutine.
func (s *sleeper) claim() {}

func (s *sleeper) close() {}

func yield() { runtime.Gosched() }
