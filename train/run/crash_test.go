// This file owns the tests of whole runs and comparisons on a simulated disk.

package run

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train/internal/disk"
	"github.com/stowage-dev/stowage/train/internal/disk/disktest"
)

// attempt runs three steps of a small model on one rank, as the command does. It resumes
// the run of a folder if there is one.
func attempt(p *disktest.Process) (s Summary, err error) {
	o, err := resumeOptions(p, "/disk/run")
	resume := err == nil
	if !resume {
		o = tiny()
	}
	return attemptWith(p, o, resume)
}

// tiny returns the options of a run of three short steps on one rank.
func tiny() Options {
	o := DefaultOptions()
	o.Model, o.Policy, o.Micro, o.Seq, o.Microbatches, o.PP, o.EP, o.DP = small(), "none", 1, 8, 1, 1, 1, 1
	o.Steps, o.SaveEvery = 3, 1
	return o
}

func jobOf(t *testing.T, o Options) *Job {
	t.Helper()
	j, err := NewJob(o, machine(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func attemptWith(p *disktest.Process, o Options, resume bool) (s Summary, err error) {
	return attemptTraced(p, o, resume, false)
}

func attemptTraced(p *disktest.Process, o Options, resume, traced bool) (s Summary, err error) {
	j, err := NewJob(o, machine(), slog.New(slog.DiscardHandler))
	if err != nil {
		return s, err
	}
	j.fs, j.NoTrace = p, !traced
	s, err = j.Run(context.Background(), "/disk/run", resume, NewProgress(io.Discard, nil, nil))
	if open := p.OpenFiles(); len(open) > 0 {
		panic(fmt.Sprintf("the run ended with %v and leaves %v open", err, open))
	}
	return s, err
}

// A run is killed, or the power fails, at any operation: the next one comes to the same
// parameters, with a line for every step. SPEC S9.1
func TestRunOnASimulatedDisk(t *testing.T) {
	d := disktest.New()
	p := d.Process("run")
	want, err := attempt(p)
	if err != nil {
		t.Fatal(err)
	}
	ops := p.Ops()
	stride := 13
	if testing.Short() {
		stride = 61
	}
	saw := map[bool]int{}
	for n := 1; n <= ops; n += stride {
		d := disktest.New()
		p := d.Process("run")
		p.Arm(n, disktest.Kills)
		_, err := attempt(p)
		if !p.Dead() {
			t.Fatalf("operation %d of %d did not happen", n, ops)
		}
		if err == nil && n < ops-5 { // the last ones close files
			t.Errorf("killed at operation %d, and the run is well", n)
		}
		if n%2 == 0 {
			d.Lose(rand.New(rand.NewPCG(1, uint64(n))))
		}
		next := d.Process("next")
		_, none := resumeOptions(next, "/disk/run")
		saw[none == nil]++
		got, err := attempt(next)
		if err != nil || got.Digest != want.Digest || !got.Finished || got.Steps != 3 || got.Device != want.Device {
			t.Errorf("killed at operation %d: %+v, %v; want %+v", n, got, err, want)
		}
		metrics, err := d.Contents("/disk/run/" + metricsName)
		if lines := bytes.Count(metrics, []byte("\n")); err != nil || lines != 3 || strings.Count(string(metrics), `"loss"`) != 3 {
			t.Errorf("killed at operation %d: the metrics are %q, %v", n, metrics, err)
		}
	}
	if saw[true] == 0 || saw[false] == 0 {
		t.Errorf("%d runs were resumed and %d began again: the test sees too little", saw[true], saw[false])
	}
}

// A run was killed before its first checkpoint. A new run in its folder has peaks of its
// own; one that resumes it keeps those before.
func TestPeaksOfADeadRun(t *testing.T) {
	want, err := attempt(disktest.New().Process("alone"))
	if err != nil {
		t.Fatal(err)
	}
	for _, resume := range []bool{false, true} {
		d := disktest.New()
		p := d.Process("run")
		o := tiny()
		f, err := claim(p, "/disk/run")
		if err == nil {
			err = f.begin(&o, 0, nil)
		}
		if err == nil {
			err = errors.Join(f.record(line{Step: 1, Ranks: []peak{{1 << 50, 1 << 50}}}), f.close())
		}
		if err != nil {
			t.Fatal(err)
		}
		device := want.Device
		if resume {
			device = 1 << 50
			if o, err = resumeOptions(p, "/disk/run"); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := attemptWith(p, o, resume); err != nil || got.Device != device || got.Digest != want.Digest {
			t.Errorf("resume %v: a peak of %d, %v; want %d", resume, got.Device, err, device)
		}
	}
}

const compared = "/disk/runs/compare"

// writeComparison writes the files of a comparison to a folder: those that the table has
// for each name.
func writeComparison(d disk.FS, dir string, files map[string]string) error {
	for name, text := range files {
		if _, err := disk.MakeAll(d, path.Dir(path.Join(dir, name))); err != nil {
			return err
		}
		if err := disk.WriteFile(d, path.Join(dir, name), []byte(text)); err != nil {
			return err
		}
	}
	return nil
}

// writeLoosely writes files as writeComparison does, and syncs nothing.
func writeLoosely(d disk.FS, dir string, files map[string]string) error {
	for name, text := range files {
		for at := len(dir); at < len(path.Join(dir, name)); at++ {
			if above := path.Join(dir, name)[:at]; path.Join(dir, name)[at] == '/' {
				if err := d.Mkdir(above); err != nil && !errors.Is(err, fs.ErrExist) {
					return err
				}
			}
		}
		f, err := d.Create(path.Join(dir, name))
		if err != nil {
			return err
		}
		_, err = f.Write([]byte(text))
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// comparison returns the files of a comparison with so many ranks.
func comparison(text string, ranks int) map[string]string {
	files := map[string]string{report.EnvironmentFile: text}
	for _, policy := range []string{"none", "budget"} {
		files[policy+"/"+metricsName], files[policy+"/"+summaryName] = text, text
		for i := range ranks {
			files[policy+"/"+report.TraceName(i, 0)] = text
		}
	}
	return files
}

// compareAgain is a process that compares and puts the result in its place, or not if it
// is interrupted.
func compareAgain(d disk.FS, files map[string]string, done bool) error {
	c := &collection{disk: d, dir: compared, p: NewProgress(io.Discard, nil, nil), work: compared + "/" + growing + "/" + inside}
	var err error
	if c.lock, err = disk.Claim(d, compared); err != nil {
		return err
	}
	if err = c.prepare(); err == nil {
		err = writeLoosely(d, c.work, files)
	}
	if err == nil && done {
		err = c.swap()
	}
	c.finish(false, "")
	return err
}

// stored returns the files of the comparison, without its lock.
func stored(d *disktest.Disk) map[string]string {
	files := map[string]string{}
	for _, name := range d.Names(compared) {
		if text, err := d.Contents(compared + "/" + name); err == nil && len(text) > 0 && name != disk.LockName {
			files[name] = string(text)
		}
	}
	return files
}

// shown returns the files of the comparison that are not hidden.
func shown(d *disktest.Disk) map[string]string {
	files := stored(d)
	maps.DeleteFunc(files, func(name, _ string) bool { return strings.HasPrefix(name, ".") })
	return files
}

// A comparison is killed, or the power fails, at any operation while it takes the place of another one: the folder then holds the whole
// of the old one, or the next process makes it hold the whole of the new one. What the user put there stays. SPEC S9.5
func TestComparisonKilled(t *testing.T) {
	losses := map[string]func(d *disktest.Disk, n int){
		"killed":  func(*disktest.Disk, int) {},
		"nothing": func(d *disktest.Disk, _ int) { d.Lose(nil) },
	}
	seeds := uint64(3)
	if testing.Short() {
		seeds = 1
	}
	for seed := range seeds {
		losses[fmt.Sprint("some", seed)] = func(d *disktest.Disk, n int) { d.Lose(rand.New(rand.NewPCG(seed, uint64(n)))) }
	}
	whole := comparison("old", 3)
	whole[report.PageFile], whole["none/"+report.PerfettoFile], whole[ownNotes] = "old", "old", "mine"
	for name, lose := range losses {
		t.Run(name, func(t *testing.T) { killComparisons(t, lose, whole) })
		if strings.HasPrefix(name, "some") { // the names of new folders may be lost while files move into them
			t.Run(name+", new folders", func(t *testing.T) { killComparisons(t, lose, map[string]string{ownNotes: "mine"}) })
		}
	}
}

const ownNotes = "none/notes.txt" // of the user

func killComparisons(t *testing.T, lose func(d *disktest.Disk, n int), before map[string]string) {
	fresh := comparison("new", 2)
	after := maps.Clone(fresh)
	after[ownNotes] = "mine"
	saw := map[string]int{}
	for n, killed := 1, true; killed; n++ {
		d := disktest.New()
		if err := writeComparison(d.Process("first"), compared, before); err != nil {
			t.Fatal(err)
		}
		p := d.Process("second")
		p.Arm(n, disktest.Kills)
		err := compareAgain(p, fresh, true)
		if killed = p.Dead(); !killed && err != nil {
			t.Fatal(err)
		}
		lose(d, n)
		visible := shown(d)
		// The next comparison is interrupted: it finishes what was left to do and no more.
		if err := compareAgain(d.Process("third"), comparison("third", 1), false); err != nil {
			t.Fatalf("killed at operation %d: %v", n, err)
		}
		state := "mixed"
		switch got := stored(d); {
		case maps.Equal(got, before) && maps.Equal(visible, before):
			state = "old"
		case maps.Equal(got, after):
			state = "new"
		default:
			t.Errorf("killed at operation %d: %v", n, got)
		}
		lose(d, n+1)
		if got := shown(d); state == "old" && !maps.Equal(got, before) || state == "new" && !maps.Equal(got, after) {
			t.Errorf("killed at operation %d: of the %s one there is later %v", n, state, got)
		}
		if !killed && state != "new" {
			t.Errorf("a comparison that was not killed left the %s one", state)
		}
		saw[state]++
		// Nothing of a comparison that was not finished is in the next one.
		if err := compareAgain(d.Process("fourth"), fresh, true); err != nil || !maps.Equal(stored(d), after) {
			t.Errorf("killed at operation %d, then compared again: %v, %v", n, stored(d), err)
		}
	}
	if saw["old"] < 20 || saw["new"] < 10 {
		t.Errorf("states are %v: the test sees too little", saw)
	}
}

// A comparison that could not write a file, or whose lock somebody removed, leaves the one
// before.
func TestComparisonNotPutInPlace(t *testing.T) {
	before := comparison("old", 1)
	for _, what := range []string{"warned", "lost"} {
		d := disktest.New()
		p := d.Process("run")
		if err := writeComparison(p, compared, before); err != nil {
			t.Fatal(err)
		}
		var said strings.Builder
		c := &collection{disk: p, dir: compared, p: NewProgress(&said, nil, nil), work: compared + "/" + growing + "/" + inside}
		var err error
		if c.lock, err = disk.Claim(p, compared); err == nil {
			err = c.prepare()
		}
		if err == nil {
			err = writeComparison(p, c.work, comparison("new", 1))
		}
		if err != nil {
			t.Fatal(err)
		}
		if what == "lost" {
			err = d.Drop(compared + "/" + disk.LockName)
		} else {
			c.warn(errStep)
		}
		file := c.finish(true, "")
		got := shown(d)
		if err != nil || file != "" || !maps.Equal(got, before) || strings.Count(said.String(), "not written") != 1 {
			t.Errorf("%s: %v, %v, %q; it says %q", what, got, err, file, said.String())
		}
	}
}

// Any operation of the disk fails once: the comparison says so, or is in its place, and the
// next one finds the old files or the new ones and nothing else.
func TestComparisonOnAFailingDisk(t *testing.T) {
	before, after := comparison("old", 3), comparison("new", 2)
	failed, replaced := 0, 0
	for n, done := 1, false; !done; n++ {
		d := disktest.New()
		if err := writeComparison(d.Process("first"), compared, before); err != nil {
			t.Fatal(err)
		}
		p := d.Process("second")
		p.Arm(n, disktest.Fails)
		err := compareAgain(p, after, true)
		done = p.Ops() < n
		if open := p.OpenFiles(); len(open) > 0 {
			t.Errorf("operation %d (%s) leaves %v open", n, p.Hit(), open)
		}
		if err := compareAgain(d.Process("third"), comparison("third", 1), false); err != nil {
			t.Fatalf("operation %d failed, and then: %v", n, err)
		}
		switch got := stored(d); {
		case maps.Equal(got, after):
			replaced++
		case err == nil || !maps.Equal(got, before):
			t.Errorf("operation %d failed with %v: %v", n, err, got)
		default:
			failed++
		}
	}
	if failed == 0 || replaced == 0 {
		t.Errorf("%d comparisons failed and %d replaced the one before", failed, replaced)
	}
}

// A process that may not have the folder of a comparison leaves the other one's files.
func TestComparisonsInOneFolder(t *testing.T) {
	for seed := range uint64(40) {
		d := disktest.New()
		var errs [2]error
		order := d.Run(t, disktest.Random(rand.New(rand.NewPCG(seed, 2))), map[*disktest.Process]func(*disktest.Process){
			d.Process("a"): func(p *disktest.Process) { errs[0] = compareAgain(p, comparison("a", 2), true) },
			d.Process("b"): func(p *disktest.Process) { errs[1] = compareAgain(p, comparison("b", 3), true) },
		})
		got := stored(d)
		a, b := maps.Equal(got, comparison("a", 2)), maps.Equal(got, comparison("b", 3))
		if errs[0] != nil && errs[1] != nil || !(a && errs[0] == nil) && !(b && errs[1] == nil) {
			t.Fatalf("seed %d: %v, and the files are %v\n%s", seed, errs, got, strings.Join(order, "\n"))
		}
		for _, err := range errs {
			if err != nil && !strings.Contains(fmt.Sprint(err), "in use") {
				t.Errorf("seed %d: %v", seed, err)
			}
		}
	}
}

// What a killed comparison had written so far is not part of the next one.
func TestComparisonLeftovers(t *testing.T) {
	d := disktest.New()
	p := d.Process("run")
	if err := writeComparison(p, compared+"/"+growing+"/"+inside, map[string]string{"none/" + report.TraceName(7, 0): "half"}); err != nil {
		t.Fatal(err)
	}
	if err := compareAgain(p, comparison("new", 2), true); err != nil || !maps.Equal(stored(d), comparison("new", 2)) {
		t.Errorf("%v, %v", stored(d), err)
	}
}

// A comparison is killed while it takes the place of another one, and the user then
// renames the folder, or an earlier version was killed, which named the inner folder after
// the outer one: the next process still finds the new files. It removes nothing if it
// finds none.
func TestComparisonUnderAnotherName(t *testing.T) {
	before, after := comparison("old", 3), comparison("new", 2)
	for _, hidden := range []string{ready, moving} {
		for _, inner := range []string{inside, "other", "none", "."} {
			d := disktest.New()
			p := d.Process("killed")
			err := writeComparison(p, path.Join(compared, hidden, inner), after)
			if hidden == ready && err == nil {
				err = writeComparison(p, compared, before)
			}
			if err == nil {
				err = compareAgain(d.Process("next"), comparison("third", 1), false)
			}
			if got := stored(d); err != nil || !maps.Equal(got, after) {
				t.Errorf("%s/%s: %v, %v", hidden, inner, got, err)
			}
		}
	}
	for hidden, file := range map[string]string{"empty": "", "foreign": "/notes", "deep": "/a/notes", "two": "/compare/environment.json"} {
		d := disktest.New()
		p := d.Process("killed")
		_, err := disk.MakeAll(p, path.Join(compared, ready))
		if err == nil && file != "" {
			err = writeComparison(p, path.Join(compared, ready), map[string]string{file: "mine"})
		}
		if err == nil && hidden == "two" {
			err = writeComparison(p, path.Join(compared, ready), map[string]string{"mine/x": "mine"})
		}
		if err == nil {
			err = writeComparison(p, compared, before)
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := compareAgain(d.Process("next"), comparison("third", 1), true); err == nil {
			t.Errorf("%s: no error", hidden)
		}
		got := shown(d)
		if !maps.Equal(got, before) {
			t.Errorf("%s: %v", hidden, got)
		}
	}
}

// A comparison changes nothing in a folder that it refuses: that of a run, also if only a
// checkpoint is left of it, or one with a file where a policy's folder should be.
func TestComparisonRefused(t *testing.T) {
	for what, file := range map[string]string{"run": configName, "checkpoint": "checkpoints/step-00000002/manifest", "file": "none"} {
		d := disktest.New()
		p := d.Process("run")
		if err := writeComparison(p, compared, map[string]string{file: "mine", growing + "/mine": "mine", disk.LockName: "7"}); err != nil {
			t.Fatal(err)
		}
		before := d.Names("/disk")
		_, err := (&Job{fs: p}).collect(compared, NewProgress(io.Discard, nil, nil))
		if err == nil || !strings.Contains(err.Error(), map[bool]string{true: "cannot replace", false: "holds a run"}[what == "file"]) {
			t.Errorf("%s: %v", what, err)
		}
		if after := d.Names("/disk"); !slices.Equal(before, after) {
			t.Errorf("%s: %q became %q", what, before, after)
		}
	}
}

// A report knows the hidden folders of a comparison that takes the place of another, and says so.
func TestReportOfTwoComparisons(t *testing.T) {
	for hidden, two := range map[string]bool{growing: false, ready: true, moving: true} {
		dir := t.TempDir()
		if err := writeComparison(disk.OS{}, dir, map[string]string{"none/" + metricsName: `{"step":1}` + "\n", hidden + "/x": ""}); err != nil {
			t.Fatal(err)
		}
		r, err := report.Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		if said := strings.Contains(strings.Join(r.Runs[0].Missing, "\n"), "parts of two comparisons"); said != two {
			t.Errorf("with a folder %s the report says %q", hidden, r.Runs[0].Missing)
		}
	}
}
