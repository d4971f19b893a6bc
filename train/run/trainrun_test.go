// This file owns the tests of what needs no command line: the comparison on a small
// model, options in YAML, models from files, and the folder of a run.

package run

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/internal/leak"
	"golang.org/x/sys/unix"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/input/inputtest"
	"github.com/stowage-dev/stowage/observe/live"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/internal/disk"
)

func TestMain(m *testing.M) { leak.Main(m) }

// small returns a mixture of experts with a shared one that trains a step in milliseconds.
func small() ModelSpec {
	return ModelSpec{Keys: map[string]any{
		"_name_or_path": "small", "model_type": "deepseek_v3", "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 16,
		"num_hidden_layers": 4, "num_attention_heads": 2, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
		"first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
		"vocab_size": 256, "num_nextn_predict_layers": 1, "rope_theta": 5000, "rms_norm_eps": 1e-6, "routed_scaling_factor": 2.5,
	}}
}

func machine() Machine {
	return Machine{
		Open: func(_ int, o device.Observer) (device.Device, error) { return cpu.Open(cpu.Options{Observe: o}) },
	}
}

func smallJob(t *testing.T, change func(*Options)) *Job {
	t.Helper()
	o := DefaultOptions()
	o.Model, o.Micro, o.Seq, o.Steps = small(), 2, 32, 5
	if testing.Short() {
		o.Micro, o.Steps = 1, 4
	}
	if change != nil {
		change(&o)
	}
	j, err := NewJob(o, machine(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	j.config.Effort = 0.05 // no test is about how good a decision is
	return j
}

// Every policy comes to the same parameters, and a row has the keys that scripts
// read. SPEC S1.6, S4.6, S5.2
func TestCompare(t *testing.T) {
	j := smallJob(t, nil)
	var said strings.Builder
	c, err := j.Compare(context.Background(), "", false, NewProgress(&said, nil, nil))
	if err != nil {
		t.Fatal(err)
	}
	rows := c.Rows
	var names []string
	for _, r := range rows {
		names = append(names, r.Policy)
		if r.Device <= 0 || r.StepRatio <= 0 || r.Speed <= 0 || r.Loss <= 0 || len(r.Digest) != 64 {
			t.Errorf("implausible: %+v", r)
		}
		if math.Abs(r.forecastError()) > closeEnough {
			t.Errorf("predicted was %d: %+v", r.Forecast, r)
		}
		if r.Budget > 0 && r.Device > r.Budget || (r.Budget > 0) != (r.Policy == "budget") {
			t.Errorf("the budget: %+v", r)
		}
		if !strings.Contains(said.String(), r.Policy+" ") {
			t.Errorf("%s is not in %q", r.Policy, said.String())
		}
	}
	if !slices.Equal(names, train.Policies) || rows[0].StepRatio != 1 {
		t.Errorf("rows are %+v", rows)
	}
	if bad := c.Different(); len(bad) > 0 {
		t.Errorf("%q differ: %+v", bad, rows)
	}
	text, err := json.Marshal(rows[0])
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"policy":"none","peak_device_bytes":`; !strings.HasPrefix(string(text), want) {
		t.Errorf("a row is %s", text)
	}
	var table strings.Builder
	c.WriteText(&table)
	if n := strings.Count(table.String(), "  yes\n"); n != len(rows) || !strings.Contains(table.String(), "bit for bit") {
		t.Errorf("the table is\n%s", table.String())
	}
	for _, l := range strings.Split(table.String(), "\n") {
		if len(l) > lineWidth {
			t.Errorf("a line of %d: %q", len(l), l)
		}
	}
	if strings.Contains(table.String(), "off by") {
		t.Errorf("nothing is off in\n%s", table.String())
	}
	rows[1].Forecast = rows[1].Device * 11 / 10
	table.Reset()
	c.WriteText(&table)
	if text := strings.Join(strings.Fields(table.String()), " "); !strings.HasSuffix(text, "The forecast for static is off by +10.0 %.") {
		t.Errorf("the table is\n%s", table.String())
	}
	rows[2].Digest = "another"
	table.Reset()
	c.WriteText(&table)
	if bad := c.Different(); !slices.Equal(bad, []string{"stash"}) || !strings.Contains(table.String(), "  no\n") || strings.Contains(table.String(), "bit for bit") {
		t.Errorf("%q differ, and the table is\n%s", bad, table.String())
	}
}

// Steps of a policy whose plans are final late are not measured, all policies do the same
// number of steps, and the last steps are measured whatever the plans are.
func TestCompareWithALatePlan(t *testing.T) {
	for _, x := range []struct{ steps, final, measured int }{{9, 5, 4}, {8, 100, 3}, {6, 100, 2}} {
		j := smallJob(t, func(o *Options) { o.Micro, o.Steps = 1, x.steps })
		seen := map[string]*contestant{}
		j.final = func(c *contestant) bool {
			seen[c.name] = c
			return c.name != "stash" || c.t.StepsDone() >= x.final
		}
		c, err := j.Compare(context.Background(), "", false, NewProgress(io.Discard, nil, nil))
		if err != nil {
			t.Fatal(err)
		}
		if bad := c.Different(); len(bad) > 0 {
			t.Errorf("%q differ from the first policy", bad)
		}
		for name, c := range seen {
			if len(c.took) != x.measured {
				t.Errorf("%d of %d steps of %s are measured, want %d", len(c.took), x.steps, name, x.measured)
			}
		}
		if len(seen) != len(train.Policies) {
			t.Errorf("the policies that were asked are %v", seen)
		}
	}
}

func interrupted(err error) bool {
	var e *InterruptedError
	return errors.As(err, &e) && e.Folder == ""
}

func TestCompareIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := smallJob(t, nil).Compare(ctx, "", false, NewProgress(io.Discard, nil, nil)); !interrupted(err) {
		t.Errorf("%v", err)
	}
}

// A run without a folder that is interrupted did one step, and says what is lost.
func TestRunIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	j := smallJob(t, func(o *Options) { o.Policy = "none" })
	if s, err := j.Run(ctx, "", false, NewProgress(io.Discard, nil, nil)); !interrupted(err) || s.Steps != 1 || s.Finished {
		t.Errorf("%+v, %v", s, err)
	}
}

// What a model's file says reaches the layers.
func TestModelSettings(t *testing.T) {
	c := smallJob(t, nil).config
	r := c.Settings.Routing
	if c.Settings.Theta != 5000 || c.Settings.Epsilon != 1e-6 || r.Factor != 2.5 || r.Balance != 0 || r.BiasRate != 1e-3 || !r.Normalise {
		t.Errorf("settings are %+v", c.Settings)
	}
	if c.Layout != (train.Layout{PP: 2, VPP: 1, EP: 2, DP: 2}) {
		t.Errorf("the layout is %+v", c.Layout)
	}
	o := DefaultOptions()
	o.Steps, o.Model.Name = 1, "tiny-dense"
	j, err := NewJob(o, machine(), nil)
	if err != nil || j.config.Layout != (train.Layout{PP: 2, VPP: 1, EP: 1, DP: 2}) {
		t.Errorf("tiny-dense: %v, %+v", err, j)
	}
}

// All presets of ours can be trained. SPEC S6.3
func TestTinyPresets(t *testing.T) {
	if testing.Short() {
		t.Skip("trains four models, which takes a minute under the race detector")
	}
	for _, name := range []string{"tiny-moe", "tiny-dense", "tiny-hybrid", "tiny-deepseek"} {
		o := DefaultOptions()
		o.Model, o.Policy, o.Steps, o.Micro, o.Seq = ModelSpec{Name: name}, "stash", 1, 1, 16
		j, err := NewJob(o, machine(), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		s, err := j.Run(context.Background(), "", false, NewProgress(io.Discard, nil, nil))
		// Before anything is learned every byte of 256 is as likely: ln 256 = 5.545.
		if err != nil || s.Loss < 5.3 || s.Loss > 5.8 {
			t.Errorf("%s: %+v, %v", name, s, err)
		}
	}
}

// A model is the same by its file, by YAML, and out of a run's options.
func TestModelFiles(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	if err := errors.Join(os.Mkdir("tiny-moe", 0o755), os.Mkdir("other", 0o755)); err != nil {
		t.Fatal(err)
	}
	if m, _, err := (&ModelSpec{Name: "tiny-moe"}).resolve(); err != nil || m.Name != "tiny-moe" {
		t.Errorf("beside a folder of its name a preset is %v, %v", m, err)
	}
	if _, _, err := (&ModelSpec{Name: "other"}).resolve(); err == nil || strings.Contains(err.Error(), "preset") {
		t.Errorf("a folder that is no preset: %v", err)
	}
	keys := small().Keys
	delete(keys, "_name_or_path")
	text, err := json.Marshal(keys)
	if err != nil {
		t.Fatal(err)
	}
	o := DefaultOptions()
	o.Model = ModelSpec{Keys: keys}
	yaml, err := o.encode()
	if err != nil {
		t.Fatal(err)
	}
	_, inner, _ := strings.Cut(string(yaml), "model:\n")
	inner, _, _ = strings.Cut(inner, "data:")
	var want any
	for name, text := range map[string]string{
		"small.json": string(text), "small.yaml": inner, "small.yml": strings.Replace(string(text), "}", `,"x":NaN}`, 1),
	} {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		spec := ModelSpec{Name: file}
		m, _, err := spec.resolve()
		if err != nil {
			t.Fatal(err)
		}
		if want == nil {
			want = m
		}
		if !reflect.DeepEqual(any(m), want) {
			t.Errorf("%s is %+v, want %+v", name, m, want)
		}
		// A run needs the file no more.
		o := DefaultOptions()
		o.Model = spec
		kept, err := o.encode()
		if err != nil {
			t.Fatal(err)
		}
		again := DefaultOptions()
		if err := again.parse("config.yaml", kept); err != nil {
			t.Fatal(err)
		}
		if m, _, err := again.Model.resolve(); err != nil || !reflect.DeepEqual(any(m), want) {
			t.Errorf("%s comes back as %+v, %v", name, m, err)
		}
	}
}

// Options come back as they were written, whatever file they came from, and a file
// that is wrong is one sentence.
func FuzzOptions(f *testing.F) {
	d := DefaultOptions()
	text, err := d.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(text))
	f.Add("policy: offload\noffload_modules: [core_attn, attn_proj]\nbudget: 60MiB\naux_loss: 0.5\n")
	f.Add("model: {model_type: llama, hidden_size: 8}\n")
	f.Add("steps: many")
	f.Add("a: [")
	f.Add("- 1")
	f.Add("policy: !!binary x\nx: &a *a")
	for _, c := range inputtest.HostileYAML {
		f.Add(c.Text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		defer inputtest.Bound(t, len(text))()
		o := DefaultOptions()
		if err := o.parse("f.yaml", []byte(text)); err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("%q is not one sentence", err)
			}
			return
		}
		out, err := o.encode()
		if err != nil {
			return // a model with keys that are no words
		}
		again := DefaultOptions()
		if err := again.parse("f.yaml", out); err != nil {
			t.Fatalf("%q was written as %q: %v", text, out, err)
		}
		second, err := again.encode()
		if err != nil || string(second) != string(out) {
			t.Errorf("%q was written as %q, and that as %q, %v", text, out, second, err)
		}
	})
}

// openFolder claims a folder on the disk and begins a run there.
func openFolder(dir string, o *Options, done int, warn func(string)) (*folder, error) {
	f, err := claim(disk.OS{}, dir)
	if err != nil {
		return nil, err
	}
	if err := f.begin(o, done, warn); err != nil {
		return nil, errors.Join(err, f.undo())
	}
	return f, nil
}

// Metrics are cut at the checkpoint, also in the middle of a line.
func TestFolder(t *testing.T) {
	o := DefaultOptions()
	dir := filepath.Join(t.TempDir(), "a", "b")
	f, err := openFolder(dir, &o, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		if err := f.record(line{Step: i + 1, Metrics: train.Metrics{Loss: float64(i)}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := openFolder(dir, &o, 0, nil); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second run in the folder: %v", err)
	}
	if _, err := io.WriteString(f.metrics, `{"step":6,"lo`); err != nil {
		t.Fatal(err)
	}
	if err := f.close(); err != nil {
		t.Fatal(err)
	}
	for _, done := range []int{5, 3, 0} {
		f, err := openFolder(dir, &o, done, nil)
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(dir, metricsName))
		if err != nil || strings.Count(string(text), "\n") != done || strings.Contains(string(text), `"lo`+"\n") {
			t.Errorf("%d steps: %q, %v", done, text, err)
		}
		if done > 0 && f.was.loss != float64(done-1) {
			t.Errorf("the last loss is %g", f.was.loss)
		}
		if err := f.undo(); err != nil {
			t.Error(err)
		}
		if !exists(filepath.Join(dir, configName)) {
			t.Error("what was there before is gone")
		}
	}
}

// Pipes that nothing reads in place of the report and the trace are warnings, and the run
// does not wait for a reader.
func TestPipesInTheFolder(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{report.PageFile, report.PerfettoFile} {
		if err := unix.Mkfifo(filepath.Join(dir, name), 0o600); err != nil {
			t.Skip(err)
		}
	}
	j, err := NewJob(tiny(), machine(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	s, err := j.Run(context.Background(), dir, false, NewProgress(&said, nil, nil))
	if n := strings.Count(said.String(), "it is a pipe that nothing reads"); err != nil || !s.Finished || n != 2 {
		t.Errorf("%+v, %v; it says %q", s, err, said.String())
	}
}

// A run removes what a process left that was killed while it wrote the trace for Perfetto.
func TestTemporaryTraceIsRemoved(t *testing.T) {
	dir := t.TempDir()
	left := filepath.Join(dir, "."+report.PerfettoFile+"-1234567890")
	if err := os.WriteFile(left, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	j, err := NewJob(tiny(), machine(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := j.Run(context.Background(), dir, false, NewProgress(io.Discard, nil, nil)); err != nil || exists(left) || !exists(filepath.Join(dir, report.PerfettoFile)) {
		t.Errorf("%v; the temporary file is left: %v", err, exists(left))
	}
}

// What fails before the first step leaves nothing.
func TestFolderIsUndone(t *testing.T) {
	top := t.TempDir()
	o := DefaultOptions()
	f, err := openFolder(filepath.Join(top, "a", "b"), &o, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.undo(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(top); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// Plain lines come once a second, with the first and the last, and a warning comes once.
func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // its clock is the test's
		var plain strings.Builder
		p := NewProgress(&plain, nil, nil)
		for i := range 100 {
			p.step("none", train.Metrics{Step: i, Loss: 2, Tokens: 10, Seconds: 1}, 100, nil, nil)
			time.Sleep(lineInterval / 10)
		}
		p.Log().Warn("strange", "rank", 1)
		p.Log().Warn("strange", "rank", 2)
		p.Log().Warn("strange: in another place")
		p.Log().Info("a tier grew")
		p.settle()
		if n := strings.Count(plain.String(), "step"); n != 11 || strings.Contains(plain.String(), "\x1b") || strings.Count(plain.String(), "warning: strange, rank=1") != 1 ||
			strings.Contains(plain.String(), "rank=2") || strings.Contains(plain.String(), "place") || strings.Contains(plain.String(), "tier") {
			t.Errorf("%d plain lines are %q", n, plain.String())
		}
	})
}

// Plain lines say when the run ends, once two steps tell and unless it is about to.
func TestProgressSaysTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var plain strings.Builder
		p := NewProgress(&plain, nil, nil)
		p.begin(live.Run{Policies: []string{"none"}, Steps: 4}, "")
		for i := range 4 {
			time.Sleep(5 * time.Minute)
			p.step("none", train.Metrics{Step: i, Loss: 2, Tokens: 10, Seconds: 1}, 4, nil, nil)
		}
		lines := strings.Split(strings.TrimSpace(plain.String()), "\n")
		for i, want := range []string{"0 B", "10m00s left", "5m00s left", "0 B"} {
			if i >= len(lines) || !strings.HasSuffix(lines[i], want) {
				t.Errorf("line %d of %q does not end with %q", i, lines, want)
			}
		}
	})
}

// Viewers of a resumed run see the peak of the whole run.
func TestViewersSeePeaksBefore(t *testing.T) {
	server, err := live.Listen("127.0.0.1:0", "")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	tr, err := train.New(smallJob(t, func(o *Options) { o.Policy = "none" }).config)
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	ranks := NewProgress(io.Discard, nil, server).ranks(tr, 0, []peak{{1, 1 << 40}, {1 << 40, 1}})
	now := peaksOf(tr, nil)
	for i, want := range []peak{{now[0].Device, 1 << 40}, {1 << 40, max(1, now[1].Host)}} {
		if got := (peak{ranks[i].Device.Peak, ranks[i].Host.Peak}); got != want || now[i].Device == 0 {
			t.Errorf("rank %d shows %+v, want %+v", i, got, want)
		}
	}
}

// A run was killed after its last step, before its summary or its pictures. Resuming it
// makes what is missing, with the figures of the steps that were done.
func TestResumeAfterTheLastStep(t *testing.T) {
	dir := t.TempDir()
	train := func(resume bool) Summary {
		j := smallJob(t, func(o *Options) { o.Policy, o.Steps = "stash", 3 })
		s, err := j.Run(t.Context(), dir, resume, NewProgress(io.Discard, nil, nil))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	want := train(false)
	files := []string{report.PageFile, report.PerfettoFile, summaryName}
	traces := len(report.TraceFiles(dir))
	for lost := 1; lost <= len(files); lost++ {
		for _, name := range files[:lost] {
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		began := report.Environment{Command: "the first", Began: "2001-02-03T04:05:06Z"}
		if err := writeJSON(filepath.Join(dir, report.EnvironmentFile), began); err != nil {
			t.Fatal(err)
		}
		s := train(true)
		if env := report.ReadEnvironment(dir); env.Began != began.Began || !strings.HasPrefix(env.Command, began.Command) || !s.idle && !strings.HasPrefix(env.Command, began.Command+"\n") {
			t.Errorf("%d files were lost: the run began %s with %q", lost, env.Began, env.Command)
		}
		for _, name := range files[:lost] {
			if !exists(filepath.Join(dir, name)) {
				t.Errorf("%d files were lost: there is no %s", lost, name)
			}
		}
		if s.report == "" || s.Tokens != want.Tokens || math.Abs(s.Speed-want.Speed) > 1e-6*want.Speed || s.Digest != want.Digest {
			t.Errorf("%d files were lost: %+v; want %+v", lost, s, want)
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, summaryName))
	if err != nil || !strings.Contains(string(text), `"step_ms"`) {
		t.Errorf("%s, %v", text, err)
	}
	if n := len(report.TraceFiles(dir)); n != traces {
		t.Errorf("%d traces, and %d before: one has no step", n, traces)
	}
	if s := train(true); s.report != "" || !s.idle {
		t.Errorf("nothing was lost: %+v", s)
	}
}
