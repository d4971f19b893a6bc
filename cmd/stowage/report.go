// This file owns `stowage report`: a page of runs that finished or are in progress.

package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/export"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/observe/report/page"
	"github.com/stowage-dev/stowage/observe/trace"
)

const reportLong = `Make one HTML page of one or several runs. It shows memory over time by tier and group,
what streams did and waited for, copies, the choice for every group and its reason,
forecasts beside measurements, losses and speeds. The page is one file and needs no
network.

A run is the folder that "stowage train --out" wrote, the folder of a comparison, which
stands for all of its runs, or a single trace. A run may be in progress, stopped or
damaged: the page shows what is there and says what is missing. Among several folders,
those without a run are left out. Folders and traces of one run whose ranks lived in several
processes are shown as one run, on the clock of rank 0.

--perfetto writes the traces of one run for https://ui.perfetto.dev, and --memory-viz for
PyTorch's viewer at https://pytorch.org/memory_viz. --json prints the figures of the page
instead of writing it; with --out the command does both.`

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
				return usagef("expected the folder of a run, such as runs/compare, or several")
			}
			return nil
		},
	}
	f := cmd.Flags()
	out := f.String("out", "", "`file` of the page (default report.html in the run's folder, or here for several runs)")
	perfetto := f.String("perfetto", "", "write the traces to a `file` for Perfetto")
	viz := f.String("memory-viz", "", "write the traces to a `file` for PyTorch's memory viewer")
	asJSON := jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, runs []string) error {
		return makeReport(cmd, runs, reportFiles{*out, *perfetto, *viz}, *asJSON)
	}
	return cmd
}

// reportFiles holds the files that the flags ask for.
type reportFiles struct{ page, perfetto, viz string }

// makeReport reads the runs, and writes and prints what the flags ask for.
func makeReport(cmd *cobra.Command, runs []string, files reportFiles, asJSON bool) error {
	out := flagFile{"out", files.page}
	if !asJSON && files.page == "" {
		out = flagFile{name: defaultPage(runs)}
	}
	var reads []flagFile
	for _, run := range runs {
		reads = append(reads, flagFile{name: run})
	}
	writes := []flagFile{out, {"perfetto", files.perfetto}, {"memory-viz", files.viz}}
	for _, f := range writes {
		if f.name != "" && slices.ContainsFunc(runs, func(run string) bool { return isPartOf(run, f.name) }) {
			return usagef("--%s %s is a file of the run, which would be lost; give another file to write", f.flag, f.name)
		}
	}
	for _, run := range runs {
		if _, err := os.ReadDir(run); errors.Is(err, fs.ErrPermission) {
			return usagef("%s cannot be read: %w%s", run, input.Cause(err), input.Denied(err))
		}
	}
	if err := checkFiles(writes, reads...); err != nil {
		return err
	}
	m := measure(cmd, "reading the runs")
	r, err := report.Read(runs...)
	m.end()
	var nothing *report.NoRunError
	if errors.As(err, &nothing) {
		return usagef("%w", err)
	}
	if err != nil {
		return err
	}
	// Several places may have traces of one run, whose ranks lived on several hosts.
	if files.perfetto+files.viz != "" && len(runs) > 1 && (len(r.Runs) > 1 || r.Runs[0].Environment["hosts"] == "") {
		return usagef("--perfetto and --memory-viz take one run, got %d; name one", len(runs))
	}
	stamp(r)
	for _, x := range r.Missing {
		say(cmd.ErrOrStderr(), x+"\n")
	}
	for _, x := range []struct {
		flag, file string
		write      func(io.Writer, []*trace.Trace) error
	}{{"perfetto", files.perfetto, export.Perfetto}, {"memory-viz", files.viz, export.MemoryViz}} {
		if x.file == "" {
			continue
		}
		var traces []*trace.Trace
		for _, run := range slices.Compact(slices.Sorted(slices.Values(runs))) {
			some, err := report.ReadTraces(run, 0)
			if err != nil {
				return usagef("--%s: %w", x.flag, err)
			}
			traces = append(traces, some...)
		}
		if err := saveFile(flagFile{x.flag, x.file}, func(w io.Writer) error { return x.write(w, traces) }); err != nil {
			return err
		}
	}
	if out.name != "" {
		if err := saveFile(out, func(w io.Writer) error { return page.Write(w, r) }); err != nil {
			return err
		}
	}
	if asJSON {
		if err := printJSON(cmd, r); err != nil {
			return err
		}
	} else {
		reportText(cmd.OutOrStdout(), r)
	}
	written(cmd, asJSON, "the report is", out.name)
	written(cmd, asJSON, "for Perfetto:", files.perfetto)
	written(cmd, asJSON, "for PyTorch's viewer:", files.viz)
	return nil
}

// isPartOf reports whether a file has the name of one that holds a run: its options,
// figures, traces or checkpoints. Pages and exports in a run's folder can be made again.
func isPartOf(run, file string) bool {
	name, err := filepath.Rel(realPath(run), realPath(file))
	if err != nil || !filepath.IsLocal(name) {
		return false
	}
	switch filepath.Base(name) {
	case report.ConfigFile, report.EnvironmentFile, report.MetricsFile, report.SummaryFile, "lock", "checkpoint.json":
		return true
	}
	return slices.Contains([]string{".trace", ".safetensors"}, filepath.Ext(name))
}

// stamp adds the version and the time to a report.
func stamp(r *report.Report) {
	r.Made, r.Version = time.Now().UTC().Format(time.RFC3339), thisVersion().String()
}

// defaultPage returns the file of the page: in the folder of one run, or here for several.
func defaultPage(runs []string) string {
	if info, err := os.Stat(runs[0]); len(runs) == 1 && err == nil && info.IsDir() {
		return filepath.Join(runs[0], report.PageFile)
	}
	return report.PageFile
}

// counted returns a number with its noun: "1 rank" or "2 ranks".
func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// reportText prints the runs and what they lack.
func reportText(w io.Writer, r *report.Report) {
	width := 18
	for _, run := range r.Runs {
		width = max(width, utf8.RuneCountInString(run.Name))
	}
	for _, run := range r.Runs {
		var words []string
		ranks := len(run.Ranks)
		for _, f := range run.Figures {
			switch f.Name {
			case "peak_device_bytes":
				words = append(words, "device peak "+memory.Bytes(f.Value).Short())
			case "ranks": // a run that was continued with fewer has traces of more
				ranks = int(f.Value)
			}
		}
		if n := len(run.Steps.Step); n > 0 {
			words = append(words, counted(run.Steps.Step[n-1], "step"), fmt.Sprintf("loss %.4f", run.Steps.Loss[n-1]))
		}
		words = append(words, counted(ranks, "rank"))
		fmt.Fprintf(w, "%-*s %s\n", width, run.Name, strings.Join(words, ", "))
		for _, x := range run.Missing {
			fmt.Fprintf(w, "  %s\n", x)
		}
	}
}
