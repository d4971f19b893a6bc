// This file owns the folder of a comparison: environment.json and report.html, and for
// each policy a folder with its metrics, summary and traces. The result of a comparison
// is its table, so a file that cannot be written is only a warning.

package run

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
)

// collection is the folder of a comparison in progress. A nil collection writes nothing.
type collection struct {
	dir    string
	lock   io.Closer
	p      *Progress
	warned bool
}

// lockName is the file that a comparison locks while it writes to the folder.
const lockName = "lock"

// collect creates the folder of a comparison, or clears the one that was there. It
// returns an error if the folder holds something else.
func (j *Job) collect(dir string, p *Progress) (c *collection, err error) {
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		return nil, fmt.Errorf("%s is a file; give a folder", dir)
	}
	if exists(filepath.Join(dir, configName)) {
		return nil, fmt.Errorf("%s holds a run; give another folder", dir)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("cannot create %s: %w; give a folder that you may write to", dir, pathless(err))
	}
	c = &collection{dir: dir, p: p}
	var held *checkpoint.LockedError
	if c.lock, err = (checkpoint.Disk{}).Lock(filepath.Join(dir, lockName)); errors.As(err, &held) {
		return nil, fmt.Errorf("%s is in use by another comparison; give another folder, or wait for it", dir)
	} else if err != nil {
		return nil, fmt.Errorf("cannot write %s: %w; give a folder that you may write to", dir, pathless(err))
	}
	if err := writeJSON(filepath.Join(dir, report.EnvironmentFile), j.environment(train.Policies...)); err != nil {
		return nil, errors.Join(err, c.lock.Close())
	}
	for _, name := range append([]string{report.PageFile}, c.earlierFiles()...) {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && exists(filepath.Join(dir, name)) {
			return nil, errors.Join(fmt.Errorf("cannot replace %s: %w", filepath.Join(dir, name), pathless(err)), c.lock.Close())
		}
	}
	return c, nil
}

// earlierFiles returns the files of an earlier comparison.
func (c *collection) earlierFiles() (names []string) {
	for _, policy := range train.Policies {
		for _, name := range []string{metricsName, summaryName, report.PerfettoFile} {
			names = append(names, filepath.Join(policy, name))
		}
		for _, f := range report.TraceFiles(filepath.Join(c.dir, policy)) {
			names = append(names, filepath.Join(policy, report.TraceFolder, filepath.Base(f.Path)))
		}
	}
	return names
}

// warn prints the first error.
func (c *collection) warn(err error) {
	if err != nil && !c.warned {
		c.p.Say("warning: %v; the comparison continues, and its report will be incomplete", err)
		c.warned = true
	}
}

// open creates the folder of a policy whose trainer is open.
func (c *collection) open(x *contestant) {
	if c == nil {
		return
	}
	dir := filepath.Join(c.dir, x.name)
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		x.metrics, err = os.Create(filepath.Join(dir, metricsName))
	}
	if err == nil && x.traces != nil {
		_, err = x.traces.attach(dir, 0)
	}
	c.warn(err)
}

// record appends a step to the metrics of a policy.
func (c *collection) record(x *contestant) {
	if c == nil || x.metrics == nil {
		return
	}
	m := x.last
	f := folder{metrics: x.metrics}
	c.warn(f.record(line{Step: m.Step + 1, Metrics: m, Speed: float64(m.Tokens) / m.Seconds, Spills: x.told.spills(x.t)}))
}

// writeSummary writes the figures of a policy. ms is the time of its step: that of the
// first policy times the ratio, which is the least noisy figure.
func (c *collection) writeSummary(j *Job, x *contestant, r Row, ms float64) {
	if c == nil {
		return
	}
	c.warn(writeJSON(filepath.Join(c.dir, x.name, summaryName), struct {
		Model string `json:"model"`
		Steps int    `json:"steps"`
		Row
		Step  float64              `json:"step_ms"`
		Ranks []report.RankSummary `json:"by_rank"`
	}{j.config.Model.Name, x.t.StepsDone(), r, ms, x.told.rankSummaries(x.t)}))
}

// close closes the files of a policy.
func (c *collection) close(x *contestant) {
	if c == nil {
		return
	}
	err := x.traces.close()
	if x.metrics != nil {
		err = errors.Join(err, x.metrics.Close())
		x.metrics = nil
	}
	c.warn(err)
}

// finish makes the report if all policies are done, and unlocks the folder. It returns
// the file of the report, or "".
func (c *collection) finish(done bool, version string) (file string) {
	if c == nil {
		return ""
	}
	if done {
		file = writeReport(c.dir, version, c.p)
		for _, name := range train.Policies {
			if err := writePerfetto(filepath.Join(c.dir, name)); err != nil {
				c.warn(err)
			}
		}
	}
	c.warn(c.lock.Close())
	return file
}
