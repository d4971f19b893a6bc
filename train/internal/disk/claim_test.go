// This file tests what claims of a folder leave when they fail, and when the folder vanishes.

package disk

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A claim that fails after it made folders removes them, and nothing else.
func TestClaimThatFails(t *testing.T) {
	calls := SystemCalls()
	calls.Open = func(string, int, uint32) (int, error) { return -1, syscall.EACCES }
	top := t.TempDir()
	if _, err := Claim(OS{Calls: &calls}, filepath.Join(top, "a", "b")); !errors.Is(err, syscall.EACCES) {
		t.Errorf("it says %v", err)
	}
	if left, err := os.ReadDir(top); err != nil || len(left) != 0 {
		t.Errorf("it left %v, %v", left, err)
	}
}

// vanishing is a disk on which somebody removes the folder between its making and its lock,
// so many times.
type vanishing struct {
	OS
	t     *testing.T
	dir   string
	times int
}

func (v *vanishing) OpenLock(name string) (LockFile, bool, error) {
	if v.times > 0 {
		v.times--
		if err := os.Remove(v.dir); err != nil {
			v.t.Error(err)
		}
	}
	return v.OS.OpenLock(name)
}

// A claim whose folder vanishes makes it again, and when it is abandoned removes all that it
// made, in every attempt.
func TestAbandonAfterTheFolderVanished(t *testing.T) {
	top := t.TempDir()
	dir := filepath.Join(top, "a", "b", "c")
	l, err := Claim(&vanishing{t: t, dir: dir, times: 2}, dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Abandon(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(top); err != nil || len(left) != 0 {
		t.Errorf("it left %v, %v", left, err)
	}
}

// A claim whose folder vanishes each time says so, and removes all that it made.
func TestClaimOfAFolderThatVanishes(t *testing.T) {
	top := t.TempDir()
	dir := filepath.Join(top, "a", "b", "c")
	if _, err := Claim(&vanishing{t: t, dir: dir, times: claims}, dir); err == nil || !strings.Contains(err.Error(), dir+" vanishes again and again") {
		t.Errorf("it says %v", err)
	}
	if left, err := os.ReadDir(top); err != nil || len(left) != 0 {
		t.Errorf("it left %v, %v", left, err)
	}
	l, err := Claim(&vanishing{t: t, dir: dir, times: claims - 1}, dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Abandon(); err != nil {
		t.Error(err)
	}
}
