// This file owns a run's folder:
//
//	config.yaml       the options, which --config and --resume read
//	environment.json  the machine and the command
//	metrics.jsonl     one line a step
//	summary.json      what the run came to
//	trace/            what every rank did
//	report.html       pictures of it, and trace.pftrace for Perfetto
//	checkpoints/      see package checkpoint
//
// config.yaml comes first: a folder without it holds no run. Package report has the
// names, and reads them.

package trainrun

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

	"github.com/stowage-dev/stowage/report"
	"github.com/stowage-dev/stowage/train/checkpoint"
)

const (
	configName  = report.ConfigFile
	metricsName = report.MetricsFile
	summaryName = report.SummaryFile
)

// folder is a run's folder under way.
type folder struct {
	dir     string
	store   *checkpoint.Store
	metrics *os.File
	last    float64  // the loss of the last step in it
	made    []string // folders and files that were not there before, the innermost last
	before  []byte   // the options that were there
}

// openFolder makes what is missing, takes the lock, writes the options and cuts the
// metrics to those of so many steps.
func openFolder(dir string, o *Options, done int, warn func(string)) (f *folder, err error) {
	f = &folder{dir: dir}
	defer func() {
		if err != nil {
			f.undo()
			err = Wrong{fmt.Errorf("--out: %w", err)}
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
	text, err := o.Text()
	if err != nil {
		return f, err
	}
	file := filepath.Join(dir, configName)
	if f.before, err = os.ReadFile(file); err != nil && exists(file) {
		return f, fmt.Errorf("%s cannot be read: %w", file, pathless(err))
	}
	if err := replace(file, text); err != nil {
		return f, err
	}
	return f, f.openMetrics(done)
}

// foreign names a file in a folder that has a name of a run's, but is not one's.
func foreign(dir string) string {
	text, err := os.ReadFile(filepath.Join(dir, configName))
	switch {
	case err == nil && bytes.HasPrefix(text, []byte(configHead)):
		return "" // all of them are
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

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// openMetrics drops lines of steps that will come again, and one that was not finished.
func (f *folder) openMetrics(done int) (err error) {
	path := filepath.Join(f.dir, metricsName)
	if f.metrics, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644); err != nil {
		return fmt.Errorf("%s cannot be written: %w", path, pathless(err))
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
		return fmt.Errorf("%s cannot be cut: %w", path, pathless(err))
	}
	_, err = f.metrics.Seek(keep, io.SeekStart)
	return err
}

// record appends a line to the metrics. It is written at once: a kill loses none.
func (f *folder) record(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if _, err := f.metrics.Write(append(text, '\n')); err != nil {
		return fmt.Errorf("%s cannot be written: %w", f.metrics.Name(), pathless(err))
	}
	return nil
}

// summary writes what the run came to.
func (f *folder) summary(s any) error { return writeJSON(filepath.Join(f.dir, summaryName), s) }

// writeJSON writes a file for people and machines.
func writeJSON(path string, v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return err
	}
	return replace(path, b.Bytes())
}

// replace writes a file beside and renames it: whoever reads finds the old one or the
// new one.
func replace(path string, text []byte) error {
	tmp := path + ".tmp"
	err := os.WriteFile(tmp, text, 0o644)
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		os.Remove(tmp)
		return fmt.Errorf("%s cannot be written: %w", path, pathless(err))
	}
	return nil
}

// undo removes what was made and puts back the options that were there, after a failure
// before the first step.
func (f *folder) undo() {
	if f.before != nil {
		_ = replace(filepath.Join(f.dir, configName), f.before) // the failure is what is told
	}
	f.close()
	for i := len(f.made) - 1; i >= 0; i-- {
		os.Remove(f.made[i]) // a folder with something else in it stays
	}
}

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
