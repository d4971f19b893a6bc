// This file tests what `stowage train` says of memory: before a run, and of all policies
// after it.

package main

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/run"
)

// A dry run has an answer for models that this machine could not hold, and for a GPU that
// it does not have, and leaves nothing. SPEC S6.1
func TestTrainDryRun(t *testing.T) {
	t.Chdir(t.TempDir())
	line := "train --model mixtral-8x7b --bf16 --ep 2 --micro 1 --microbatches 1 --seq 1024 --device cuda --out run --dry-run"
	stdout, stderr, code := command(strings.Fields(line)...)
	if code != exitOK || stderr != "" || !strings.Contains(stdout, "parameters") || !strings.Contains(stdout, " GiB ") {
		t.Errorf("code %d, errors %q, output\n%s", code, stderr, stdout)
	}
	stdout, stderr, code = command(strings.Fields(line + " --json")...)
	var one run.Forecast
	if err := json.Unmarshal([]byte(stdout), &one); err != nil || code != exitOK || stderr != "" || one.Policy != "stash" || len(one.Ranks) != 4 || one.Device < 1<<37 {
		t.Errorf("code %d, errors %q, %+v, %v", code, stderr, one, err)
	}
	stdout, stderr, code = command("train", "--dry-run", "--json")
	var all []run.ForecastRow
	if err := json.Unmarshal([]byte(stdout), &all); err != nil || code != exitOK || stderr != "" || len(all) != len(train.Policies) {
		t.Errorf("code %d, errors %q, %+v, %v", code, stderr, all, err)
	}
	if left, err := os.ReadDir("."); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// The command of the README, with smaller batches: every policy comes to the same
// parameters, the stash takes far less than static buffers, the budget is kept, and
// memory is as predicted. Five steps are the fewest in which captured graphs are replayed.
// SPEC S1.1, S4.6, S5.5, S6.1
func TestTrainDefault(t *testing.T) {
	if !*allCases {
		t.Skip("trains the default model under all policies, which takes a minute; -full runs it")
	}
	t.Chdir(t.TempDir())
	stdout, stderr, code := command(strings.Fields("train --steps 5 --micro 2 --json")...)
	if code != exitOK {
		t.Fatalf("code %d, errors %q", code, stderr)
	}
	var rows []run.Row
	if err := json.Unmarshal([]byte(stdout), &rows); err != nil {
		t.Fatal(err)
	}
	peak := map[string]float64{}
	var names []string
	for _, r := range rows {
		names = append(names, r.Policy)
		peak[r.Policy] = float64(r.Device)
		if r.Digest != rows[0].Digest || r.Loss != rows[0].Loss || len(r.Digest) != 64 || r.StepRatio <= 0 {
			t.Errorf("%+v, first %+v", r, rows[0])
		}
		if d := float64(r.Forecast)/float64(r.Device) - 1; d < -0.05 || d > 0.05 {
			t.Errorf("%s: the forecast is off by %.1f %%", r.Policy, 100*d)
		}
		if (r.Budget > 0) != (r.Policy == "budget") || r.Budget > 0 && r.Device > r.Budget {
			t.Errorf("%s takes %d of a budget of %d", r.Policy, r.Device, r.Budget)
		}
	}
	if !slices.Equal(names, train.Policies) {
		t.Errorf("policies are %q", names)
	}
	if share := peak["stash"] / peak["static"]; share > 0.6 {
		t.Errorf("the stash takes %.0f %% of static buffers", 100*share)
	}
	if peak["budget"] > peak["none"] || peak["offload"] > peak["none"] || peak["offload+recompute"] > peak["offload"] {
		t.Errorf("nothing is saved: %v", peak)
	}
	var keys []string
	for _, key := range regexp.MustCompile(`(?m)^    "(\w+)"`).FindAllStringSubmatch(stdout, 6) {
		keys = append(keys, key[1])
	}
	if want := []string{"policy", "peak_device_bytes", "peak_host_bytes", "step_ratio", "final_loss", "params_sha256"}; !slices.Equal(keys, want) || !strings.Contains(stdout, `"predicted_device_bytes"`) {
		t.Errorf("keys are %q, want first %q", keys, want)
	}
}

// Settings without effect are named with their flags, on the terminal and beside JSON.
func TestNotesOnSettings(t *testing.T) {
	line := "train --policy stash --steps 1 --micro 1 --seq 16 --plain --offload-modules gdp_qkv core_attn"
	want := "note: --offload-modules gdp_qkv has no effect, because this model saves nothing under that name; leave it out\n"
	stdout, _, code := command(strings.Fields(line)...)
	if code != exitOK || !strings.HasSuffix(stdout, want) || strings.Count(stdout, "note:") != 1 {
		t.Errorf("code %d, %q", code, stdout)
	}
	if stdout, _, code = command(strings.Fields(line + " --dry-run")...); code != exitOK || strings.Count(stdout, want) != 1 {
		t.Errorf("code %d, %q", code, stdout)
	}
	stdout, stderr, code := command(strings.Fields(line + " --json")...)
	if code != exitOK || strings.Contains(stdout, "note") || !strings.Contains(stderr, want) {
		t.Errorf("code %d, %q, %q", code, stdout, stderr)
	}
	stdout, _, code = command(strings.Fields("plan --model llama-3-8b --gpus 8 --gbs 8 --seq 4096 --offload core_attn gdp_qkv --recompute moe_act --rank none")...)
	if code != exitOK {
		t.Fatalf("code %d, %q", code, stdout)
	}
	for _, want := range []string{"--offload-modules gdp_qkv has no effect", "--recompute-modules moe_act has no effect"} {
		if strings.Count(stdout, want) != 1 {
			t.Errorf("%q does not say %q once", stdout, want)
		}
	}
	if strings.Contains(stdout, "core_attn has no effect") {
		t.Errorf("%q", stdout)
	}
}
