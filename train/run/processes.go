// This file owns runs whose ranks live in several processes. All of them run the same
// code and agree wherever they could part. The process with rank 0 speaks: it alone holds
// the folder, writes everything but the traces and checkpoints of other ranks, and prints.

package run

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/data"
	"github.com/stowage-dev/stowage/train/internal/disk"
)

// start is what the speaking process finds before the first step.
type start struct {
	Options []byte // all processes must have the same
	Text    string // the checksums of what is trained and evaluated on, likewise
	Lock    []byte // the contents of the folder's lock, by which others know the folder
	Step    int    // of the checkpoint to continue from, or -1
	Done    bool   // the run has finished, and its summary is written
}

// agreeOnOptions returns an error if a process has other options or another text than the
// first. Options hold the keys of the model, but only the name of the text.
func (j *Job) agreeOnOptions() error {
	mine := start{}
	var err error
	mine.Options, err = j.Options.encode()
	if j.machine.Process == nil {
		return err
	}
	for _, text := range []*data.Text{j.config.Text, j.config.HeldOut} {
		if text != nil {
			mine.Text += text.SHA256() + " "
		}
	}
	first := mine
	if err := j.machine.Process.Share(&first, err); err != nil {
		return err
	}
	switch {
	case !bytes.Equal(first.Options, mine.Options):
		err = refuseHere(j, "has other options than rank 0", "give the same command to all ranks")
	case first.Text != mine.Text:
		err = refuseHere(j, fmt.Sprintf("has another text in %s than rank 0", j.config.Text.Name()), "give all ranks the same text")
	}
	return j.machine.Process.Share(nil, err)
}

// interrupted reports whether the run of all processes ends before its last step.
func (j *Job) interrupted(ctx context.Context) (bool, error) {
	n := 0
	if ctx.Err() != nil {
		n = 1
	}
	n, err := j.machine.Process.Most(n)
	return n > 0, err
}

// refuseHere returns an InputError about this process.
func refuseHere(j *Job, problem, remedy string) error {
	host, _ := os.Hostname() // without a name the rank must do
	return &InputError{memory.OnRank(j.machine.Process.Ranks[0], fmt.Errorf("%s %s; %s", host, problem, remedy))}
}

// enter takes the folder of the run, or finds that of the process that took it, and
// returns the checkpoint to continue from, or nil.
func (r *run) enter(dir string, resume bool) (from *checkpoint.Checkpoint, done bool, err error) {
	p := r.machine.Process
	found := start{Step: -1}
	if p.Speaks() {
		if from, err = r.claimed(dir, resume); err == nil && from != nil {
			found.Step = from.Step
			_, found.Done = r.folder.readSummary(from.Step)
		}
		if err == nil && p != nil {
			found.Lock, err = disk.ReadFile(r.disk(), filepath.Join(dir, disk.LockName), mostConfig)
		}
	}
	if err = p.Share(&found, err); err != nil {
		return nil, false, err
	}
	if !p.Speaks() {
		from, err = r.follow(dir, found)
	}
	return from, found.Done, p.Share(nil, err)
}

// claimed takes the lock of a folder and looks for the checkpoint to continue from.
func (r *run) claimed(dir string, resume bool) (*checkpoint.Checkpoint, error) {
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		return nil, refuse("Folder", dir, "is a file", "give a folder")
	}
	var err error
	if r.folder, err = claim(r.disk(), dir); err != nil {
		return nil, err
	}
	return r.folder.look(resume, r.p)
}

// follow finds the checkpoint that the speaking process continues from.
func (r *run) follow(dir string, found start) (from *checkpoint.Checkpoint, err error) {
	elsewhere := refuseHere(r.Job, fmt.Sprintf("does not see the folder %s of rank 0", dir), "give a folder on a file system that all machines share")
	lock, err := disk.ReadFile(r.disk(), filepath.Join(dir, disk.LockName), mostConfig)
	if err != nil || !bytes.Equal(lock, found.Lock) {
		return nil, elsewhere
	}
	if found.Step < 0 {
		return nil, nil
	}
	from, err = checkpoint.Latest(checkpoint.Options{Dir: dir, FS: r.disk()})
	if err == nil && from.Step != found.Step {
		return nil, elsewhere
	}
	return from, err
}

// begin writes what is known before the first step, and opens the traces of all ranks.
func (r *run) begin(dir string, resume, resumed bool) error {
	p, j := r.machine.Process, r.Job
	part := -1
	var err error
	if p.Speaks() {
		if err = r.folder.begin(&j.Options, r.t.StepsDone(), warner(r.p)); err == nil {
			if !resume { // the lines that were dropped are those of another run
				r.folder.was = history{}
			}
			if j.Options.note != "" {
				r.p.Say("warning: %s", j.Options.note)
			}
			r.out.Loss, r.told.before = r.folder.was.loss, r.folder.was.peaks
			if part = r.describe(resumed); part >= 0 { // undo removes the traces of all ranks
				for rank := range r.out.Ranks {
					if path := r.folder.path(report.TraceName(rank, part)); !slices.Contains(r.folder.made, path) {
						r.folder.made = append(r.folder.made, path)
					}
				}
			}
		}
	}
	if err = p.Share(&part, err); err != nil {
		return err
	}
	if !p.Speaks() {
		r.traces.follow(r.disk(), dir, part)
	}
	r.saver = &checkpoint.Saver{Options: checkpoint.Options{Dir: dir, FS: r.disk(), Warn: warner(r.p)}, Ranks: r.out.Ranks}
	if p.Speaks() {
		r.saver.Store, r.saver.Before = r.folder.store, r.folder.syncMetrics
	}
	if p != nil {
		r.saver.Gather = p.Control.Gather
	}
	return nil
}

// follow writes the traces of ranks to a folder that the speaking process has prepared. A
// negative part writes none.
func (t *tracing) follow(d disk.FS, dir string, part int) {
	if t == nil {
		return
	}
	if part < 0 {
		_ = t.fail(fmt.Errorf("there is no folder for traces"))
		return
	}
	_, _ = t.openAll(d, dir, part) // a trace that cannot be written ends no run
}
