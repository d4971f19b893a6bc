// This file owns the conformance of ranks over NCCL, in processes that share a machine's
// GPUs. Processes that share one GPU have different ids of their host, so that NCCL takes
// them for two machines.

package nccl

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/commtest"
	"github.com/stowage-dev/stowage/internal/comm/mpi"
	"github.com/stowage-dev/stowage/internal/leak"
	"github.com/stowage-dev/stowage/internal/nccl"
	"github.com/stowage-dev/stowage/memory"
)

// role makes the test binary a rank of TestGPU.
const role = "STOWAGE_NCCL_TEST"

var process *mpi.Process // of a rank of TestGPU

func TestMain(m *testing.M) {
	if os.Getenv(role) == "" {
		os.Exit(m.Run())
	}
	var err error
	if process, err = mpi.Start(os.Getenv); err != nil {
		fmt.Println("FAILED:", err)
		os.Exit(1)
	}
	if code := m.Run(); code != 0 {
		os.Exit(code) // without Finalize: the launcher ends the others
	}
	if err := process.Finalize(); err != nil {
		fmt.Println("FAILED:", err)
		os.Exit(1)
	}
}

// missing returns why the machine cannot run ranks over NCCL, or nothing.
func missing() string {
	if n, err := cuda.Count(); err != nil || n == 0 {
		return fmt.Sprintf("the machine has no GPU (%v)", err)
	}
	if _, err := nccl.Open(os.Getenv); err != nil {
		return err.Error()
	}
	if _, err := exec.LookPath("mpirun"); err != nil {
		return "mpirun is not installed (package openmpi-bin)"
	}
	return ""
}

// Two processes over NCCL pass the suite.
func TestGPU(t *testing.T) { // SPEC S7.2
	if why := missing(); why != "" {
		t.Skip(why)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	// The library reads the environment before Go can change it.
	rank := `NCCL_HOSTID=host$OMPI_COMM_WORLD_RANK$PMI_RANK exec "$0" "$@"`
	cmd := exec.CommandContext(ctx, "mpirun", "-n", "2", "sh", "-c", rank, self, "-test.v", "-test.run=^TestSuite$")
	cmd.Env = append(os.Environ(), role+"=1", "NCCL_SOCKET_IFNAME=lo", "NCCL_IB_DISABLE=1", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
		"OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_MCA_hwloc_base_binding_policy=none")
	cmd.SysProcAttr = leak.Child(syscall.SIGTERM)
	runtime.LockOSThread() // Linux takes the end of this thread for the end of the test
	defer runtime.UnlockOSThread()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // whatever is left
}

// TestSuite is what the processes of TestGPU run.
func TestSuite(t *testing.T) {
	if process == nil {
		t.Skip("the processes of TestGPU run it")
	}
	if err := nccl.RegisterNoGraphs(); err != nil {
		t.Fatal(err)
	}
	lib, err := nccl.Open(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("NCCL %s from %s", nccl.Words(lib.Version), lib.Name)
	count, err := cuda.Count()
	if err != nil {
		t.Fatal(err)
	}
	host, err := openCPU(process.Rank())
	if err != nil {
		t.Fatal(err)
	}
	commtest.Run(t, commtest.World{
		Size: process.Size(), Held: []int{process.Rank()}, OwnOrder: true,
		Device: func(rank int) (device.Device, error) {
			d, err := cuda.Open(cuda.Options{Ordinal: rank % count, DeviceCapacity: memory.GiB, Assist: Assist(nil), Shareable: true})
			if err != nil {
				return nil, err
			}
			return d, nil
		},
		Open: func(devs []device.Device) ([]comm.Comm, error) {
			h, err := process.Open(host, mpi.Options{Scratch: 64 * memory.KiB, Patience: time.Minute})
			if err != nil {
				return nil, err
			}
			c, err := Open(lib, devs[0], Options{Host: h, HostDevice: host})
			return []comm.Comm{c}, err
		},
	})
	if err := host.Close(); err != nil {
		t.Error(err)
	}
}
