// This file owns the test of the library as others load it: built, opened by a process
// that is not Go's, and used through its header alone.

package main

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// SPEC S6.4: a step with memory of the caller's, failures with a code and a sentence that
// belongs to the thread, panics that stay inside, a fork that is turned away.
func TestLibrary(t *testing.T) {
	if testing.Short() {
		t.Skip("it builds the library")
	}
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip(err)
	}
	lib := filepath.Join(t.TempDir(), "libstowage.so")
	build := exec.Command("go", "build", "-buildmode=c-shared", "-o", lib, ".")
	build.Env = append(build.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		if strings.Contains(string(out), "C compiler") || strings.Contains(string(out), "executable file not found") {
			t.Skipf("cgo needs a C compiler: %s", out)
		}
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := exec.Command(python, filepath.Join("testdata", "smoke.py"), lib).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "as the header says") {
		t.Errorf("%v\n%s", err, out)
	}
}
