// This file owns the example of the package's documentation: the test file of a device.

package devicetest_test

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/device/devicetest"
	"github.com/stowage-dev/stowage/memory"
)

// A device's package has one test that runs the suite. In a test file its name is
// TestConformance, and goleak.VerifyTestMain stands in TestMain beside it.
func ExampleRun() {
	limited := func(t *testing.T, capacity [memory.Kinds]memory.Bytes) device.Device {
		d, err := cpu.Open(cpu.Options{Capacity: capacity})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	testConformance := func(t *testing.T) {
		devicetest.Run(t,
			func(t *testing.T) device.Device { return limited(t, [memory.Kinds]memory.Bytes{}) },
			devicetest.Limited(limited),
			devicetest.LaunchesAllocateNothing(),
		)
	}
	_ = testConformance
}
