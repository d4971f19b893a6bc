// This file owns the devices that tests run on, and the loops that they run.

package engine

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

func cpuDevice() (device.Device, error) {
	return cpu.Open(cpu.Options{CopyThreads: 1, Capacity: [memory.Kinds]memory.Bytes{64 * memory.MiB, 64 * memory.MiB}})
}

func openCPU(t testing.TB) device.Device {
	t.Helper()
	d, err := cpuDevice()
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// openCUDA opens the first GPU, or skips with the reason.
func openCUDA(t testing.TB) device.Device {
	t.Helper()
	d, err := cuda.Open(cuda.Options{CopyKernel: kernels.GraphCopy})
	var no *device.Unsupported
	if errors.As(err, &no) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// onDevices runs a test on the CPU and on a GPU, each opened once.
func onDevices(t *testing.T, f func(t *testing.T, dev device.Device)) {
	for name, open := range map[string]func(testing.TB) device.Device{"cpu": openCPU, "cuda": openCUDA} {
		t.Run(name, func(t *testing.T) {
			dev := open(t)
			f(t, dev)
			if err := dev.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// testLinks spare tests the measurement.
var testLinks = memory.Links{Out: 5e9, In: 5e9}

var pipelines = []struct {
	name string
	schedule.Pipeline
	rank, layers int
}{
	{"pp1", schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 2}, 0, 4},
	{"1f1b", schedule.Pipeline{Ranks: 3, Chunks: 1, Microbatches: 4}, 0, 2},
	{"interleaved", schedule.Pipeline{Ranks: 2, Chunks: 2, Microbatches: 4}, 1, 2},
}

// on is a loop configuration for a pipeline.
func on(i int, c Config) loopConfig {
	p := pipelines[i]
	if c.Links == (memory.Links{}) {
		c.Links = testLinks
	}
	return loopConfig{Config: c, pipeline: p.Pipeline, rank: p.rank, layers: p.layers}
}

// run runs a loop on a device and closes it.
func run(dev device.Device, c loopConfig, body func(l *loop, rng *rand.Rand) error) error {
	l, err := newLoop(dev, c)
	if err == nil {
		err = body(l, rand.New(rand.NewPCG(1, 2)))
	}
	return errors.Join(err, l.close())
}

// must runs a loop on the CPU by a steady clock: what is measured, and the plans that
// follow from it, are the same on every machine.
func must(t *testing.T, c loopConfig, body func(l *loop, rng *rand.Rand) error) {
	t.Helper()
	mustOn(t, func(dev device.Device) device.Device { return dev }, c, body)
}

// mustOn is must on a device that is wrapped.
func mustOn(t *testing.T, wrap func(device.Device) device.Device, c loopConfig, body func(l *loop, rng *rand.Rand) error) {
	t.Helper()
	c.work = cmp.Or(c.work, quick)
	var err error
	steady(t, func() {
		dev, failed := cpuDevice()
		if err = failed; err == nil {
			dev = wrap(dev)
			err = errors.Join(run(dev, c, body), dev.Close())
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

// quick is the work of a module by a steady clock. Without any, all plans are equally
// fast, and the solver tries a great many.
const quick = 5 * time.Microsecond

// steady runs a part of a test by a clock that moves only while all streams wait.
func steady(t *testing.T, f func()) {
	t.Helper()
	synctest.Test(t, func(*testing.T) { f() })
}

// steps is a body that trains. A capture that failed and was made up for by an eager
// step is a failure here.
func steps(n int) func(l *loop, rng *rand.Rand) error {
	return func(l *loop, rng *rand.Rand) error {
		err := l.train(n, rng)
		if g := l.rt.Summary(l.key()).Graphs; err == nil && g != nil && g.Refused > 0 {
			err = fmt.Errorf("%d scopes were refused", g.Refused)
		}
		return err
	}
}

// extent is what a loop takes with everything kept.
func extent(t *testing.T, c loopConfig) (n memory.Bytes) {
	t.Helper()
	c.SavedLimit, c.ByHand, c.Policy = 0, nil, nil
	must(t, c, func(l *loop, rng *rand.Rand) error {
		err := l.train(2, rng)
		n = l.rt.Summary(l.key()).Extent
		return err
	})
	return n
}
