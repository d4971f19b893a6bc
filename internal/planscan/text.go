// This file owns the text of a report.

package planscan

import (
	"fmt"
	"io"

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
}
