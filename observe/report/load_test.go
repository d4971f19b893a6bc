package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

func figureOf(r Run, name string) *Figure {
	i := slices.IndexFunc(r.Figures, func(f Figure) bool { return f.Name == name })
	if i < 0 {
		return nil
	}
	return &r.Figures[i]
}

// A complete run has nothing in Missing.
func TestLoad(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	folder(t, dir, "offload")
	r, err := loadRun(dir, 0, beginnings{})
	if err != nil || len(r.Missing) > 0 {
		t.Fatalf("%v, %q", err, r.Missing)
	}
	peak := figureOf(r, "peak_device_bytes")
	if r.Name != "offload" || r.Command != "stowage train --policy offload" || r.Environment["cpu"] != "a CPU" || r.Options == "" || peak == nil ||
		peak.Value != 9437184 || peak.Predicted == nil || *peak.Predicted != 9e6 || figureOf(r, "predicted_device_bytes") != nil {
		t.Errorf("the run is %+v", r)
	}
	if f := figureOf(r, "seconds"); f == nil || f.Unit != Millis || f.Value != 750 {
		t.Errorf("the time is %+v", f)
	}
	if s := r.Steps; len(s.Step) != 2 || s.Loss[1] != 5.25 || s.Millis[0] != 500 || s.Tokens[0] != 100 || s.Spills[1] != 3 || s.Held[0] != 5.75 || s.HeldAt[0] != 2 {
		t.Errorf("steps are %+v", s)
	}
	// The trace of the fixture agrees with its summary.
	if k := r.Ranks[0]; len(r.Ranks) != 1 || float64(k.Memory.Peak.Bytes) != peak.Value || len(k.Policy) != 1 || k.Policy[0].Reason != "offload: its copies hide" {
		t.Errorf("ranks are %+v", r.Ranks)
	}
}

// A sentence describes what is missing or damaged, and the rest is shown. SPEC S6.5
func TestLoadDamaged(t *testing.T) {
	remove := func(name string) func(string) error {
		return func(dir string) error { return os.RemoveAll(filepath.Join(dir, name)) }
	}
	write := func(name, text string) func(string) error {
		return func(dir string) error { return os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644) }
	}
	cut := func(name string, share float64) func(string) error {
		return func(dir string) error {
			path := filepath.Join(dir, name)
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			return os.WriteFile(path, data[:int(share*float64(len(data)))], 0o644)
		}
	}
	for _, c := range []struct {
		name    string
		damage  func(dir string) error
		missing string // a part of the sentence
		figures int
		steps   int
		ranks   int
	}{
		{"no summary", remove(SummaryFile), "summary.json is not there", 4, 2, 1},
		{"an empty summary", write(SummaryFile, ""), "summary.json is empty", 4, 2, 1},
		{"half a summary", cut(SummaryFile, 0.4), "summary.json ends early", 5, 2, 1},
		{"a flipped byte", write(SummaryFile, "{\"policy\":\"x\",\"more\":7\x02,\"finished\":true}"), "summary.json is damaged; what can be read", 2, 2, 1},
		{"a policy that is a number", write(SummaryFile, `{"policy":5,"other":"x"}`), "summary.json is damaged; what can be read", 2, 2, 1},
		{"fewer traces than ranks", write(SummaryFile, `{"policy":"x","by_rank":[{"rank":0},{"rank":1}]}`), "there is no trace of rank 1;", 1, 2, 2},
		{"fewer steps than the summary has", write(SummaryFile, `{"policy":"x","steps":7}`), "metrics.jsonl ends after step 2 of the 7", 2, 2, 1},
		{"a summary of an earlier step", write(SummaryFile, `{"policy":"x","steps":1,"finished":true,"final_loss":9,"by_rank":[{"rank":0},{"rank":1}]}`), "summary.json is of step 1, but metrics.jsonl goes on to step 2", 4, 2, 1},
		{"a step is missing", write(MetricsFile, `{"step":1}`+"\n"+`{"step":4}`+"\n"), "metrics.jsonl lacks 2 steps", 5, 2, 1},
		{"the first step is missing", write(MetricsFile, `{"step":2}`+"\n"), "metrics.jsonl lacks 1 step", 5, 1, 1},
		{"steps in another order", write(MetricsFile, `{"step":2}`+"\n"+`{"step":1}`+"\n"), "metrics.jsonl was changed: its lines are not in the order of steps", 5, 2, 1},
		{"a step twice", write(MetricsFile, `{"step":1}`+"\n"+`{"step":1}`+"\n"), "metrics.jsonl was changed: its lines are not in the order of steps", 5, 1, 1},
		{"fewer bytes than none", write(SummaryFile, `{"policy":"x","peak_device_bytes":-7,"steps":2}`), "summary.json says that peak_device_bytes is -7, which cannot be; it is left out", 2, 2, 1},
		{"fewer ranks than none", write(SummaryFile, `{"policy":"x","ranks":-4,"steps":2}`), "summary.json says that ranks is -4, which cannot be; it is left out", 2, 2, 1},
		{"bytes that are a word", write(SummaryFile, `{"policy":"x","peak_device_bytes":"much","steps":2}`), `summary.json says that peak_device_bytes is "much", which is no number; it is left out`, 2, 2, 1},
		{"a number that is a truth", write(SummaryFile, `{"policy":"x","final_loss":true,"finished":true}`), `summary.json says that final_loss is "yes", which is no number; it is left out`, 2, 2, 1},
		{"more ranks than the summary lists", write(SummaryFile, `{"policy":"x","ranks":1000000000,"by_rank":[{"rank":0}]}`), "summary.json says that ranks is 1000000000, which cannot be; it is left out", 1, 2, 1},
		{"no object", write(SummaryFile, "[1,2]"), "summary.json is damaged", 4, 2, 1},
		{"unknown keys", write(SummaryFile, `{"policy":"x","later":{"a":[1]},"more":7,"none":null}`), "", 2, 2, 1},
		{"a wrong profile", write(SummaryFile, `{"policy":"x","profile":{"kernels":[]}}`), "the profile in summary.json is damaged", 1, 2, 1},
		{"wrong ranks", write(SummaryFile, `{"policy":"x","by_rank":[{"rank":"zero"}]}`), "the ranks in summary.json are damaged", 1, 2, 1},
		{"no metrics", remove(MetricsFile), "metrics.jsonl is not there", 5, 0, 1},
		{"half a line", cut(MetricsFile, 0.7), "metrics.jsonl has 1 line that cannot be read", 5, 1, 1},
		{"empty metrics", write(MetricsFile, ""), "metrics.jsonl has no line", 5, 0, 1},
		{"other metrics", write(MetricsFile, "hello\n{}\n\n"), "metrics.jsonl has no line", 5, 0, 1},
		{"no trace", remove(TraceFolder), "there are no traces", 5, 2, 1},
		{"half a trace", cut(TraceName(0, 0), 0.5), "trace/rank-0.trace ends early", 5, 2, 1},
		{"an empty trace", write(TraceName(0, 0), ""), "trace/rank-0.trace is left out: this is not a trace", 5, 2, 1},
		{"no environment", remove(EnvironmentFile), "environment.json is not there; the command", 5, 2, 1},
		{"a damaged environment", write(EnvironmentFile, "{"), "environment.json is damaged (it ends too early)", 5, 2, 1},
		{"no options", remove(ConfigFile), "", 5, 2, 1},
		{"options that are no text", write(ConfigFile, "a\xff"), "config.yaml is damaged", 5, 2, 1},
		{"a folder for a file", func(dir string) error {
			return errors.Join(os.Remove(filepath.Join(dir, SummaryFile)), os.Mkdir(filepath.Join(dir, SummaryFile), 0o755))
		}, "summary.json cannot be read", 4, 2, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			folder(t, dir, "offload")
			if err := c.damage(dir); err != nil {
				t.Fatal(err)
			}
			r, err := loadRun(dir, 0, beginnings{})
			if err != nil {
				t.Fatal(err)
			}
			said := strings.Join(r.Missing, "\n")
			if !strings.Contains(said, c.missing) || (c.missing == "") != (len(r.Missing) == 0) || len(r.Missing) > 1 {
				t.Errorf("it says %q, want %q", r.Missing, c.missing)
			}
			if strings.Contains(said, dir) || strings.Contains(said, "\n") {
				t.Errorf("it says %q", said)
			}
			if len(r.Figures) != c.figures || len(r.Steps.Step) != c.steps || len(r.Ranks) != c.ranks {
				t.Errorf("%d figures, %d steps, %d ranks: %+v", len(r.Figures), len(r.Steps.Step), len(r.Ranks), r.Figures)
			}
		})
	}
}

// The figures of a run that was resumed and killed are those of its last step, and its peak is
// that of its metrics if its traces lack it. They are not those of the summary, which an earlier
// stop wrote.
func TestLoadKilledAfterResuming(t *testing.T) {
	dir := t.TempDir()
	folder(t, dir, "offload")
	put(t, []byte(`{"steps":2,"finished":true,"final_loss":9,"peak_device_bytes":7}`), dir, SummaryFile)
	put(t, []byte(`{"step":1,"loss":3,"peak_device_bytes":1}`+"\n"+`{"step":2,"loss":2}`+"\n"+`{"step":3,"loss":1,"peak_device_bytes":9999999999,"peak_host_bytes":8888888888}`+"\n"), dir, MetricsFile)
	r, err := loadRun(dir, 0, beginnings{})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]float64{"steps": 3, "final_loss": 1, "peak_device_bytes": 9999999999, "peak_host_bytes": 8888888888} {
		if f := figureOf(r, name); f == nil || f.Value != want {
			t.Errorf("%s is %+v, want %g", name, f, want)
		}
	}
	if f := figureOf(r, "finished"); f != nil {
		t.Errorf("the run calls itself finished: %+v", f)
	}
}

// The error for a path without a run says what was expected.
func TestLoadNothing(t *testing.T) {
	dir := t.TempDir()
	put(t, []byte("hello"), dir, "file")
	put(t, []byte("hello"), dir, "other", "file")
	for path, want := range map[string]string{
		"missing": "is not there; expected the folder", "file": "is a file but not a trace; expected the folder", "other": "holds no run; expected the folder", ".": "holds no run",
	} {
		_, err := Read(filepath.Join(dir, path))
		var nothing *NoRunError
		if !errors.As(err, &nothing) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// A comparison stands for its runs in their order. Damaged ones are named and left out.
func TestReadComparison(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "compare")
	for _, name := range []string{"stash", "none", "extra"} {
		folder(t, filepath.Join(dir, name), name)
		if err := os.Remove(filepath.Join(dir, name, EnvironmentFile)); err != nil {
			t.Fatal(err)
		}
	}
	put(t, []byte(`{"command":"stowage train","machine":{"cpu":"one"},"runs":["none","stash","lost","../x"]}`), dir, EnvironmentFile)
	r, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, x := range r.Runs {
		names = append(names, x.Name)
		if x.Command != "stowage train" || x.Environment["cpu"] != "one" {
			t.Errorf("%s: %q on %v", x.Name, x.Command, x.Environment)
		}
	}
	if !slices.Equal(names, []string{"none", "stash", "extra"}) || r.Title != "compare" {
		t.Errorf("runs are %q of %q", names, r.Title)
	}
	if got := r.Runs[0].Missing; len(got) != 1 || !strings.Contains(got[0], "the folder lost of the comparison") {
		t.Errorf("missing are %q", got)
	}
	// A single run of a comparison has the environment of the comparison.
	one, err := loadRun(filepath.Join(dir, "none"), 0, beginnings{})
	if err != nil || one.Command != "stowage train" || one.Environment["cpu"] != "one" || len(one.Missing) > 0 {
		t.Errorf("%v, by %q on %v, missing are %q", err, one.Command, one.Environment, one.Missing)
	}
	// A folder that the comparison does not list has no environment.
	if one, err = loadRun(filepath.Join(dir, "extra"), 0, beginnings{}); err != nil || one.Command != "" || len(one.Missing) != 1 {
		t.Errorf("%v, by %q, missing are %q", err, one.Command, one.Missing)
	}
}

// A comparison that takes the place of another was killed: the report says that its runs may be
// of either, for all of them and for a single one.
func TestReadBetweenTwoComparisons(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "compare")
	folder(t, filepath.Join(dir, "none"), "none")
	if err := os.Remove(filepath.Join(dir, "none", EnvironmentFile)); err != nil {
		t.Fatal(err)
	}
	put(t, []byte(`{"command":"stowage train","runs":["none"]}`), dir, EnvironmentFile)
	for _, hidden := range []string{"", readyFolder, movingFolder} {
		if hidden != "" {
			if err := os.Mkdir(filepath.Join(dir, hidden), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		for _, path := range []string{dir, filepath.Join(dir, "none")} {
			r, err := Read(path)
			if err != nil {
				t.Fatal(err)
			}
			got := r.Runs[0].Missing
			if said := len(got) == 1 && strings.HasPrefix(got[0], dir+" holds parts of two comparisons"); said != (hidden != "") || !said && len(got) > 0 {
				t.Errorf("with a folder %q, the report of %s says %q", hidden, path, got)
			}
		}
		if hidden != "" {
			if err := os.Remove(filepath.Join(dir, hidden)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// The traces of all ranks and parts are found in order, and nothing else.
func TestTraceFiles(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{TraceName(10, 0), TraceName(2, 0), TraceName(2, 10), TraceName(2, 9), "trace/rank-x.trace", "trace/rank-1.trace.tmp"} {
		put(t, encode(t, &small(0).t), dir, name)
	}
	var got []string
	for _, f := range TraceFiles(dir) {
		got = append(got, fmt.Sprintf("%d.%d", f.Rank, f.Part))
	}
	if !slices.Equal(got, []string{"2.0", "2.9", "2.10", "10.0"}) {
		t.Errorf("traces are %q", got)
	}
	r, err := loadRun(dir, 0, beginnings{})
	if err != nil || len(r.Ranks) != 2 || r.Ranks[0].Rank != 2 || len(r.Ranks[0].Steps) != 9 || r.Ranks[1].Rank != 10 {
		t.Errorf("%v, %+v", err, r.Ranks)
	}
}

// A full trace is reported as such, and a single trace is enough for a page.
func TestFullAndLoneTrace(t *testing.T) {
	s := small(3)
	var b strings.Builder
	w := trace.NewWriter(&b, s.t.Header, 1000)
	for range 10 {
		for _, e := range s.t.Events {
			w.Emit(e)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "bench.trace")
	put(t, []byte(b.String()), file)
	r, err := loadRun(file, 0, beginnings{})
	if err != nil || r.Name != "bench" || len(r.Missing) != 2 || !strings.Contains(r.Missing[1], "was full and lacks the last") || len(r.Ranks) != 1 || r.Ranks[0].Rank != 3 || r.Ranks[0].Dropped == 0 {
		t.Errorf("%v, %+v", err, r)
	}
}

// Of a long run every n-th step is shown, with the counts of the steps in between.
func TestManySteps(t *testing.T) {
	var lines []line
	held := 1.5
	for i := range 3 * mostSteps {
		l := line{Step: i + 1, Spills: 1, Device: int64(i % 7)}
		if i == 1 {
			l.Eval = &held
		}
		lines = append(lines, l)
	}
	s := stepsOf(lines)
	var spills int64
	for _, n := range s.Spills {
		spills += n
	}
	if len(s.Step) != mostSteps || s.Step[mostSteps-1] != 3*mostSteps || spills != 3*mostSteps || s.HeldAt[0] != 2 || slices.Max(s.Device) != 6 {
		t.Errorf("%d steps to %d with %d spills", len(s.Step), s.Step[len(s.Step)-1], spills)
	}
}

// A defect of several traces is described once, with their ranks.
func TestRanksLackTheSame(t *testing.T) {
	dir := t.TempDir()
	folder(t, dir, "offload")
	for rank, part := range []int{0, 0, 0, 2} {
		data := encode(t, &small(rank).t)
		put(t, data[:len(data)/2], dir, TraceName(rank, part))
	}
	r, err := loadRun(dir, 0, beginnings{})
	if err != nil || len(r.Missing) != 1 || !strings.HasPrefix(r.Missing[0], "4 traces of ranks 0 to 3 end early (the first: ") {
		t.Errorf("%v, missing are %q", err, r.Missing)
	}
	for rank := range 3 {
		put(t, nil, dir, TraceName(rank, 0))
	}
	if r, err = loadRun(dir, 0, beginnings{}); err != nil || len(r.Missing) != 2 || !strings.HasPrefix(r.Missing[0], "3 traces of ranks 0 to 2 are left out (the first: this is not a trace") {
		t.Errorf("%v, missing are %q", err, r.Missing)
	}
	for want, ranks := range map[string][]int{"rank 3": {3}, "ranks 1 and 2": {1, 2}, "ranks 0, 2 and 5": {0, 2, 5}, "ranks 4 to 6": {4, 5, 6}} {
		if got := ranksText(ranks); got != want {
			t.Errorf("%v are %q, want %q", ranks, got, want)
		}
	}
	var full lacks
	for rank := range 2 {
		full.dropped("x", &trace.Trace{Header: trace.Header{Rank: rank}, Dropped: 5})
	}
	r.Missing = nil
	if r.lacking(lacks{}, lacks{}, full); len(r.Missing) != 1 || !strings.HasPrefix(r.Missing[0], "2 traces of ranks 0 and 1 were full and lack the last 10 events") {
		t.Errorf("missing are %q", r.Missing)
	}
}

// All that a report says of a run with two ranks and something of everything. A change of
// any field is seen; write it anew with -update if the change is meant.
func TestWholeReport(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	folder(t, dir, "stash")
	var metrics strings.Builder
	for i, ms := range []int{900, 500, 70, 40, 60} {
		fmt.Fprintf(&metrics, `{"step":%d,"loss":%g,"seconds":%g,"tokens_per_second":%d,"device_bytes":%d,"host_bytes":%d,"peak_device_bytes":%d,"peak_host_bytes":%d,"reruns":%d,"spills":%d}`+"\n",
			i+1, 6-float64(i)/4, float64(ms)/1000, 1000+i, 10+i, 20+i, 30-i, 40-i, i/2, 2*i)
	}
	put(t, []byte(metrics.String()), dir, MetricsFile)
	put(t, []byte(`{"model": "m", "policy": "stash", "steps": 5, "finished": true, "peak_device_bytes": 9437184, "predicted_device_bytes": 9000000, "peak_host_bytes": 77,
  "final_loss": 5, "eval_loss": 5.5, "reruns": 2, "tokens": 50, "seconds": 1.57, "step_ms": 70, "tokens_per_second": 31, "step_ratio": 1.25, "params_sha256": "ab", "budget_bytes": 12,
  "traced": "from step 3 on", "by_rank": [
  {"rank": 1, "peak_device_bytes": 11, "peak_host_bytes": 12, "predicted_device_bytes": 13, "predicted_step_ms": 14, "notes": ["one", "two"],
   "policy": [{"group": "a", "units": {"keep": 2, "stash": 1}, "saved": 15, "moved": 16, "reason": "r"}],
   "figures": [{"name": "n", "label": "l", "unit": "count", "value": 17}], "pools": [{"name": "p", "unit": 1, "steps": [1], "size": [18], "most": [19]}]},
  {"rank": 0, "peak_device_bytes": 21, "peak_host_bytes": 22, "predicted_device_bytes": 23, "predicted_step_ms": 24, "policy": []}]}`), dir, SummaryFile)
	s := small(1)
	for n := range 3 {
		s.decide(trace.Event{Kind: trace.Begin, Step: 4 + n})
		for tier, pages := range [2]int64{5, 2} {
			s.decide(trace.Event{Kind: trace.Spill, Step: 4 + n, Tier: memory.Kind(tier), Offset: 64 * kib, Bytes: pages * int64(n+1) * kib})
		}
		s.decide(trace.Event{Kind: trace.Stash, Step: 4 + n, Name: "rows", Layer: n % 2})
		s.decide(trace.Event{Kind: trace.Rerun, Step: 4 + n})
		s.decide(trace.Event{Kind: trace.End, Step: 4 + n})
	}
	put(t, encode(t, &s.t), dir, TraceName(1, 0))
	r, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	golden.Check(t, "report.json", string(text)+"\n")
}

// A folder that holds runs, each with its environment, needs none of its own.
func TestFolderOfRuns(t *testing.T) {
	dir := t.TempDir()
	folder(t, filepath.Join(dir, "a"), "none")
	folder(t, filepath.Join(dir, "b"), "stash")
	r, err := Read(dir)
	if err != nil || len(r.Runs) != 2 || len(r.Runs[0].Missing)+len(r.Runs[1].Missing) != 0 {
		t.Fatalf("got %+v, %v", r, err)
	}
	if err := os.Remove(filepath.Join(dir, "b", EnvironmentFile)); err != nil {
		t.Fatal(err)
	}
	if r, err = Read(dir); err != nil || len(r.Runs[0].Missing) != 1 {
		t.Errorf("without an environment: %q, %v", r.Runs[0].Missing, err)
	}
}
