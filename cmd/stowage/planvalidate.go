// This file owns `stowage plan validate`: its flags and its errors.

package main

import (
	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/internal/planvalidate"
)

func newPlanValidate() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "validate",
		Short: "Compare forecasts with a file of measured runs",
		Long: `Predict every case of a file as before its launch. Print the predicted and the measured
figure with the error of each, the mean absolute error and the worst by kind of case, how
many cases of each kind were modelled, and why others were skipped. The file is JSON with
"cases" (arguments of Megatron-LM with what was measured), "external_cases" (published
figures) and "throughput_rows" (published layouts with tokens a second a GPU). Errors are
parts of the measured figure.`,
		Example: `  stowage plan validate --cases measured_cases.json
  stowage plan validate --cases measured_cases.json --json`,
		Args: noArgs,
	}
	file := cmd.Flags().String("cases", "", "the `file` of measured runs")
	asJSON := jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *file == "" {
			return usagef("give --cases FILE, a file of measured runs")
		}
		data, err := input.ReadFile(*file, input.Settings)
		if err != nil {
			return usagef("--cases %s: the file cannot be read: %w", *file, input.Cause(err))
		}
		m := measure(cmd, "predicting cases")
		r, err := planvalidate.File(data, m.at)
		m.end()
		if err != nil {
			return usagef("--cases %s: %w", *file, planError(err))
		}
		if *asJSON {
			return printJSON(cmd, r.JSON())
		}
		r.WriteText(cmd.OutOrStdout())
		return nil
	}
	return cmd
}
