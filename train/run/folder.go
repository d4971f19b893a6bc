// This file owns a run's folder:
//
//	config.yaml       the options, which a resumed run reads
//	environment.json  the machine and the command
//	metrics.jsonl     one line a step
//	summary.json      the figures of the run
//	trace/            what every rank did
//	report.html       pictures of it, and trace.pftrace for Perfetto
//	checkpoints/      see package checkpoint
//
// config.yaml comes first: a folder without it holds no run. Package report owns the
// names and reads the files.

package run

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/stowage-dev/stowage/internal/atomicfile"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
)

const (
	configName  = report.ConfigFile
	metricsName = report.MetricsFile
	summaryName = report.SummaryFile
)

// folder is the folder of a run in progress.
type folder struct {
	dir     string
	store   *checkpoint.Store
	metrics *os.File
	last    float64  // the loss of the last step in it
	made    []string // new folders and files, the innermost last
	before  []byte   // the options that the folder had
}

// openFolder creates what is missing, locks the folder, writes the options and cuts the
// metrics after the given number of steps.
func openFolder(dir string, o *Options, done int, warn func(string)) (f *folder, err error) {
	f = &folder{dir: dir}
	defer func() {
		if err != nil {
			f.undo()
			err = blame("Folder", err)
		}
	}()
	for d := filepath.Clean(dir); !exists(d); d = filepath.Dir(d) {
		f.made = append([]string{d}, f.made...)
	}
	for _, name := range []string{configName, metricsName, "checkpoints", "checkpoints/lock"} {
		if path := filepath.Join(dir, name); !exists(path) {
			f.made = append(f.made, path)
		}
	}
	if f.store, err = checkpoint.Open(checkpoint.Options{Dir: dir, Keep: o.Keep, Warn: warn}); err != nil {
		return f, err
	}
	text, err := o.encode()
	if err != nil {
		return f, err
	}
	file := filepath.Join(dir, configName)
	if f.before, err = os.ReadFile(file); err != nil && exists(file) {
		return f, fmt.Errorf("cannot read %s: %w", file, pathless(err))
	}
	if err := atomicfile.WriteBytes(file, text); err != nil {
		return f, err
	}
	return f, f.openMetrics(done)
}

// foreign returns a file in the folder that has the name of a run's file, and that no run
// wrote.
func foreign(dir string) string {
	text, err := os.ReadFile(filepath.Join(dir, configName))
	switch {
	case err == nil && bytes.HasPrefix(text, []byte(configHead)):
		return "" // a run wrote all of them
	case exists(filepath.Join(dir, configName)):
		return configName
	}
	for _, name := range []string{metricsName, summaryName} {
		if exists(filepath.Join(dir, name)) {
			return name
		}
	}
	return ""
}

// exists reports whether there is something at a path.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// openMetrics drops the lines of steps that are about to be repeated, and a line that is
// incomplete.
func (f *folder) openMetrics(done int) (err error) {
	path := filepath.Join(f.dir, metricsName)
	if f.metrics, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644); err != nil {
		return fmt.Errorf("cannot write %s: %w", path, pathless(err))
	}
	keep, in := int64(0), bufio.NewReader(f.metrics)
	for {
		line, err := in.ReadBytes('\n')
		var m struct {
			Step int
			Loss float64
		}
		if err != nil || json.Unmarshal(line, &m) != nil || m.Step < 1 || m.Step > done {
			break
		}
		keep += int64(len(line))
		f.last = m.Loss
	}
	if err := f.metrics.Truncate(keep); err != nil {
		return fmt.Errorf("cannot shorten %s: %w", path, pathless(err))
	}
	_, err = f.metrics.Seek(keep, io.SeekStart)
	return err
}

// record appends a line to the metrics at once, so that a killed run loses none.
func (f *folder) record(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if _, err := f.metrics.Write(append(text, '\n')); err != nil {
		return fmt.Errorf("cannot write %s: %w", f.metrics.Name(), pathless(err))
	}
	return nil
}

// writeSummary writes the figures of the run.
func (f *folder) writeSummary(s any) error { return writeJSON(filepath.Join(f.dir, summaryName), s) }

// writeJSON replaces a file with indented JSON.
func writeJSON(path string, v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return err
	}
	return atomicfile.WriteBytes(path, b.Bytes())
}

// undo removes what openFolder created and restores the options that were there. A run
// calls it if it fails before the end of its first step.
func (f *folder) undo() {
	if f.before != nil {
		_ = atomicfile.WriteBytes(filepath.Join(f.dir, configName), f.before) // the caller reports its own error
	}
	f.close()
	for i := len(f.made) - 1; i >= 0; i-- {
		os.Remove(f.made[i]) // fails for a folder that holds something else, which stays
	}
}

// close closes the metrics and unlocks the folder.
func (f *folder) close() (err error) {
	if f.metrics != nil {
		err = f.metrics.Close()
	}
	if f.store != nil {
		err = errors.Join(err, f.store.Close())
	}
	f.metrics, f.store = nil, nil
	return err
}
