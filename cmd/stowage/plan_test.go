package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/plaintext"
	"github.com/stowage-dev/stowage/internal/planview"
	"github.com/stowage-dev/stowage/memory"
)

func TestPlanHelp(t *testing.T) {
	for name, line := range map[string]string{
		"help-plan.txt":          "plan --help",
		"help-plan-explain.txt":  "help plan explain",
		"help-plan-ring.txt":     "plan ring --help",
		"help-plan-scan.txt":     "plan scan --help",
		"help-plan-validate.txt": "plan validate -h",
	} {
		stdout, stderr, code := command(strings.Fields(line)...)
		if code != exitOK || stderr != "" || !strings.Contains(stdout, "Examples:") {
			t.Errorf("%s: code %d, errors %q", line, code, stderr)
		}
		golden.Check(t, name, stdout)
	}
	if bare, _, code := command("plan"); code != exitOK || !strings.HasPrefix(bare, "Predict what a training job needs") {
		t.Errorf("without arguments: code %d, %q", code, bare)
	}
}

// The examples of the help work as they stand, where they need no file.
func TestPlanExamples(t *testing.T) {
	tried := 0
	for _, line := range strings.Split(strings.ReplaceAll(planExample, "\\\n", ""), "\n") {
		words := strings.Fields(strings.ReplaceAll(line, "'", ""))
		if strings.Contains(line, ".yaml") || strings.Contains(line, ".json") || (testing.Short() && strings.Contains(line, "--search layout")) {
			continue
		}
		tried++
		if stdout, stderr, code := command(words[1:]...); code != exitOK || stderr != "" || len(stdout) < 300 {
			t.Errorf("%s: code %d, errors %q", line, code, stderr)
		}
	}
	if tried < 3 {
		t.Errorf("only %d examples were tried", tried)
	}
}

// planFiles writes small inputs into a folder that becomes the current one.
func planFiles(t *testing.T, files map[string]string) {
	t.Helper()
	t.Chdir(t.TempDir())
	for name, text := range files {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// jobs are small enough for golden files, and between them have every part of an
// answer.
var planJobs = map[string]string{
	"plan-dense":     "plan --model llama-3-8b --gpu h100 --gpus 8 --tp 2 --mbs 1 --gbs 8 --seq 8192",
	"plan-policy":    "plan --model mixtral-8x7b --gpu h100 --gpus 32 --pp 4 --ep 8 --mbs 1 --gbs 64 --seq 4096 --budget 52GiB",
	"plan-given":     "plan --model mixtral-8x7b --gpu h100 --gpus 32 --pp 4 --ep 8 --gbs 32 --seq 4096 --recompute moe_act --offload core_attn expert_fc1 --routing skewed:1.3",
	"plan-too-large": "plan --model llama-3-70b --gpu h100 --gpus 8 --tp 8 --gbs 8 --seq 8192 --rank none",
	"plan-largest":   "plan --model llama-3-8b --gpu h100 --gpus 8 --tp 2 --largest seq --search policy --rank none",
	"plan-no-gpu":    "plan --model qwen3-30b-a3b --gpus 8 --ep 8 --gbs 8 --seq 4096 --rank none",
	"plan-layouts":   "plan --model llama-3-8b --gpu h100 --gpus 8 --gbs 16 --seq 8192 --search layout --rank none",
}

// SPEC S6.1: what people see.
func TestPlanText(t *testing.T) {
	for name, line := range planJobs {
		stdout, stderr, code := command(strings.Fields(line)...)
		if code != exitOK || stderr != "" {
			t.Errorf("%s: code %d, errors %q", line, code, stderr)
			continue
		}
		for _, l := range strings.Split(stdout, "\n") {
			if len([]rune(l)) > plaintext.Width {
				t.Errorf("%s: a line has %d columns: %s", name, len([]rune(l)), l)
			}
		}
		golden.Check(t, name+".txt", "$ stowage "+line+"\n"+stdout)
	}
}

// planJSON runs a job for its report.
func planJSON(t *testing.T, line string) (*planview.Report, string) {
	t.Helper()
	stdout, stderr, code := command(strings.Fields(line + " --json")...)
	if code != exitOK || stderr != "" {
		t.Fatalf("%s: code %d, errors %q", line, code, stderr)
	}
	var r planview.Report
	d := json.NewDecoder(strings.NewReader(stdout))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		t.Fatal(err)
	}
	return &r, stdout
}

// The report is whole: causes add up to the peak, the timeline reaches it, the
// heaviest rank is the heaviest, and nothing is no number.
func TestPlanJSON(t *testing.T) {
	for name, line := range planJobs {
		r, text := planJSON(t, line)
		if name == "plan-dense" {
			golden.Check(t, name+".json", text)
		}
		for _, k := range r.Ranks {
			var causes, items memory.Bytes
			for _, c := range k.Causes {
				causes += c.Bytes
			}
			for _, it := range k.Items {
				items += it.Bytes
			}
			if causes != k.Peak.Expected || items != causes {
				t.Errorf("%s, rank %d: causes add up to %d, items to %d, the peak is %d", name, k.Rank, causes, items, k.Peak.Expected)
			}
			if k.Peak.Expected > r.Peak.Expected {
				t.Errorf("%s: rank %d is heavier than rank %d", name, k.Rank, r.Heaviest)
			}
			for _, b := range []planview.Band{k.Static, k.Peak, k.Reserved} {
				if b.Low <= 0 || b.Low > b.Expected || b.Expected > b.High {
					t.Errorf("%s, rank %d: the band %+v", name, k.Rank, b)
				}
			}
		}
		var top memory.Bytes
		for _, p := range r.Timeline {
			top = max(top, p.Bytes())
		}
		if top != r.Peak.Expected {
			t.Errorf("%s: the timeline reaches %d, the peak is %d", name, top, r.Peak.Expected)
		}
		if (r.Hardware == nil) != (r.Time == nil) || len(r.Flags) != 3 {
			t.Errorf("%s: hardware %v, time %v, flags %d", name, r.Hardware, r.Time, len(r.Flags))
		}
		checkNumbers(t, name, reflect.ValueOf(*r))
	}
}

// checkNumbers looks at every number of a report.
func checkNumbers(t *testing.T, name string, v reflect.Value) {
	switch v.Kind() {
	case reflect.Float64:
		if math.IsNaN(v.Float()) || math.IsInf(v.Float(), 0) || v.Float() < 0 {
			t.Errorf("%s: the number %g", name, v.Float())
		}
	case reflect.Int64:
		if v.Int() < 0 {
			t.Errorf("%s: the number %d", name, v.Int())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			checkNumbers(t, name+"."+v.Type().Field(i).Name, v.Field(i))
		}
	case reflect.Slice:
		for i := range v.Len() {
			checkNumbers(t, name, v.Index(i))
		}
	case reflect.Pointer:
		if !v.IsNil() {
			checkNumbers(t, name, v.Elem())
		}
	}
}

// Between what is expected and what is possible a plan commits itself to neither.
func TestPlanVerdict(t *testing.T) {
	line := planJobs["plan-dense"] + " --search none --rank none"
	r, _ := planJSON(t, line)
	for budget, want := range map[memory.Bytes]string{
		r.Reserved.High:         "\nFITS: ",
		r.Reserved.High - 1:     "\nMAY NOT FIT: ",
		r.Reserved.Expected:     "\nMAY NOT FIT: ",
		r.Reserved.Expected - 1: "\nDOES NOT FIT: ",
	} {
		stdout, stderr, code := command(strings.Fields(line + fmt.Sprintf(" --budget %dB", budget))...)
		if code != exitOK || !strings.Contains(stdout, want) {
			t.Errorf("a budget of %d of %+v: code %d, no %q, errors %q", budget, r.Reserved, code, want, stderr)
		}
	}
}

// A search answers with something that fits, and asking for what it found gives
// the same peak.
func TestPlanSearchFits(t *testing.T) {
	free, _ := planJSON(t, strings.TrimSuffix(planJobs["plan-policy"], " --budget 52GiB"))
	r, _ := planJSON(t, planJobs["plan-policy"])
	if free.Search != nil || r.Search == nil || !r.Fits || r.Missing != 0 || r.Reserved.High > r.Budget {
		t.Errorf("found %+v, which fits: %v", r.Search, r.Fits)
	}
	if free.Peak.Expected < r.Peak.Expected || free.Time.Step > r.Time.Step*1.000001 {
		t.Errorf("without a policy %d bytes and %g s, with one %d and %g", free.Peak.Expected, free.Time.Step, r.Peak.Expected, r.Time.Step)
	}
	for _, d := range r.Decisions {
		if d.Reason == "" || d.Group == "" {
			t.Errorf("%+v has no reason", d)
		}
	}
}

// The flags that are printed ask for what was planned: reading them back as a
// file gives the same memory.
func TestPlanFlagsReadBack(t *testing.T) {
	for _, name := range []string{"plan-dense", "plan-given"} {
		line := planJobs[name]
		r, _ := planJSON(t, line)
		stdout, stderr, code := command(strings.Fields(line + " --flags megatron")...)
		if code != exitOK || stderr != "" && !strings.HasPrefix(stderr, "note: ") {
			t.Fatalf("code %d, errors %q", code, stderr)
		}
		file := filepath.Join(t.TempDir(), "flags.sh")
		if err := os.WriteFile(file, []byte(stdout), 0o644); err != nil {
			t.Fatal(err)
		}
		rest := " --gpu h100 --gpus 8"
		if name == "plan-given" {
			rest = " --gpu h100 --gpus 32 --routing skewed:1.3"
		}
		again, _ := planJSON(t, "plan --megatron "+file+rest)
		if again.Peak != r.Peak || again.Reserved != r.Reserved {
			t.Errorf("%s: %+v becomes %+v", name, r.Peak, again.Peak)
		}
	}
	for _, program := range []string{"maxtext", "stowage"} {
		stdout, stderr, code := command(strings.Fields(planJobs["plan-given"] + " --flags " + program)...)
		if code != exitOK || stderr != "" && !strings.HasPrefix(stderr, "note: ") || len(stdout) < 100 {
			t.Errorf("%s: code %d, errors %q, %q", program, code, stderr, stdout)
		}
	}
}

// A job that came in a script gets the flags that change, and keeps all others. The script
// with the changes asks for what was found.
func TestPlanChanges(t *testing.T) {
	folder := t.TempDir()
	const flags = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --vocab-size 32000 " +
		"--seq-length 4096 --max-position-embeddings 4096 --swiglu --disable-bias-linear --num-experts 8 --moe-router-topk 2 " +
		"--moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8 --pipeline-model-parallel-size 4 " +
		"--global-batch-size 64 --micro-batch-size 1 --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather " +
		"--lr 1e-4 --recompute-activations"
	script := filepath.Join(folder, "train.sh")
	if err := os.WriteFile(script, []byte("torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py "+flags+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	same, _ := planJSON(t, "plan --megatron "+script+" --gpu h100")
	if f := same.Flags[0]; f.File != script || len(f.Changes) != 0 {
		t.Errorf("nothing was searched, and %s changes %q", f.File, f.Changes)
	}
	for line, want := range map[string][]string{
		" --budget 50GiB --search policy": {"- --recompute-activations", "+ --fine-grained-activation-offloading"},
		" --pp 2 --vpp 4":                 {"- --pipeline-model-parallel-size 4", "+ --pipeline-model-parallel-size 2", "+ --num-virtual-stages-per-pipeline-rank 4"},
		" --recompute none --mbs 2":       {"- --recompute-activations", "- --micro-batch-size 1", "+ --micro-batch-size 2"},
	} {
		line = "plan --megatron " + script + " --gpu h100" + line
		r, _ := planJSON(t, line)
		f := r.Flags[0]
		for _, w := range want {
			if !slices.Contains(f.Changes, w) {
				t.Errorf("%s: there is no %q in %q", line, w, f.Changes)
			}
		}
		for _, kept := range []string{"--overlap-grad-reduce", "--overlap-param-gather", "--lr 1e-4"} {
			if !strings.Contains(f.Text, kept) || strings.Contains(strings.Join(f.Changes, " "), kept) {
				t.Errorf("%s: %s is not kept: %q, %s", line, kept, f.Changes, f.Text)
			}
		}
		if stdout, _, _ := command(strings.Fields(line + " --flags changes")...); stdout != strings.Join(f.Changes, "\n")+"\n" {
			t.Errorf("%s: --flags changes prints %q", line, stdout)
		}
		after := filepath.Join(folder, "after.sh")
		if err := os.WriteFile(after, []byte("pretrain_gpt.py "+f.Text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		again, _ := planJSON(t, "plan --megatron "+after+" --gpu h100 --gpus 32 --search none")
		if len(again.Flags[0].Changes) != 0 || again.Setup.PP != r.Setup.PP || again.Setup.VPP != r.Setup.VPP || again.Setup.MicroBatch != r.Setup.MicroBatch ||
			!slices.Equal(again.Setup.RecomputeModules, r.Setup.RecomputeModules) || !slices.Equal(again.Setup.OffloadModules, r.Setup.OffloadModules) {
			t.Errorf("%s: found %+v, and the flags give %+v", line, r.Setup, again.Setup)
		}
	}
	if _, stderr, code := command(strings.Fields("plan --model tiny-moe --gpu h100 --flags changes")...); code != exitUsage || !strings.Contains(stderr, "--megatron") {
		t.Errorf("changes without a file: code %d, %q", code, stderr)
	}
	// A model without arguments gets all that was assumed for it.
	if r, _ := planJSON(t, "plan --model tiny-moe --gpu h100"); !strings.Contains(r.Flags[0].Text, "--overlap-grad-reduce") {
		t.Errorf("what was assumed is not in %s", r.Flags[0].Text)
	}
}

// The trainer takes the flags that are for it.
func TestPlanFlagsTrain(t *testing.T) {
	for _, line := range []string{"", " --budget 60GiB", " --graph attn moe_router --recompute layernorm --offload core_attn --fraction 0.5", " --graph moe --stash 1.5", " --pp 4 --ep 1 --vpp 2"} {
		stdout, stderr, code := command(strings.Fields("plan --model tiny-moe --gpu h100 --gpus 4 --pp 2 --ep 2 --gbs 8 --seq 128 --flags stowage" + line)...)
		if code != exitOK {
			t.Fatalf("%q: code %d, errors %q", line, code, stderr)
		}
		words := strings.Fields(strings.TrimPrefix(stdout, "stowage "))
		if _, stderr, code := command(append(words, "--dry-run")...); code != exitOK {
			t.Errorf("%q: %s: code %d, errors %q", line, stdout, code, stderr)
		}
	}
}

func TestPlanPage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "plan.html")
	stdout, stderr, code := command(strings.Fields(planJobs["plan-given"] + " --html " + file)...)
	if code != exitOK || stderr != "" || !strings.Contains(stdout, "the page is in "+file) {
		t.Errorf("code %d, errors %q", code, stderr)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"mixtral-8x7b on 32", "stowage plan --model", "core_attn", `id="chart"`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	stdout, stderr, code = command(strings.Fields(planJobs["plan-given"] + " --html " + filepath.Join(file, "x"))...)
	if code != exitUsage || stdout != "" || !strings.Contains(stderr, "--html") {
		t.Errorf("code %d, errors %q", code, stderr)
	}
}

// A report compared with arguments of the same job differs in nothing; another
// setting shows up.
func TestPlanCompareFiles(t *testing.T) {
	line := planJobs["plan-given"]
	_, text := planJSON(t, line)
	flags, _, _ := command(strings.Fields(line + " --flags megatron")...)
	planFiles(t, map[string]string{"a.json": text, "b.sh": flags, "c.sh": strings.ReplaceAll(flags, "core_attn", "moe_act")})
	rest := " --gpu h100 --gpus 32 --routing skewed:1.3 --json"
	for name, same := range map[string]bool{"b.sh": true, "c.sh": false} {
		stdout, stderr, code := command(strings.Fields("plan --compare a.json " + name + rest)...)
		if code != exitOK || stderr != "" {
			t.Fatalf("%s: code %d, errors %q", name, code, stderr)
		}
		var c planview.Comparison
		if err := json.Unmarshal([]byte(stdout), &c); err != nil {
			t.Fatal(err)
		}
		if (c.A.Peak == c.B.Peak) != same {
			t.Errorf("%s: %+v and %+v", name, c.A, c.B)
		}
		for _, s := range c.Settings {
			if s.Name != "model" && (same || s.Name != "offload_modules") {
				t.Errorf("%s: %+v differs", name, s)
			}
		}
	}
}

func TestPlanExplain(t *testing.T) {
	line := "plan explain core_attn " + strings.TrimPrefix(planJobs["plan-policy"], "plan ")
	stdout, stderr, code := command(strings.Fields(line)...)
	if code != exitOK || stderr != "" {
		t.Fatalf("code %d, errors %q", code, stderr)
	}
	golden.Check(t, "plan-explain.txt", "$ stowage "+line+"\n"+stdout)
	stdout, _, code = command(strings.Fields(line + " --json")...)
	var e planview.Explanation
	if err := json.Unmarshal([]byte(stdout), &e); err != nil || code != exitOK || e.Group != "core_attn" || len(e.Tensors) == 0 || e.Reason == "" {
		t.Errorf("code %d, %v, %s", code, err, stdout)
	}
}

// Routing counts say how much fuller the fullest rank is, layers taken together.
func TestPlanRoutingCounts(t *testing.T) {
	planFiles(t, map[string]string{"counts.jsonl": `{"version":1,"ranks":2,"tokens":10,"top_k":2,"layers":2,"microbatches":1}
{"step":0,"layer":0,"microbatch":0,"rank":0,"rows":14}
{"step":0,"layer":0,"microbatch":0,"rank":1,"rows":6}
{"step":0,"layer":1,"microbatch":0,"rank":0,"rows":10}
{"step":0,"layer":1,"microbatch":0,"rank":1,"rows":10}
`})
	line := "plan --model mixtral-8x7b --gpus 8 --ep 8 --gbs 8"
	balanced, _ := planJSON(t, line+" --routing balanced")
	natural, _ := planJSON(t, line)
	counted, _ := planJSON(t, line+" --routing counts:counts.jsonl")
	old, _ := planJSON(t, line+" --routing trace:counts.jsonl") // the old word
	if !reflect.DeepEqual(old.Setup, counted.Setup) || old.Peak != counted.Peak {
		t.Errorf("counts: gives %+v, trace: %+v", counted.Setup, old.Setup)
	}
	skewed, _ := planJSON(t, line+" --routing skewed:1.2")
	if counted.Setup.Imbalance != 1.2 || counted.Peak != skewed.Peak || counted.Peak.Expected <= balanced.Peak.Expected {
		t.Errorf("the counts give %g: %d bytes, balanced %d, skewed %d", counted.Setup.Imbalance, counted.Peak.Expected, balanced.Peak.Expected, skewed.Peak.Expected)
	}
	if !slices.ContainsFunc(counted.Warnings, func(n string) bool { return strings.Contains(n, "2 expert ranks, the job 8") }) {
		t.Errorf("nothing is said about the ranks of the counts: %q", counted.Warnings)
	}
	// What was assumed is said.
	for want, r := range map[string]*planview.Report{"counts counts.jsonl": counted, "natural": natural, "balanced": balanced, "skewed": skewed} {
		if r.Setup.Routing != want {
			t.Errorf("routing is %q, want %q", r.Setup.Routing, want)
		}
	}
	if natural.Setup.Imbalance != 1.1 || natural.Peak.Expected <= balanced.Peak.Expected {
		t.Errorf("natural routing counts %g", natural.Setup.Imbalance)
	}
}

// SPEC S6.1: memory, time and policy of a search are those of its settings, given
// as settings: every pipeline rank has its own share.
func TestPlanSharesByRank(t *testing.T) {
	line := "plan --model mixtral-8x7b --gpu h100 --gpus 32 --pp 4 --ep 8 --gbs 64 --seq 4096 --budget 52GiB"
	found, _ := planJSON(t, line)
	shares := found.Setup.OffloadFractions
	if len(shares) != 4 || shares[0] <= shares[3] || !found.Fits || found.Search.Nothing {
		t.Fatalf("fractions %v, fits %v", shares, found.Fits)
	}
	line += fmt.Sprintf(" --offload %s --offload-bytes %s", strings.Join(found.Setup.OffloadModules, " "), strings.Trim(fmt.Sprint(shares), "[]"))
	given, _ := planJSON(t, line)
	if !reflect.DeepEqual(given.Ranks, found.Ranks) || !reflect.DeepEqual(given.Time, found.Time) || !reflect.DeepEqual(given.Setup, found.Setup) {
		t.Errorf("found %+v, %+v; given %+v, %+v", found.Setup, found.Time, given.Setup, given.Time)
	}
	for _, f := range found.Flags {
		switch f.For {
		case "megatron":
			if !strings.Contains(f.Text, "--delta-offload-bytes-across-pp-ranks") || !slices.ContainsFunc(f.Notes, func(n string) bool { return strings.Contains(n, "with the flags rank") }) {
				t.Errorf("megatron: %s, %q", f.Text, f.Notes)
			}
		case "stowage":
			if !strings.Contains(f.Text, fmt.Sprintf("--offload-fraction %g --budget 52GiB", slices.Max(shares))) || !slices.ContainsFunc(f.Notes, func(n string) bool { return strings.Contains(n, "the largest") }) {
				t.Errorf("stowage: %s, %q", f.Text, f.Notes)
			}
		}
	}
}

// The size of a group is the same in both tables of a plan, wherever its parts are, and
// what the first one counts adds up.
func TestPlanSizesOfGroups(t *testing.T) {
	const job = "plan --model mixtral-8x7b --gpu h100 --gpus 32 --pp 4 --ep 8 --gbs 64 --seq 4096 "
	for _, more := range []string{"--budget 52GiB", "--offload-modules moe_act,core_attn", "--recompute-modules moe_act,layernorm"} {
		r, _ := planJSON(t, job+more)
		sizes := map[string]memory.Bytes{}
		for _, d := range r.Decisions {
			sizes[d.Group] = d.Bytes
		}
		moved := false
		for _, g := range r.Ranks[r.Heaviest].Groups {
			size, decided := sizes[g.Name]
			if off := g.Bytes - size; decided && g.Live > 0 && max(off, -off) > g.Bytes/1000 {
				t.Errorf("%s: a group of %s has %d bytes, and %d in the decisions", more, g.Name, g.Bytes, size)
			}
			if all := g.Total + g.Away + g.Dropped; all-g.Bytes*memory.Bytes(g.Live) >= memory.Bytes(max(g.Live, 1)) {
				t.Errorf("%s: %d groups of %s have %d bytes, not %d each", more, g.Live, g.Name, all, g.Bytes)
			}
			moved = moved || g.Away+g.Dropped > 0
		}
		if !moved {
			t.Errorf("%s: nothing is offloaded or recomputed", more)
		}
	}
}

// Layers that do not divide just work, with one note and the flag.
func TestPlanUnevenLayers(t *testing.T) {
	for sizes, layout := range map[string]string{"--pp 8": "Et*8|(t*8|)*6t*5mL", "--pp 8 --vpp 2": "Et*4|(t*4|)*14tmL"} {
		r, _ := planJSON(t, "plan --model deepseek-v3 --gpu gb200 --gpus 256 --ep 32 --gbs 2048 --seq 4096 "+sizes)
		notes := 0
		for _, n := range r.Warnings {
			if strings.Contains(n, layout) {
				notes++
			}
		}
		if notes != 1 || !strings.Contains(r.Flags[0].Text, "--pipeline-model-parallel-layout '"+layout+"'") {
			t.Errorf("%s: notes %q, flags %s", sizes, r.Warnings, r.Flags[0].Text)
		}
	}
}

// What the hardware cannot do, and what a search chooses in place of a setting, is noted.
func TestPlanNotesOfContradictions(t *testing.T) {
	for line, want := range map[string]string{
		"--gpu a100 --precision fp8":                                     "a100 has no rate for fp8",
		"--gpu h100 --precision nvfp4":                                   "h100 has no rate for nvfp4",
		"--gpu b200 --precision nvfp4":                                   "",
		"--gpu h100 --gpus 8 --gbs 8 --search layout --tp 2":             "--tp is not kept, because --search layout chooses it",
		"--gpu h100 --gpus 8 --tp 2 --search policy --offload core_attn": "--offload is not kept, because --search policy chooses it",
		"--gpu h100 --gpus 8 --tp 2 --search policy":                     "",
		"--gpu h100 --gpus 8 --tp 2 --budget 60GiB --recompute none":     "--recompute is not kept, because --budget chooses it",
	} {
		stdout, stderr, code := command(strings.Fields("plan --model llama-3-8b --gbs 8 " + line)...)
		text := strings.Join(strings.Fields(stdout), " ")
		if code != exitOK || !strings.Contains(text, want) || want == "" && (strings.Contains(text, "has no rate") || strings.Contains(text, "is not kept")) {
			t.Errorf("%s: code %d, errors %q, output %q", line, code, stderr, stdout)
		}
	}
}

// Room for more rows than can arrive is told, and what can arrive is not.
func TestPlanNoteOfNeedlessRoom(t *testing.T) {
	for capacity, want := range map[string]bool{"4": false, "4.5": true, "1000": true} {
		stdout, stderr, code := command(strings.Fields("plan --model mixtral-8x7b --gpus 8 --ep 8 --stash " + capacity)...)
		note := "--moe-expert-rank-capacity-factor " + capacity + " leaves room for more rows than a rank can get, which is 4 x the balanced ones; give at most that"
		if got := strings.Contains(strings.Join(strings.Fields(stdout), " "), note); code != exitOK || got != want {
			t.Errorf("--stash %s: code %d, errors %q, noted %v, want %v", capacity, code, stderr, got, want)
		}
	}
}
