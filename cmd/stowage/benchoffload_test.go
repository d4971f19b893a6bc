// This file tests the offload bench as a user meets it.

package main

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/bench"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/observe/trace"
)

// brief is a step that takes no time.
const brief = "bench offload --model qwen3-30b-a3b --layers 2 --seq 8 --steps 2 --link-gbps 2,3 "

// SPEC S5.4, S5.5: the table of bytes by group, the ratios and the forecast.
func TestBenchOffload(t *testing.T) {
	file := filepath.Join(t.TempDir(), "offload.trace")
	stdout, stderr, code := command(strings.Fields(brief + "--offload-modules expert_fc1,moe_act --recompute-modules core_attn --margin 0 --json --trace " + file)...)
	if code != exitOK || stderr != "the trace is in "+file+"\n" {
		t.Fatalf("code %d, errors %q", code, stderr)
	}
	var r bench.Offload
	if err := json.Unmarshal([]byte(stdout), &r); err != nil {
		t.Fatal(err)
	}
	if !r.Equal || r.StepRatio <= 0 || r.PeakRatio >= 1 || r.SavedBytes <= 0 || r.MovedBytes <= 0 || r.LinkUtilisation <= 0 || r.PredictedMS <= 0 || r.Model != "qwen3-30b-a3b" {
		t.Errorf("implausible: %+v", r)
	}
	for _, name := range []string{"step_ratio", "peak_ratio", "saved_bytes", "expected_bytes", "link_utilisation", "hidden_fraction"} {
		if !strings.Contains(stdout, `"`+name+`": `) {
			t.Errorf("the JSON has no %s", name)
		}
	}
	if len(r.Step.Passes) != 4 || len(r.Step.Modules) == 0 || len(r.Groups) == 0 {
		t.Errorf("the step has passes %v, %d modules and %d groups", r.Step.Passes, len(r.Step.Modules), len(r.Groups))
	}
	x, err := report.ReadTrace(file)
	if err != nil || x.Cut != nil || !slices.ContainsFunc(x.Events, func(e trace.Event) bool { return e.Kind == trace.Offload && e.Storage > 0 }) {
		t.Errorf("the trace shows nothing that leaves (%v)", err)
	}

	if _, stderr, code = command(strings.Fields(brief + "--layers 1 --microbatches 1 --trace /dev/full")...); code != exitFailure || !strings.Contains(stderr, "--trace: cannot write /dev/full: no space left on device") {
		t.Errorf("a full disk: code %d, errors %q", code, stderr)
	}
	stdout, stderr, code = command(strings.Fields(brief + "--layers 1 --budget 1MiB --graph full")...)
	if code != exitOK || stderr != "" || strings.Contains(stdout, "NaN") || !strings.Contains(stdout, "yes, bit for bit") {
		t.Errorf("code %d, errors %q, printed\n%s", code, stderr, stdout)
	}
}

func TestBenchOffloadHelp(t *testing.T) {
	stdout, stderr, code := command("bench", "offload", "--help")
	if code != exitOK || stderr != "" || !strings.Contains(stdout, "Examples:") {
		t.Errorf("code %d, errors %q", code, stderr)
	}
	golden.Check(t, "help-bench-offload.txt", stdout)
}

// Every wrong setting is one sentence that names the flag, and exit code 2.
func TestBenchOffloadErrors(t *testing.T) {
	var all strings.Builder
	for _, line := range []string{
		"now",
		"--model mixtrall",
		"--layers 0",
		"--layers 99",
		"--layers 3 --pp 2 --vpp 2",
		"--seq 0",
		"--mbs 0",
		"--microbatches -1",
		"--pp 0",
		"--pp 2 --rank 2",
		"--rank -1",
		"--vpp 2",
		"--steps 0",
		"--tflops 0",
		"--tflops NaN",
		"--memory-gbps -1",
		"--intensity 0",
		"--intensity 1 --tflops 2",
		"--budget 5XB",
		"--budget -5",
		"--budget 0",
		"--budget 1KiB --seq 1 --layers 1",
		"--no-recompute",
		"--budget 9MiB --offload-modules moe_act",
		"--activation-offload-fraction 0.5",
		"--offload-modules moeact",
		"--recompute-modules=",
		"--offload-modules core_attn moe_act",
		"--recompute-modules attention",
		"--offload-modules moe_act --recompute-modules moe_act",
		"--offload-modules attn_proj",
		"--recompute-modules mlp",
		"--offload-modules fused_group_mlp",
		"--offload-modules moe_act --activation-offload-fraction 1.5",
		"--offload-modules moe_act --min-offloaded-tensor-size big",
		"--offload-modules moe_act --delta-offload-bytes-across-pp-ranks -1",
		"--offload-modules moe_act --margin -1",
		"--offload-modules moe_act --fine-grained-offloading-max-inflight-offloads -2",
		"--offload-modules attn_norm --cuda-graph-scope attn --seq 1 --layers 1",
		"--graph whole",
		"--graph none --cuda-graph-scope attn",
		"--graph scopes --cuda-graph-scope full_iteration",
		"--graph full --cuda-graph-scope attn",
		"--cuda-graph-scope attention",
		"--cuda-graph-scope moe,moe_router",
		"--stash --model llama-3-8b",
		"--link-gbps fast",
		"--link-gbps 1,2,3",
		"--link-gbps 1,1e-12",
		"--tflops 1e-6",
		"--memory-gbps 1e-9",
		"--device cuda --link-gbps 1",
	} {
		stdout, stderr, code := command(strings.Fields("bench offload " + line)...)
		if code != exitUsage || stdout != "" || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%q: code %d, output %q, errors %q", line, code, stdout, stderr)
		}
		all.WriteString("$ stowage bench offload " + line + "\n" + stderr)
	}
	golden.Check(t, "bench-offload-errors.txt", all.String())
}

// Every flag of a policy by hand reaches the options that are measured, and plain sizes count
// elements or bytes as Megatron-LM's do.
func TestOffloadFlagsReachTheOptions(t *testing.T) {
	cmd := &cobra.Command{}
	x := addOffloadFlags(cmd)
	line := "--model qwen3-30b-a3b --layers 2 --seq 8 --offload-modules core_attn,moe_act --recompute-modules router --min-offloaded-tensor-size 300 --delta-offload-bytes-across-pp-ranks 5KiB"
	if err := cmd.ParseFlags(strings.Fields(line)); err != nil {
		t.Fatal(err)
	}
	o, err := x.options()
	if err != nil {
		t.Fatal(err)
	}
	if h := o.ByHand; !o.Hand || h.MinBytes != 600 || h.DeltaBytes != 5*memory.KiB || !slices.Equal(h.OffloadModules, []string{"core_attn", "moe_act"}) || !slices.Equal(h.RecomputeModules, []string{"router"}) {
		t.Errorf("%t, %+v", o.Hand, h)
	}
	if o.Step.Layers != 2 || o.Step.Seq != 8 || o.Budget != 0 {
		t.Errorf("%+v", o)
	}
}
