package run

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/observe/trace"
	"github.com/stowage-dev/stowage/train"
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
		if len(begun) != steps || owned != steps+10 {
			t.Errorf("%d steps, %d times memory was taken", len(begun), owned)
		}
		if full[1] != 200 || full[tr.thinned] != 0 || full[300] != 100 || full[steps] != 100 || len(full) > 150 || spans != 100*(len(full)+10) || x.Header.Rank != f.Rank {
			t.Errorf("%d steps are there in full, %d spans; thin from %d", len(full), spans, tr.thinned)
		}
	}
	if want := fmt.Sprintf("from step %d on one step in 50", tr.thinned); tr.gaps() != want {
		t.Errorf("it says %q", tr.gaps())
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
