// This file owns `stowage doctor`.

package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/doctor"
	"github.com/stowage-dev/stowage/internal/launcher"
	"github.com/stowage-dev/stowage/internal/sysinfo"
)

func newDoctor() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Show what this machine offers and what is missing",
		Long: `Show the processor, the memory and its limits, the GPUs and their links, the
optional libraries, and the place among the ranks that a launcher started (mpirun,
srun, torchrun, a Kubernetes job). For everything that is missing, say what would
provide it.
Something missing is no error: the exit code is 0 on a machine without a GPU.

The command measures links with copies of 64 MiB, which takes some seconds. With
--json, stowage plan --doctor plans with the memory that is free on the machine.`,
		Example: "  stowage doctor\n  stowage doctor --json >node.json\n  stowage plan --doctor node.json --model llama-3-8b --gpus 8",
		Args:    noArgs,
	}
	asJSON := jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		m := measure(cmd, "measuring links")
		defer m.end()
		report := doctor.Examine(doctor.Probe{
			Progress:  m.at,
			Version:   thisVersion().String(),
			Machine:   sysinfo.Read,
			Place:     func() (*launcher.Place, error) { return launcher.Find(os.Getenv) },
			OpenCPU:   func() (device.Device, error) { return openCPU(nil) },
			GPUs:      cuda.List,
			OpenGPU:   openGPU,
			Libraries: doctor.Libraries,
			Bench:     doctor.LinkBench(),
		})
		if *asJSON {
			return printJSON(cmd, report)
		}
		report.Text(cmd.OutOrStdout())
		return nil
	}
	return cmd
}
