// This file owns `stowage plan validate`: predictions beside measured runs.

package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/plan/page"
	"github.com/stowage-dev/stowage/plan/validate"
)

func newPlanValidate() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "validate",
		Short: "Hold predictions against a file of measured runs",
		Long: `Predict every case of a file as it would have been predicted before the launch,
and print predicted, measured and error of each figure, then the mean absolute
error and the worst by kind of case, how many cases of each kind were modelled,
and for each skipped one the reason. The file is JSON with "cases" (arguments of Megatron-LM
with what was measured) and "external_cases" (published figures). Errors are
shares of what was measured.`,
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
		data, err := os.ReadFile(*file)
		if err != nil {
			return usagef("--cases %s cannot be read: %v", *file, pathless(err))
		}
		r, err := validate.File(data)
		if err != nil {
			return usagef("--cases %s: %v", *file, planError(err))
		}
		if *asJSON {
			return printJSON(cmd, withErrors(r))
		}
		validateText(cmd.OutOrStdout(), r)
		return nil
	}
	return cmd
}

// validated is a report whose rows say their error.
type validated struct {
	*validate.Report
	Rows []validatedRow `json:"rows"`
}

type validatedRow struct {
	validate.Row
	Error float64 `json:"error"`
}

func withErrors(r *validate.Report) validated {
	whole := *r
	whole.Kinds, whole.Skipped, whole.FalseFits, whole.Counts = orEmpty(r.Kinds), orEmpty(r.Skipped), orEmpty(r.FalseFits), orEmpty(r.Counts)
	v := validated{Report: &whole, Rows: []validatedRow{}}
	for _, row := range r.Rows {
		v.Rows = append(v.Rows, validatedRow{row, row.Error()})
	}
	return v
}

func validateText(w io.Writer, r *validate.Report) {
	fmt.Fprintf(w, "%-49s  %-9s %-8s %4s %9s %9s %8s\n", "case", "kind", "figure", "rank", "predicted", "measured", "error")
	for _, row := range r.Rows {
		id := row.ID
		if row.What != "" {
			id += ", " + row.What
		}
		fmt.Fprintf(w, "%-49s  %-9s %-8s %4d", shorten(id, 49), row.Kind, row.Quantity, row.Rank)
		if row.Quantity == validate.Fits {
			fmt.Fprintf(w, " %9s %9s %8s\n", fitsWord(row.Predicted), fitsWord(row.Measured), rightWord(row.Within))
			continue
		}
		fmt.Fprintf(w, " %9s %9s %+7.1f%%\n", page.GiB(row.Predicted), page.GiB(row.Measured), 100*row.Error())
	}
	fmt.Fprintf(w, "\n%-12s  %-8s  %7s  %14s  %7s  %11s  %s\n", "kind", "figure", "figures", "mean abs error", "worst", "within band", "the worst case")
	for _, k := range r.Kinds {
		fmt.Fprintf(w, "%-12s  %-8s  %7d  %13.2f%%  %+6.1f%%  %11d  %s\n",
			k.Kind, k.Quantity, k.Rows, 100*k.MeanAbsError, 100*k.Worst, k.Within, shorten(k.WorstID, 34))
	}
	fmt.Fprintf(w, "\n%-12s  %8s  %7s\n", "kind", "modelled", "skipped")
	for _, c := range r.Counts {
		fmt.Fprintf(w, "%-12s  %8d  %7d\n", c.Kind, c.Modelled, c.Skipped)
	}
	fmt.Fprintf(w, "\npeaks: mean abs error %.2f %%, worst %+.1f %%\n%d of %d cases modelled, %d skipped; said to fit although they ran out of memory: %d\n",
		100*r.MeanAbsError, 100*r.Worst, r.Modelled, r.Cases, len(r.Skipped), len(r.FalseFits))
	for _, id := range r.FalseFits {
		fmt.Fprint(w, wrap("false \"fits\": "+id, "  "))
	}
	for _, s := range r.Skipped {
		fmt.Fprint(w, wrap("skipped "+s.ID+": "+s.Reason, "  "))
	}
}

func fitsWord(n int64) string {
	if n > 0 {
		return "fits"
	}
	return "does not"
}

func rightWord(ok bool) string {
	if ok {
		return "right"
	}
	return "WRONG"
}

// shorten keeps the end of a long name, where names differ.
func shorten(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return "…" + string(r[len(r)-n+1:])
	}
	return s
}
