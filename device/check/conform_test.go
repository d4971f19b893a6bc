// This file owns the proof that a checked device is still a device: the
// conformance suite over the CPU device and over a GPU, under check.

package check_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/device/devicetest"
	"github.com/stowage-dev/stowage/memory"
)

// SPEC S6.2: checking changes nothing, whatever the schedule.
func TestConformance(t *testing.T) {
	conform(t, func() (device.Device, error) { return cpu.Open(cpu.Options{}) })
}

// SPEC S6.3: nor on a GPU. One device stays open meanwhile, so that the context
// is made once.
func TestConformanceOnGPU(t *testing.T) {
	keep, err := cuda.Open(cuda.Options{})
	var no *device.Unsupported
	if errors.As(err, &no) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer keep.Close()
	conform(t, func() (device.Device, error) { return cuda.Open(cuda.Options{}) })
}

func conform(t *testing.T, open func() (device.Device, error)) {
	t.Run("Unscheduled", func(t *testing.T) { conformUnder(t, nil, open) })
	for _, seed := range []uint64{0, 4, 5} { // in order, mixed, and everything as late as can be
		if testing.Short() && seed != 4 {
			continue
		}
		t.Run(fmt.Sprint("Seed", seed), func(t *testing.T) { conformUnder(t, &check.Schedule{Seed: seed}, open) })
	}
}

func conformUnder(t *testing.T, s *check.Schedule, open func() (device.Device, error)) {
	wrap := func(t *testing.T, limits [memory.Kinds]memory.Bytes) device.Device {
		inner, err := open()
		if err != nil {
			t.Fatal(err)
		}
		return check.New(check.Options{Schedule: s, Limits: limits}).Wrap(inner)
	}
	devicetest.Run(t,
		func(t *testing.T) device.Device { return wrap(t, [memory.Kinds]memory.Bytes{}) },
		devicetest.Limited(wrap))
}
