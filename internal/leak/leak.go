// Package leak finds what tests leave behind: goroutines and open files. It ends processes
// with the test that started them. Only tests import it.
package leak

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// Main runs the tests of a package. It fails if goroutines or files that they opened are
// left at the end. Files that nothing refers to do not count: whether the garbage
// collector has closed them is chance. The collector runs less often than in programs, because
// tests make much garbage and keep little.
func Main(m *testing.M) {
	debug.SetGCPercent(400)
	run(m, func(before []string) (left []string) {
		for range 100 {
			if left = Since(before); len(left) == 0 {
				break
			}
			runtime.GC() // then what it found is closed, some time later
			time.Sleep(20 * time.Millisecond)
		}
		return left
	})
}

func run(m *testing.M, since func(before []string) []string) {
	before := Files()
	goleak.VerifyTestMain(m, goleak.IgnoreCurrent(), goleak.Cleanup(func(code int) {
		if code != 0 {
			os.Exit(code)
		}
		if left := since(before); len(left) > 0 {
			fmt.Fprintf(os.Stderr, "files are open after the tests: %s\n", strings.Join(left, ", "))
			code = 1
		}
		os.Exit(code)
	}))
}

// MainWithoutCollector is [Main] for tests that need little memory: the garbage collector
// runs only if they take more than a gigabyte, so that it closes no file and all count.
func MainWithoutCollector(m *testing.M) {
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(1 << 30)
	run(m, Since)
}

// Files returns the files and folders that the process has open, sorted, but for those of
// the system and of the driver of GPUs, which keeps its own. It returns none on systems
// without /proc.
func Files() (names []string) {
	const dir = "/proc/self/fd"
	list, _ := os.ReadDir(dir)
	for _, f := range list {
		name, err := os.Readlink(filepath.Join(dir, f.Name()))
		name = strings.TrimSuffix(name, " (deleted)")
		system := func(top string) bool { return strings.HasPrefix(name, top) }
		if err == nil && filepath.IsAbs(name) && !system("/proc/") && !system("/sys/") && !system("/dev/nvidia") {
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
