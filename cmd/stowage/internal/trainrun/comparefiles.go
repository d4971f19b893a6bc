// This file owns the folder of a comparison: environment.json and report.html, and for
// each policy a folder with its metrics, summary and traces. A comparison is for its
// table; what cannot be written of it is a warning.

package trainrun

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/stowage-dev/stowage/report"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/checkpoint"
)

// CompareFolder is where a comparison is written if nobody says.
var CompareFolder = filepath.Join("runs", "compare")

// collection is a comparison's folder under way; nil is none.
type collection struct {
	dir  string
	lock io.Closer
	p    *Progress
	lost bool // something could not be written, and was told
}

// lockName is the file that says that a comparison writes here.
const lockName = "lock"

// collect makes the folder of a comparison, in place of the one that was there. It is
// refused where something else is.
func (j *Job) collect(dir string, p *Progress) (c *collection, err error) {
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		return nil, fmt.Errorf("%s is a file; give a folder", dir)
	}
	if exists(filepath.Join(dir, configName)) {
		return nil, fmt.Errorf("%s holds a run; give another folder", dir)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("%s cannot be made: %w; give a folder that you may write to", dir, pathless(err))
	}
	c = &collection{dir: dir, p: p}
	var held *checkpoint.LockedError
	if c.lock, err = (checkpoint.Disk{}).Lock(filepath.Join(dir, lockName)); errors.As(err, &held) {
		return nil, fmt.Errorf("%s is in use by another comparison; give another folder, or wait for it", dir)
	} else if err != nil {
		return nil, fmt.Errorf("%s cannot be written: %w; give a folder that you may write to", dir, pathless(err))
	}
	if err := writeJSON(filepath.Join(dir, report.EnvironmentFile), j.environment(train.Policies...)); err != nil {
		return nil, errors.Join(err, c.lock.Close())
	}
	for _, name := range append([]string{report.PageFile}, c.old()...) {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && exists(filepath.Join(dir, name)) {
			return nil, errors.Join(fmt.Errorf("%s cannot be replaced: %w", filepath.Join(dir, name), pathless(err)), c.lock.Close())
		}
	}
	return c, nil
}

// old are the files of an earlier comparison.
func (c *collection) old() (names []string) {
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

// warn tells of the first thing that could not be written.
func (c *collection) warn(err error) {
	if err != nil && !c.lost {
		c.p.Say("warning: %v; the comparison goes on, and its report will lack something", err)
		c.lost = true
	}
}

// begin makes the folder of a policy that has been opened.
func (c *collection) begin(x *contestant) {
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

// finish writes what a policy came to. The time of its step is that of the first policy
// times its ratio, which noise has least to do with.
func (c *collection) finish(j *Job, x *contestant, r Row, ms float64) {
	if c == nil {
		return
	}
	c.warn(writeJSON(filepath.Join(c.dir, x.name, summaryName), struct {
		Model string `json:"model"`
		Steps int    `json:"steps"`
		Row
		Step  float64              `json:"step_ms"`
		Ranks []report.RankSummary `json:"by_rank"`
	}{j.config.Model.Name, x.t.Done(), r, ms, x.told.ranks(x.t)}))
}

// close ends the files of a policy.
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

// end makes the report when all policies are done, and gives the folder free. It names
// the report, if there is one.
func (c *collection) end(done bool, version string) (file string) {
	if c == nil {
		return ""
	}
	if done {
		file = draw(c.dir, version, c.p)
		for _, name := range train.Policies {
			if err := perfetto(filepath.Join(c.dir, name)); err != nil {
				c.warn(err)
			}
		}
	}
	c.warn(c.lock.Close())
	return file
}
