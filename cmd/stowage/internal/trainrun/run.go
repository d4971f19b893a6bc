// This file owns one run: beginning or going on, steps, checkpoints, and the end.

package trainrun

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/stowage-dev/stowage/plan/page"
	"github.com/stowage-dev/stowage/report"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/checkpoint"
)

// RunSteps is how many steps a run trains where nobody says.
const RunSteps = 100

// Interrupted is the end that the user asked for.
type Interrupted struct{ Saved string }

func (e Interrupted) Error() string {
	if e.Saved == "" {
		return "interrupted; nothing was saved, because there is no --out"
	}
	return "interrupted; the run is saved, and goes on with --out " + e.Saved + " --resume"
}

// Summary is what a run came to. Tokens, seconds and speed are those since it began
// or was resumed.
type Summary struct {
	Model    string  `json:"model"`
	Policy   string  `json:"policy"`
	Ranks    int     `json:"ranks"`
	Steps    int     `json:"steps"`
	Finished bool    `json:"finished"`
	Device   int64   `json:"peak_device_bytes"` // of the fullest rank
	Host     int64   `json:"peak_host_bytes"`
	Loss     float64 `json:"final_loss"`
	Sum      string  `json:"params_sha256"`
	Reruns   int     `json:"reruns"`
	Tokens   int64   `json:"tokens"`
	Seconds  float64 `json:"seconds"`
	Speed    float64 `json:"tokens_per_second"`
	// Eval is the loss on what was held out, of the parameters at the end; nil where
	// nothing was, or where the run was interrupted.
	Eval *float64 `json:"eval_loss,omitempty"`
	// Predicted is what the first steps said that the fullest rank would take.
	Predicted int64 `json:"predicted_device_bytes,omitempty"`
	page      string
	idle      bool // nothing was left to do: these are the figures of before
}

// line is a line of metrics. Steps count from one: line n is of the state that
// checkpoint n has.
type line struct {
	Step int `json:"step"`
	train.Metrics
	Speed  float64  `json:"tokens_per_second"`
	Spills int64    `json:"spills,omitempty"` // pages of host memory, on all ranks, in this step
	Eval   *float64 `json:"eval_loss,omitempty"`
}

// run is a run under way.
type run struct {
	*Job
	t      *train.Trainer
	folder *folder  // nil without --out
	traces *tracing // nil without a folder, or a wish for them
	p      *Progress
	out    Summary
	saved  int // the step of the last checkpoint
	told   ahead
}

// Resumable reads the options of the run in a folder.
func Resumable(dir string, o *Options) error {
	file := filepath.Join(dir, configName)
	if !exists(file) {
		return Wrong{fmt.Errorf("--resume: there is no run in %s; leave --resume out to begin one, or give the --out of another", dir)}
	}
	if err := o.Read(file); err != nil {
		return Wrong{fmt.Errorf("--resume: %w", err)}
	}
	return nil
}

// Run trains. A folder of "" keeps nothing.
func (j *Job) Run(ctx context.Context, dir string, resume bool, p *Progress) (s Summary, err error) {
	from, err := j.begin(dir, resume, p)
	if err != nil {
		return s, err
	}
	if j.config.Memory.Links, err = j.measure(); err != nil {
		return s, err
	}
	r := &run{Job: j, p: p, saved: -1}
	r.out.Model, r.out.Policy, r.out.Ranks = j.config.Model.Name, j.Options.Policy, j.config.Layout.Ranks()
	cfg := j.config
	if dir != "" && j.Trace {
		r.traces = j.trace(&cfg)
	}
	if r.t, err = open(cfg); err != nil {
		return s, err
	}
	defer func() {
		err = errors.Join(err, r.t.Close())
		s.page = r.pictures()
		p.Settle()
		if r.folder != nil {
			err = errors.Join(err, r.folder.close())
		}
	}()
	if from != nil {
		if err := r.t.Resume(from); err != nil {
			return s, blame(err)
		}
		if from.Step > j.Options.Steps {
			return s, Wrong{fmt.Errorf("--steps %d is less than the %d that the run has done; give more", j.Options.Steps, from.Step)}
		}
		if s, done := finished(dir, from.Step); done && from.Step == j.Options.Steps {
			return s, nil
		}
		r.saved = from.Step
		p.Say("goes on after step %d", from.Step)
	}
	if dir != "" {
		if r.folder, err = openFolder(dir, &j.Options, r.t.Done(), warner(p)); err != nil {
			r.folder = nil
			return s, err
		}
		r.out.Loss = r.folder.last
		r.describe(from != nil)
	}
	p.begin(j.watched([]string{r.out.Policy}, r.t.Done()), dir)
	return r.steps(ctx, from == nil)
}

func warner(p *Progress) func(string) { return func(text string) { p.Say("warning: %s", text) } }

// begin looks at the folder and changes nothing: is there a run, and may there be one?
func (j *Job) begin(dir string, resume bool, p *Progress) (*checkpoint.Checkpoint, error) {
	if dir == "" {
		return nil, nil
	}
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		return nil, Wrong{fmt.Errorf("--out %s is a file; give a folder", dir)}
	}
	o := checkpoint.Options{Dir: dir, Warn: warner(p)}
	if resume {
		c, err := checkpoint.Latest(o)
		if errors.Is(err, checkpoint.ErrNone) {
			p.Say("the run in %s has no checkpoint yet; it begins anew", dir)
			return nil, nil
		}
		return c, err
	}
	steps, err := checkpoint.Steps(o)
	if err != nil {
		return nil, Wrong{fmt.Errorf("--out: %w", err)}
	}
	if len(steps) > 0 {
		return nil, Wrong{fmt.Errorf("--out %s holds a run of %d steps already; use --resume to go on with it, or another --out", dir, steps[len(steps)-1])}
	}
	if name := foreign(dir); name != "" {
		return nil, Wrong{fmt.Errorf("--out %s has a %s that no run wrote; give another folder, or move the file", dir, name)}
	}
	return nil, nil
}

// steps trains to the end, or until the user has it end.
func (r *run) steps(ctx context.Context, fresh bool) (Summary, error) {
	o := &r.Options
	stopped := false
	for r.t.Done() < o.Steps && !stopped {
		r.traces.begin(r.t.Done()+1, r.t.Done()+1 == o.Steps)
		m, err := step(r.t, r.config.Memory.Budget, r.out.Tokens == 0)
		r.traces.over()
		if err != nil {
			if r.folder != nil && (r.out.Tokens == 0 || fresh && r.saved < 0 && isWrong(err)) {
				r.folder.undo()
				r.folder = nil
			}
			return r.out, err
		}
		stopped = ctx.Err() != nil
		last := r.t.Done() == o.Steps
		if err := r.took(m, last || !stopped && o.EvalEvery > 0 && r.t.Done()%o.EvalEvery == 0); err != nil {
			return r.out, err
		}
		if last || stopped || o.SaveEvery > 0 && r.t.Done()%o.SaveEvery == 0 {
			if err := r.save(); err != nil {
				return r.out, err
			}
		}
	}
	if err := r.finish(r.t.Done() == o.Steps); err != nil {
		return r.out, err
	}
	if !r.out.Finished {
		dir := ""
		if r.folder != nil {
			dir = r.folder.dir
		}
		return r.out, Interrupted{Saved: dir}
	}
	return r.out, nil
}

// evaluate finds the loss on what was held out, if anything was.
func (r *run) evaluate() (*float64, error) {
	if r.config.HeldOut == nil {
		return nil, nil
	}
	loss, _, err := r.t.Evaluate(r.batches)
	if err != nil {
		return nil, refused(err, r.config.Memory.Budget)
	}
	return &loss, nil
}

// took notes a step, with an evaluation where one is due.
func (r *run) took(m train.Metrics, due bool) (err error) {
	r.out.Eval = nil // of other parameters
	r.told.look(r.t)
	if due {
		if r.out.Eval, err = r.evaluate(); err != nil {
			return err
		}
	}
	r.p.step(r.out.Policy, m, r.Options.Steps, r.out.Eval, r.p.ranks(r.t, r.config.Memory.Budget))
	r.out.Loss, r.out.Reruns = m.Loss, m.Reruns
	r.out.Tokens += int64(m.Tokens)
	r.out.Seconds += m.Seconds
	r.told.took = append(r.told.took, m.Seconds)
	if r.folder == nil {
		return nil
	}
	return r.folder.record(line{Step: m.Step + 1, Metrics: m, Speed: float64(m.Tokens) / m.Seconds, Spills: r.told.spills(r.t), Eval: r.out.Eval})
}

func (r *run) save() error {
	if r.folder == nil || r.saved == r.t.Done() {
		return nil
	}
	if err := r.folder.metrics.Sync(); err != nil {
		return fmt.Errorf("%s cannot be written: %w", r.folder.metrics.Name(), pathless(err))
	}
	if err := r.t.Save(r.folder.store); err != nil {
		return err
	}
	r.saved = r.t.Done()
	return nil
}

// finish adds up.
func (r *run) finish(finished bool) (err error) {
	s := &r.out
	d, h := peaks(r.t)
	s.Steps, s.Finished, s.Device, s.Host = r.t.Done(), finished, int64(d), int64(h)
	if s.Seconds > 0 {
		s.Speed = float64(s.Tokens) / s.Seconds
	}
	if s.Eval == nil && finished { // it was so already
		if s.Eval, err = r.evaluate(); err != nil {
			return err
		}
	}
	if s.Sum, err = r.t.Sum(); err != nil || r.folder == nil {
		return err
	}
	s.Predicted = r.told.most()
	return r.folder.summary(struct {
		Summary
		Step   float64              `json:"step_ms,omitempty"`
		Traced string               `json:"traced,omitempty"`
		Ranks  []report.RankSummary `json:"by_rank"`
	}{*s, r.told.step(), r.traces.note(), r.told.ranks(r.t)})
}

// finished is the summary of a run that came to its end after so many steps. One that
// was killed between its last checkpoint and its summary has none.
func finished(dir string, steps int) (s Summary, ok bool) {
	text, err := os.ReadFile(filepath.Join(dir, summaryName))
	ok = err == nil && json.Unmarshal(text, &s) == nil && s.Finished && s.Steps == steps
	s.idle = ok
	return s, ok
}

// Text shows what a run came to.
func (s Summary) Text(w io.Writer, dir string) {
	steps := "steps"
	if s.Steps == 1 {
		steps = "step"
	}
	if s.idle {
		fmt.Fprintf(w, "nothing to do: the run has its %d %s; raise --steps to go on\n", s.Steps, steps)
		return
	}
	fmt.Fprintf(w, "%s under %s: %d %s, loss %.4f, ", s.Model, s.Policy, s.Steps, steps, s.Loss)
	if s.Eval != nil {
		fmt.Fprintf(w, "on held-out text %.4f, ", *s.Eval)
	}
	fmt.Fprintf(w, "%.0f tokens/s\nat most %s of device and %s of host memory on a rank\n", s.Speed, page.Size(s.Device), page.Size(s.Host))
	fmt.Fprintf(w, "parameters %s\n", s.Sum)
	if dir != "" {
		fmt.Fprintf(w, "the run is in %s\n", dir)
	}
	if s.page != "" {
		fmt.Fprintf(w, "the report is %s\n", s.page)
	}
}
