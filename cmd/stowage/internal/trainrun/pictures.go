// This file owns the pictures that a run leaves in its folder: report.html, and its
// traces for Perfetto. They are made when all else is written, and when they cannot be
// the run is none the worse: that is a warning.

package trainrun

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/stowage-dev/stowage/report"
	"github.com/stowage-dev/stowage/report/page"
	"github.com/stowage-dev/stowage/trace"
	"github.com/stowage-dev/stowage/trace/export"
)

// describe writes what is known before the first step, and lets traces go to the folder.
func (r *run) describe(goesOn bool) {
	f := r.folder
	path := filepath.Join(f.dir, report.EnvironmentFile)
	if !exists(path) {
		f.made = append(f.made, path)
	}
	env := r.environment()
	if was := report.ReadEnvironment(f.dir); goesOn && was.Command != "" {
		env.Command, env.Began = was.Command+"\n"+env.Command, was.Began
	}
	if err := writeJSON(path, env); err != nil {
		r.p.Say("warning: %v; the report will not say where the run was made", err)
	}
	if r.traces == nil {
		return
	}
	part := 0
	if goesOn {
		part = nextPart(f.dir)
	}
	made, err := r.traces.attach(f.dir, part)
	if f.made = append(f.made, made...); err != nil {
		r.p.Say("warning: %v; the run goes on without a trace", err)
	}
}

// pictures ends the traces of a run that has trained, and shows them. It names the
// report.
func (r *run) pictures() (file string) {
	err := r.traces.close()
	if r.folder == nil || r.out.Tokens == 0 {
		return ""
	}
	if err != nil {
		r.p.Say("warning: the trace is not whole: %v", err)
	}
	if err := perfetto(r.folder.dir); err != nil {
		r.p.Say("warning: there is no trace for Perfetto: %v", err)
	}
	return draw(r.folder.dir, r.machine.Version, r.p)
}

// draw makes the report of a folder, and names it.
func draw(dir, version string, p *Progress) (file string) {
	rep, err := report.Read(dir)
	if err != nil {
		p.Say("warning: there is no report: %v", err)
		return ""
	}
	rep.Made, rep.Version = time.Now().UTC().Format(time.RFC3339), version
	file = filepath.Join(dir, report.PageFile)
	if err := WriteFile(file, func(w io.Writer) error { return page.Write(w, rep) }); err != nil {
		p.Say("warning: there is no report: %v; make room and use `stowage report %s`", err, dir)
		return ""
	}
	return file
}

// perfetto writes the traces of a run for Perfetto, if it has any.
func perfetto(dir string) error {
	var all []*trace.Trace
	for _, f := range report.TraceFiles(dir) {
		t, err := report.ReadTrace(f.Path)
		if err == nil {
			all = append(all, t)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return WriteFile(filepath.Join(dir, report.PerfettoFile), func(w io.Writer) error { return export.Perfetto(w, all) })
}

// WriteFile writes a file beside and renames it: whoever reads finds the old one or the
// new one, and on a full disk the old one stays.
func WriteFile(path string, write func(io.Writer) error) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return fmt.Errorf("%s cannot be written: %w", path, pathless(err))
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
			err = fmt.Errorf("%s cannot be written: %w", path, pathless(err))
		}
	}()
	b := bufio.NewWriterSize(f, 1<<20)
	if err = write(b); err == nil {
		err = b.Flush()
	}
	if err == nil {
		err = f.Chmod(0o644)
	}
	if end := f.Close(); err == nil {
		err = end
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
