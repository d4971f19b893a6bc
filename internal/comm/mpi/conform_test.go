// This file owns the conformance of ranks over MPI.

package mpi

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/commtest"
	"github.com/stowage-dev/stowage/memory"
)

var full = flag.Bool("full", false, "also run the suite with four processes")

// Processes under Open MPI and MPICH pass the suite, directly and through pinned buffers,
// under the race checker.
func TestConformance(t *testing.T) { // SPEC S7.2
	for _, l := range launchers {
		for _, n := range []int{2, 4} {
			if n > 2 && !*full {
				continue
			}
			t.Run(fmt.Sprintf("%s with %d", l.name, n), func(t *testing.T) {
				if out, err := l.start(t, n, "suite", nil, "-test.v", "-test.run=^TestSuite$"); err != nil {
					t.Errorf("%v\n%s", err, out)
				}
			})
		}
	}
}

var process *Process // of a process that runs the suite

// suite runs the suite in a process that a launcher started.
func suite(m *testing.M) int {
	var err error
	if process, err = Start(os.Getenv); err != nil {
		fmt.Println("FAILED:", err)
		return 1
	}
	if code := m.Run(); code != 0 {
		return code // without Finalize: the launcher ends the others
	}
	if err := process.Finalize(); err != nil {
		fmt.Println("FAILED:", err)
		return 1
	}
	return 0
}

// gpuVariable makes the processes of the suite use the GPU of the machine.
const gpuVariable = "STOWAGE_MPI_TEST_GPU"

func openGPU() (device.Device, error) {
	d, err := cuda.Open(cuda.Options{DeviceCapacity: memory.GiB})
	if err != nil {
		return nil, err
	}
	return d, nil
}

// Processes that share a GPU pass the suite, through pinned buffers.
func TestConformanceOnGPU(t *testing.T) {
	if n, err := cuda.Count(); err != nil || n == 0 {
		t.Skipf("the machine has no GPU (%v)", err)
	}
	for _, n := range []int{2, 4} {
		t.Run(fmt.Sprintf("%d processes", n), func(t *testing.T) {
			l := launchers[0]
			if _, err := exec.LookPath(l.name); err != nil {
				l.name = "mpirun" // not of Debian
			}
			if out, err := l.start(t, n, "suite", []string{gpuVariable + "=1"}, "-test.v", "-test.run=^TestSuite$"); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// TestSuite is what the processes of TestConformance run.
func TestSuite(t *testing.T) {
	if process == nil {
		t.Skip("the processes of TestConformance run it")
	}
	onGPU := os.Getenv(gpuVariable) != ""
	for _, staged := range []bool{false, true} {
		if onGPU && !staged { // the host cannot read its memory
			continue
		}
		t.Run(fmt.Sprintf("staged %v", staged), func(t *testing.T) {
			checker := check.New(check.Options{Report: func(err error) { t.Error(err) }})
			commtest.Run(t, commtest.World{
				Size: process.Size(),
				Held: []int{process.Rank()},
				Device: func(rank int) (device.Device, error) {
					if onGPU {
						return openGPU()
					}
					d, err := cpu.Open(cpu.Options{Ordinal: rank, Capacity: [memory.Kinds]memory.Bytes{256 * memory.MiB, 64 * memory.MiB}})
					if err == nil {
						d = checker.Wrap(d)
					}
					return d, err
				},
				Open: func(devs []device.Device) ([]comm.Comm, error) {
					c, err := process.Open(devs[0], Options{Scratch: memory.MiB, Staged: staged, largest: 100_000})
					return []comm.Comm{c}, err
				},
			})
		})
		if t.Failed() {
			return
		}
	}
}
