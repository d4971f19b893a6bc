// This file owns the text of a report.

package planscan

import (
	"fmt"
	"io"
	"math"

	"github.com/stowage-dev/stowage/internal/planview"
)

// WriteText writes the refused files with their reasons, then the counts.
func (r *Report) WriteText(w io.Writer) {
	for _, row := range r.Rows {
		if !row.Planned {
			fmt.Fprint(w, planview.Wrap(row.File+": "+row.Text, "  "))
		}
	}
	if r.Planned < r.Files {
		fmt.Fprintln(w)
	}
	fmt.Fprintf(w, "%5d  files\n%5d  planned as they are\n", r.Files, r.Planned)
	for _, c := range r.Refused {
		fmt.Fprintf(w, "%5d  refused: %s\n", c.Files, c.Reason)
	}
	if r.Golden != nil {
		r.Golden.writeText(w)
	}
}

// writeText writes the peaks whose forecast is more than 8 % off, then the table.
func (g *Golden) writeText(w io.Writer) {
	fmt.Fprintln(w)
	for _, p := range g.Peaks {
		if math.Abs(p.Error) > 0.08 {
			fmt.Fprint(w, planview.Wrap(fmt.Sprintf("%s: %s predicted, %s measured, %+.1f %%", p.File, planview.Size(p.Predicted), planview.Size(p.Measured), 100*p.Error), "  "))
		}
	}
	fmt.Fprintf(w, "%-34s  %5s  %10s  %10s  %6s  %6s\n", "measured peaks of the last rank", "peaks", "within 3 %", "within 8 %", "mean", "median")
	for _, a := range g.Accuracy {
		fmt.Fprintf(w, "%-34s  %5d  %8.1f %%  %8.1f %%  %4.2f %%  %4.2f %%\n", a.Name, a.Peaks, 100*a.Within3, 100*a.Within8, 100*a.Mean, 100*a.Median)
	}
	for _, s := range g.Skipped {
		fmt.Fprint(w, planview.Wrap("not compared: "+s.File+": "+s.Reason, ""))
	}
}
