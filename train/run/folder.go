// This file owns a run's folder:
//
//	lock              held by the process that uses the folder
//	config.yaml       the options, which a resumed run reads
//	environment.json  the machine and the command
//	metrics.jsonl     one line a step
//	summary.json      the figures of the run
//	trace/            what every rank did
//	report.html       pictures of it, and trace.pftrace for Perfetto
//	checkpoints/      see package checkpoint
//
// A process takes the lock before it looks at the folder, and changes nothing if it is
// refused. The options are on the disk before the first step, and every checkpoint holds
// a copy of them. The metrics of a step are on the disk before its checkpoint. Package
// report owns the names and reads the files.

package run

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/disk"
)

const (
	configName  = report.ConfigFile
	metricsName = report.MetricsFile
	summaryName = report.SummaryFile
)

// mostConfig limits what is read of the options of a run.
const mostConfig = 16 << 20

// folder is the folder of a run. Its life:
//
//  1. claim takes the lock.
//  2. look finds the checkpoint to continue from, and refuses a folder of something else.
//  3. begin writes the options and opens the metrics; record writes steps.
//  4. close ends it, or undo if no step was done.
type folder struct {
	disk    disk.FS
	dir     string
	lock    *disk.Lock
	store   *checkpoint.Store
	metrics disk.Output
	was     history  // what the metrics say of the steps before
	made    []string // new folders and files, the innermost last

	// What undo restores:
	before map[string][]byte // contents of files that were there
	cut    *tail             // of the metrics, or nil
	aside  []string          // traces of an earlier run under the names that setAside returns
}

// tail is what a file held behind a size.
type tail struct {
	size int64
	text []byte
}

// claim takes the lock of a run's folder, which it makes if it is missing.
func claim(d disk.FS, dir string) (*folder, error) {
	l, err := disk.Claim(d, dir)
	if err != nil {
		return nil, blame("Folder", err)
	}
	return &folder{disk: d, dir: dir, lock: l}, nil
}

// path returns the path of a file in the folder.
func (f *folder) path(name string) string { return filepath.Join(f.dir, name) }

// look returns the checkpoint to continue from, or nil to start a new run. It returns an
// error if the folder cannot hold the run. It changes nothing.
func (f *folder) look(resume bool, p *Progress) (*checkpoint.Checkpoint, error) {
	o := checkpoint.Options{Dir: f.dir, FS: f.disk, Warn: warner(p)}
	if resume {
		c, err := checkpoint.Latest(o)
		if errors.Is(err, checkpoint.ErrNone) {
			if s, err := f.readSummaryFile(); err == nil && s.Finished { // its last checkpoint was on the disk
				return nil, fmt.Errorf("the run in %s finished %d steps, but its checkpoints are not in %s; put them back, or start a new run in another folder",
					f.dir, s.Steps, f.path("checkpoints"))
			}
			p.Say("the run in %s has no checkpoint yet; starting from the first step", f.dir)
			return nil, nil
		}
		return c, err
	}
	steps, err := checkpoint.Steps(o)
	if err != nil {
		return nil, blame("Folder", err)
	}
	if len(steps) > 0 {
		return nil, refuse("Folder", f.dir, fmt.Sprintf("already holds a run of %d steps", steps[len(steps)-1]), "resume it, or give another folder")
	}
	name, err := f.foreign()
	if err != nil {
		return nil, blame("Folder", err)
	}
	if name != "" {
		return nil, refuse("Folder", f.dir, "has a "+name+" that no run wrote", "give another folder, or move the file")
	}
	if f.holdsComparison() {
		return nil, refuse("Folder", f.dir, "holds a comparison", "give another folder")
	}
	return nil, nil
}

// foreign returns a file in the folder that has the name of a run's file, and that no run
// wrote.
func (f *folder) foreign() (string, error) {
	text, err := disk.ReadFile(f.disk, f.path(configName), mostConfig)
	switch {
	case err == nil && (bytes.HasPrefix(text, []byte(configHead)) || blank(text)):
		return "", nil // a run wrote all of them
	case !errors.Is(err, fs.ErrNotExist):
		return configName, nil
	}
	for _, name := range []string{metricsName, summaryName} {
		if there, err := f.disk.Exists(f.path(name)); there || err != nil {
			return name, err
		}
	}
	return "", nil
}

// holdsComparison reports whether the folder is that of a comparison, whose report a run
// would replace.
func (f *folder) holdsComparison() bool {
	var env report.Environment
	text, err := disk.ReadFile(f.disk, f.path(report.EnvironmentFile), mostConfig)
	return err == nil && json.Unmarshal(text, &env) == nil && len(env.Runs) > 0
}

// blank reports whether a file holds nothing: an earlier version did not sync it, and a
// loss of power left it empty or full of zeros.
func blank(text []byte) bool { return len(bytes.Trim(text, "\x00 \t\r\n")) == 0 }

// begin writes the options and keeps the metrics of the given number of steps.
func (f *folder) begin(o *Options, done int, warn func(string)) (err error) {
	for _, name := range []string{metricsName, "checkpoints"} {
		there, err := f.disk.Exists(f.path(name))
		if err != nil {
			return blame("Folder", err)
		}
		if !there {
			f.made = append(f.made, f.path(name))
		}
	}
	text, err := o.encode()
	if err != nil {
		return err
	}
	was, err := f.remember(configName)
	if err != nil {
		return blame("Folder", fmt.Errorf("cannot read %s: %w%s", f.path(configName), input.Cause(err), input.Denied(err)))
	}
	if o.read != nil && !bytes.Equal(o.read, was) {
		return blame("Folder", fmt.Errorf("another process changed the options in %s meanwhile; try again", f.path(configName)))
	}
	describes, err := json.Marshal(string(text))
	if err != nil {
		return err
	}
	if f.store, err = checkpoint.Open(checkpoint.Options{Dir: f.dir, Keep: o.Keep, Warn: warn, FS: f.disk, Lock: f.lock, Run: describes}); err != nil {
		return blame("Folder", err)
	}
	if err := disk.WriteFile(f.disk, f.path(configName), text); err != nil {
		return blame("Folder", fmt.Errorf("cannot write %s: %w%s", f.path(configName), input.Cause(err), input.Denied(err)))
	}
	if err := f.openMetrics(done, warn); err != nil {
		return blame("Folder", err)
	}
	return nil
}

// remember reads a file that is about to be replaced, so that undo can restore or remove
// it. It returns nil if there is none.
func (f *folder) remember(name string) ([]byte, error) {
	text, err := disk.ReadFile(f.disk, f.path(name), mostConfig)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		f.made = append(f.made, f.path(name))
		return nil, nil
	case err != nil:
		return nil, err
	}
	if f.before == nil {
		f.before = map[string][]byte{}
	}
	f.before[name] = text
	return text, nil
}

// record appends a line to the metrics at once, so that a killed run loses none.
func (f *folder) record(v any) error {
	if err := f.lost(); err != nil {
		return err
	}
	err := appendLine(f.metrics, f.path(metricsName), v)
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		err = fmt.Errorf("%w; %s, and resume the run", err, disk.MakeRoom(f.dir))
	}
	return err
}

// lost returns a *disk.LostError if somebody removed the lock: what is in the folder may be
// another process's. A lock that cannot be looked at is still held.
func (f *folder) lost() error {
	var lost *disk.LostError
	if err := f.lock.Held(); errors.As(err, &lost) {
		return err
	}
	return nil
}

// appendLine writes a value as a line of JSON to a file with the given path.
func appendLine(to disk.Output, path string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if _, err := to.Write(append(text, '\n')); err != nil {
		return fmt.Errorf("cannot write %s: %w", path, input.Cause(err))
	}
	return nil
}

// keep is called when a checkpoint is begun: a run with a checkpoint is not undone.
func (f *folder) keep() {
	f.cut = nil
	f.dropAside()
}

// syncMetrics writes the metrics to the disk. It is called before a checkpoint is
// complete, beside steps that add lines.
func (f *folder) syncMetrics() error {
	if err := f.metrics.Sync(); err != nil {
		return fmt.Errorf("cannot write %s: %w", f.path(metricsName), input.Cause(err))
	}
	return nil
}

// dropAside removes the traces of an earlier run.
func (f *folder) dropAside() {
	if len(f.aside) > 0 && f.lock.Held() == nil { // otherwise they may be another process's
		for _, path := range f.aside {
			_ = f.disk.Remove(path) // the next run tries again
		}
	}
	f.aside = nil
}

// writeJSON replaces a file in the folder with indented JSON.
func (f *folder) writeJSON(name string, v any) error {
	if err := f.lost(); err != nil {
		return err
	}
	text, err := indented(v)
	if err != nil {
		return err
	}
	if err := disk.WriteFile(f.disk, f.path(name), text); err != nil {
		return fmt.Errorf("cannot write %s: %w", f.path(name), input.Cause(err))
	}
	return nil
}

// indented returns a value as JSON for people.
func indented(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return b.Bytes(), err
}

// undo removes what this process created, restores what it replaced or cut, and ends the
// lock. A run calls it if it fails before the end of its first step.
func (f *folder) undo() error {
	if f.lock.Held() == nil { // otherwise all of it may be another process's
		for name, text := range f.before {
			_ = disk.WriteFile(f.disk, f.path(name), text) // the caller reports its own error
		}
		_ = f.restoreMetrics() // as above
		for i := len(f.made) - 1; i >= 0; i-- {
			_ = f.disk.Remove(f.made[i]) // fails for a folder that holds something else, which stays
		}
		for _, path := range f.aside {
			_ = f.disk.Rename(path, filepath.Join(filepath.Dir(path), putBack(filepath.Base(path)))) // as above
		}
	}
	return errors.Join(f.closeFiles(), f.lock.Abandon())
}

// close closes the metrics and ends the lock.
func (f *folder) close() error {
	f.dropAside()
	return errors.Join(f.closeFiles(), f.lock.Close())
}

func (f *folder) closeFiles() (err error) {
	if f.metrics != nil {
		if err = f.metrics.Close(); err != nil {
			err = fmt.Errorf("cannot close %s: %w", f.path(metricsName), input.Cause(err))
		}
	}
	if f.store != nil {
		err = errors.Join(err, f.store.Close())
	}
	f.metrics, f.store = nil, nil
	return err
}

// exists reports whether there is something at a path.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
