// This file owns one run: beginning or going on, steps, checkpoints, and the end.

package run

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/profile"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/disk"
)

// Summary holds the figures of a run. Peaks are those of the whole run. Tokens, seconds
// and speed count from its start or its last resumption, or from its start if no step was
// left when it was resumed.
type Summary struct {
	Model    string  `json:"model"`
	Policy   string  `json:"policy"`
	Ranks    int     `json:"ranks"`
	Steps    int     `json:"steps"`
	Finished bool    `json:"finished"`
	Device   int64   `json:"peak_device_bytes"` // of the fullest rank
	Host     int64   `json:"peak_host_bytes"`
	Loss     float64 `json:"final_loss"`
	Digest   string  `json:"params_sha256,omitempty"`
	Reruns   int     `json:"reruns"`
	Tokens   int64   `json:"tokens"`
	Seconds  float64 `json:"seconds"`
	Speed    float64 `json:"tokens_per_second"`
	// Eval is the loss of the last parameters on the held-out text. It is nil if nothing
	// was held out or the run was interrupted.
	Eval *float64 `json:"eval_loss,omitempty"`
	// Forecast is the peak of the fullest rank that the first steps led the runtime to
	// expect.
	Forecast int64 `json:"predicted_device_bytes,omitempty"`
	// Profile says what each kernel took, if the run was profiled and not stopped early.
	Profile *profile.Result `json:"profile,omitempty"`
	// Notes are remarks on options that had no effect: a [memory.ModuleError] or a
	// [memory.SettingError] for each.
	Notes  []error `json:"-"`
	folder string  // the run's folder, or ""
	report string  // the file of the report, or ""
	idle   bool    // the run had no steps left; the figures are those of its folder
	hidden hidden  // how much of the collectives was, if the run is traced
}

// line is a line of metrics. Steps count from one: line n describes the step that
// checkpoint n holds the result of.
type line struct {
	Step int `json:"step"`
	train.Metrics
	Speed  float64  `json:"tokens_per_second"`
	Spills int64    `json:"spills,omitempty"` // pages of host memory, on all ranks, in this step
	Eval   *float64 `json:"eval_loss,omitempty"`
	peak            // of the fullest ranks
	// Ranks has the peaks of each rank, if they are not those of the line before.
	Ranks []peak `json:"rank_peaks,omitempty"`
}

// run is a run under way.
type run struct {
	*Job
	t        *train.Trainer
	folder   *folder    // nil if nothing is written
	traces   *tracing   // nil if nothing is traced
	untraced bool       // the user knows that there is no trace
	timing   *profiling // nil if nothing is profiled
	p        *Progress
	out      Summary
	saved    int               // the step of the last checkpoint that was begun
	saver    *checkpoint.Saver // nil if nothing is written
	told     notes
}

// Run trains to the last step, and writes the run to a folder unless dir is "". With
// resume it continues from the folder's last checkpoint. When ctx is cancelled it
// finishes the step, saves and returns an *InterruptedError. It returns an *InputError
// if it refuses the folder, the options or the budget, or if another process uses the
// folder.
func (j *Job) Run(ctx context.Context, dir string, resume bool, p *Progress) (s Summary, err error) {
	r := &run{Job: j, p: p, saved: -1}
	if err := j.agreeOnOptions(); err != nil {
		return s, err
	}
	var from *checkpoint.Checkpoint
	done := false
	if dir != "" {
		defer func() { err = errors.Join(err, r.leave(err)) }()
		if from, done, err = r.enter(dir, resume); err != nil {
			return s, err
		}
	}
	if j.config.Memory.Links, err = j.measureLinks(); err != nil {
		return s, err
	}
	r.out.folder = dir
	r.out.Model, r.out.Policy, r.out.Ranks = j.config.Model.Name, j.Options.Policy, j.config.Layout.Ranks()
	cfg := j.config
	if dir != "" && !j.NoTrace {
		r.traces = j.trace(&cfg)
	}
	if r.t, err = open(cfg); err != nil {
		return s, err
	}
	defer func() {
		err = errors.Join(err, r.t.Close())
		traced := r.traces.close()
		_ = j.machine.Process.Share(nil, nil) // all traces are closed, or a process is gone
		s.report = r.writePictures(traced)
		p.settle()
	}()
	if from != nil {
		if err := j.machine.Process.Share(nil, r.t.Resume(from)); err != nil {
			return s, beforeStart(err)
		}
		if from.Step > j.Options.Steps {
			return s, refuse("Steps", fmt.Sprint(j.Options.Steps), fmt.Sprintf("is less than the %d that the run has done", from.Step), "give more")
		}
		if done && from.Step == j.Options.Steps {
			if r.out.idle = true; r.folder != nil {
				s, _ = r.folder.readSummary(from.Step)
			}
			return s, nil
		}
		r.saved = from.Step
		p.Say("continuing after step %d", from.Step)
	}
	if dir != "" {
		if err := r.begin(dir, resume, from != nil); err != nil {
			return s, err
		}
	}
	if r.timing, err = j.profile(j.Options.Steps - r.t.StepsDone()); err != nil {
		return s, err
	}
	p.begin(j.description([]string{r.out.Policy}, r.t.StepsDone()), dir)
	return r.steps(ctx, from == nil)
}

// disk returns the file system that the folder is on.
func (j *Job) disk() disk.FS {
	if j.fs == nil {
		return disk.OS{}
	}
	return j.fs
}

// leave ends the use of the folder. A run that failed before its first step leaves it as
// it was.
func (r *run) leave(failed error) error {
	f := r.folder
	r.folder = nil
	switch {
	case f == nil: // undone already
		return nil
	case failed != nil && r.out.Tokens == 0:
		return f.undo()
	}
	return f.close()
}

// warner returns a function that prints warnings.
func warner(p *Progress) func(string) { return func(text string) { p.Say("warning: %s", text) } }

// steps trains to the last step, or until ctx is cancelled. It returns after the last
// checkpoint is complete or has failed.
func (r *run) steps(ctx context.Context, fresh bool) (s Summary, err error) {
	o := &r.Options
	defer func() { err = r.settled(err) }()
	stopped := false
	for r.t.StepsDone() < o.Steps && !stopped {
		left := o.Steps - r.t.StepsDone()
		r.traces.beginStep(r.t.StepsDone()+1, left == 1)
		r.timing.begin(left)
		m, err := step(r.t, r.config.Memory.Budget, r.out.Tokens == 0)
		r.traces.endStep()
		if err == nil {
			err = r.timing.end(left, m.Seconds)
		}
		if err != nil {
			err = r.settled(err)
			if r.folder != nil && (r.out.Tokens == 0 || fresh && r.saver.Saved() < 0 && isInput(err)) {
				err = errors.Join(err, r.folder.undo())
				r.folder = nil
			}
			return r.out, err
		}
		if stopped, err = r.interrupted(ctx); err != nil {
			return r.out, err
		}
		last := r.t.StepsDone() == o.Steps
		if err := r.record(m, last || o.EvalEvery > 0 && r.t.StepsDone()%o.EvalEvery == 0); err != nil {
			return r.out, err
		}
		if last || stopped || o.SaveEvery > 0 && r.t.StepsDone()%o.SaveEvery == 0 {
			if r.folder != nil && (last || stopped) {
				_ = r.folder.writeJSON(summaryName, r.summaryFile()) // for a run that is killed before finish, which returns the error
			}
			if err := r.save(); err != nil {
				return r.out, err
			}
		}
		if err := r.saver.Poll(); err != nil {
			return r.out, err
		}
	}
	if err := r.saver.Wait(); err != nil {
		return r.out, err
	}
	if err := r.finish(r.t.StepsDone() == o.Steps); err != nil {
		return r.out, err
	}
	if !r.out.Finished {
		return r.out, &InterruptedError{Folder: r.out.folder}
	}
	return r.out, nil
}

// evaluate returns the loss on the held-out text, or nil if there is none.
func (r *run) evaluate() (*float64, error) {
	if r.config.HeldOut == nil {
		return nil, nil
	}
	defer r.traces.evaluate()()
	loss, _, err := r.t.Evaluate(r.batches)
	if err != nil {
		return nil, checkBudget(err, r.config.Memory.Budget)
	}
	return &loss, nil
}

// record adds a step to the figures, the metrics and what is shown, with an evaluation
// if one is due.
func (r *run) record(m train.Metrics, due bool) (err error) {
	r.out.Eval = nil // the last one had other parameters
	r.told.noteForecasts(r.t)
	if due {
		if r.out.Eval, err = r.evaluate(); err != nil {
			return err
		}
	}
	r.p.step(r.out.Policy, m, r.Options.Steps, r.out.Eval, r.p.ranks(r.t, r.config.Memory.Budget, r.told.before))
	r.out.Loss, r.out.Reruns = m.Loss, m.Reruns
	r.out.Tokens += int64(m.Tokens)
	r.out.Seconds += m.Seconds
	r.told.took = append(r.told.took, m.Seconds)
	if r.folder != nil {
		l := r.told.line(r.t, m)
		l.Eval = r.out.Eval
		err = r.folder.record(l)
	}
	return r.machine.Process.Share(nil, err)
}

// save begins a checkpoint, which is written while steps go on, unless the last one is of
// the same step.
func (r *run) save() error {
	if r.saver == nil || r.saved == r.t.StepsDone() {
		return nil
	}
	if r.folder != nil {
		r.folder.keep()
	}
	if err := r.machine.Process.Share(nil, r.t.Save(r.saver)); err != nil {
		return err
	}
	r.saved = r.t.StepsDone()
	return nil
}

// settled waits for the checkpoint that is being written, and adds its error to that of
// the run, unless it failed because a process or the lock is gone, which the other error says.
func (r *run) settled(err error) error {
	saved := r.saver.Wait()
	var gone *comm.Failure
	var lost *disk.LostError
	if err != nil && errors.As(saved, &gone) || errors.As(err, &lost) && errors.As(saved, &lost) {
		return err
	}
	return errors.Join(err, saved)
}

// summaryFile is what summary.json holds.
type summaryFile struct {
	Summary
	hidden
	Step   float64              `json:"step_ms,omitempty"`
	Traced string               `json:"traced,omitempty"`
	Ranks  []report.RankSummary `json:"by_rank"`
}

// summaryFile returns what is known of the steps that this process trained. The run has
// not finished.
func (r *run) summaryFile() summaryFile {
	s := &r.out
	most := fullest(peaksOf(r.t, r.told.before))
	s.Steps, s.Device, s.Host = r.t.StepsDone(), most.Device, most.Host
	s.Forecast = r.told.highest()
	if s.Seconds > 0 {
		s.Speed = float64(s.Tokens) / s.Seconds
	}
	return summaryFile{*s, r.traces.hidden(), r.told.stepTime(), r.traces.gaps(), r.told.rankSummaries(r.t)}
}

// completeSummary returns what is known of a run that was resumed after its last step:
// what its metrics say, and what it wrote before its last checkpoint.
func (r *run) completeSummary() summaryFile {
	s, was := &r.out, &r.folder.was
	s.Tokens, s.Reruns, r.told.took = was.tokens, was.reruns, was.took
	for _, t := range was.took {
		s.Seconds += t
	}
	f := r.summaryFile()
	if len(was.peaks) > 0 { // this process did no step, and may have opened other ranks or another policy
		most := fullest(was.peaks)
		s.Device, s.Host = most.Device, most.Host
		f.Ranks = f.Ranks[:min(len(f.Ranks), len(was.peaks))]
		for i := range f.Ranks {
			f.Ranks[i].Device, f.Ranks[i].Host = was.peaks[i].Device, was.peaks[i].Host
		}
	}
	old, err := r.folder.readSummaryFile()
	if err != nil || old.Steps != s.Steps || old.Policy != s.Policy || len(old.Ranks) != len(f.Ranks) {
		return f
	}
	s.Forecast, f.Traced, f.hidden = old.Forecast, old.Traced, old.hidden
	for i, rank := range old.Ranks {
		rank.Device, rank.Host = f.Ranks[i].Device, f.Ranks[i].Host
		f.Ranks[i] = rank
	}
	return f
}

// finish completes the summary and writes it.
func (r *run) finish(finished bool) (err error) {
	s := &r.out
	known, trained := r.summaryFile, s.Tokens > 0 // alike in all processes; completeSummary adds tokens to that of the folder
	if !trained && r.folder != nil {              // no step was left
		known = r.completeSummary
	}
	f := known()
	s.Finished, s.Profile = finished, r.timing.result(r.Job)
	if s.Eval == nil && finished { // the run was resumed after its last step
		if s.Eval, err = r.evaluate(); err != nil {
			return err
		}
	}
	if names := groupNames(f.Ranks); len(names) > 0 { // without any, nothing is known of the groups
		s.Notes = r.withoutEffect(names)
	}
	if s.Digest, err = r.t.Digest(); err != nil {
		return err
	}
	if trained {
		if s.hidden, err = r.traces.hiddenOfAll(r.machine.Process); err != nil {
			return err
		}
		f.hidden = s.hidden
	}
	if r.folder != nil {
		f.Summary = *s
		if !trained {
			err = r.folder.store.Tidy(s.Steps)
		}
		if err == nil {
			err = r.folder.writeJSON(summaryName, f)
		}
	}
	return r.machine.Process.Share(nil, err)
}

// readSummary reads the summary of a run that finished after so many steps. A run that
// was killed between its last checkpoint and its end has none.
func (f *folder) readSummary(steps int) (s Summary, ok bool) {
	file, err := f.readSummaryFile()
	s = file.Summary
	ok = err == nil && s.Finished && s.Steps == steps
	s.idle = ok
	return s, ok
}

func (f *folder) readSummaryFile() (s summaryFile, err error) {
	text, err := disk.ReadFile(f.disk, f.path(summaryName), mostConfig)
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	return s, err
}

// WriteText prints the summary for people.
func (s Summary) WriteText(w io.Writer) {
	steps := "steps"
	if s.Steps == 1 {
		steps = "step"
	}
	if s.idle {
		fmt.Fprintf(w, "nothing to do: the run has finished its %d %s; give more steps to continue\n", s.Steps, steps)
		if s.report != "" {
			fmt.Fprintf(w, "its report was missing and is now %s\n", s.report)
		}
		return
	}
	fmt.Fprintf(w, "%s under %s: %d %s, loss %.4f, ", s.Model, s.Policy, s.Steps, steps, s.Loss)
	if s.Eval != nil {
		fmt.Fprintf(w, "on held-out text %.4f, ", *s.Eval)
	}
	fmt.Fprintf(w, "%.0f tokens/s\nat most %s of device and %s of host memory on a rank\n", s.Speed, memory.Bytes(s.Device).Short(), memory.Bytes(s.Host).Short())
	s.hidden.write(w)
	fmt.Fprintf(w, "parameters %s\n", s.Digest)
	if s.Profile != nil {
		defer s.Profile.WriteText(w)
	}
	if s.folder != "" {
		fmt.Fprintf(w, "the run is in %s\n", s.folder)
	}
	if s.report != "" {
		fmt.Fprintf(w, "the report is %s\n", s.report)
	}
}
