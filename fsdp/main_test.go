// This file owns what surrounds the tests: no goroutine may be left behind.

package fsdp

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// cpuDevice does not look for how much memory the machine has: it is opened often.
func cpuDevice() (device.Device, error) {
	return cpu.Open(cpu.Options{CopyThreads: 1, Capacity: [device.Kinds]device.Bytes{64 * device.MiB, 64 * device.MiB}})
}

// mustPanic runs a programmer's error and compares what it says.
func mustPanic(t *testing.T, says string, do func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if x := recover(); x != says {
			t.Errorf("panic %q, want %q", x, says)
		}
	}()
	do()
}
