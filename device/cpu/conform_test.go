// This file owns the conformance of the CPU device.

package cpu_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/device/devicetest"
	"github.com/stowage-dev/stowage/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// SPEC S6.3: the CPU device keeps the contract.
func TestConformance(t *testing.T) {
	devicetest.Run(t,
		func(t *testing.T) device.Device { return open(t, cpu.Options{}) },
		devicetest.Limited(func(t *testing.T, capacity [memory.Kinds]memory.Bytes) device.Device {
			return open(t, cpu.Options{Capacity: capacity})
		}),
		devicetest.LaunchesAllocateNothing())
}
