// This file tests `stowage train` as a user meets it: what is refused, what is left in
// a folder, and that a run goes on where it ended, however it ended.

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train/run"
)

// smallModel is a mixture of experts that trains a step in milliseconds.
const smallModel = `{"model_type":"mixtral","hidden_size":32,"intermediate_size":16,"num_hidden_layers":2,"num_attention_heads":2,
"num_key_value_heads":1,"num_local_experts":4,"num_experts_per_tok":2,"vocab_size":256,"max_position_embeddings":512}`

// inFolder makes an empty folder with the small model the working one, and gives the
// words of a command that trains it.
func inFolder(t *testing.T) (words string) {
	t.Helper()
	t.Chdir(t.TempDir())
	writeFile(t, "small.json", smallModel)
	return "train --model small.json --micro 1 --seq 16 "
}

func writeFile(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// trained runs a command that must work, and reads its summary.
func trained(t *testing.T, line string) (s run.Summary) {
	t.Helper()
	stdout, stderr, code := command(strings.Fields(line + " --json")...)
	if code != exitOK {
		t.Fatalf("%s: code %d, errors %q", line, code, stderr)
	}
	if strings.HasPrefix(stdout, "[") { // a comparison
		return s
	}
	if err := json.Unmarshal([]byte(stdout), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// losses returns those in a run's folder, which must have a line for each step.
func losses(t *testing.T, dir string) (out []float64) {
	t.Helper()
	f, err := os.Open(filepath.Join(dir, "metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for in := bufio.NewScanner(f); in.Scan(); {
		var m struct {
			Step int     `json:"step"`
			Loss float64 `json:"loss"`
		}
		if err := json.Unmarshal(in.Bytes(), &m); err != nil || m.Step != len(out)+1 {
			t.Fatalf("%s: line %d is %q: %v", dir, len(out)+1, in.Text(), err)
		}
		out = append(out, m.Loss)
	}
	return out
}

// Whatever is wrong is one sentence, with code 2, and leaves nothing behind.
func TestTrainErrors(t *testing.T) {
	var all strings.Builder
	t.Run("lines", func(t *testing.T) { trainErrors(t, &all) }) // golden files are beside the test again behind it
	golden.Check(t, "train-errors.txt", all.String())
}

var (
	trainSizes = regexp.MustCompile(`[0-9.]+ (?:KiB|B)\b`)
	trainRanks = regexp.MustCompile(`rank [0-9]+:`)
	trainNames = regexp.MustCompile(`(rank N: .*there are )\[.*\]`)
)

func trainErrors(t *testing.T, all *strings.Builder) {
	words := inFolder(t)
	for name, text := range map[string]string{
		"short.txt": "hello", "key.yaml": "policy: stash\npolcy: none\n", "kind.yaml": "steps: many\n", "part.yaml": "steps: 2.5\n", "syntax.yaml": "a: [\n", "nothing.yaml": "# steps: 9\n",
		"bad.json": `{"model_type":`, "gelu.json": strings.Replace(smallModel, "{", `{"hidden_act":"gelu",`, 1), "negative.json": `{"model_type":"mixtral","hidden_size":-3}`,
	} {
		writeFile(t, name, text)
	}
	for _, dir := range []string{"empty", "mine"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	writeFile(t, "mine/config.yaml", "somebody: else\n")
	before, err := filepath.Glob("*")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		"--polcy none", "--policy nothing", "--policy budget", "fast", "--offload-modules", "--aux-loss much",
		"--model nope.json", "--model bad.json", "--model gelu.json", "--model empty", "--model negative.json", "--model gpt-oss-20b",
		"--config key.yaml", "--config kind.yaml", "--config part.yaml", "--config syntax.yaml", "--config nothing.yaml", "--config nope.yaml",
		"--pp 3", "--ep 3", "--dp 3 --ep 2", "--vpp 2", "--model tiny-dense --ep 2",
		"--data empty", "--data short.txt", "--data nope",
		"--micro -1", "--seq 0", "--seq 100000", "--steps 0", "--lr 0", "--lr -1", "--lr 1e39", "--aux-loss 1e39", "--dp 99999999", "--clip NaN", "--beta1 2", "--pool arena --prefetch 0", "--capacity-factor -1",
		"--budget 60", "--budget -1MiB", "--budget 1KiB --out q", "--offload-fraction 2 --out q",
		"--offload-modules core_atn", "--offload-modules qk_norm --out q", "--offload-modules core_attn --recompute-modules core_attn",
		"--stash-modules core_attn", "--policy none --stash-modules moe_act --out q",
		"--graph atn", "--graph attn moe", "--policy none --graph attn --out q",
		"--pool maximum", "--dispatch rings", "--device gpu",
		"--hold-out 1", "--hold-out -0.1", "--eval-every 3", "--hold-out 0.5 --eval-every -1", "--hold-out 1e-9", "--hold-out 0.0001 --seq 128", "--hold-out 0.9999 --seq 128",
		"--budget 260KiB --out q", "--budget 260KiB --dry-run", "--dry-run --pp 3",
		"--profile --dry-run", "--profile --graph attn", "--profile --policy graphs", "--profile --policy all", "--profile --steps 7 --out q",
		"--policy stash --out small.json", "--policy stash --out short.txt/x", "--policy stash --out mine", "--resume", "--out q --resume",
	} {
		stdout, stderr, code := command(strings.Fields(words + line)...)
		if code != exitUsage || stdout != "" || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%q: code %d, output %q, errors %q", line, code, stdout, stderr)
		}
		// What a rank holds changes with the trainer, and which says so first with the wind;
		// each has modules of its own.
		stderr = trainRanks.ReplaceAllString(trainSizes.ReplaceAllString(stderr, "SIZE"), "rank N:")
		all.WriteString("$ stowage train " + line + "\n" + trainNames.ReplaceAllString(stderr, "${1}[ITS MODULES]"))
	}
	if after, _ := filepath.Glob("*"); !slices.Equal(after, before) {
		t.Errorf("left behind: %q, before it was %q", after, before)
	}
}

// A folder without write permission is refused before anything is trained.
func TestTrainWithoutPermission(t *testing.T) {
	if os.Getuid() == 0 {
		t.Skip("everything is permitted to root")
	}
	words := inFolder(t)
	if err := os.Mkdir("shut", 0o555); err != nil {
		t.Fatal(err)
	}
	stdout, stderr, code := command(strings.Fields(words + "--policy stash --out shut/run")...)
	if code != exitUsage || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, "permission denied") {
		t.Errorf("code %d, output %q, errors %q", code, stdout, stderr)
	}
}

// SPEC S6.3
func TestTrainWithoutGPU(t *testing.T) {
	if _, err := openGPU(0); err == nil {
		t.Skip("this machine has a GPU")
	}
	words := inFolder(t)
	_, stderr, code := command(strings.Fields(words + "--policy none --device cuda --out q")...)
	if _, err := os.Stat("q"); code != exitFailure || strings.Count(stderr, "\n") != 1 || err == nil {
		t.Errorf("code %d, errors %q, the folder: %v", code, stderr, err)
	}
}

// contents returns the files in a folder, with when they were written. It leaves out the
// lock, which every process takes before it looks at a folder.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == "lock" {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		text, err := os.ReadFile(path)
		all[path] = info.ModTime().String() + string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// A run in two parts is the run in one, also under another memory policy.
func TestTrainResumes(t *testing.T) {
	words := inFolder(t)
	whole := trained(t, words+"--policy stash --steps 6 --out whole")
	trained(t, words+"--policy stash --steps 3 --out parts")
	parts := trained(t, "train --out parts --resume --steps 6 --policy offload --recompute-modules layernorm")
	if parts.Digest != whole.Digest || parts.Steps != 6 || !parts.Finished || parts.Loss != whole.Loss {
		t.Errorf("in parts %+v, whole %+v", parts, whole)
	}
	want := losses(t, "whole")
	if got := losses(t, "parts"); len(got) != 6 || !slices.Equal(got, want) {
		t.Errorf("losses are %v, want %v", got, want)
	}
	before := contents(t, "parts")
	if again := trained(t, "train --out parts --resume"); again.Digest != whole.Digest || again.Loss != whole.Loss || again.Device != parts.Device || again.Speed != parts.Speed {
		t.Errorf("nothing is left to do, and it came to %+v", again)
	}
	if stdout, stderr, code := command("train", "--out", "parts", "--resume"); code != exitOK || stderr != "" || stdout != "nothing to do: the run has finished its 6 steps; give more steps to continue\n" {
		t.Errorf("code %d, output %q, errors %q", code, stdout, stderr)
	}
	if !maps.Equal(contents(t, "parts"), before) {
		t.Error("nothing was left to do, and files of the run changed")
	}
	for line, say := range map[string]string{
		"train --out parts --policy none":             "resume it",
		"train --out parts --resume --steps 2":        "has done",
		"train --out parts --resume --seed 3":         "stowage: --seed 3 differs from the run's 1; resume with the settings of the run, or start",
		"train --out parts --resume --lr 1 --steps 7": "stowage: --lr 1 differs from the run's 0.003; ",
		"train --out parts --resume --decay 9":        "stowage: --decay 9 differs from the run's 0",
		"train --out parts --resume --aux-loss 1":     "stowage: --aux-loss 1 differs from the run's 0",
		"train --out parts --resume --micro 3":        "stowage: --micro 3 makes ",
		"train --out parts --resume --bf16":           "stowage: --bf16 differs: this run has bf16, and the one to resume fp32; ",
		"train --out parts --resume --model tiny-moe": "stowage: --model tiny-moe differs from the run's small; ",
		"train --out parts --resume --dp 1 --ep 1":    "stowage: --dp 1 makes 2 sequences a step, but the run has 4; choose dp, microbatches and micro with the product 4",
	} {
		if _, stderr, code := command(strings.Fields(line)...); code != exitUsage || !strings.Contains(stderr, say) {
			t.Errorf("%s: code %d, errors %q", line, code, stderr)
		}
	}
	if got := losses(t, "parts"); !slices.Equal(got, want) {
		t.Errorf("refusals changed the metrics to %v", got)
	}
	writeFile(t, "other.yaml", "steps: 1\n")
	copied := trained(t, "train --config parts/config.yaml --steps 6 --policy none --offload-modules= --recompute-modules=")
	if copied.Digest != whole.Digest {
		t.Errorf("from its configuration it came to %+v", copied)
	}
}

// A run goes on with fewer replicas and with sharded parameters, and then as it began. Losses
// differ by the order of sums.
func TestTrainResumesOnAnotherLayout(t *testing.T) { // SPEC S7.5
	words := inFolder(t)
	want := trained(t, words+"--policy stash --steps 5 --out whole")
	trained(t, words+"--policy stash --steps 2 --out parts")
	trained(t, "train --out parts --resume --steps 3 --dp 1 --ep 1 --pp 1 --microbatches 4")
	trained(t, "train --out parts --resume --steps 4 --dp 4 --ep 2 --pp 1 --microbatches 1 --pool arena --grad-comm-dtype fp32")
	got := trained(t, "train --out parts --resume --steps 5 --dp 2 --pp 2 --microbatches 2 --pool=")
	if !got.Finished || math.Abs(got.Loss-want.Loss) > 1e-4*want.Loss {
		t.Errorf("loss %v, want about %v", got.Loss, want.Loss)
	}
	all := losses(t, "whole")
	for i, loss := range losses(t, "parts") {
		if math.Abs(loss-all[i]) > 1e-4*all[i] {
			t.Errorf("step %d has loss %v, want about %v", i+1, loss, all[i])
		}
	}
}

// A run that is damaged is a failure and no wrong command line, whatever part of it is damaged.
func TestTrainDamagedRuns(t *testing.T) {
	words := inFolder(t)
	trained(t, words+"--policy none --steps 2 --save-every 0 --out run")
	const step = "run/checkpoints/step-00000002"
	for want, spoil := range map[string]func() error{
		"run/config.yaml, line 1: expected YAML": func() error { return os.WriteFile("run/config.yaml", []byte("model: [\n"), 0o644) },
		"run/config.yaml, line 1: unknown key":   func() error { return os.WriteFile("run/config.yaml", []byte("colour: red\n"), 0o644) },
		"the only checkpoint in run/checkpoints is damaged: start a new run in another folder": func() error {
			return os.Truncate(step+"/checkpoint.json", 9)
		},
		"the only checkpoint in run/checkpoints is damaged: start a new run": func() error { // and there are no options
			return errors.Join(os.Remove("run/config.yaml"), os.Truncate(step+"/checkpoint.json", 9))
		},
		"its checkpoints are not in run/checkpoints": func() error { return os.RemoveAll("run/checkpoints") },
	} {
		if err := os.CopyFS("kept", os.DirFS("run")); err != nil {
			t.Fatal(err)
		}
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		_, stderr, code := command("train", "--out", "run", "--resume", "--steps", "3")
		if code != exitFailure || !strings.Contains(stderr, "stowage: ") || !strings.Contains(stderr, want) || strings.Contains(stderr, "--help") {
			t.Errorf("%s: code %d, errors %q", want, code, stderr)
		}
		if err := errors.Join(os.RemoveAll("run"), os.Rename("kept", "run")); err != nil {
			t.Fatal(err)
		}
	}
}

// A finished run whose checkpoints are gone is not started again: that would lose its
// metrics. One that was stopped before its first checkpoint is.
func TestTrainLostCheckpoints(t *testing.T) {
	words := inFolder(t)
	trained(t, words+"--policy none --steps 2 --out run")
	if err := os.Rename("run/checkpoints", "elsewhere"); err != nil {
		t.Fatal(err)
	}
	before := contents(t, "run")
	const want = "stowage: the run in run finished 2 steps, but its checkpoints are not in run/checkpoints; put them back, or start a new run in another folder\n"
	if stdout, stderr, code := command("train", "--out", "run", "--resume", "--steps", "3"); code != exitFailure || stdout != "" || stderr != want {
		t.Errorf("code %d, output %q, errors %q", code, stdout, stderr)
	}
	if !maps.Equal(contents(t, "run"), before) {
		t.Error("files of the run changed")
	}
	if err := os.Remove("run/summary.json"); err != nil {
		t.Fatal(err)
	}
	trained(t, "train --out run --resume --steps 3")
}

// What the trainer does not use of a model is said.
func TestTrainWarnsOfKeys(t *testing.T) {
	words := inFolder(t)
	writeFile(t, "small.json", strings.Replace(smallModel, "{", `{"rope_scaling":{"rope_type":"yarn"},"attention_dropout":0.1,"router_jitter_noise":0.0,"n_group":8,`, 1))
	const want = "warning: the trainer does not use rope_scaling, n_group, attention_dropout of the model\n"
	if _, stderr, code := command(strings.Fields(words + "--policy none --dry-run")...); code != exitOK || stderr != want {
		t.Errorf("code %d, errors %q", code, stderr)
	}
}

// Numbers that are none end a run in a sentence.
func TestTrainDiverges(t *testing.T) {
	words := inFolder(t)
	for _, line := range []string{"--policy none --out run", "--steps 9"} {
		stdout, stderr, code := command(strings.Fields(words + "--lr 1e30 --warm-up 0 --json " + line)...)
		if last := stderr[strings.LastIndex(strings.TrimSpace(stderr), "\n")+1:]; code != exitFailure || stdout != "" || !strings.Contains(last, "lower learning rate") {
			t.Errorf("%s: code %d, output %q, errors %q", line, code, stdout, stderr)
		}
	}
}

// A run that was started without traces is resumed without them, unless a flag asks.
func TestResumeWithoutTrace(t *testing.T) {
	t.Chdir(t.TempDir())
	tiny := "train --model tiny-dense --policy none --pp 1 --dp 1 --micro 1 --seq 8 --microbatches 1 --trace=false --out run --steps 1"
	for _, x := range []struct {
		line  string
		trace bool
	}{{tiny, false}, {"train --out run --resume --steps 2", false}, {"train --out run --resume --steps 3 --trace", true}} {
		trained(t, x.line)
		if _, err := os.Stat("run/trace"); (err == nil) != x.trace {
			t.Errorf("%s: the folder of traces: %v; want one: %v", x.line, err, x.trace)
		}
	}
}

// A path with .. means the same to every file and message.
func TestOutWithDots(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := errors.Join(os.MkdirAll("far/away", 0o755), os.Symlink("far/away", "link")); err != nil {
		t.Fatal(err)
	}
	for _, out := range []string{"b/../c", "link/../z"} {
		stdout, stderr, code := command(strings.Fields("train --model tiny-dense --policy none --pp 1 --dp 1 --micro 1 --seq 8 --microbatches 1 --steps 1 --out " + out)...)
		if code != exitOK || !strings.Contains(stdout, "the run is in "+filepath.Clean(out)+"\n") {
			t.Errorf("%s: code %d, %q, %q", out, code, stdout, stderr)
		}
		for _, file := range []string{"config.yaml", "report.html", "lock"} {
			if _, err := os.Stat(filepath.Join(filepath.Clean(out), file)); err != nil {
				t.Errorf("%s: %v", out, err)
			}
		}
	}
	if found, _ := filepath.Glob("far/*"); len(found) != 1 {
		t.Errorf("files were written behind the link: %v", found)
	}
}

// A resume that is refused leaves the options of the run as they were.
func TestTrainRefusedResume(t *testing.T) {
	words := inFolder(t)
	trained(t, words+"--policy stash --steps 2 --out run")
	before, err := os.ReadFile("run/config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, budget := range []string{"1KiB", "260KiB"} {
		_, stderr, code := command(strings.Fields("train --out run --resume --steps 3 --budget " + budget)...)
		after, err := os.ReadFile("run/config.yaml")
		if code != exitUsage || err != nil || string(after) != string(before) {
			t.Errorf("%s: code %d, errors %q; the options are %q, %v", budget, code, stderr, after, err)
		}
	}
	if s := trained(t, "train --out run --resume --steps 3"); s.Steps != 3 {
		t.Errorf("%+v", s)
	}
}

// A damaged checkpoint is passed over with a sentence.
func TestTrainFallsBack(t *testing.T) {
	words := inFolder(t)
	whole := trained(t, words+"--policy stash --steps 4 --out run --save-every 2")
	file := filepath.Join("run", "checkpoints", "step-00000004", "model-00002-of-00004.safetensors")
	if err := os.Truncate(file, 100); err != nil {
		t.Fatal(err)
	}
	stdout, stderr, code := command("train", "--out", "run", "--resume", "--json")
	var s run.Summary
	if err := json.Unmarshal([]byte(stdout), &s); err != nil || code != exitOK || s.Digest != whole.Digest {
		t.Errorf("code %d, %+v, errors %q", code, s, stderr)
	}
	if !strings.Contains(stderr, "warning: skipping the checkpoint") || !strings.Contains(stderr, "continuing after step 2") {
		t.Errorf("it said %q", stderr)
	}
}

// ignored are the signals that the test was started to ignore, as nohup does with SIGHUP.
var ignored = slices.DeleteFunc(slices.Clone(stops), func(sig os.Signal) bool { return !signal.Ignored(sig) })

// passSignals lets programs that a test starts have all signals: what the test ignores is
// inherited, and what it catches is not.
func passSignals(t *testing.T) {
	if len(ignored) == 0 {
		return
	}
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, ignored...)
	t.Cleanup(func() { signal.Stop(caught) })
}

// program returns the program as a process of its own.
func program(t *testing.T, line string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	passSignals(t)
	cmd := exec.Command(self, strings.Fields(line)...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	return cmd
}

// Killed again and again, at any moment, a run comes to what it comes to undisturbed.
// SPEC S9.1
func TestTrainSurvivesKills(t *testing.T) {
	steps, most := 30, 16
	if testing.Short() {
		steps, most = 8, 5
	}
	words := inFolder(t) + fmt.Sprintf("--policy stash --steps %d --save-every 1 --seed 5 ", steps)
	whole := trained(t, words+"--out whole")
	began := time.Now()
	if err := program(t, words+"--out timed").Run(); err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	random := rand.New(rand.NewPCG(1, 2))
	kills := 0
	for attempt := 0; ; attempt++ {
		line := words + "--out run"
		if _, err := os.Stat("run/config.yaml"); err == nil {
			line = "train --out run --resume"
		}
		cmd := program(t, line)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if attempt < most {
			time.Sleep(time.Duration(random.Float64() * float64(took) / 4))
			if err := cmd.Process.Kill(); err == nil {
				kills++
			}
		}
		err := cmd.Wait()
		if err == nil {
			break
		}
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Exited() {
			t.Fatalf("attempt %d: %v", attempt, err)
		}
	}
	done := trained(t, "train --out run --resume")
	if got, want := losses(t, "run"), losses(t, "whole"); done.Digest != whole.Digest || !slices.Equal(got, want) {
		t.Errorf("after %d kills %+v with losses %v, undisturbed %+v with %v", kills, done, got, whole, want)
	}
	t.Logf("%d kills, an undisturbed run takes %v", kills, took)
}

// What is held out is evaluated when it is due and at the end, also by a run in parts,
// and the run is otherwise the one that evaluates nothing.
func TestTrainEvaluates(t *testing.T) {
	words := inFolder(t) + "--policy stash --hold-out 0.1 "
	silent := trained(t, words+"--steps 5 --out silent")
	whole := trained(t, words+"--steps 5 --eval-every 2 --out whole")
	trained(t, words+"--steps 3 --eval-every 2 --out parts")
	parts := trained(t, "train --out parts --resume --steps 5")
	for name, s := range map[string]run.Summary{"silent": silent, "whole": whole, "parts": parts, "again": trained(t, "train --out parts --resume")} {
		if s.Digest != whole.Digest || s.Eval == nil || *s.Eval != *whole.Eval {
			t.Errorf("%s came to %+v, whole to %+v", name, s, whole)
		}
	}
	for dir, want := range map[string][]int{"silent": {5}, "whole": {2, 4, 5}, "parts": {2, 3, 4, 5}} {
		text, err := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		for line := range strings.Lines(string(text)) {
			var m struct {
				Step int      `json:"step"`
				Eval *float64 `json:"eval_loss"`
			}
			if err := json.Unmarshal([]byte(line), &m); err != nil {
				t.Fatal(err)
			}
			if m.Eval != nil {
				got = append(got, m.Step)
			}
			if m.Step == 5 && *m.Eval != *whole.Eval {
				t.Errorf("%s ends with %g, want %g", dir, *m.Eval, *whole.Eval)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s was evaluated after %v, want %v", dir, got, want)
		}
	}
	if _, stderr, code := command(strings.Fields("train --out parts --resume --steps 6 --hold-out 0.2")...); code != exitUsage || !strings.Contains(stderr, "is another text; give the same text with the same part held out") {
		t.Errorf("resumed with what was held out: code %d, errors %q", code, stderr)
	}
}

// After a resumption under a policy that needs less, everything that tells of the peak
// tells of the highest: summary, terminal, metrics and page, in all and by rank.
// SPEC S9.6
func TestTrainPeakOfAllParts(t *testing.T) {
	words := inFolder(t)
	for _, killed := range []bool{false, true} {
		dir := fmt.Sprint("killed-", killed)
		first := trained(t, words+"--policy offload --steps 2 --out "+dir)
		if killed { // before it wrote its summary
			if err := os.Remove(filepath.Join(dir, "summary.json")); err != nil {
				t.Fatal(err)
			}
		}
		second := trained(t, words+"--policy none --steps 1")
		if second.Device >= first.Device || second.Host >= first.Host {
			t.Fatalf("%d after %d bytes: the test shows nothing", second.Device, first.Device)
		}
		stdout, stderr, code := command(strings.Fields("train --out " + dir + " --resume --steps 3 --policy none")...)
		if want := fmt.Sprintf("at most %s of device and %s of host", memory.Bytes(first.Device).Short(), memory.Bytes(first.Host).Short()); code != exitOK || !strings.Contains(stdout, want) {
			t.Errorf("it says %q, %q; want %q", stdout, stderr, want)
		}
		r, err := report.Read(dir)
		if err != nil || len(r.Runs) != 1 {
			t.Fatalf("%+v, %v", r, err)
		}
		x := r.Runs[0]
		var figures, ranks [2]int64
		for _, f := range x.Figures {
			switch f.Name {
			case "peak_device_bytes":
				figures[0] = int64(f.Value)
			case "peak_host_bytes":
				figures[1] = int64(f.Value)
			}
		}
		for _, k := range x.Ranks {
			ranks[0], ranks[1] = max(ranks[0], k.Memory.Peak.Bytes), max(ranks[1], k.Memory.Peak.Host)
			for _, c := range k.Counts {
				if c.Name == "peak_device_bytes" && int64(c.Value) != k.Memory.Peak.Bytes {
					t.Errorf("rank %d had %d bytes by the summary and %d by its trace", k.Rank, int64(c.Value), k.Memory.Peak.Bytes)
				}
			}
		}
		n := len(x.Steps.Device)
		want := [2]int64{first.Device, first.Host}
		if steps := [2]int64{x.Steps.Device[n-1], x.Steps.Host[n-1]}; figures != want || steps != want || ranks != want {
			t.Errorf("want %d: the summary says %d, the steps say %d, the traces %d", want, figures, steps, ranks)
		}
	}
}
