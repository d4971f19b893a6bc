// This file owns the life of a trace's file: it may be written to before it is opened and
// after it is closed.

package run

import (
	"bytes"
	"errors"
	"path/filepath"
	"testing"

	"github.com/stowage-dev/stowage/train/internal/disk"
)

func TestLateFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace")
	var l lateFile
	write := func(text string, fine bool) {
		t.Helper()
		if n, err := l.Write([]byte(text)); (err == nil) != fine || fine && n != len(text) {
			t.Errorf("%q: %d, %v", text, n, err)
		}
	}
	if err := l.close(); err != nil { // it was never opened
		t.Error(err)
	}
	write("before ", true)
	if err := l.open(disk.OS{}, path); err != nil {
		t.Fatal(err)
	}
	write("behind", true)
	if err := l.close(); err != nil {
		t.Error(err)
	}
	write("lost", false)
	if err := l.close(); err != nil {
		t.Error(err)
	}
	if n := l.size.Load(); n != int64(len("before behindlost")) {
		t.Errorf("%d bytes were asked for", n)
	}
	text, err := disk.ReadFile(disk.OS{}, path, 100)
	if err != nil || !bytes.Equal(text, []byte("before behind")) {
		t.Errorf("%q, %v", text, err)
	}
	// A file that cannot be made keeps its error, and so does one that is given up.
	var refused lateFile
	if err := refused.open(disk.OS{}, path); err == nil { // it exists
		t.Error("a trace replaced another")
	}
	if _, err := refused.Write([]byte("x")); err == nil {
		t.Error("a file that was not made was written to")
	}
	var lost lateFile
	why := errors.New("the disk is full")
	_, _ = lost.Write([]byte("x"))
	lost.lose(why)
	lost.lose(errors.New("later"))
	if _, err := lost.Write([]byte("y")); !errors.Is(err, why) || lost.before.Len() > 0 {
		t.Errorf("%v, and %d bytes are kept", err, lost.before.Len())
	}
}
