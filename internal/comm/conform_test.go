// This file owns the conformance of ranks in one process.

package comm_test

import (
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/commtest"
	"github.com/stowage-dev/stowage/memory"
)

// Ranks in one process pass the suite, also under the race checker. SPEC S6.3
func TestConformance(t *testing.T) {
	for _, checked := range []bool{false, true} {
		for _, size := range []int{2, 3, 5} {
			if testing.Short() && size != 3 {
				continue
			}
			t.Run(fmt.Sprintf("%d ranks, checked %v", size, checked), func(t *testing.T) {
				checker := check.New(check.Options{Report: func(err error) { t.Error(err) }})
				held := make([]int, size)
				for r := range held {
					held[r] = r
				}
				commtest.Run(t, commtest.World{
					Size: size,
					Held: held,
					Device: func(rank int) (device.Device, error) {
						d, err := cpu.Open(cpu.Options{Ordinal: rank, Capacity: [memory.Kinds]memory.Bytes{256 * memory.MiB, 64 * memory.MiB}})
						if err == nil && checked {
							d = checker.Wrap(d)
						}
						return d, err
					},
					Open: func(devs []device.Device) ([]comm.Comm, error) { return comm.NewLocal(devs, comm.Options{}) },
				})
			})
		}
	}
}
