// This file owns the pictures in a run's folder: report.html, and the traces for
// Perfetto. A run makes them last, and a picture that cannot be made is a warning.

package run

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/stowage-dev/stowage/internal/atomicfile"
	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/observe/export"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/observe/report/page"
)

// describe writes what is known before the first step, and starts to write traces to the
// folder. It returns the part of the traces, or -1 if there are none.
func (r *run) describe(resumed bool) (part int) {
	f := r.folder
	_, err := f.remember(report.EnvironmentFile)
	if err != nil {
		err = fmt.Errorf("cannot read %s: %w", f.path(report.EnvironmentFile), input.Cause(err))
	}
	env := r.environment()
	if was := report.ReadEnvironment(f.dir); resumed && was.Command != "" {
		env.Command, env.Began = was.Command+"\n"+env.Command, was.Began
	}
	if err == nil {
		err = f.writeJSON(report.EnvironmentFile, env)
	}
	if err != nil {
		r.p.Say("warning: %v; the report will not describe the machine", err)
	}
	if r.traces == nil || r.t.StepsDone() == r.Options.Steps { // no step is left to trace
		return -1
	}
	if resumed {
		part = nextPart(f.disk, f.dir)
	}
	stepped := f.cut != nil && len(f.cut.text) > 0
	made, aside, err := r.traces.attach(f.disk, f.dir, part, stepped)
	if f.made, f.aside = append(f.made, made...), aside; err != nil {
		r.p.Say("warning: %v; the run continues without a trace", err)
		r.untraced = true
		return -1
	}
	return part
}

// writePictures makes the report of a run, whose file it returns. err is that of closing
// its traces.
// It returns "" if the run did no step, or has no folder or no longer its lock. A run that had finished before
// gets what it lacks because it was killed meanwhile.
func (r *run) writePictures(err error) (file string) {
	if r.folder == nil || r.folder.lost() != nil || r.out.Tokens == 0 && !r.out.Finished && !r.out.idle {
		return ""
	}
	if err != nil && !r.untraced {
		r.p.Say("warning: the trace is incomplete: %v", err)
	}
	lacks := func(name string) bool { return !r.out.idle || !exists(r.folder.path(name)) }
	if lacks(report.PerfettoFile) {
		if err := writePerfetto(r.folder.dir); err != nil {
			r.p.Say("warning: cannot write the trace for Perfetto: %v", err)
		}
	}
	if !lacks(report.PageFile) {
		return ""
	}
	return writeReport(r.folder.dir, r.machine.Version, r.p)
}

// writeReport makes the report of a folder and returns its file, or "" if that fails.
func writeReport(dir, version string, p *Progress) (file string) {
	rep, err := report.ReadRecent(traceBytes, dir)
	if err != nil {
		p.Say("warning: cannot make the report: %v", err)
		return ""
	}
	rep.Made, rep.Version = time.Now().UTC().Format(time.RFC3339), version
	file = filepath.Join(dir, report.PageFile)
	if err := atomicfile.Write(file, func(w io.Writer) error { return page.Write(w, rep) }); err != nil {
		p.Say("warning: cannot make the report: %v; `stowage report %s` makes it when that is mended", err, dir)
		return ""
	}
	return file
}

// writePerfetto writes the traces of a run for Perfetto, if it has any.
func writePerfetto(dir string) error {
	traces, err := report.ReadTraces(dir, traceBytes)
	if err != nil {
		return nil // there is none; the report says so
	}
	// A process that was killed here left its temporary file. No other process writes this one.
	left, _ := filepath.Glob(filepath.Join(dir, "."+report.PerfettoFile+"-*"))
	for _, path := range left {
		_ = os.Remove(path) // the next run tries again
	}
	return atomicfile.Write(filepath.Join(dir, report.PerfettoFile), func(w io.Writer) error { return export.Perfetto(w, traces) })
}
