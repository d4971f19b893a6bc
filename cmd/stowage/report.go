// This file owns `stowage report`: pictures of runs that were made before, or that are
// under way.

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/cmd/stowage/internal/trainrun"
	sizes "github.com/stowage-dev/stowage/plan/page"
	"github.com/stowage-dev/stowage/report"
	"github.com/stowage-dev/stowage/report/page"
	"github.com/stowage-dev/stowage/trace"
	"github.com/stowage-dev/stowage/trace/export"
)

const reportLong = `Make one HTML page of one or several runs: memory over time by tier and group, what
streams did and waited for, copies, what was chosen for every group and why, predictions
beside what came true, losses and speeds. The page needs no network and nothing beside it.

A run is the folder that "stowage train --out" wrote, a folder of a comparison, which
stands for all of its runs, or a single trace. Runs that were stopped, damaged, or are under
way will do: what is missing is said, and the rest is shown. Of several, folders without a
run are left out.

--perfetto writes the traces of one run for https://ui.perfetto.dev, --memory-viz for
PyTorch's viewer at https://pytorch.org/memory_viz. --json prints the figures of the page
instead of writing it; with --out it does both.`

func newReportCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "report RUN…",
		Short: "Make a page of one or several runs",
		Long:  reportLong,
		Example: `  stowage report runs/compare
  stowage report run
  stowage report run other --out both.html
  stowage report run --perfetto run.pftrace --memory-viz run.pickle
  stowage report run --json`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("name the folder of a run, such as runs/compare, or several")
			}
			return nil
		},
	}
	f := cmd.Flags()
	out := f.String("out", "", "`file` of the page (default report.html in the run's folder; of several runs, here)")
	perfetto := f.String("perfetto", "", "write the traces to a `file` for Perfetto")
	viz := f.String("memory-viz", "", "write the traces to a `file` for PyTorch's memory viewer")
	asJSON := jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, runs []string) error {
		return makeReport(cmd, runs, reportFiles{*out, *perfetto, *viz}, *asJSON)
	}
	return cmd
}

// reportFiles are the files that are asked for.
type reportFiles struct{ page, perfetto, viz string }

func makeReport(cmd *cobra.Command, runs []string, files reportFiles, asJSON bool) error {
	if files.perfetto+files.viz != "" && len(runs) > 1 {
		return usagef("--perfetto and --memory-viz are for one run, and there are %d; name one", len(runs))
	}
	for _, x := range []struct{ flag, file string }{{"out", files.page}, {"perfetto", files.perfetto}, {"memory-viz", files.viz}} {
		if info, err := os.Stat(x.file); strings.HasSuffix(x.file, "/") || err == nil && info.IsDir() {
			return usagef("--%s %s names a folder; give a file", x.flag, x.file)
		}
	}
	r, err := report.Read(runs...)
	var nothing *report.Nothing
	if errors.As(err, &nothing) {
		return usagef("%v", err)
	}
	if err != nil {
		return err
	}
	stamp(r)
	for _, x := range r.Missing {
		fmt.Fprintln(cmd.ErrOrStderr(), x)
	}
	for _, x := range []struct {
		flag, file string
		write      func(io.Writer, []*trace.Trace) error
	}{{"perfetto", files.perfetto, export.Perfetto}, {"memory-viz", files.viz, export.MemoryViz}} {
		if x.file == "" {
			continue
		}
		traces, err := tracesOf(runs[0])
		if err != nil {
			return usagef("--%s: %v", x.flag, err)
		}
		if err := trainrun.WriteFile(x.file, func(w io.Writer) error { return x.write(w, traces) }); err != nil {
			return fmt.Errorf("--%s: %w", x.flag, err)
		}
	}
	if !asJSON || files.page != "" {
		file := cmp.Or(files.page, defaultPage(runs))
		if err := trainrun.WriteFile(file, func(w io.Writer) error { return page.Write(w, r) }); err != nil {
			return fmt.Errorf("--out: %w; name a file in a folder that may be written", err)
		}
		files.page = file
	}
	if asJSON {
		return printJSON(cmd, r)
	}
	reportText(cmd.OutOrStdout(), r, files)
	return nil
}

// stamp says who made a report, and when.
func stamp(r *report.Report) {
	r.Made, r.Version = time.Now().UTC().Format(time.RFC3339), thisVersion().String()
}

// defaultPage is the page's file: in the folder of one run, and of several here.
func defaultPage(runs []string) string {
	if info, err := os.Stat(runs[0]); len(runs) == 1 && err == nil && info.IsDir() {
		return filepath.Join(runs[0], report.PageFile)
	}
	return report.PageFile
}

// tracesOf are the traces of one run, those that can be read.
func tracesOf(run string) (all []*trace.Trace, err error) {
	files := report.TraceFiles(run)
	if info, err := os.Stat(run); err == nil && !info.IsDir() {
		files = []report.TraceFile{{Path: run}}
	}
	for _, f := range files {
		t, cannot := report.ReadTrace(f.Path)
		if cannot != nil {
			err = cmp.Or(err, cannot)
			continue
		}
		all = append(all, t)
	}
	switch {
	case len(all) > 0:
		return all, nil
	case err != nil:
		return nil, fmt.Errorf("%s has no trace that can be read: %w", run, err)
	}
	return nil, fmt.Errorf("%s has no trace; of a comparison name the folder of one policy", run)
}

func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// reportText says what was made of what, and what of its runs is missing.
func reportText(w io.Writer, r *report.Report, files reportFiles) {
	for _, run := range r.Runs {
		var words []string
		for _, f := range run.Figures {
			if f.Name == "peak_device_bytes" {
				words = append(words, "device peak "+sizes.Size(int64(f.Value)))
			}
		}
		if n := len(run.Steps.Step); n > 0 {
			words = append(words, counted(run.Steps.Step[n-1], "step"), fmt.Sprintf("loss %.4f", run.Steps.Loss[n-1]))
		}
		words = append(words, counted(len(run.Ranks), "rank"))
		fmt.Fprintf(w, "%-18s %s\n", run.Name, strings.Join(words, ", "))
		for _, x := range run.Missing {
			fmt.Fprintf(w, "  %s\n", x)
		}
	}
	for _, f := range []struct{ what, file string }{{"the report is", files.page}, {"for Perfetto:", files.perfetto}, {"for PyTorch's viewer:", files.viz}} {
		if f.file != "" {
			fmt.Fprintf(w, "%s %s\n", f.what, f.file)
		}
	}
}
