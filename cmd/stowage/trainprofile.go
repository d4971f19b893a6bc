// This file owns `stowage train --profile`: what it cannot be used with, and the devices and
// limits that a profile needs.

package main

import (
	"cmp"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bench"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/profile"
	"github.com/stowage-dev/stowage/memory"
)

// checkProfile returns an error if the other flags leave nothing to profile.
func (f *trainFlags) checkProfile(launched bool) error {
	o := &f.options
	switch {
	case !f.profile:
	case f.dryRun:
		return usagef("--profile times a run, and --dry-run trains nothing; leave one of them out")
	case launched:
		return usagef("--profile is for ranks in one process; leave the launcher (mpirun, srun, torchrun) out")
	case len(o.Graph) > 0 || o.Policy == "graphs":
		return usagef("--profile times single launches, and a graph is replayed as a whole; choose another policy and leave --graph out")
	}
	return nil
}

// profiler returns the profiler, or nil if none is asked for, and the function that opens
// the device of a rank.
func (f *trainFlags) profiler(dev deviceChoice) (*profile.Profiler, func(int, device.Observer) (device.Device, error)) {
	open := func(_ int, watch device.Observer) (device.Device, error) { return dev.watched(watch) }
	if !f.profile {
		return nil, open
	}
	p := &profile.Profiler{Measure: func() (profile.Limits, error) { return measureLimits(dev, f.options.BF16) }}
	return p, func(rank int, watch device.Observer) (device.Device, error) {
		d, err := open(rank, watch)
		if err != nil {
			return nil, err
		}
		return p.Wrap(d), nil
	}
}

// measureLimits measures the device as `stowage doctor` does.
func measureLimits(choice deviceChoice, bf16 bool) (l profile.Limits, err error) {
	d, err := choice.open()
	if err != nil {
		return l, err
	}
	number, size := kernels.F32, 64*memory.MiB
	if l.Format = "fp32"; bf16 {
		number, l.Format = kernels.BF16, "bf16"
	}
	if choice.backend == "cuda" {
		size = memory.GiB
	}
	if l.Product, err = bench.Product(d, number, bench.ProductSize(d)); err == nil {
		err = bench.Copies(d, bench.Options{Line: 100 * time.Millisecond}, size, []bench.Direction{bench.Device}, func(c bench.Copy) error {
			l.Copy = c.GBps
			return nil
		})
	}
	return l, cmp.Or(err, d.Close())
}
