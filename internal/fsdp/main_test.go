// This file owns what surrounds the tests: no goroutine may be left behind.

package fsdp

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// cpuDevice opens a device without asking how much memory the machine has, because tests
// open many.
func cpuDevice() (device.Device, error) {
	return cpu.Open(cpu.Options{CopyThreads: 1, Capacity: [memory.Kinds]memory.Bytes{64 * memory.MiB, 64 * memory.MiB}})
}

// mustPanic calls do and checks the text of its panic.
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

// plans returns the plans of the steps under a key, if its order is recorded.
func (p *Pipeline) plans(key memory.Key) (params, grads *bucket.PoolPlan, known bool) {
	if g := p.programs[key]; g != nil {
		return g.params.pool.plan, g.grads.pool.plan, true
	}
	return nil, nil, false
}
