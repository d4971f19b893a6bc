// This file tests that open files are found.

package leak

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
)

func TestMain(m *testing.M) { MainWithoutCollector(m) }

func TestSince(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("open files are listed in /proc")
	}
	name := filepath.Join(t.TempDir(), "file")
	open := func() *os.File {
		f, err := os.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	first := open()
	before := Files()
	second := open()
	if got := Since(before); !slices.Equal(got, []string{name}) {
		t.Errorf("found %v", got)
	}
	second.Close()
	if got := Since(before); len(got) > 0 {
		t.Errorf("found %v after closing it", got)
	}
	first.Close()
	if slices.Contains(Files(), name) {
		t.Error("a closed file is listed")
	}
}
