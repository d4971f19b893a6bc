// This file owns tests of the text that goes with a report.

package main

import (
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/observe/report"
)

// A run that was continued on fewer ranks has traces of more. The text has those of the end.
func TestReportTextOfContinuedRuns(t *testing.T) {
	for _, x := range []struct {
		figures []report.Figure
		want    string
	}{{nil, "4 ranks\n"}, {[]report.Figure{{Name: "ranks", Value: 2}}, "2 ranks\n"}, {[]report.Figure{{Name: "ranks", Value: 1}}, "1 rank\n"}} {
		var b strings.Builder
		reportText(&b, &report.Report{Runs: []report.Run{{Name: "a", Ranks: make([]report.Rank, 4), Figures: x.figures}}})
		if !strings.HasSuffix(b.String(), x.want) {
			t.Errorf("%v: %q, want %q", x.figures, b.String(), x.want)
		}
	}
}

// Figures stand below each other, also beside a name that is long.
func TestReportTextAligns(t *testing.T) {
	var b strings.Builder
	reportText(&b, &report.Report{Runs: []report.Run{{Name: "compare/none"}, {Name: "compare/offload+recompute"}}})
	if want := "compare/none              0 ranks\ncompare/offload+recompute 0 ranks\n"; b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
}
