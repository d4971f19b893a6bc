// This file owns the tests of what goes wrong in a crew.

package parallel

import (
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
)

// caught returns what f panics with.
func caught(f func()) (p any) {
	defer func() { p = recover() }()
	f()
	return nil
}

// A fault, a panic or the end of a goroutine in a helper reaches the caller as a panic, and
// the crew works again afterwards.
func TestCrewPassesTroubleOn(t *testing.T) {
	none, err := syscall.Mmap(-1, 0, 4096, syscall.PROT_NONE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Munmap(none) }()
	for says, f := range map[string]func(){
		"invalid memory address": func() { none[1] = 1 },
		"bad luck":               func() { panic("bad luck") },
		"ended its goroutine":    runtime.Goexit,
	} {
		c := NewCrew(f)
		c.helpers.Add(1)
		go c.help()
		c.helpers.Wait()
		var ran atomic.Int64
		c.work = func() { ran.Add(1) }
		if p := caught(func() { c.Run(0) }); p == nil || !strings.Contains(fmt.Sprint(p), says) {
			t.Errorf("the caller panics with %v; want %q in it", p, says)
		}
		ran.Store(0)
		if p := caught(func() { c.Run(3) }); p != nil || ran.Load() != 4 {
			t.Errorf("after %q, a crew of four ran %d times and panicked with %v", says, ran.Load(), p)
		}
	}
}

// The caller leaves only when all helpers are done, also if its own share panics: they
// still use its memory.
func TestCrewWaitsForHelpers(t *testing.T) {
	for _, f := range []func(){func() {}, func() { panic("bad luck") }, runtime.Goexit} {
		synctest.Test(t, func(t *testing.T) {
			c := NewCrew(f)
			c.helpers.Add(1) // a helper that takes long
			var left atomic.Bool
			go func() {
				defer left.Store(true)
				_ = caught(func() { c.Run(0) })
			}()
			if synctest.Wait(); left.Load() {
				t.Error("the caller left while a helper worked")
			}
			c.helpers.Done()
			if synctest.Wait(); !left.Load() {
				t.Error("the caller stays after the last helper")
			}
		})
	}
}
