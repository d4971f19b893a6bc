// This file tests what a process that gives up tells MPICH's mpirun.

package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/launcher"
)

// Only the mpirun that started the process is told, and no other file that has the number.
func TestAbortPMI(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	number := func(f *os.File) func(string) string { return func(string) string { return fmt.Sprint(f.Fd()) } }
	abortPMI(&launcher.Place{Launcher: launcher.PMI}, number(file))
	abortPMI(&launcher.Place{Launcher: launcher.Torchrun}, number(w))
	abortPMI(&launcher.Place{Launcher: launcher.PMI}, number(w))
	_ = w.Close()
	text, err := io.ReadAll(r)
	info, _ := file.Stat()
	if err != nil || strings.Count(string(text), "cmd=abort") != 1 || info.Size() != 0 {
		t.Errorf("%v: %q, and %d bytes in a file", err, text, info.Size())
	}
}
