// This file owns the comparison: the same model from the same seed under every memory
// policy.

package run

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
	"github.com/stowage-dev/stowage/train"
)

// warmSteps are not measured: the first step is recorded, the next is timed, then graphs
// are captured, and by then pools have grown to what they need. Steps before the plans are
// final are not measured either, but for the last leastRounds: a machine that is disturbed
// often makes plans final late, and a median over few steps says little.
const warmSteps, leastRounds = 4, 3

// Comparison is the result of training under every policy.
type Comparison struct {
	Rows   []Row  // one for each policy; the first keeps everything
	Report string // the file of the report, or "" if there is none
	job    *Job
}

// Row holds the figures of one policy.
type Row struct {
	Policy    string  `json:"policy"`
	Device    int64   `json:"peak_device_bytes"` // of the fullest rank
	Host      int64   `json:"peak_host_bytes"`
	StepRatio float64 `json:"step_ratio"` // median over all rounds of the step time over that of the first policy
	Loss      float64 `json:"final_loss"`
	Digest    string  `json:"params_sha256"`
	Forecast  int64   `json:"predicted_device_bytes"` // of the fullest rank, before the measured steps
	Speed     float64 `json:"tokens_per_second"`
	Reruns    int     `json:"reruns"`
	Budget    int64   `json:"budget_bytes,omitempty"`
}

// closeEnough is the error of a forecast that is not worth a sentence, and of a budget that
// is not worth another try.
const closeEnough = 0.05

// forecastError returns how far the forecast is from the measured peak, as a share
// of it.
func (r Row) forecastError() float64 { return float64(r.Forecast)/float64(r.Device) - 1 }

// contestant is a policy that is being trained.
type contestant struct {
	name     string
	t        *train.Trainer
	budget   memory.Bytes
	expected memory.Bytes
	last     train.Metrics
	took     []float64 // seconds, by rounds

	files   *collection // nil writes nothing
	work    string      // the folder of the comparison that all processes write traces to, or ""
	metrics *os.File
	traces  *tracing // nil if nothing is traced
	told    notes
}

// Compare trains the same model under all policies. It opens the trainers of all of them
// at once and measures their steps in turns, so that a disturbance of the machine meets
// all of them. It divides the time of a step by that of the first policy in the same
// round.
//
// It writes the runs and their report to a folder unless dir is "". If it cannot, it warns and compares
// without. If required is set, it returns an *InputError in place of a comparison if it cannot begin to write, and
// beside the comparison an error if it fails later.
func (j *Job) Compare(ctx context.Context, dir string, required bool, p *Progress) (*Comparison, error) {
	if err := j.agreeOnOptions(); err != nil {
		return nil, err
	}
	var files *collection
	var err error
	work := "" // where all ranks write their traces
	if dir != "" && j.machine.Process.Speaks() {
		files, err = j.collect(dir, p)
		switch {
		case err != nil && required:
			err = blame("Folder", err)
		case err != nil:
			p.Say("warning: %v; the comparison is not written", err)
			err = nil
		default:
			work = files.work
		}
	}
	if err = j.machine.Process.Share(&work, err); err != nil {
		return nil, err
	}
	rows, err := j.compare(ctx, files, work, p)
	_ = j.machine.Process.Share(nil, nil) // all traces are closed, or a process is gone
	report := files.finish(err == nil, j.machine.Version)
	if err != nil {
		return nil, err
	}
	if required && files != nil && files.failed != nil {
		err = fmt.Errorf("the comparison was not written: %w", files.failed)
	}
	return &Comparison{Rows: rows, Report: report, job: j}, err
}

func (j *Job) compare(ctx context.Context, files *collection, dir string, p *Progress) (rows []Row, err error) {
	if j.config.Memory.Links, err = j.measureLinks(); err != nil {
		return nil, err
	}
	links := j.config.Memory.Links
	var all []*contestant
	defer func() {
		for _, c := range all {
			err = errors.Join(err, c.t.Close())
			files.close(c)
		}
		p.settle()
	}()
	steps := j.Options.Steps
	p.begin(j.description(train.Policies, 0), dir)
	most := max(1, steps-1) // at least one: the budget follows from a step
	warm := 0
	var budgets []memory.Bytes
	for _, name := range train.Policies {
		c := &contestant{name: name, files: files, work: dir}
		until := func(enough func() bool) error {
			for n := c.t.StepsDone(); n < most && !enough(); n++ {
				if err := c.step(ctx, j, p, steps); err != nil {
					return err
				}
			}
			return nil
		}
		warmUp := func() error {
			err := until(func() bool {
				done := c.t.StepsDone()
				return done >= warmSteps && (j.isFinal(c) || done >= steps-leastRounds)
			})
			c.forecast()
			return err
		}
		if name == "budget" {
			decide := func() error { return until(func() bool { return !slices.Contains(c.t.Decisions(), nil) }) }
			err = c.tryBudgets(j, links, budgets, decide, warmUp)
		} else if err = c.open(j, links, 0); err == nil {
			err = warmUp()
		}
		if c.t != nil {
			all = append(all, c)
		}
		if err != nil {
			return nil, err
		}
		warm = max(warm, c.t.StepsDone())
		if name == "none" {
			var ranks []heldBy
			for _, u := range c.t.Usage() {
				ranks = append(ranks, heldBy{u.Kind[memory.Device].Peak, u.Owners})
			}
			budgets = budgetsToTry(j.share, ranks)
		}
	}
	for _, c := range all { // all of them are as far as the one whose plans were final last
		for c.t.StepsDone() < warm {
			if err := c.step(ctx, j, p, steps); err != nil {
				return nil, err
			}
		}
		if warm == steps {
			c.took = append(c.took, c.last.Seconds) // no step is left to measure
		}
	}
	for round := range steps - warm {
		for k := range all { // a different policy begins each round
			c := all[(round+k)%len(all)]
			if err := c.step(ctx, j, p, steps); err != nil {
				return nil, err
			}
			c.took = append(c.took, c.last.Seconds)
		}
	}
	for _, c := range all {
		row, err := c.row(all[0])
		if err != nil {
			return nil, err
		}
		files.writeSummary(j, c, row, 1e3*row.StepRatio*median(slices.Clone(all[0].took)))
		rows = append(rows, row)
	}
	return rows, nil
}

// isFinal reports whether the plans of every rank of a policy are final.
func (j *Job) isFinal(c *contestant) bool {
	if j.final != nil {
		return j.final(c)
	}
	return !slices.ContainsFunc(c.t.Decisions(), func(d *policy.Decision) bool { return d == nil || !d.Final })
}

// heldBy is the peak of a rank's device, and who holds how much of it.
type heldBy struct {
	peak   memory.Bytes
	owners []device.OwnerUsage
}

// budgetsToTry returns budgets in the order in which they are tried. The first is a share
// of what keeping everything takes. If parameters alone take too much of that, the next
// ones are what parameters take and a share of the rest. In a very small model pages and
// workspaces take the most, so the last budgets exceed what keeping everything takes.
func budgetsToTry(share float64, ranks []heldBy) (out []memory.Bytes) {
	var most, fixed memory.Bytes
	for _, r := range ranks {
		most = max(most, r.peak)
		rest := r.peak
		for _, o := range r.owners {
			if o.Kind == memory.Device && o.Owner == trace.HeapOwner(memory.Device) {
				rest -= o.Peak
			}
		}
		fixed = max(fixed, rest)
	}
	out = append(out, memory.Bytes(share*float64(most)))
	for _, share := range []float64{share, (1 + share) / 2, 1, 2, 4} {
		if b := fixed + memory.Bytes(share*float64(most-fixed)); b > out[len(out)-1] {
			out = append(out, b)
		}
	}
	return out
}

// narrowings limits the budgets that are tried between one that is refused and the next
// one. Each halves the distance.
const narrowings = 3

// leastBudget returns a small budget that try accepts: the first of the limits, or a lower
// one above the limit before, which was refused.
func leastBudget(limits []memory.Bytes, try func(memory.Bytes) error) (least memory.Bytes, err error) {
	var refused memory.Bytes
	for i, limit := range limits {
		if err = try(limit); err == nil {
			least = limit
			break
		}
		if !isInput(err) || i == len(limits)-1 {
			return 0, err
		}
		refused = limit
	}
	if refused == 0 {
		return least, nil
	}
	for range narrowings {
		if float64(least-refused) < closeEnough*float64(least) {
			break
		}
		between := refused + (least-refused)/2
		switch err := try(between); {
		case err == nil:
			least = between
		case isInput(err):
			refused = between
		default:
			return 0, err
		}
	}
	return least, nil
}

// tryBudgets trains under a small budget that is not refused. The first steps decide, so
// others follow only under the budget that is chosen.
func (c *contestant) tryBudgets(j *Job, links memory.Links, limits []memory.Bytes, decide, warmUp func() error) error {
	var last error
	try := func(limit memory.Bytes) error {
		if c.t != nil {
			_ = c.t.Close() // another budget was tried
			c.files.close(c)
			c.t = nil
		}
		if last = c.open(j, links, limit); last == nil {
			last = decide()
		}
		return last
	}
	least, err := leastBudget(limits, try)
	if err != nil {
		return err
	}
	// Times differ, so a budget may be refused that was not before.
	limits = slices.DeleteFunc(slices.Clone(limits), func(b memory.Bytes) bool { return b <= least })
	for _, limit := range append([]memory.Bytes{least}, limits...) {
		if last != nil || c.budget != limit {
			err = try(limit)
		}
		if err == nil {
			err = warmUp()
		}
		if err == nil || !isInput(err) {
			break
		}
	}
	return err
}

// open opens the trainer of a policy.
func (c *contestant) open(j *Job, links memory.Links, budget memory.Bytes) (err error) {
	cfg := j.config
	if cfg.Memory, err = train.NamedMemory(c.name, budget); err != nil {
		return err
	}
	cfg.Memory.Links = links
	c.traces, c.told, c.took, c.expected = nil, notes{}, nil, 0 // of another budget
	if c.work != "" && !j.NoTrace {
		c.traces = j.trace(&cfg)
	}
	if c.t, err = open(cfg); err != nil {
		c.t = nil
		return &PolicyError{c.name, err}
	}
	c.budget = budget
	c.files.open(c)
	if err := j.machine.Process.Share(nil, nil); err != nil {
		return &PolicyError{c.name, err}
	}
	if !j.machine.Process.Speaks() {
		c.traces.follow(j.disk(), filepath.Join(c.work, c.name), 0)
	}
	return nil
}

// step runs one step.
func (c *contestant) step(ctx context.Context, j *Job, p *Progress, of int) (err error) {
	if stopped, err := j.interrupted(ctx); err != nil || stopped {
		return cmp.Or(err, error(&InterruptedError{Comparison: true}))
	}
	c.traces.beginStep(c.t.StepsDone()+1, c.t.StepsDone()+1 == of)
	c.last, err = step(c.t, c.budget, c.t.StepsDone() == 0)
	if c.traces.endStep(); err != nil {
		return &PolicyError{c.name, err}
	}
	c.told.noteForecasts(c.t)
	c.files.record(c)
	p.step(c.name, c.last, of, nil, p.ranks(c.t, c.budget, nil))
	return nil
}

// forecast keeps the forecast of the fullest rank, which the recorded step gives.
func (c *contestant) forecast() {
	for _, p := range c.t.Forecasts() {
		c.expected = max(c.expected, p.Device)
	}
}

// row returns the figures of the policy. first is the policy that times are divided by.
func (c *contestant) row(first *contestant) (r Row, err error) {
	if c.expected == 0 {
		c.forecast() // the warm-up was too short for a forecast
	}
	r = Row{Policy: c.name, Forecast: int64(c.expected), Loss: c.last.Loss, Reruns: c.last.Reruns, Budget: int64(c.budget)}
	most := fullest(peaksOf(c.t, nil))
	r.Device, r.Host = most.Device, most.Host
	ratios := make([]float64, len(c.took))
	for i, t := range c.took {
		ratios[i] = t / first.took[i]
	}
	r.StepRatio = median(ratios)
	r.Speed = float64(c.last.Tokens) / median(slices.Clone(c.took))
	r.Digest, err = c.t.Digest()
	return r, err
}

// median returns the median of x, which it sorts.
func median(x []float64) float64 {
	slices.Sort(x)
	n := len(x)
	if n == 0 {
		return 0
	}
	return (x[(n-1)/2] + x[n/2]) / 2
}

// Different returns the policies whose parameters or loss differ from those of the first.
// There are none unless the program is faulty.
func (c *Comparison) Different() (names []string) {
	for _, r := range c.Rows {
		if !r.sameAs(c.Rows[0]) {
			names = append(names, r.Policy)
		}
	}
	return names
}

// sameAs reports whether two policies trained the same parameters.
func (r Row) sameAs(other Row) bool { return r.Digest == other.Digest && r.Loss == other.Loss }

// WriteText prints the comparison as a table for people.
func (c *Comparison) WriteText(w io.Writer) {
	j := c.job
	steps := "steps"
	if j.Options.Steps == 1 {
		steps = "step"
	}
	fmt.Fprintf(w, "%s on %s, %d %s of %d tokens a policy\n\n", j.config.Model.Name, j.layout(), j.Options.Steps, steps, j.config.Tokens())
	fmt.Fprintf(w, "%-18s %12s %12s %12s %10s %11s  %s\n", "policy", "peak device", "predicted", "peak host", "step time", "final loss", "identical")
	for _, r := range c.Rows {
		same := "yes"
		if !r.sameAs(c.Rows[0]) {
			same = "no"
		}
		fmt.Fprintf(w, "%-18s %12s %12s %12s %9.2fx %11.4f  %s\n", r.Policy, memory.Bytes(r.Device).Short(), memory.Bytes(r.Forecast).Short(), memory.Bytes(r.Host).Short(), r.StepRatio, r.Loss, same)
	}
	fmt.Fprintf(w, "\n%s\n", wrap(c.conclusion(), lineWidth))
	if c.Report != "" {
		fmt.Fprintf(w, "\nthe report is %s\n", c.Report)
	}
}

// lineWidth is the length of lines under a table.
const lineWidth = 100

// wrap breaks a text into lines between words.
func wrap(text string, width int) string {
	var b strings.Builder
	at := 0
	for word := range strings.FieldsSeq(text) {
		switch {
		case at > 0 && at+1+len(word) > width:
			b.WriteByte('\n')
			at = 0
		case at > 0:
			b.WriteByte(' ')
			at++
		}
		b.WriteString(word)
		at += len(word)
	}
	return b.String()
}

// conclusion says what the rows show.
func (c *Comparison) conclusion() string {
	if bad := c.Different(); len(bad) > 0 {
		return fmt.Sprintf("Parameters under %s differ from those under %s, which is a bug in Stowage.", strings.Join(bad, ", "), c.Rows[0].Policy)
	}
	return "Every policy trained the same parameters, bit for bit: " + savings(c.Rows) + "." + worstForecast(c.Rows)
}

// savings says what stash and budget save.
func savings(rows []Row) (text string) {
	share := func(a, b string) float64 {
		find := func(name string) int { return slices.IndexFunc(rows, func(r Row) bool { return r.Policy == name }) }
		return 100 * float64(rows[find(a)].Device) / float64(rows[find(b)].Device)
	}
	if s := share("stash", "static"); s < 100 { // otherwise there are no experts
		text = fmt.Sprintf("stash with %.0f %% of the device memory of oversized static buffers, and ", s)
	}
	return text + fmt.Sprintf("budget with %.0f %% of what keeping everything takes", share("budget", "none"))
}

// worstForecast names the forecast with the largest error, if it is not close enough.
func worstForecast(rows []Row) string {
	worst := slices.MaxFunc(rows, func(a, b Row) int {
		return cmp.Compare(math.Abs(a.forecastError()), math.Abs(b.forecastError()))
	})
	if worst.Forecast == 0 || math.Abs(worst.forecastError()) <= closeEnough {
		return ""
	}
	return fmt.Sprintf(" The forecast for %s is off by %+.1f %%.", worst.Policy, 100*worst.forecastError())
}
