// This file owns the tests of replacing files.

package atomicfile

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "a")
	for _, text := range []string{"first", "second"} {
		if err := WriteBytes(file, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(file); err != nil || string(got) != text {
			t.Fatalf("the file has %q, %v; want %q", got, err, text)
		}
	}
	failed := errors.New("no more ink")
	err := Write(file, func(w io.Writer) error {
		_, _ = io.WriteString(w, "half")
		return failed
	})
	if !errors.Is(err, failed) || !strings.Contains(err.Error(), file) {
		t.Errorf("the error is %v", err)
	}
	if got, _ := os.ReadFile(file); string(got) != "second" {
		t.Errorf("a failed write left %q", got)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("files left behind: %v", left)
	}
	err = WriteBytes(filepath.Join(dir, "nowhere", "a"), nil)
	if err == nil || strings.Count(err.Error(), "nowhere") != 1 {
		t.Errorf("the error is %v", err)
	}
}
