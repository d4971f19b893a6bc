package run

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"

	"github.com/stowage-dev/stowage/internal/leak"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/observe/trace"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/internal/disk"
	"github.com/stowage-dev/stowage/train/internal/disk/disktest"
)

// steps emits so many steps of a hundred storages, each with an evaluation behind it.
func (t *tracing) steps(n int) {
	for step := 1; step <= n; step++ {
		t.beginStep(step, step == n)
		for _, r := range t.ranks {
			r.Emit(trace.Event{Kind: trace.Begin, Step: 77})
			for i := range 100 {
				r.Emit(trace.Event{Kind: trace.Alloc, Storage: i + 1, Time: int64(step * i * i), Bytes: int64(i), First: uint64(100*step + i)})
				r.Emit(trace.Event{Kind: trace.Launch, Stream: computeStream, Time: int64(step * i * i), Took: int64(i), First: uint64(100*step + i), Last: uint64(100*step + i + 1)})
			}
			r.Emit(trace.Event{Kind: trace.Alloc, Name: "parameters", Bytes: 1})
			r.Emit(trace.Event{Kind: trace.End, Step: 77})
		}
		t.endStep()
		t.ranks[0].Emit(trace.Event{Kind: trace.Begin}) // of an evaluation
	}
}

// A long run is traced in full at first, and then now and then and at its end: every
// step is there, and all memory that devices gave out. What was emitted before there was
// a folder is kept.
func TestLongTrace(t *testing.T) {
	cfg := smallJob(t, nil).config
	j := &Job{}
	tr := j.trace(&cfg)
	tr.limit = 200 << 10
	const steps = 330
	tr.steps(10)
	dir := t.TempDir()
	made, _, err := tr.attach(disk.OS{}, dir, 0, false)
	if err != nil || len(made) != 5 {
		t.Fatalf("%q, %v", made, err)
	}
	tr.steps(steps)
	if err := tr.close(); err != nil {
		t.Fatal(err)
	}
	for _, f := range report.TraceFiles(dir) {
		x, err := report.ReadTrace(f.Path)
		if err != nil || x.Cut != nil || x.Dropped > 0 {
			t.Fatalf("%v, %v, %d dropped", err, x.Cut, x.Dropped)
		}
		begun, full, owned, spans := map[int]int{}, map[int]int{}, 0, 0
		for _, e := range x.Events {
			switch {
			case e.Kind == trace.Begin:
				begun[e.Step]++
			case e.Kind.Span():
				spans++
			case e.Storage > 0:
				full[e.Step]++
			case e.Kind == trace.Alloc:
				owned++
			}
		}
		for step, n := range begun { // evaluations are no steps, and the first ten steps were emitted twice
			if want := map[bool]int{false: 1, true: 2}[step <= 10]; n != want {
				t.Errorf("step %d began %d times, want %d", step, n, want)
			}
		}
		if len(begun) != steps || owned != steps+10 {
			t.Errorf("%d steps, %d times memory was taken", len(begun), owned)
		}
		thin := 1 // the first step that is not there in full
		for full[thin] > 0 {
			thin++
		}
		if full[1] != 200 || tr.thinned != thin || full[300] != 100 || full[steps] != 100 || len(full) > 150 || spans != 100*(len(full)+10) || x.Header.Rank != f.Rank {
			t.Errorf("%d steps are there in full, %d spans; thin from %d", len(full), spans, tr.thinned)
		}
	}
	if want := fmt.Sprintf("from step %d on one step in 50", tr.thinned); tr.gaps() != want {
		t.Errorf("it says %q", tr.gaps())
	}
}

// A resumed run adds traces to those of the parts before it.
func TestTracesOfAResumedRun(t *testing.T) {
	dir := t.TempDir()
	cfg := smallJob(t, nil).config
	for part := range 3 {
		tr := (&Job{}).trace(&cfg)
		made, aside, err := tr.attach(disk.OS{}, dir, part, true)
		if err != nil || len(aside) != 0 {
			t.Fatalf("part %d made %q and set %q aside, %v", part, made, aside, err)
		}
		tr.steps(1)
		if err := tr.close(); err != nil {
			t.Fatal(err)
		}
		if n := len(report.TraceFiles(dir)); n != (part+1)*cfg.Layout.Ranks() {
			t.Errorf("after part %d there are %d traces of %d ranks", part, n, cfg.Layout.Ranks())
		}
	}
	if part := nextPart(disk.OS{}, dir); part != 3 {
		t.Errorf("the next part is %d", part)
	}
}

// Without a folder nothing is written, and a run that is refused leaves nothing.
func TestTraceWithoutFolder(t *testing.T) {
	var none *tracing
	none.beginStep(1, false)
	none.endStep()
	if none.gaps() != "" || none.close() != nil {
		t.Error("no trace does something")
	}
	cfg := smallJob(t, nil).config
	tr := (&Job{}).trace(&cfg)
	tr.steps(1)
	if err := tr.close(); err != nil {
		t.Error(err)
	}
	// Parameters are 394 KiB: refused before there is a folder, and in the first step.
	for _, kib := range []memory.Bytes{100, 450} {
		o := DefaultOptions()
		o.Model, o.Micro, o.Seq, o.Steps, o.Policy, o.Budget = small(), 1, 32, 1, "budget", (kib * memory.KiB).Exact()
		j, err := NewJob(o, machine(), nil)
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(t.TempDir(), "a", "b")
		_, err = j.Run(context.Background(), dir, false, NewProgress(io.Discard, nil, nil))
		if _, there := os.Stat(filepath.Dir(dir)); there == nil || !isInput(err) {
			t.Errorf("%d KiB: something is left after %v", int64(kib), err)
		}
	}
}

// A run was killed before its first checkpoint. A new run in its folder that is refused
// leaves its traces, and one that trains replaces them. If the run was killed in its first
// step, the traces are those of the run before, which it had set aside.
func TestTracesOfADeadRun(t *testing.T) {
	for _, x := range []struct {
		stepped bool
		budget  memory.Bytes
	}{{true, 450 * memory.KiB}, {false, 450 * memory.KiB}, {true, memory.GiB}, {false, memory.GiB}} {
		o := DefaultOptions()
		o.Model, o.Micro, o.Seq, o.Steps, o.Policy, o.Budget = small(), 1, 32, 2, "budget", x.budget.Exact()
		j, err := NewJob(o, machine(), nil)
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		config, err := o.encode()
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]string{report.TraceName(0, 0): "zero", report.TraceName(0, 2): "two", report.TraceName(7, 0): "seven"}
		files := map[string]string{configName: string(config), metricsName: ""}
		if x.stepped {
			files[metricsName] = `{"step":1}` + "\n"
			files[filepath.Join(report.TraceFolder, setAside("rank-1.trace"))] = "before"
			maps.Copy(files, want)
		} else {
			files[report.TraceName(0, 0)], files[report.TraceName(3, 0)] = "killed", "killed"
			for name, text := range want {
				files[filepath.Join(report.TraceFolder, setAside(filepath.Base(name)))] = text
			}
		}
		for name, text := range files {
			if err := cmp.Or(os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755), os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		_, err = j.Run(context.Background(), dir, false, NewProgress(io.Discard, nil, nil))
		list, e := os.ReadDir(filepath.Join(dir, report.TraceFolder))
		if e != nil {
			t.Fatal(e)
		}
		if x.budget == memory.GiB {
			trace, cannot := report.ReadTrace(filepath.Join(dir, report.TraceName(0, 0)))
			if err := cmp.Or(err, cannot); err != nil || len(list) != j.config.Layout.Ranks() || trace.Cut != nil || len(trace.Events) == 0 {
				t.Errorf("a run that trains has the traces %v, %v", list, err)
			}
			continue
		}
		if !isInput(err) || len(list) != len(want) {
			t.Fatalf("the run ended with %v and left %v", err, list)
		}
		for name, text := range want {
			if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != text {
				t.Errorf("%s holds %q, %v, after a run that was refused", name, got, err)
			}
		}
	}
}

// noRoom is a disk that has no room for the traces of ranks.
type noRoom struct{ disk.FS }

func (d noRoom) Create(name string) (disk.Output, error) {
	f, err := d.FS.Create(name)
	if err == nil && strings.HasPrefix(filepath.Base(name), "rank-") {
		f = full{f}
	}
	return f, err
}

type full struct{ disk.Output }

func (full) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

// A run whose traces find no room on the disk trains, saves and says so.
func TestTracesOnAFullDisk(t *testing.T) {
	j, err := NewJob(tiny(), machine(), nil)
	if err != nil {
		t.Fatal(err)
	}
	d := disktest.New()
	j.fs = noRoom{d.Process("run")}
	var said strings.Builder
	s, err := j.Run(context.Background(), "/disk/run", false, NewProgress(&said, nil, nil))
	if err != nil || !s.Finished || !strings.Contains(said.String(), "warning: ") || !strings.Contains(said.String(), "no space left") {
		t.Errorf("%+v, %v; it says %q", s, err, said.String())
	}
	if strings.Contains(said.String(), "continues without a trace") == strings.Contains(said.String(), "the trace is incomplete") {
		t.Errorf("it does not say once that a trace is missing: %q", said.String())
	}
}

// unsynced is a disk that has no more files open for the sync of a folder of traces, and
// stuck one whose earlier traces cannot be moved.
type (
	unsynced struct{ disk.FS }
	stuck    struct{ disk.FS }
)

func (unsynced) SyncDir(name string) error {
	return &fs.PathError{Op: "open", Path: name, Err: syscall.EMFILE}
}

func (stuck) Rename(from, to string) error {
	return &os.LinkError{Op: "rename", Old: from, New: to, Err: syscall.EACCES}
}

// What goes wrong with a folder of traces is said in one sentence with its cause alone.
func TestTracesThatCannotBeAttached(t *testing.T) {
	for want, wrap := range map[string]func(disk.FS) disk.FS{
		"cannot write /d/trace: too many open files (ulimit -n allows no more)": func(d disk.FS) disk.FS { return unsynced{d} },
		"cannot replace /d/trace/rank-0.trace: permission denied":               func(d disk.FS) disk.FS { return stuck{d} },
	} {
		p := disktest.New().Process("run")
		if _, err := disk.MakeAll(p, "/d/trace"); err != nil {
			t.Fatal(err)
		}
		f, err := p.Create("/d/trace/rank-0.trace")
		if err == nil {
			err = f.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := new(tracing).attach(wrap(p), "/d", 0, true); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// The power fails at any moment: what is left of a trace can be read up to where it ends,
// and the run is not lost. The traces of a run that ended are whole.
func TestTracesAfterALossOfPower(t *testing.T) {
	dead, left, stride := true, 0, 9
	if testing.Short() {
		stride = 31
	}
	for n := 1; dead; n += stride {
		d := disktest.New()
		p := d.Process("run")
		p.Arm(n, disktest.Kills)
		_, _ = attemptTraced(p, tiny(), false, true) // it is killed
		dead = p.Dead()
		d.Lose(rand.New(rand.NewPCG(4, uint64(n))))
		read := func(part int) (*trace.Trace, error) {
			text, err := d.Contents("/disk/run/" + report.TraceName(0, part))
			if err != nil {
				return nil, err
			}
			return trace.Read(bytes.NewReader(text))
		}
		x, err := read(0)
		if err == nil {
			left++
		}
		if !dead && (err != nil || x.Cut != nil || len(x.Events) == 0) {
			t.Errorf("a run that ended has the trace %v, %v", x, err)
		}
		next := d.Process("next")
		o, err := resumeOptions(next, "/disk/run")
		resume := err == nil
		if !resume {
			o = tiny()
		}
		if s, err := attemptTraced(next, o, resume, true); err != nil || s.Steps != 3 {
			t.Errorf("the power failed at operation %d: %+v, %v", n, s, err)
		}
	}
	if left == 0 {
		t.Errorf("%d traces were left: the test sees too little", left)
	}
}

// Two comparisons do not write into one folder, and a policy that cannot be written does
// not end a comparison.
func TestCollection(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "compare")
	var said strings.Builder
	j, p := smallJob(t, nil), NewProgress(&said, nil, nil)
	c, err := j.collect(dir, p)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := j.collect(dir, p); err == nil || !strings.Contains(err.Error(), "in use by process") {
		t.Errorf("a second one: %v", err)
	}
	if env := report.ReadEnvironment(c.work); len(env.Runs) != len(train.Policies) || env.Machine["model"] != "small" {
		t.Errorf("the environment is %+v", env)
	}
	if err := os.WriteFile(filepath.Join(c.work, "none"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	x := &contestant{name: "none", files: c}
	c.open(x)
	c.record(x)
	c.close(x)
	func() {
		defer debug.SetGCPercent(debug.SetGCPercent(-1)) // it closes files
		before := leak.Files()
		cfg := j.config
		y := &contestant{name: "stash", files: c, traces: j.trace(&cfg)}
		if c.open(y); y.metrics == nil || len(leak.Since(before)) < 2 {
			t.Errorf("a policy has %v open", leak.Since(before))
		}
		if c.close(y); len(leak.Since(before)) > 0 {
			t.Errorf("a policy leaves %v open", leak.Since(before))
		}
	}()
	if n := strings.Count(said.String(), "warning"); n != 1 || !strings.Contains(said.String(), "the comparison continues") {
		t.Errorf("it says %q", said.String())
	}
	if file := c.finish(false, ""); file != "" {
		t.Errorf("a report of nothing: %s", file)
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("a comparison that was not finished left a folder")
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "none"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err = j.collect(dir, p); err == nil || !strings.Contains(err.Error(), "cannot replace") {
		t.Errorf("over a file: %v", err)
	}
}

// fullFile is a file beyond the limit on the size of files.
type fullFile struct{}

var errLarge = &os.PathError{Op: "write", Path: "/x/trace/rank-0.trace", Err: syscall.EFBIG}

func (fullFile) Write([]byte) (int, error) { return 0, errLarge }
func (fullFile) Sync() error               { return errLarge }
func (fullFile) Close() error              { return nil }

// A trace that cannot be written is named as the folder was given, with the limit of the
// shell that is the reason.
func TestTraceThatCannotBeWritten(t *testing.T) {
	const want = "cannot write x/trace/rank-0.trace: file too large (ulimit -f allows no more)"
	l := &lateFile{path: "x/trace/rank-0.trace", f: fullFile{}}
	_, err := l.Write([]byte("event"))
	for _, err := range []error{err, l.close()} {
		if err == nil || err.Error() != want {
			t.Errorf("the error is %v", err)
		}
	}
}
