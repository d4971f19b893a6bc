package trainrun

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/report"
	"github.com/stowage-dev/stowage/trace"
	"github.com/stowage-dev/stowage/train"
)

// steps emits so many steps of a hundred storages, each with an evaluation behind it.
func (t *tracing) steps(n int) {
	for step := 1; step <= n; step++ {
		t.begin(step, step == n)
		for _, r := range t.ranks {
			r.Emit(trace.Event{What: trace.Begin, Step: 77})
			for i := range 100 {
				r.Emit(trace.Event{What: trace.Alloc, Storage: i + 1, Time: int64(step * i * i), Bytes: int64(i), First: uint64(100*step + i)})
				r.Emit(trace.Event{What: trace.Launch, Stream: computeStream, Time: int64(step * i * i), Took: int64(i), First: uint64(100*step + i), Last: uint64(100*step + i + 1)})
			}
			r.Emit(trace.Event{What: trace.Alloc, Name: "parameters", Bytes: 1})
			r.Emit(trace.Event{What: trace.End, Step: 77})
		}
		t.over()
		t.ranks[0].Emit(trace.Event{What: trace.Begin}) // of an evaluation
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
	made, err := tr.attach(dir, 0)
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
			case e.What == trace.Begin:
				begun[e.Step]++
			case e.What.Span():
				spans++
			case e.Storage > 0:
				full[e.Step]++
			case e.What == trace.Alloc:
				owned++
			}
		}
		if len(begun) != steps || owned != steps+10 {
			t.Errorf("%d steps, %d times memory was taken", len(begun), owned)
		}
		if full[1] != 200 || full[tr.thinned] != 0 || full[300] != 100 || full[steps] != 100 || len(full) > 150 || spans != 100*(len(full)+10) || x.Header.Rank != f.Rank {
			t.Errorf("%d steps are there in full, %d spans; thin from %d", len(full), spans, tr.thinned)
		}
	}
	if want := fmt.Sprintf("from step %d on one step in 50", tr.thinned); tr.note() != want {
		t.Errorf("it says %q", tr.note())
	}
}

// Without a folder nothing is written, and a run that is refused leaves nothing.
func TestTraceWithoutFolder(t *testing.T) {
	var none *tracing
	none.begin(1, false)
	none.over()
	if none.note() != "" || none.close() != nil {
		t.Error("no trace does something")
	}
	cfg := smallJob(t, nil).config
	tr := (&Job{}).trace(&cfg)
	tr.steps(1)
	if err := tr.close(); err != nil {
		t.Error(err)
	}
	// Parameters are 394 KiB: refused before there is a folder, and in the first step.
	for _, kib := range []device.Bytes{100, 450} {
		o := Defaults()
		o.Model, o.Micro, o.Seq, o.Steps, o.Policy, o.Budget = small(), 1, 32, 1, "budget", "little"
		m := machine()
		m.ParseSize = func(string) (device.Bytes, error) { return kib * device.KiB, nil }
		j, err := NewJob(o, m, nil)
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(t.TempDir(), "a", "b")
		_, err = j.Run(context.Background(), dir, false, NewProgress(io.Discard, nil, nil))
		if _, there := os.Stat(filepath.Dir(dir)); there == nil || !isWrong(err) {
			t.Errorf("%d KiB: something is left after %v", int64(kib), err)
		}
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
	if _, err := j.collect(dir, p); err == nil || !strings.Contains(err.Error(), "in use by another comparison") {
		t.Errorf("a second one: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "none"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	x := &contestant{name: "none", files: c}
	c.begin(x)
	c.record(x)
	c.close(x)
	if n := strings.Count(said.String(), "warning"); n != 1 || !strings.Contains(said.String(), "the comparison goes on") {
		t.Errorf("it says %q", said.String())
	}
	if file := c.end(false, ""); file != "" {
		t.Errorf("a report of nothing: %s", file)
	}
	if _, err = j.collect(dir, p); err == nil || !strings.Contains(err.Error(), "cannot be replaced") {
		t.Errorf("over a file: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, "none")); err != nil {
		t.Fatal(err)
	}
	if c, err = j.collect(dir, p); err != nil {
		t.Fatal(err)
	}
	c.end(false, "")
	if env := report.ReadEnvironment(dir); len(env.Runs) != len(train.Policies) || env.Machine["model"] != "small" {
		t.Errorf("the environment is %+v", env)
	}
}

// A file that cannot be written leaves what was there, and nothing else.
func TestWriteFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "page")
	for _, c := range []struct {
		text string
		err  error
		want string
	}{{"old", nil, "old"}, {"half of", io.ErrShortWrite, "old"}, {"new", nil, "new"}} {
		err := WriteFile(path, func(w io.Writer) error {
			io.WriteString(w, c.text)
			return c.err
		})
		if (err == nil) != (c.err == nil) || err != nil && !strings.HasPrefix(err.Error(), path+" cannot be written: ") {
			t.Errorf("%v", err)
		}
		text, err := os.ReadFile(path)
		left, _ := os.ReadDir(dir)
		if err != nil || string(text) != c.want || len(left) != 1 {
			t.Errorf("there is %q, %v, %d files", text, err, len(left))
		}
	}
}
