// This file owns the folder of a comparison: environment.json and report.html, and for
// each policy a folder with its metrics, summary and traces. The result of a comparison
// is its table, so a file that cannot be written is only a warning.
//
// A comparison writes to a hidden folder and takes the place of the one before when it is
// complete. One that is interrupted leaves the one before as it was.

package run

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/stowage-dev/stowage/internal/atomicfile"
	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/disk"
)

// collection is the folder of a comparison. A nil collection writes nothing.
type collection struct {
	disk   disk.FS
	dir    string
	work   string // where its files are until it is complete
	lock   *disk.Lock
	begun  bool // the hidden folder is of this comparison
	first  bool // there is no comparison to replace
	p      *Progress
	failed error // the first that kept the comparison from being written
}

// Hidden folders in that of a comparison. A folder is renamed from each to the next, so a
// process that is killed leaves no doubt about what is left to do.
const (
	growing = ".new"    // being written; the next comparison removes it
	ready   = ".ready"  // complete; files of the one before are removed
	moving  = ".moving" // files are moved to their places
)

// inside is the folder in a hidden folder that holds the files. Its name does not depend
// on that of the comparison's folder, which a user may rename between two processes.
const inside = "compare"

// collect locks the folder of a comparison, which it makes if it is missing. It returns an
// error if the folder holds something else.
func (j *Job) collect(dir string, p *Progress) (c *collection, err error) {
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		return nil, fmt.Errorf("%s is a file; give a folder", dir)
	}
	c = &collection{disk: j.disk(), dir: dir, p: p, work: filepath.Join(dir, growing, inside)}
	if c.lock, err = disk.Claim(c.disk, dir); err != nil {
		return nil, err
	}
	if err = c.prepare(); err == nil {
		err = writeJSON(filepath.Join(c.work, report.EnvironmentFile), j.environment(train.Policies...))
	}
	if err != nil {
		if c.begun {
			err = errors.Join(err, c.disk.RemoveAll(filepath.Join(dir, growing)))
		}
		return nil, errors.Join(err, c.lock.Abandon())
	}
	return c, nil
}

// prepare checks the folder, finishes what a killed comparison left to do, and makes the
// folder for the new files.
func (c *collection) prepare() error {
	run, err := c.disk.Exists(filepath.Join(c.dir, configName))
	if err == nil && !run { // a checkpoint alone is enough to resume a run
		var steps []int
		steps, err = checkpoint.Steps(checkpoint.Options{Dir: c.dir, FS: c.disk})
		run = len(steps) > 0
	}
	switch {
	case err != nil:
		return fmt.Errorf("cannot see whether %s holds a run: %w; give another folder", c.dir, input.Cause(err))
	case run:
		return fmt.Errorf("%s holds a run; give another folder", c.dir)
	}
	for _, name := range train.Policies {
		path := filepath.Join(c.dir, name)
		if _, err := c.disk.List(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("cannot replace %s: %w", path, input.Cause(err))
		}
	}
	err = c.finishSwap()
	if err == nil {
		err = c.disk.RemoveAll(filepath.Join(c.dir, growing))
	}
	if err == nil {
		c.begun = true
		_, err = disk.MakeAll(c.disk, c.work)
	}
	if err != nil {
		return fmt.Errorf("cannot write %s: %w; give a folder that you may write to", c.dir, input.Cause(err))
	}
	there, err := c.disk.Exists(filepath.Join(c.dir, report.EnvironmentFile))
	if err != nil {
		return err
	}
	c.first = !there
	return nil
}

// writeJSON replaces a file with indented JSON.
func writeJSON(path string, v any) error {
	text, err := indented(v)
	if err != nil {
		return err
	}
	return atomicfile.WriteBytes(path, text)
}

// swap puts the new files in the place of those of the comparison before.
func (c *collection) swap() error {
	if err := c.lock.Held(); err != nil {
		return err
	}
	from := filepath.Join(c.dir, growing)
	if err := disk.SyncAll(c.disk, from); err != nil {
		return err
	}
	if err := c.disk.Rename(from, filepath.Join(c.dir, ready)); err != nil {
		return err
	}
	return c.finishSwap()
}

// finishSwap does what is left of a swap, and nothing if nothing is. What it does in one
// folder is on the disk before it changes the next: a loss of power may keep any of the
// changes that were not synced.
func (c *collection) finishSwap() error {
	from, to := filepath.Join(c.dir, ready), filepath.Join(c.dir, moving)
	there, err := c.disk.Exists(from)
	if err != nil {
		return err
	}
	if there {
		files, err := c.inner(from)
		if err == nil && files == "" {
			err = fmt.Errorf("%s is empty, and a comparison was expected in it; remove it", from)
		}
		if err == nil {
			err = c.disk.SyncDir(c.dir)
		}
		if err != nil {
			return err
		}
		old, err := c.files(c.dir)
		if err != nil {
			return err
		}
		changed := map[string]bool{} // also by a process that was killed
		for _, name := range old {
			changed[filepath.Dir(filepath.Join(c.dir, name))] = true
			if replaced, err := c.disk.Exists(filepath.Join(files, name)); replaced || err != nil {
				if err != nil {
					return err
				}
				continue
			}
			if err := c.disk.Remove(filepath.Join(c.dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		for _, dir := range slices.Sorted(maps.Keys(changed)) {
			if err := c.disk.SyncDir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		if err := c.disk.Rename(from, to); err != nil {
			return err
		}
	}
	if there, err = c.disk.Exists(to); err != nil || !there {
		return err
	}
	files, err := c.inner(to)
	if err == nil {
		err = c.disk.SyncDir(c.dir)
	}
	if err != nil {
		return err
	}
	if files != "" { // otherwise all of them are moved
		if err := c.merge(files, c.dir); err != nil {
			return err
		}
	}
	return c.disk.RemoveAll(to)
}

// inner returns the folder with the files in a hidden folder, or "" if the hidden folder is
// empty. Earlier versions gave it the name of the comparison's folder, and for "." they
// put the files into the hidden folder itself.
func (c *collection) inner(dir string) (string, error) {
	names, err := c.disk.List(dir)
	if err != nil || len(names) == 0 {
		return "", err
	}
	known := func(name string) bool { return name == report.EnvironmentFile || slices.Contains(train.Policies, name) }
	other := func(name string) bool { return !known(name) }
	if len(names) == 1 {
		path := filepath.Join(dir, names[0])
		within, err := c.disk.List(path)
		switch {
		case err == nil && (names[0] == inside || !slices.ContainsFunc(within, other)):
			return path, nil
		case err != nil && !errors.Is(err, syscall.ENOTDIR):
			return "", err
		}
	}
	if slices.ContainsFunc(names, other) {
		return "", fmt.Errorf("%s holds something else than a comparison; move it", dir)
	}
	return dir, nil
}

// merge moves a file or what is in a folder to another place. It removes nothing else
// from there.
func (c *collection) merge(from, to string) error {
	names, err := c.disk.List(from)
	switch {
	case errors.Is(err, syscall.ENOTDIR):
		return c.disk.Rename(from, to)
	case err != nil:
		return err
	}
	if to != c.dir { // which is there
		if err := c.disk.Mkdir(to); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if err := c.disk.SyncDir(filepath.Dir(to)); err != nil {
			return err
		}
	}
	for _, name := range names {
		if err := c.merge(filepath.Join(from, name), filepath.Join(to, name)); err != nil {
			return err
		}
	}
	if err := c.disk.SyncDir(to); err != nil {
		return err
	}
	return c.disk.Remove(from)
}

// files returns the names that a comparison's files can have in a folder. It returns an
// error if a folder of traces cannot be read: what is in it would stay beside new traces.
func (c *collection) files(dir string) (names []string, err error) {
	names = append(names, report.PageFile, report.EnvironmentFile)
	for _, policy := range train.Policies {
		for _, name := range []string{metricsName, summaryName, report.PerfettoFile} {
			names = append(names, filepath.Join(policy, name))
		}
		traces, err := c.disk.List(filepath.Join(dir, policy, report.TraceFolder))
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) { // without a folder there are none
			return nil, err
		}
		for _, name := range slices.Sorted(slices.Values(traces)) {
			if strings.HasPrefix(name, "rank-") && strings.HasSuffix(name, ".trace") {
				names = append(names, filepath.Join(policy, report.TraceFolder, name))
			}
		}
	}
	return names, nil
}

// warn prints the first error.
func (c *collection) warn(err error) {
	if err != nil && c.failed == nil {
		c.p.Say("warning: %v; the comparison continues and is not written", err)
		c.failed = err
	}
}

// open creates the folder of a policy whose trainer is open.
func (c *collection) open(x *contestant) {
	if c == nil {
		return
	}
	dir := filepath.Join(c.work, x.name)
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		x.metrics, err = os.Create(filepath.Join(dir, metricsName))
	}
	if err == nil && x.traces != nil {
		var before []string // of a budget that was too small and is tried again
		_, before, err = x.traces.attach(c.disk, dir, 0, false)
		for _, path := range before {
			err = cmp.Or(err, replaced(path, c.disk.Remove(path)))
		}
	}
	c.warn(err)
}

// record appends a step to the metrics of a policy.
func (c *collection) record(x *contestant) {
	if c == nil || x.metrics == nil {
		return
	}
	c.warn(appendLine(x.metrics, x.metrics.Name(), x.told.line(x.t, x.last)))
}

// writeSummary writes the figures of a policy. ms is the time of its step: that of the
// first policy times the ratio, which is the least noisy figure.
func (c *collection) writeSummary(j *Job, x *contestant, r Row, ms float64) {
	if c == nil {
		return
	}
	c.warn(writeJSON(filepath.Join(c.work, x.name, summaryName), struct {
		Model string `json:"model"`
		Steps int    `json:"steps"`
		Row
		hidden
		Step  float64              `json:"step_ms"`
		Ranks []report.RankSummary `json:"by_rank"`
	}{j.config.Model.Name, x.t.StepsDone(), r, x.traces.hidden(), ms, x.told.rankSummaries(x.t)}))
}

// close closes the files of a policy.
func (c *collection) close(x *contestant) {
	err := x.traces.close()
	if c == nil {
		return
	}
	if x.metrics != nil {
		err = errors.Join(err, x.metrics.Close())
		x.metrics = nil
	}
	c.warn(err)
}

// finish puts the comparison in its place and makes its report if all policies are done,
// and ends the lock. It returns the file of the report, or "".
func (c *collection) finish(done bool, version string) (file string) {
	if c == nil {
		return ""
	}
	if done && c.failed == nil {
		if err := c.swap(); err != nil {
			c.warn(fmt.Errorf("cannot replace the files in %s: %w", c.dir, input.Cause(err)))
		} else {
			c.first = false
			c.p.show(c.dir)
			for _, name := range train.Policies {
				if err := writePerfetto(filepath.Join(c.dir, name)); err != nil {
					c.p.Say("warning: %v", err)
				}
			}
			file = writeReport(c.dir, version, c.p)
		}
	}
	var err error
	if c.lock.Held() == nil {
		err = c.disk.RemoveAll(filepath.Join(c.dir, growing))
	}
	if c.first { // nothing is here
		err = errors.Join(err, c.lock.Abandon())
	} else {
		err = errors.Join(err, c.lock.Close())
	}
	if err != nil {
		c.p.Say("warning: cannot clean up in %s: %v", c.dir, input.Cause(err))
	}
	return file
}
