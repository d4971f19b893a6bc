// Package inputtest bounds what a parser may cost in tests and fuzz targets. A fuzz target
// without bounds passes over an input that takes a minute or a gigabyte.
//
// This file owns the bounds.
package inputtest

import (
	"runtime"
	"testing"
	"time"
)

// A parser may take fixedTime and perByte more for each byte of its input, and may
// allocate fixedBytes and bytesPerByte more for each byte. Fuzzing makes inputs of a few
// hundred bytes, which take far less of both unless the cost grows too fast.
const (
	fixedTime, perByte       = 3 * time.Second, 100 * time.Microsecond
	fixedBytes, bytesPerByte = 160 << 20, 4 << 10
)

// Bound bounds the rest of a test that parses n bytes:
//
//	defer inputtest.Bound(t, len(data))()
//
// The test fails if it takes more processor time or allocates more memory than a parser
// may. All allocations count, also those that were given back.
func Bound(t testing.TB, n int) (end func()) {
	runtime.LockOSThread() // the thread's own time does not depend on other load
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	began := threadTime()
	return func() {
		took := threadTime() - began
		runtime.UnlockOSThread()
		runtime.ReadMemStats(&after)
		if most := fixedTime + time.Duration(n)*perByte; took > most {
			t.Errorf("%d bytes took %v; the most is %v", n, took, most)
		}
		if got, most := after.TotalAlloc-before.TotalAlloc, uint64(fixedBytes+n*bytesPerByte); got > most {
			t.Errorf("%d bytes allocated %d MiB; the most is %d MiB", n, got>>20, most>>20)
		}
	}
}
