// This file owns the page that shows predicted beside measured figures.

package planvalidate

import (
	"fmt"
	"strings"
)

// Markdown writes a report as a page: figures by kind, then every figure, then
// what was skipped and why.
func (r *Report) Markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d of %d cases modelled. Peaks: mean absolute error %.2f %%, worst %+.1f %%. Cases that ran out of memory and would have been said to fit: %d.\n\n",
		r.Modelled, r.Cases, 100*r.MeanAbsError, 100*r.Worst, len(r.FalseFits))
	b.WriteString("| kind | cases modelled | skipped |\n|---|--:|--:|\n")
	for _, c := range r.Counts {
		fmt.Fprintf(&b, "| %s | %d | %d |\n", c.Kind, c.Modelled, c.Skipped)
	}
	b.WriteString("\n| figure | kind | figures | mean abs error | worst | in band | the worst |\n|---|---|--:|--:|--:|--:|---|\n")
	for _, k := range r.Kinds {
		fmt.Fprintf(&b, "| %s | %s | %d | %.2f %% | %+.2f %% | %d | %s |\n", k.Quantity, k.Kind, k.Rows, 100*k.MeanAbsError, 100*k.Worst, k.Within, k.WorstID)
	}
	b.WriteString("\n| case | kind | figure | rank | predicted GiB | measured GiB | error |\n|---|---|---|--:|--:|--:|--:|\n")
	for _, row := range r.Rows {
		name := row.ID
		if row.What != "" {
			name += ", " + row.What
		}
		if row.Quantity == Fits {
			fmt.Fprintf(&b, "| %s | %s | %s | %d | %s | ran out | |\n", name, row.Kind, row.Quantity, row.Rank, said(row.Within))
			continue
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %d | %.3f | %.3f | %+.2f %% |\n", name, row.Kind, row.Quantity, row.Rank,
			float64(row.Predicted)/gib, float64(row.Measured)/gib, 100*row.Error())
	}
	b.WriteString("\n| skipped | kind | why |\n|---|---|---|\n")
	for _, s := range r.Skipped {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", s.ID, s.Kind, s.Reason)
	}
	if len(r.Throughput) == 0 {
		return b.String()
	}
	fmt.Fprintf(&b, "\n%d of %d runs with a throughput modelled. Tokens a second: mean absolute error %.2f %%, worst %+.1f %%.\n\n",
		len(r.Throughput), len(r.Throughput)+len(r.TimeSkipped), 100*r.TimeMeanAbsError, 100*r.TimeWorst)
	b.WriteString("| kind | runs | mean abs error | worst | the worst |\n|---|--:|--:|--:|---|\n")
	for _, k := range r.TimeKinds {
		fmt.Fprintf(&b, "| %s | %d | %.2f %% | %+.2f %% | %s |\n", k.Kind, k.Rows, 100*k.MeanAbsError, 100*k.Worst, k.WorstID)
	}
	b.WriteString("\n| run | kind | predicted tokens a second a GPU | measured | error |\n|---|---|--:|--:|--:|\n")
	for _, row := range r.Throughput {
		fmt.Fprintf(&b, "| %s | %s | %.0f | %.0f | %+.2f %% |\n", row.ID, row.Kind, row.Predicted, row.Measured, 100*row.Error)
	}
	b.WriteString("\n| skipped | kind | why |\n|---|---|---|\n")
	for _, s := range r.TimeSkipped {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", s.ID, s.Kind, s.Reason)
	}
	return b.String()
}

func said(right bool) string {
	if right {
		return "does not fit"
	}
	return "fits"
}
