// This file tests pictures as a user meets them: what a run leaves, what `stowage
// report` makes of it, and that nothing that happens to pictures harms a run.

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/run"
)

// reported runs `stowage report --json`, which must work.
func reported(t *testing.T, line string) (r report.Report) {
	t.Helper()
	stdout, stderr, code := command(strings.Fields("report --json " + line)...)
	if code != exitOK || stderr != "" {
		t.Fatalf("%s: code %d, errors %q", line, code, stderr)
	}
	if err := json.Unmarshal([]byte(stdout), &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// peaks returns the largest of all ranks.
func peaks(r report.Run) (dev, host int64) {
	for _, k := range r.Ranks {
		dev, host = max(dev, k.Memory.Peak.Bytes), max(host, k.Memory.Peak.Host)
	}
	return dev, host
}

func has(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		if info, err := os.Stat(name); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A run leaves its pictures, whose peaks are those of its summary. SPEC S5.4, S6.5
func TestReport(t *testing.T) {
	words := inFolder(t)
	stdout, stderr, code := command(strings.Fields(words + "--policy offload --steps 3 --out run")...)
	if code != exitOK || strings.Contains(stderr, "warning") || !strings.HasSuffix(stdout, "the report is "+filepath.Join("run", "report.html")+"\n") {
		t.Fatalf("code %d, output %q, errors %q", code, stdout, stderr)
	}
	has(t, "run/report.html", "run/trace.pftrace", "run/environment.json", "run/trace/rank-0.trace", "run/trace/rank-3.trace")
	var sum struct {
		Device, Host int64
		Loss         float64
	}
	text, err := os.ReadFile("run/summary.json")
	if err != nil {
		t.Fatal(err)
	}
	var s run.Summary
	if err := json.Unmarshal(text, &s); err != nil {
		t.Fatal(err)
	}
	sum.Device, sum.Host, sum.Loss = s.Device, s.Host, s.Loss
	r := reported(t, "run")
	if len(r.Runs) != 1 || len(r.Runs[0].Missing)+len(r.Missing) > 0 {
		t.Fatalf("missing are %q of %d runs", r.Runs[0].Missing, len(r.Runs))
	}
	run := r.Runs[0]
	if dev, host := peaks(run); dev != sum.Device || host != sum.Host {
		t.Errorf("the traces have peaks of %d and %d, and the summary of %d and %d", dev, host, sum.Device, sum.Host)
	}
	if run.Name != "offload" || run.Command != "stowage "+strings.TrimSpace(words)+" --policy offload --steps 3 --out run" || run.Environment["device"] != "cpu" || run.Options == "" {
		t.Errorf("it is %q by %q in %v", run.Name, run.Command, run.Environment)
	}
	if n := len(run.Steps.Loss); n != 3 || run.Steps.Loss[2] != sum.Loss {
		t.Errorf("losses are %v", run.Steps.Loss)
	}
	for _, k := range run.Ranks {
		if len(k.Steps) != 3 || k.Steps[2].Step != 3 || len(k.Policy) == 0 || len(k.Details) == 0 || len(k.Details[0].Storages) == 0 {
			t.Errorf("rank %d: %+v, %d details", k.Rank, k.Steps, len(k.Details))
		}
		for _, c := range k.Policy {
			if c.Reason == "" {
				t.Errorf("rank %d: nothing says why %s is %v", k.Rank, c.Group, c.Units)
			}
		}
	}
	stdout, stderr, code = command(strings.Fields("report run --out page.html --perfetto p.pftrace --memory-viz m.pickle")...)
	if code != exitOK || stderr != "" || !strings.Contains(stdout, "the report is page.html\n") {
		t.Errorf("code %d, output %q, errors %q", code, stdout, stderr)
	}
	has(t, "page.html", "p.pftrace", "m.pickle")
	if stdout, _, code = command("report", "run", "run/trace/rank-1.trace"); code != exitOK || !strings.Contains(stdout, "this is a single trace") {
		t.Errorf("code %d, output %q", code, stdout)
	}
	has(t, "report.html")
}

// Peaks are the ledger's to the byte however memory is held, and stacks add up to them.
// SPEC S6.5
func TestReportPeaks(t *testing.T) {
	if testing.Short() {
		t.Skip("trains four models")
	}
	words := inFolder(t)
	for i, line := range []string{
		"--policy none --pool dynamic", "--policy stash --pool max --microbatches 2", "--policy budget --budget 700KiB", "--policy stash --graph full_iteration --pp 1 --dp 1 --ep 1", "--policy offload --graph full_iteration",
	} {
		dir := fmt.Sprint("run", i)
		s := trained(t, words+line+" --steps 4 --out "+dir)
		run := reported(t, dir).Runs[0]
		if dev, host := peaks(run); dev != s.Device || host != s.Host || len(run.Missing) > 0 {
			t.Errorf("%s: the traces have peaks of %d and %d, and the summary of %d and %d; missing are %q", line, dev, host, s.Device, s.Host, run.Missing)
		}
		for _, k := range run.Ranks {
			most := int64(0)
			for i := range k.Memory.Time {
				sum := int64(0)
				for _, x := range k.Memory.Series {
					if x.Tier == "device" {
						sum += x.Bytes[i]
					}
				}
				most = max(most, sum)
			}
			// A rank that only waits for the graph of another one may find it done.
			short := len(k.Steps) < 4 || k.Steps[3].End < k.Steps[3].Begin || k.Steps[3].End == k.Steps[3].Begin && k.Rank == 0
			if most != k.Memory.Peak.Bytes || short {
				t.Errorf("%s: rank %d: a stack of %d and a peak of %d, steps at %+v", line, k.Rank, most, k.Memory.Peak.Bytes, k.Steps)
			}
		}
	}
}

// A comparison is one report, whose peaks are those of its table; the next takes its
// place. SPEC S6.5
func TestReportOfComparison(t *testing.T) {
	if testing.Short() {
		t.Skip("trains under all policies three times")
	}
	words := inFolder(t)
	for _, steps := range []string{"2", "1"} {
		stdout, stderr, code := command(strings.Fields(words + "--json --steps " + steps)...)
		if code != exitOK || strings.Contains(stderr, "warning") {
			t.Fatalf("code %d, errors %q", code, stderr)
		}
		var rows []run.Row
		if err := json.Unmarshal([]byte(stdout), &rows); err != nil {
			t.Fatal(err)
		}
		has(t, "runs/compare/report.html", "runs/compare/stash/trace.pftrace")
		r := reported(t, "runs/compare")
		if len(r.Runs) != len(train.Policies) {
			t.Fatalf("%d runs", len(r.Runs))
		}
		for i, run := range r.Runs {
			dev, host := peaks(run)
			if run.Name != rows[i].Policy || dev != rows[i].Device || host != rows[i].Host || len(run.Missing) > 0 || len(run.Ranks) != 4 || len(run.Steps.Step) != int(steps[0]-'0') {
				t.Errorf("%s has peaks of %d and %d, %d ranks and %d steps, and lacks %q; the table has %+v", run.Name, dev, host, len(run.Ranks), len(run.Steps.Step), run.Missing, rows[i])
			}
		}
	}
	stdout, _, code := command(strings.Fields(words + "--policy all --steps 1 --out other --trace=false")...)
	if code != exitOK || !strings.HasSuffix(stdout, "the report is "+filepath.Join("other", "report.html")+"\n") {
		t.Errorf("code %d, output %q", code, stdout)
	}
	has(t, "other/report.html")
	if _, err := os.Stat("other/stash/trace"); err == nil {
		t.Error("it was traced all the same")
	}
}

// A comparison that nobody wanted to be written goes on where it cannot be; one that
// somebody did is refused.
func TestComparisonThatCannotBeWritten(t *testing.T) {
	words := inFolder(t)
	writeFile(t, "runs", "in the way")
	stdout, stderr, code := command(strings.Fields(words + "--steps 1")...)
	if code != exitOK || strings.Count(stderr, "warning") != 1 || !strings.Contains(stderr, "the comparison is not written") || strings.Contains(stdout, "the report") {
		t.Errorf("code %d, output %q, errors %q", code, stdout, stderr)
	}
	if _, stderr, code = command(strings.Fields(words + "--policy all --steps 1 --out runs")...); code != exitUsage || !strings.Contains(stderr, "--out: runs is a file") {
		t.Errorf("code %d, errors %q", code, stderr)
	}
}

// Whatever cannot be drawn, a run trains, saves and ends as without.
func TestPicturesThatCannotBeWritten(t *testing.T) {
	words := inFolder(t) + "--policy stash --steps 2 "
	want := trained(t, words+"--out plain --trace=false")
	if _, err := os.Stat("plain/trace"); err == nil {
		t.Error("it was traced all the same")
	}
	if r := reported(t, "plain"); len(r.Runs[0].Missing) != 1 || !strings.Contains(r.Runs[0].Missing[0], "there are no traces") || len(r.Runs[0].Ranks) != 4 || len(r.Runs[0].Ranks[0].Policy) == 0 {
		t.Errorf("it lacks %q", r.Runs[0].Missing)
	}
	for name, c := range map[string]struct {
		spoil func(dir string) error
		want  []string
	}{
		"a file in place of the traces": {func(dir string) error { return os.WriteFile(filepath.Join(dir, "trace"), nil, 0o644) }, []string{"the run continues without a trace"}},
		"an old trace that cannot be removed": {func(dir string) error {
			traces := filepath.Join(dir, "trace")
			return errors.Join(os.MkdirAll(filepath.Join(traces, ".rank-1.trace.before"), 0o755), os.MkdirAll(filepath.Join(traces, "rank-1.trace", "x"), 0o755))
		}, []string{"the run continues without a trace"}},
		"a folder in place of the page":        {func(dir string) error { return os.MkdirAll(filepath.Join(dir, "report.html", "x"), 0o755) }, []string{"cannot make the report"}},
		"a folder in place of Perfetto's file": {func(dir string) error { return os.MkdirAll(filepath.Join(dir, "trace.pftrace", "x"), 0o755) }, []string{"cannot write the trace for Perfetto"}},
		"a folder in place of the environment": {func(dir string) error { return os.Mkdir(filepath.Join(dir, "environment.json"), 0o755) }, []string{"the report will not describe the machine"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := c.spoil(dir); err != nil {
				t.Skip(err)
			}
			stdout, stderr, code := command(strings.Fields(words + "--json --out " + dir)...)
			var got run.Summary
			if err := json.Unmarshal([]byte(stdout), &got); err != nil || code != exitOK || got.Digest != want.Digest || got.Loss != want.Loss || !got.Finished {
				t.Fatalf("code %d, %v, %+v, errors %q", code, err, got, stderr)
			}
			if !strings.Contains(stderr, "warning: ") {
				t.Errorf("nobody was warned: %q", stderr)
			}
			for _, w := range c.want {
				if !strings.Contains(stderr, w) {
					t.Errorf("%q is not in %q", w, stderr)
				}
			}
			if left, _ := filepath.Glob(filepath.Join(dir, ".*")); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
			if again := trained(t, words+"--resume --steps 3 --out "+dir); again.Steps != 3 {
				t.Errorf("it goes on to %+v", again)
			}
		})
	}
}

// A run that goes on has one trace in parts, and one that begins anew has none of what
// was there.
func TestReportOfResumedRun(t *testing.T) {
	words := inFolder(t)
	trained(t, words+"--policy stash --steps 2 --out run --hold-out 0.3 --eval-every 1")
	trained(t, "train --out run --resume --steps 3")
	trained(t, "train --out run --resume --steps 5")
	has(t, "run/trace/rank-0.trace", "run/trace/rank-0.1.trace", "run/trace/rank-0.2.trace")
	run := reported(t, "run").Runs[0]
	var steps []int
	for i, b := range run.Ranks[0].Steps {
		if steps = append(steps, b.Step); i > 0 && b.Begin < run.Ranks[0].Steps[i-1].End {
			t.Errorf("step %d begins before the one before it is over: %+v", b.Step, run.Ranks[0].Steps)
		}
	}
	// A step that was run again is there twice; evaluations are none.
	if steps = slices.Compact(steps); !slices.Equal(steps, []int{1, 2, 3, 4, 5}) || strings.Count(run.Command, "\n") != 2 {
		t.Errorf("steps are %v, by %q", steps, run.Command)
	}
	for _, name := range []string{"run/checkpoints", "run/summary.json"} { // as if it had been stopped before its first checkpoint
		if err := os.RemoveAll(name); err != nil {
			t.Fatal(err)
		}
	}
	trained(t, "train --out run --resume --steps 1")
	if files := report.TraceFiles("run"); len(files) != 4 {
		t.Errorf("traces are %+v", files)
	}
}

// A run that was killed is shown as far as it got, and says what is missing.
func TestReportOfDamagedRun(t *testing.T) {
	words := inFolder(t)
	trained(t, words+"--policy none --steps 2 --out run")
	name := filepath.Join("run", report.TraceName(2, 0))
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, name, string(text[:len(text)/2]))
	if err := os.Remove("run/summary.json"); err != nil {
		t.Fatal(err)
	}
	writeFile(t, "run/metrics.jsonl", `{"step":1,"loss":5.5}`+"\n"+`{"step":2,"lo`)
	stdout, stderr, code := command("report", "run")
	for _, want := range []string{"1 line that cannot be read", "summary.json is not there", "trace/rank-2.trace ends early", "device peak", "the report is"} {
		if code != exitOK || stderr != "" || !strings.Contains(stdout, want) {
			t.Errorf("code %d, errors %q; %q is not in %q", code, stderr, want, stdout)
		}
	}
}

// What is wrong is one sentence, with code 2.
// A run whose traces cannot be read is refused in words of its files.
func TestPicturesOfDamagedTraces(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.MkdirAll("run/trace", 0o755); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		make func(path string) error
		want string
	}{
		"folder": {func(path string) error { return os.Mkdir(path, 0o755) }, "rank-0.trace: it is a folder; expected a file"},
		"text":   {func(path string) error { return os.WriteFile(path, []byte("hello"), 0o600) }, "rank-0.trace: this is not a trace; expected a rank-N.trace file of a run"},
		"large": {func(path string) error {
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				return err
			}
			return os.Truncate(path, 1<<40)
		}, "rank-0.trace: it is larger than 256.0 MiB, the most that is read of such a file"},
	} {
		if err := errors.Join(os.RemoveAll("run/trace/rank-0.trace"), c.make("run/trace/rank-0.trace")); err != nil {
			t.Fatal(err)
		}
		writeFile(t, "run/metrics.jsonl", "{}\n")
		_, stderr, code := command("report", "run", "--perfetto", "x")
		if want := "stowage: --perfetto: run has no trace that can be read: " + c.want + "; see `stowage report --help`\n"; code != exitUsage || stderr != want {
			t.Errorf("%s: code %d, errors %q, want %q", name, code, stderr, want)
		}
	}
}

func TestReportErrors(t *testing.T) {
	var all strings.Builder
	t.Run("lines", func(t *testing.T) {
		words := inFolder(t)
		trained(t, words+"--policy none --steps 1 --out run --trace=false")
		writeFile(t, "file", "hello")
		if err := os.Mkdir("empty", 0o755); err != nil {
			t.Fatal(err)
		}
		for _, line := range []string{
			"report", "report missing", "report file", "report empty", "report missing empty", "report run --out empty", "report run --out pages/", "report run --perfetto empty", "report run run --perfetto x", "report run --perfetto x", "report run --memory-viz x",
			"report run --frobnicate", words + "--policy all --resume --out run", words + "--policy all --budget 1MiB", words + "--policy all --out run", words + "--trace=perhaps",
		} {
			stdout, stderr, code := command(strings.Fields(line)...)
			if code != exitUsage || stdout != "" || strings.Count(stderr, "\n") != 1 {
				t.Errorf("%q: code %d, output %q, errors %q", line, code, stdout, stderr)
			}
			all.WriteString("$ stowage " + line + "\n" + stderr)
		}
		if err := os.Symlink("run/config.yaml", "options"); err != nil {
			t.Fatal(err)
		}
		before := contents(t, "run")
		for _, ending := range []string{
			"--out run/config.yaml", "--out run/../run/metrics.jsonl", "--out options", "--json --out run/lock", "--perfetto run/summary.json", "--memory-viz run/environment.json",
			"--perfetto run/trace/rank-0.trace", "--out run/checkpoints/step-00000001/checkpoint.json", "--memory-viz run/checkpoints/step-00000001/model-00001-of-00001.safetensors",
		} {
			if _, stderr, code := command(strings.Fields("report run " + ending)...); code != exitUsage || !strings.Contains(stderr, "is a file of the run") {
				t.Errorf("%s: code %d, errors %q", ending, code, stderr)
			}
		}
		if !maps.Equal(contents(t, "run"), before) {
			t.Error("the run changed")
		}
		stdout, stderr, code := command("report", "run", "missing")
		if code != exitOK || !strings.Contains(stdout, "the report is report.html") || !strings.Contains(stdout, ", 1 step, loss ") || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, "missing is not there; ") {
			t.Errorf("code %d, output %q, errors %q", code, stdout, stderr)
		}
		if _, stderr, code := command("report", "run", "--out", "no/folder/page.html"); code != exitUsage || !strings.Contains(stderr, "give a file in a folder that you may write to") {
			t.Errorf("code %d, errors %q", code, stderr)
		}
	})
	golden.Check(t, "report-errors.txt", all.String()) // beside the test again
}

// Benchmarks write pages too.
func TestBenchReports(t *testing.T) {
	t.Chdir(t.TempDir())
	lines := []string{
		"bench stash --time 1ms --rows 16 --width 64", "bench stash --synth zipf --layers 1 --width 64", "bench pools --model mixtral-8x7b", "bench copy --size 4KiB --time 1ms",
		"bench offload --steps 1 --layers 1 --tflops 100 --memory-gbps 100 --link-gbps 10",
	}
	if testing.Short() {
		lines = lines[:1] // the race detector makes twenty seconds of all of them
	}
	for _, line := range lines {
		if stdout, stderr, code := command(strings.Fields(line + " --report page.html")...); code != exitOK || !strings.HasSuffix(stdout, "\nthe report is page.html\n") {
			t.Errorf("%s: code %d, output %q, errors %q", line, code, stdout, stderr)
		}
		has(t, "page.html")
		if err := os.Remove("page.html"); err != nil {
			t.Error(err)
		}
		stdout, stderr, code := command(strings.Fields(line + " --report no/page.html")...)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, "--report: ") { // before the work
			t.Errorf("%s: code %d, output %q, errors %q", line, code, stdout, stderr)
		}
	}
}

// A folder that may not be read is named, and not the page that would be in it.
func TestReportOfAFolderThatMayNotBeRead(t *testing.T) {
	if os.Getuid() == 0 {
		t.Skip("root may read everything")
	}
	t.Chdir(t.TempDir())
	if err := os.Mkdir("run", 0o300); err != nil {
		t.Fatal(err)
	}
	_, said, code := command("report", "run")
	if want := "stowage: run cannot be read: permission denied; give this user the right to it; see `stowage report --help`\n"; code != exitUsage || said != want {
		t.Errorf("code %d, errors %q, want %q", code, said, want)
	}
}

// An error about the page that nobody named does not blame a flag, and says what to do.
func TestDefaultPageThatCannotBeWritten(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "run")
	if _, errs, code := command("train", "--policy", "none", "--steps", "1", "--micro", "1", "--seq", "8", "--out", folder); code != 0 {
		t.Fatal(errs)
	}
	page := filepath.Join(folder, "report.html")
	for _, c := range []struct {
		make func() error
		args []string
		want string
		code int
	}{
		{func() error { return os.Symlink("/dev/full", page) }, nil, "stowage: cannot write " + page + ": no space left on device; free some space, or give another file with --out", exitFailure},
		{func() error { return nil }, []string{"--out", "/dev/full"}, "stowage: --out: cannot write /dev/full: no space left on device; free some space, or give another file", exitFailure},
		{func() error { return os.Mkdir(page, 0o755) }, nil, "stowage: " + page + " is a folder; give another file with --out", exitUsage},
	} {
		if err := errors.Join(os.Remove(page), c.make()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		_, errs, code := command(append([]string{"report", folder}, c.args...)...)
		if code != c.code || !strings.Contains(errs, c.want) {
			t.Errorf("%v: code %d, %s\nwant code %d, %s", c.args, code, errs, c.code, c.want)
		}
	}
}

// The page that nobody named has no flag in an error, also beside another file.
func TestDefaultPageBesideOthers(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.WriteFile("report.html", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]string{
		"report a b --perfetto report.html": "stowage: --perfetto and the page name the same file, report.html; give another file to write",
		"report report.html b":              "stowage: the page and an argument name the same file, report.html; give another file with --out",
		"report a b --out x --perfetto x":   "stowage: --perfetto and --out name the same file, x; give another file to write",
	} {
		if _, errs, code := command(strings.Fields(line)...); code != exitUsage || !strings.HasPrefix(errs, want) {
			t.Errorf("%s: code %d, %s\nwant %s", line, code, errs, want)
		}
	}
}
