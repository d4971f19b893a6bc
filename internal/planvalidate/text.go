// This file owns the text and the JSON of a report.

package planvalidate

import (
	"fmt"
	"io"

	"github.com/stowage-dev/stowage/internal/planview"
	"github.com/stowage-dev/stowage/memory"
)

// jsonReport is a report whose rows state their error.
type jsonReport struct {
	*Report
	Rows []jsonRow `json:"rows"`
}

type jsonRow struct {
	Row
	Error float64 `json:"error"`
}

// JSON returns the value that encoding/json writes as the report: empty lists are [],
// and every row has its error.
func (r *Report) JSON() any {
	whole := *r
	whole.Kinds, whole.Skipped, whole.FalseFits, whole.Counts = orEmpty(r.Kinds), orEmpty(r.Skipped), orEmpty(r.FalseFits), orEmpty(r.Counts)
	whole.Throughput, whole.TimeKinds, whole.TimeSkipped = orEmpty(r.Throughput), orEmpty(r.TimeKinds), orEmpty(r.TimeSkipped)
	v := jsonReport{Report: &whole, Rows: []jsonRow{}}
	for _, row := range r.Rows {
		v.Rows = append(v.Rows, jsonRow{row, row.Error()})
	}
	return v
}

// orEmpty returns an empty list for nil, so that JSON has [] and not null.
func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// WriteText writes the report for a terminal: cases of memory, then rows of throughput.
func (r *Report) WriteText(w io.Writer) {
	if r.Cases > 0 {
		r.writeMemory(w)
	}
	if len(r.Throughput)+len(r.TimeSkipped) == 0 {
		return
	}
	if r.Cases > 0 {
		fmt.Fprintln(w)
	}
	r.writeTime(w)
}

func (r *Report) writeTime(w io.Writer) {
	fmt.Fprintf(w, "%-63s  %-6s %9s %9s %8s\n", "run, tokens a second a GPU", "kind", "predicted", "measured", "error")
	for _, row := range r.Throughput {
		fmt.Fprintf(w, "%-63s  %-6s %9.0f %9.0f %+7.1f%%\n", shorten(row.ID, 63), row.Kind, row.Predicted, row.Measured, 100*row.Error)
	}
	fmt.Fprintf(w, "\n%-6s  %4s  %14s  %7s  %s\n", "kind", "runs", "mean abs error", "worst", "the worst run")
	for _, k := range r.TimeKinds {
		fmt.Fprintf(w, "%-6s  %4d  %13.2f%%  %+6.1f%%  %s\n", k.Kind, k.Rows, 100*k.MeanAbsError, 100*k.Worst, k.WorstID)
	}
	fmt.Fprintf(w, "\ntokens a second: mean abs error %.2f %%, worst %+.1f %%\n%d of %d runs modelled, %d skipped\n",
		100*r.TimeMeanAbsError, 100*r.TimeWorst, len(r.Throughput), len(r.Throughput)+len(r.TimeSkipped), len(r.TimeSkipped))
	for _, s := range r.TimeSkipped {
		fmt.Fprint(w, planview.Wrap("skipped "+s.ID+": "+s.Reason, "  "))
	}
}

func (r *Report) writeMemory(w io.Writer) {
	fmt.Fprintf(w, "%-49s  %-9s %-8s %4s %9s %9s %8s\n", "case", "kind", "figure", "rank", "predicted", "measured", "error")
	for _, row := range r.Rows {
		id := row.ID
		if row.What != "" {
			id += ", " + row.What
		}
		fmt.Fprintf(w, "%-49s  %-9s %-8s %4d", shorten(id, 49), row.Kind, row.Quantity, row.Rank)
		if row.Quantity == Fits {
			fmt.Fprintf(w, " %9s %9s %8s\n", fitsWord(row.Predicted), fitsWord(row.Measured), rightWord(row.Within))
			continue
		}
		fmt.Fprintf(w, " %9s %9s %+7.1f%%\n", planview.GiB(row.Predicted), planview.GiB(row.Measured), 100*row.Error())
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
		fmt.Fprint(w, planview.Wrap("false \"fits\": "+id, "  "))
	}
	for _, s := range r.Skipped {
		fmt.Fprint(w, planview.Wrap("skipped "+s.ID+": "+s.Reason, "  "))
	}
}

func fitsWord(n memory.Bytes) string {
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
