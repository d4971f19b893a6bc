// Package leak finds what tests leave behind: goroutines and open files. Only tests
// import it.
package leak

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// Main runs the tests of a package. It fails if goroutines or files that they opened are
// left at the end, unless the garbage collector has closed the files meanwhile.
func Main(m *testing.M) {
	before := Files()
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if left := Since(before); len(left) > 0 && code == 0 {
			fmt.Fprintf(os.Stderr, "files are open after the tests: %s\n", strings.Join(left, ", "))
			code = 1
		}
		os.Exit(code)
	}))
}

// MainWithoutCollector is [Main] for tests that need little memory: the garbage collector
// runs only if they take more than a gigabyte, so that it closes no file.
func MainWithoutCollector(m *testing.M) {
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(1 << 30)
	Main(m)
}

// Files returns the files and folders that the process has open, sorted. It returns none
// on systems without /proc.
func Files() (names []string) {
	const dir = "/proc/self/fd"
	list, _ := os.ReadDir(dir)
	for _, f := range list {
		name, err := os.Readlink(filepath.Join(dir, f.Name()))
		name = strings.TrimSuffix(name, " (deleted)")
		system := func(top string) bool { return strings.HasPrefix(name, top) }
		if err == nil && filepath.IsAbs(name) && !system("/proc/") && !system("/sys/") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Since returns the files that are open and were not before.
func Since(before []string) (left []string) {
	rest := slices.Clone(before)
	for _, name := range Files() {
		if i := slices.Index(rest, name); i >= 0 {
			rest = slices.Delete(rest, i, i+1)
			continue
		}
		left = append(left, name)
	}
	return left
}
