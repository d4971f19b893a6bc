// This file owns the comparison: the same model from the same seed under every memory
// policy.

package trainrun

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/plan/page"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/trace"
	"github.com/stowage-dev/stowage/train"
)

// CompareSteps is how many steps a policy of a comparison trains where nobody says.
const CompareSteps = 9

// mostWarm is the steps that are not measured: the first is recorded, the next is
// timed, then graphs are captured, and pools have grown to what they need.
const mostWarm = 4

// Row is what a policy came to.
type Row struct {
	Policy    string  `json:"policy"`
	Device    int64   `json:"peak_device_bytes"` // of the fullest rank
	Host      int64   `json:"peak_host_bytes"`
	StepRatio float64 `json:"step_ratio"` // step time over that of the first policy, in the middle of all rounds
	Loss      float64 `json:"final_loss"`
	Sum       string  `json:"params_sha256"`
	Predicted int64   `json:"predicted_device_bytes"` // of the rank that was to be the fullest, before the measured steps
	Speed     float64 `json:"tokens_per_second"`
	Reruns    int     `json:"reruns"`
	Budget    int64   `json:"budget_bytes,omitempty"`
}

// near is what a prediction may be off without being spoken of.
const near = 0.05

// off is how far the prediction is from what was taken, as a share of that.
func (r Row) off() float64 { return float64(r.Predicted)/float64(r.Device) - 1 }

// contestant is a policy under way.
type contestant struct {
	name      string
	t         *train.Trainer
	budget    device.Bytes
	predicted device.Bytes
	last      train.Metrics
	took      []float64 // seconds, by rounds

	files   *collection // nil keeps nothing
	metrics *os.File
	traces  *tracing // nil is none
	told    ahead
}

// Compare trains under all policies. Trainers of all of them are open at once, and
// their measured steps come in turn, round by round: whatever else the machine
// does meets all of them, and a policy is held against the step of the first in the
// same round. All of them are traced, or none. They are written to a folder; "" keeps
// nothing. Page is the report.
func (j *Job) Compare(ctx context.Context, dir string, p *Progress) (rows []Row, page string, err error) {
	if dir == "" {
		rows, err = j.compare(ctx, nil, p)
		return rows, "", err
	}
	c, err := j.collect(dir, p)
	switch {
	case err != nil && dir != CompareFolder:
		return nil, "", Wrong{fmt.Errorf("--out: %w", err)}
	case err != nil: // nobody asked for it
		p.Say("warning: %v; the comparison is not written", err)
	}
	rows, err = j.compare(ctx, c, p)
	return rows, c.end(err == nil, j.machine.Version), err
}

func (j *Job) compare(ctx context.Context, files *collection, p *Progress) (rows []Row, err error) {
	if j.config.Memory.Links, err = j.measure(); err != nil {
		return nil, err
	}
	links := j.config.Memory.Links
	var all []*contestant
	defer func() {
		for _, c := range all {
			err = errors.Join(err, c.t.Close())
			files.close(c)
		}
		p.Settle()
	}()
	steps := j.Options.Steps
	dir := ""
	if files != nil {
		dir = files.dir
	}
	p.begin(j.watched(train.Policies, 0), dir)
	warm := min(mostWarm, max(1, steps-1)) // the budget follows from a step
	var budgets []device.Bytes
	for _, name := range train.Policies {
		c := &contestant{name: name, files: files}
		warmUp := func() error {
			for range warm {
				if err := c.step(ctx, p, steps); err != nil {
					return err
				}
			}
			c.predict()
			if warm == steps {
				c.took = append(c.took, c.last.Seconds) // the only one
			}
			return nil
		}
		if name == "budget" {
			err = c.within(j, links, budgets, warmUp)
		} else {
			err = c.open(j, links, 0, warmUp)
		}
		if c.t != nil {
			all = append(all, c)
		}
		if err != nil {
			return nil, err
		}
		if name == "none" {
			var ranks []heldBy
			for _, u := range c.t.Usage() {
				ranks = append(ranks, heldBy{u.Kind[device.Accel].Peak, u.Owners})
			}
			budgets = limits(j.share, ranks)
		}
	}
	for round := range steps - warm {
		for k := range all { // another one is first in every round
			c := all[(round+k)%len(all)]
			if err := c.step(ctx, p, steps); err != nil {
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
		files.finish(j, c, row, 1e3*row.StepRatio*middle(slices.Clone(all[0].took)))
		rows = append(rows, row)
	}
	return rows, nil
}

// heldBy is what a rank's device holds at most, and whose it is.
type heldBy struct {
	peak   device.Bytes
	owners []device.OwnerUsage
}

// limits are the budgets to try, in order: a share of what keeping everything takes;
// where parameters alone are too much of that, what they take and a share of the rest; and
// as a model may be so small that pages and workspaces are most, more than everything.
func limits(share float64, ranks []heldBy) (out []device.Bytes) {
	var most, fixed device.Bytes
	for _, r := range ranks {
		most = max(most, r.peak)
		rest := r.peak
		for _, o := range r.owners {
			if o.Kind == device.Accel && o.Owner == trace.Device.Pool() {
				rest -= o.Peak
			}
		}
		fixed = max(fixed, rest)
	}
	out = append(out, device.Bytes(share*float64(most)))
	for _, share := range []float64{share, (1 + share) / 2, 1, 2, 4} {
		if b := fixed + device.Bytes(share*float64(most-fixed)); b > out[len(out)-1] {
			out = append(out, b)
		}
	}
	return out
}

// within trains within the first of some budgets that is not refused.
func (c *contestant) within(j *Job, links policy.Links, limits []device.Bytes, warmUp func() error) (err error) {
	for i, limit := range limits {
		if err = c.open(j, links, limit, warmUp); err == nil || !isWrong(err) || i == len(limits)-1 {
			return err
		}
		if c.t != nil {
			_ = c.t.Close() // it was refused, and says so in err
			c.files.close(c)
			c.t = nil
		}
	}
	return err
}

// open begins to train.
func (c *contestant) open(j *Job, links policy.Links, budget device.Bytes, warmUp func() error) (err error) {
	cfg := j.config
	if cfg.Memory, err = train.Named(c.name, budget); err != nil {
		return err
	}
	cfg.Memory.Links = links
	c.traces, c.told = nil, ahead{}
	if c.files != nil && j.Trace {
		c.traces = j.trace(&cfg)
	}
	if c.t, err = open(cfg); err != nil {
		c.t = nil
		return fmt.Errorf("policy %s: %w", c.name, err)
	}
	c.budget = budget
	c.files.begin(c)
	return warmUp()
}

func (c *contestant) step(ctx context.Context, p *Progress, of int) (err error) {
	if ctx.Err() != nil {
		return Interrupted{}
	}
	c.traces.begin(c.t.Done()+1, c.t.Done()+1 == of)
	c.last, err = step(c.t, c.budget, c.t.Done() == 0)
	if c.traces.over(); err != nil {
		return fmt.Errorf("policy %s: %w", c.name, err)
	}
	c.told.look(c.t)
	c.files.record(c)
	p.step(c.name, c.last, of, nil, p.ranks(c.t, c.budget))
	return nil
}

// predict notes what the recorded step says that the fullest rank takes.
func (c *contestant) predict() {
	for _, p := range c.t.Predicted() {
		c.predicted = max(c.predicted, p.Device)
	}
}

func (c *contestant) row(first *contestant) (r Row, err error) {
	if c.predicted == 0 {
		c.predict() // nothing was decided so early
	}
	r = Row{Policy: c.name, Predicted: int64(c.predicted), Loss: c.last.Loss, Reruns: c.last.Reruns, Budget: int64(c.budget)}
	d, h := peaks(c.t)
	r.Device, r.Host = int64(d), int64(h)
	ratios := make([]float64, len(c.took))
	for i, t := range c.took {
		ratios[i] = t / first.took[i]
	}
	r.StepRatio = middle(ratios)
	r.Speed = float64(c.last.Tokens) / middle(slices.Clone(c.took))
	r.Sum, err = c.t.Sum()
	return r, err
}

// middle is the median; it sorts.
func middle(x []float64) float64 {
	slices.Sort(x)
	n := len(x)
	if n == 0 {
		return 0
	}
	return (x[(n-1)/2] + x[n/2]) / 2
}

// peaks are those of the fullest device, of each kind of memory.
func peaks(t *train.Trainer) (dev, host device.Bytes) {
	for _, u := range t.Usage() {
		dev, host = max(dev, u.Kind[device.Accel].Peak), max(host, u.Kind[device.Host].Peak)
	}
	return dev, host
}

// Differ are the policies whose parameters are not those of the first.
func Differ(rows []Row) (names []string) {
	for _, r := range rows {
		if r.Sum != rows[0].Sum || r.Loss != rows[0].Loss {
			names = append(names, r.Policy)
		}
	}
	return names
}

// Table shows what a comparison found.
func (j *Job) Table(w io.Writer, rows []Row) {
	fmt.Fprintf(w, "%s on %s, %d steps of %d tokens a policy\n\n", j.config.Model.Name, j.layout(), j.Options.Steps, j.config.Tokens())
	fmt.Fprintf(w, "%-18s %12s %12s %12s %10s %11s  %s\n", "policy", "peak device", "predicted", "peak host", "step time", "final loss", "identical")
	for _, r := range rows {
		same := "yes"
		if r.Sum != rows[0].Sum || r.Loss != rows[0].Loss {
			same = "no"
		}
		fmt.Fprintf(w, "%-18s %12s %12s %12s %9.2fx %11.4f  %s\n", r.Policy, page.Size(r.Device), page.Size(r.Predicted), page.Size(r.Host), r.StepRatio, r.Loss, same)
	}
	fmt.Fprintf(w, "\n%s\n", wrap(shows(rows), lineWidth))
}

// lineWidth is what lines under a table may have.
const lineWidth = 100

// wrap breaks lines between words.
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

// shows says what the rows show.
func shows(rows []Row) string {
	if bad := Differ(rows); len(bad) > 0 {
		return fmt.Sprintf("Parameters under %s are not those under %s, which is a fault of this program.", strings.Join(bad, ", "), rows[0].Policy)
	}
	return "Every policy trained the same parameters, bit for bit: " + saves(rows) + "." + missed(rows)
}

// saves says what stash and budget save.
func saves(rows []Row) (text string) {
	share := func(a, b string) float64 {
		find := func(name string) int { return slices.IndexFunc(rows, func(r Row) bool { return r.Policy == name }) }
		return 100 * float64(rows[find(a)].Device) / float64(rows[find(b)].Device)
	}
	if s := share("stash", "static"); s < 100 { // otherwise there are no experts
		text = fmt.Sprintf("stash with %.0f %% of the device memory of oversized static buffers, and ", s)
	}
	return text + fmt.Sprintf("budget with %.0f %% of what keeping everything takes", share("budget", "none"))
}

// missed names the worst prediction, if it is not near enough.
func missed(rows []Row) string {
	worst := slices.MaxFunc(rows, func(a, b Row) int { return cmp.Compare(math.Abs(a.off()), math.Abs(b.off())) })
	if worst.Predicted == 0 || math.Abs(worst.off()) <= near {
		return ""
	}
	return fmt.Sprintf(" The prediction for %s is off by %+.1f %%.", worst.Policy, 100*worst.off())
}
