// This file owns the helper for programmers' errors: what must panic, and with
// which sentence.

package devicekit_test

import (
	"fmt"
	"strings"
	"testing"
)

// wantPanic runs fn, which must panic with a sentence that holds want.
func wantPanic(t *testing.T, want string, fn func()) {
	t.Helper()
	got, panicked := caught(fn)
	if !panicked {
		t.Errorf("no panic; want one that says %q", want)
	} else if !strings.Contains(got, want) {
		t.Errorf("panic says %q; want %q in it", got, want)
	}
}

// caught runs fn and gives what it panicked with.
func caught(fn func()) (text string, panicked bool) {
	defer func() {
		if p := recover(); p != nil {
			text, panicked = fmt.Sprint(p), true
		}
	}()
	fn()
	return "", false
}
