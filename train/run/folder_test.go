// This file owns the tests of a run's folder on a simulated disk: processes that use one
// folder at once in many orders, kills, and losses of power at every operation.

package run

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/disk"
	"github.com/stowage-dev/stowage/train/internal/disk/disktest"
)

const simulated = "/disk/runs/run"

// simulation is a process that does what Job.Run does to a folder, without the training.
type simulation struct {
	seed   uint64 // of its options
	resume bool
	fail   bool // before its first step
	steps  int

	from    int   // the step that it continued after
	begun   bool  // it wrote to the folder
	saved   int   // the last step whose checkpoint was written
	done    bool  // it wrote its summary
	err     error // why it ended
	warned  []string
	inside  *int // processes that use the folder
	crowded bool // there was another one
}

var errStep = errors.New("the first step failed")

func (s *simulation) run(d disk.FS) { s.err = s.train(d) }

func (s *simulation) train(d disk.FS) (err error) {
	o := DefaultOptions()
	o.Seed, o.Steps = s.seed, s.steps
	if s.resume {
		if o, err = resumeOptions(d, simulated); err != nil {
			return err
		}
		o.Steps = s.steps
	}
	f, err := claim(d, simulated)
	if err != nil {
		return err
	}
	if s.inside != nil {
		*s.inside++
		s.crowded = *s.inside > 1
	}
	failed := true
	defer func() {
		if s.inside != nil {
			*s.inside--
		}
		if failed && s.saved == 0 {
			err = errors.Join(err, f.undo())
		} else {
			err = errors.Join(err, f.close())
		}
	}()
	from, err := f.look(s.resume, NewProgress(&bytes.Buffer{}, nil, nil))
	if err != nil {
		return err
	}
	if from != nil {
		s.from = from.Step
	}
	if err := f.begin(&o, s.from, func(text string) { s.warned = append(s.warned, text) }); err != nil {
		return err
	}
	s.begun = true
	if s.fail {
		return errStep
	}
	for step := s.from + 1; step <= o.Steps; step++ {
		if err := f.record(line{Step: step, Metrics: train.Metrics{Loss: float64(step)}}); err != nil {
			return err
		}
		if err := f.saveNow(simulatedMeta(o.Seed, step)); err != nil {
			return err
		}
		s.saved = step
	}
	if err := f.writeJSON(summaryName, Summary{Steps: o.Steps, Finished: true, Reruns: int(o.Seed)}); err != nil {
		return err
	}
	s.done, failed = true, false
	return nil
}

func simulatedMeta(seed uint64, step int) checkpoint.Meta {
	return checkpoint.Meta{Step: step, Layout: json.RawMessage(`{}`), Config: json.RawMessage(fmt.Sprintf(`{"seed":%d}`, seed)), Data: json.RawMessage(`{}`)}
}

// complete wants a folder to hold all of a run of so many steps.
func complete(d disk.FS, seed uint64, steps int) error {
	text, err := disk.ReadFile(d, simulated+"/"+configName, mostConfig)
	if err != nil || !strings.Contains(string(text), fmt.Sprintf("\nseed: %d\n", seed)) || cutShort(text) {
		return fmt.Errorf("the options are %q, %w", text, err)
	}
	metrics, err := disk.ReadFile(d, simulated+"/"+metricsName, mostConfig)
	if n := bytes.Count(metrics, []byte("\n")); err != nil || n != steps {
		return fmt.Errorf("the metrics are %q, %v; want %d lines", metrics, err, steps)
	}
	c, err := checkpoint.Latest(checkpoint.Options{Dir: simulated, FS: d})
	if err != nil || c.Step != steps || string(c.Config) == "" {
		return fmt.Errorf("the checkpoint is %+v, %v; want step %d", c, err, steps)
	}
	f := folder{disk: d, dir: simulated}
	if s, ok := f.readSummary(steps); !ok || s.Reruns != int(seed) {
		return fmt.Errorf("the summary is %+v", s)
	}
	return nil
}

// together runs two processes at once and checks what they leave.
func together(t *testing.T, choose disktest.Choose, a, b simulation) (order []string) {
	t.Helper()
	d := disktest.New()
	var inside int
	a.seed, b.seed, a.inside, b.inside = 11, 12, &inside, &inside
	a.steps, b.steps = 2, 2
	order = d.Run(t, choose, map[*disktest.Process]func(*disktest.Process){
		d.Process("a"): func(p *disktest.Process) { a.run(p) },
		d.Process("b"): func(p *disktest.Process) { b.run(p) },
	})
	after := d.Process("after")
	for _, s := range []simulation{a, b} {
		var held *disk.LockedError
		switch {
		case s.crowded:
			t.Errorf("two processes used the folder at once")
		case s.done:
			if err := complete(after, s.seed, 2); err != nil {
				t.Errorf("the process was well, and %v", err)
			}
		case s.fail && errors.Is(s.err, errStep), errors.As(s.err, &held), isInput(s.err) && strings.Contains(s.err.Error(), "already holds a run"):
		default:
			t.Errorf("a process ended with %v", s.err)
		}
	}
	switch {
	case a.done && b.done:
		t.Error("both processes wrote the run")
	case a.fail && b.fail && !errors.Is(a.err, errStep) && !errors.Is(b.err, errStep),
		!a.fail && !b.fail && !a.done && !b.done:
		t.Errorf("nobody had the folder: %v, %v", a.err, b.err)
	case a.begun && b.begun && !a.fail && !b.fail:
		t.Error("both processes began")
	}
	if !a.done && !b.done { // nothing but empty folders, which belong to nobody
		for _, name := range d.Names("/disk") {
			if !slices.Contains([]string{"runs", "runs/run", "runs/run/lock"}, name) {
				t.Errorf("%s is left", name)
			}
		}
	}
	if t.Failed() {
		t.Fatalf("the order was\n%s", strings.Join(order, "\n"))
	}
	return order
}

// Two processes start a run in one folder, or one of them fails in its first step: in
// every order with one switch, in many with two, and in others by chance. SPEC S9.2
func TestProcessesInOneFolder(t *testing.T) {
	for name, fail := range map[string][2]bool{"both": {false, false}, "one fails": {true, false}, "both fail": {true, true}} {
		t.Run(name, func(t *testing.T) {
			a, b := simulation{fail: fail[0]}, simulation{fail: fail[1]}
			n := len(together(t, disktest.Switches(), a, b))
			stride := 9
			if testing.Short() {
				stride = 50
			}
			for i := 1; i <= n; i++ {
				together(t, disktest.Switches(i), a, b)
				for j := i + 1 + i%stride; j <= n; j += stride {
					together(t, disktest.Switches(i, j), a, b)
				}
			}
			for seed := range uint64(50) {
				together(t, disktest.Random(rand.New(rand.NewPCG(seed, 0))), a, b)
			}
		})
	}
}

// Two processes start a run in one folder whose lock has another name too.
func TestProcessesInACopiedFolder(t *testing.T) {
	for seed := range uint64(100) {
		d := disktest.New()
		inside, done := 0, 0
		s := []simulation{{seed: 11, steps: 1, inside: &inside}, {seed: 12, steps: 1, inside: &inside}}
		if err := writeComparison(d.Process("first"), simulated, map[string]string{disk.LockName: "7"}); err != nil {
			t.Fatal(err)
		}
		if err := d.Link(simulated+"/"+disk.LockName, "/disk/copy"); err != nil {
			t.Fatal(err)
		}
		order := d.Run(t, disktest.Random(rand.New(rand.NewPCG(seed, 3))), map[*disktest.Process]func(*disktest.Process){
			d.Process("a"): func(p *disktest.Process) { s[0].run(p) },
			d.Process("b"): func(p *disktest.Process) { s[1].run(p) },
		})
		for i := range s {
			var held *disk.LockedError
			switch {
			case s[i].crowded:
				t.Error("two processes used the folder at once")
			case s[i].err == nil:
				done++
			case !errors.As(s[i].err, &held) && !isInput(s[i].err):
				t.Error(s[i].err)
			}
		}
		if text, err := d.Contents("/disk/copy"); done != 1 || err != nil || string(text) != "7" || t.Failed() {
			t.Fatalf("seed %d: %d were well, and the copy holds %q, %v\n%s", seed, done, text, err, strings.Join(order, "\n"))
		}
	}
}

// every is the distance between the operations at which something goes wrong.
func every(full int) int {
	if testing.Short() {
		return 7
	}
	return full
}

// afterwards is what a user does with a folder after a crash: resume, and if there is no
// run, start it again. One of them works, and no step is lost that was saved.
func afterwards(t *testing.T, d *disktest.Disk, before simulation) {
	t.Helper()
	p := d.Process("after")
	next := simulation{seed: 11, steps: 4, resume: true}
	if next.run(p); next.err != nil && before.saved == 0 && next.from == 0 {
		next = simulation{seed: 11, steps: 4}
		next.run(p)
	}
	switch {
	case next.err != nil:
		t.Errorf("the next process: %v", next.err)
	case next.from < before.saved:
		t.Errorf("step %d was saved, and the next process continued after step %d", before.saved, next.from)
	case len(next.warned) > 0:
		t.Errorf("the next process says %q", next.warned)
	default:
		if err := complete(p, 11, 4); err != nil {
			t.Error(err)
		}
	}
}

// A process is killed at every operation, alone or beside another one: the next one
// resumes it or starts it again. SPEC S9.1
func TestFolderOfAKilledProcess(t *testing.T) {
	for n, killed := 1, true; killed; n += every(1) {
		for _, began := range []simulation{{seed: 11, steps: 3}, {seed: 11, steps: 3, resume: true}} {
			d := disktest.New()
			if began.resume {
				first := simulation{seed: 11, steps: 1}
				if first.run(d.Process("first")); first.err != nil {
					t.Fatal(first.err)
				}
			}
			p := d.Process("run")
			p.Arm(n, disktest.Kills)
			began.run(p)
			killed = p.Dead()
			if afterwards(t, d, began); t.Failed() {
				t.Fatalf("killed at operation %d of %+v: %q", n, began, d.Names("/disk"))
			}
		}
	}
	for seed := range uint64(60) {
		d, r := disktest.New(), rand.New(rand.NewPCG(seed, 1))
		a, b := simulation{seed: 11, steps: 3}, simulation{seed: 11, steps: 3, fail: seed%2 == 0}
		p := d.Process("a")
		p.Arm(1+r.IntN(60), disktest.Kills)
		order := d.Run(t, disktest.Random(r), map[*disktest.Process]func(*disktest.Process){
			p:              func(p *disktest.Process) { a.run(p) },
			d.Process("b"): func(p *disktest.Process) { b.run(p) },
		})
		a.saved = max(a.saved, b.saved)
		if afterwards(t, d, a); t.Failed() {
			t.Fatalf("seed %d:\n%s", seed, strings.Join(order, "\n"))
		}
	}
}

// The power fails at every operation, and the disk has all, some or nothing of what was
// not synced. SPEC S9.1
func TestFolderAfterALossOfPower(t *testing.T) {
	for seed := range uint64(4) {
		for n, dead := 1+int(seed), true; dead; n += every(2) {
			for _, began := range []simulation{{seed: 11, steps: 3}, {seed: 11, steps: 3, resume: true}} {
				d := disktest.New()
				if began.resume {
					first := simulation{seed: 11, steps: 1}
					if first.run(d.Process("first")); first.err != nil {
						t.Fatal(first.err)
					}
				}
				p := d.Process("run")
				p.Arm(n, disktest.Kills)
				began.run(p)
				dead = p.Dead()
				switch {
				case seed == 0:
					d.Lose(nil)
				default:
					d.Lose(rand.New(rand.NewPCG(seed, uint64(n))))
				}
				f := folder{disk: d.Process("reader"), dir: simulated}
				if _, ok := f.readSummary(3); began.done && !ok {
					t.Error("the summary is lost")
				}
				if began.resume {
					began.saved = max(began.saved, 1)
				}
				if afterwards(t, d, began); t.Failed() {
					t.Fatalf("the power failed at operation %d of %+v, seed %d: %q", n, began, seed, d.Names("/disk"))
				}
			}
		}
	}
}

// Every operation fails once: the process ends with one sentence, or goes on, and the
// next one continues.
func TestFolderOnAFailingDisk(t *testing.T) {
	for n, done := 1, false; !done; n++ {
		d := disktest.New()
		p := d.Process("run")
		p.Arm(n, disktest.Fails)
		s := simulation{seed: 11, steps: 3}
		s.run(p)
		done = p.Ops() < n
		if s.err != nil && len(s.err.Error()) < 20 {
			t.Errorf("operation %d: %v", n, s.err)
		}
		if open := p.OpenFiles(); len(open) > 0 {
			t.Errorf("operation %d (%s) leaves %v open", n, p.Hit(), open)
		}
		if afterwards(t, d, s); t.Failed() {
			t.Fatalf("operation %d failed with %v: %q", n, s.err, d.Names("/disk"))
		}
	}
}

// Somebody removes the lock of a run by hand, and another process starts a run. The first
// one writes no line, no figures and no checkpoint, and removes nothing, however it ends.
func TestLockRemovedByHand(t *testing.T) {
	for how, end := range map[string]func(*folder) error{"undo": (*folder).undo, "close": (*folder).close} {
		d := disktest.New()
		a := d.Process("a")
		f, err := claim(a, simulated)
		if err != nil {
			t.Fatal(err)
		}
		o := DefaultOptions()
		if err := f.begin(&o, 0, nil); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{disk.LockName, configName, metricsName} {
			if err := d.Drop(simulated + "/" + name); err != nil {
				t.Fatal(err)
			}
		}
		b := d.Process("b")
		other := simulation{seed: 12, steps: 2}
		if other.run(b); other.err != nil {
			t.Fatal(other.err)
		}
		// What the first one set aside has the name of what the other one did.
		aside := []string{simulated + "/" + setAside("rank-0.trace")}
		if err := disk.WriteFile(b, aside[0], []byte("a trace")); err != nil {
			t.Fatal(err)
		}
		before := d.Names("/disk")
		var lost *disk.LostError
		if err := f.record(line{Step: 1}); !errors.As(err, &lost) {
			t.Errorf("%s: recorded a step with %v", how, err)
		}
		if err := f.writeJSON(summaryName, summaryFile{}); !errors.As(err, &lost) {
			t.Errorf("%s: wrote figures with %v", how, err)
		}
		f.aside = aside
		if err := f.saveNow(simulatedMeta(11, 3)); !errors.As(err, &lost) {
			t.Errorf("%s: saved with %v", how, err)
		}
		f.aside = aside
		if err := end(f); err != nil {
			t.Errorf("%s: %v", how, err)
		}
		if err := complete(d.Process("after"), 12, 2); err != nil || !slices.Equal(before, d.Names("/disk")) {
			t.Errorf("%s: %v; %q became %q", how, err, before, d.Names("/disk"))
		}
	}
}

// A checkpoint alone is enough to resume: config.yaml is missing, empty, full of zeros or
// cut anywhere. SPEC S9.3
func TestResumeWithoutOptions(t *testing.T) {
	for _, size := range []int{-2, -1, 0, 1, 10, len(configHead), 60, 300, 700} {
		d := disktest.New()
		p := d.Process("run")
		first := simulation{seed: 11, steps: 2}
		if first.run(p); first.err != nil {
			t.Fatal(first.err)
		}
		want := "is cut short"
		config := simulated + "/" + configName
		var err error
		switch {
		case size == -2:
			want, err = "is missing", d.Drop(config)
		case size == -1:
			want, err = "is empty", d.Spoil(config, func(b []byte) []byte { return make([]byte, len(b)) })
		default:
			if size == 0 {
				want = "is empty"
			}
			err = d.Spoil(config, func(b []byte) []byte { return b[:min(size, len(b)-1)] })
		}
		if err != nil {
			t.Fatal(err)
		}
		o, err := resumeOptions(p, simulated)
		if err != nil || o.Seed != 11 || o.Keep != 2 || !strings.Contains(o.note, want) || !strings.Contains(o.note, "the checkpoint of step 2") {
			t.Errorf("%d bytes: %+v, %v", size, o, err)
		}
		next := simulation{steps: 4, resume: true}
		if next.run(p); next.err != nil || next.from != 2 {
			t.Errorf("%d bytes: after step %d, %v", size, next.from, next.err)
		}
		if err := complete(p, 11, 4); err != nil {
			t.Error(err)
		}
	}
	// Neither a run nor a checkpoint: the sentence leads to what works.
	d := disktest.New()
	p := d.Process("run")
	if _, err := resumeOptions(p, simulated); err == nil || !strings.Contains(err.Error(), "start one without resuming") {
		t.Errorf("no folder: %v", err)
	}
	f, err := claim(p, simulated)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.close(), d.Spoil(simulated+"/"+configName, func([]byte) []byte { return nil })); err != nil {
		t.Fatal(err)
	}
	if _, err := resumeOptions(p, simulated); err == nil || !strings.Contains(err.Error(), "start the run again without resuming") {
		t.Errorf("empty options: %v", err)
	}
	again := simulation{seed: 11, steps: 2}
	if again.run(p); again.err != nil {
		t.Errorf("started again: %v", again.err)
	}
}

// A run does not replace a comparison.
func TestRunInAComparison(t *testing.T) {
	d := disktest.New()
	p := d.Process("run")
	files := comparison(`{"runs":["none","budget"]}`, 1)
	if err := writeComparison(p, simulated, files); err != nil {
		t.Fatal(err)
	}
	before := d.Names("/disk")
	s := simulation{seed: 11, steps: 2}
	if s.run(p); s.err == nil || !strings.Contains(s.err.Error(), "holds a comparison") || !slices.Equal(before, d.Names("/disk")) {
		t.Errorf("%v; %q became %q", s.err, before, d.Names("/disk"))
	}
}

// A checkpoint of a version that kept no options can be resumed with those that are given.
func TestResumeOldCheckpoint(t *testing.T) {
	d := disktest.New()
	p := d.Process("run")
	s, err := checkpoint.Open(checkpoint.Options{Dir: simulated, FS: p})
	if err == nil {
		err = errors.Join(s.Save(simulatedMeta(11, 2), []checkpoint.Rank{{}}), s.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	o, err := resumeOptions(p, simulated)
	if err != nil || o.Seed != DefaultOptions().Seed || !strings.Contains(o.note, "those that were not given are the defaults") {
		t.Errorf("%+v, %v", o, err)
	}
}

// Options that another process changed between reading and locking are not written over.
func TestOptionsChangeMeanwhile(t *testing.T) {
	d := disktest.New()
	p := d.Process("run")
	for _, steps := range []int{1, 2} {
		s := simulation{seed: 11, steps: steps, resume: steps > 1}
		if s.run(p); s.err != nil {
			t.Fatal(s.err)
		}
	}
	o, err := resumeOptions(p, simulated)
	if err != nil {
		t.Fatal(err)
	}
	other := simulation{steps: 3, resume: true}
	if other.run(d.Process("other")); other.err != nil {
		t.Fatal(other.err)
	}
	f, err := claim(p, simulated)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.begin(&o, 3, nil); err == nil || !strings.Contains(err.Error(), "meanwhile; try again") {
		t.Errorf("begun with %v", err)
	}
	if err := errors.Join(f.undo(), complete(p, 11, 3)); err != nil {
		t.Error(err)
	}
}

// saveNow saves one rank without tensors, as a run does.
func (f *folder) saveNow(meta checkpoint.Meta) error {
	f.keep()
	s := &checkpoint.Saver{Options: f.store.Options, Store: f.store, Ranks: 1, Before: f.syncMetrics}
	return errors.Join(s.Save(meta, []checkpoint.Rank{{}}), s.Wait())
}
