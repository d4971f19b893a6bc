// This file owns `stowage plan scan`: its flags and its errors.

package main

import (
	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/planscan"
	"github.com/stowage-dev/stowage/plan/hardware"
)

func newPlanScan() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "scan <folder>...",
		Short: "Plan every launch file below folders and count what came of it",
		Long: `Plan every launch file below the folders as it is, as stowage plan --megatron does. Print
the files that are refused with the reason of each, then how many are planned and how
many are refused for each reason. Files are shell scripts and YAML unless --name selects
others; a file among the folders counts whatever its name.

With --golden, compare the forecasts with the peaks that Megatron-LM's functional tests
have beside them (golden_values_*.json). The last rank of a job measured them, so they
are compared with the last pipeline rank. The number of GPUs is that of the recipes in
test_utils; tests that no recipe names have 8, or 4 on one GB200 node.`,
		Example: `  stowage plan scan Megatron-LM/examples --name '*.sh'
  stowage plan scan Megatron-LM/tests/functional_tests --name model_config.yaml --golden`,
	}
	f := cmd.Flags()
	f.SortFlags = false
	gpu := f.String("gpu", "h100", "the hardware's `name`")
	names := f.StringSlice("name", planscan.Names, "which files count, `patterns` such as '*.sh'")
	golden := f.Bool("golden", false, "compare with the measured peaks beside Megatron-LM's functional tests")
	asJSON := jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, folders []string) error {
		if len(folders) == 0 {
			return usagef("give a folder with launch files")
		}
		if _, err := hardware.ByName(*gpu); err != nil {
			return usagef("--gpu %s: %w", *gpu, err)
		}
		files, err := planscan.Find(folders, *names)
		if err != nil {
			return usagef("%w", err)
		}
		if len(files) == 0 {
			return usagef("no launch files are below %s; give another folder, or other names with --name", folders[0])
		}
		m := measure(cmd, "planning files")
		r := planscan.Scan(files, *gpu, m.at)
		m.end()
		if *golden {
			m := measure(cmd, "comparing peaks")
			err := r.Compare(m.at)
			m.end()
			if err != nil {
				return err
			}
			if len(r.Golden.Peaks)+len(r.Golden.Skipped) == 0 {
				return usagef("--golden: no measured peaks (golden_values_*.json) lie beside the planned files; give a folder of Megatron-LM's functional tests, or leave --golden out")
			}
		}
		if *asJSON {
			return printJSON(cmd, r)
		}
		r.WriteText(cmd.OutOrStdout())
		return nil
	}
	return cmd
}
