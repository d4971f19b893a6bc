// This file owns the recorder: a testing.TB that takes a failing test down
// instead of failing, so that the suite can be tested itself.

package devicetest

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
)

// recorder stands in for the *testing.T of one case.
type recorder struct {
	testing.TB // for what is not taken over here

	mu       sync.Mutex
	failed   bool
	texts    []string
	cleanups []func()
}

func (r *recorder) Helper() {}

func (r *recorder) Cleanup(fn func()) { r.cleanups = append(r.cleanups, fn) }

func (r *recorder) Failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed
}

func (r *recorder) Fail() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = true
}

func (r *recorder) note(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.texts = append(r.texts, text)
}

func (r *recorder) FailNow()                       { r.Fail(); runtime.Goexit() }
func (r *recorder) Log(args ...any)                { r.note(fmt.Sprint(args...)) }
func (r *recorder) Logf(format string, a ...any)   { r.note(fmt.Sprintf(format, a...)) }
func (r *recorder) Error(args ...any)              { r.Log(args...); r.Fail() }
func (r *recorder) Errorf(format string, a ...any) { r.Logf(format, a...); r.Fail() }
func (r *recorder) Fatal(args ...any)              { r.Log(args...); r.FailNow() }
func (r *recorder) Fatalf(format string, a ...any) { r.Logf(format, a...); r.FailNow() }

// record runs one case of a suite and says whether it failed, and how.
func record(t *testing.T, s *suite, c testCase) (failed bool, text string) {
	r := &recorder{TB: t}
	r.apart(func() { s.run(r, c) })
	for i := len(r.cleanups) - 1; i >= 0; i-- {
		r.apart(r.cleanups[i])
	}
	return r.Failed(), strings.Join(r.texts, "\n")
}

// apart runs fn in a goroutine that FailNow may end. A panic fails the test, as
// it would end a real one.
func (r *recorder) apart(fn func()) {
	var wg sync.WaitGroup
	wg.Go(func() {
		defer func() {
			if p := recover(); p != nil {
				r.Errorf("panic: %v", p)
			}
		}()
		fn()
	})
	wg.Wait()
}
