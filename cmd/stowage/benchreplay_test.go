// This file tests the replay of routing traces as a user meets it.

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/bench"
)

// quick is a trace that takes no time.
const quick = " --ranks 2 --layers 4 --microbatches 4 --steps 2 --tokens 64 --experts 8 --top-k 2 --width 64 --page 4KiB"

// SPEC S1.7: a trace that is made up, saved and replayed gives the same figures.
func TestBenchStashReplays(t *testing.T) {
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	layout := " --pp 2 --vpp 2 --stage 1 --width 64 --page 4KiB --json"
	var results []bench.Replay
	for _, line := range []string{
		"bench stash --synth drift --skew 2 --seed 7" + quick + layout + " --save-trace " + file,
		"bench stash --trace " + file + layout,
	} {
		stdout, stderr, code := command(strings.Fields(line)...)
		if code != exitOK || strings.Replace(stderr, "the routing counts are in "+file+"\n", "", 1) != "" {
			t.Fatalf("%s: code %d, errors %q", line, code, stderr)
		}
		var r bench.Replay
		if err := json.Unmarshal([]byte(stdout), &r); err != nil {
			t.Fatal(err)
		}
		results = append(results, r)
	}
	a, b := results[0], results[1]
	if len(a.Ranks) != 2 || a.Steps != 2 || a.Layers != 2 || a.Total.Live == 0 || a.Total.Pool < a.Total.Stored || a.Total.Dropped != 0 || a.Total.Wrong != 0 {
		t.Errorf("implausible: %+v", a)
	}
	if a.Total.Live != b.Total.Live || a.Total.Pool != b.Total.Pool || a.Total.Bound != b.Total.Bound {
		t.Errorf("made up %+v, replayed %+v", a.Total, b.Total)
	}

	stdout, stderr, code := command(strings.Fields("bench stash --rank 1 --trace " + file + " --device-pool 4KiB --max-rows 3")...)
	if code != exitUsage || !strings.Contains(stderr, "at least a page") || stdout != "" {
		t.Errorf("code %d, errors %q", code, stderr)
	}
	stdout, stderr, code = command(strings.Fields("bench stash --rank 1 --page 4KiB --trace " + file + " --device-pool 8KiB --max-rows 3")...)
	if code != exitOK || stderr != "" || strings.Count(stdout, "\n") != 14 || strings.Contains(stdout, "NaN") {
		t.Errorf("code %d, errors %q, printed\n%s", code, stderr, stdout)
	}
}

// Flags that do not go together, that lie outside of what makes sense, or that name files
// which cannot be used are wrong usage; too little memory is not.
func TestBenchStashReplayErrors(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.jsonl")
	if err := os.WriteFile(bad, []byte(`{"version":1,"ranks":2,"tokenz":3}`+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]string{
		"--pp 2":                               "--pp needs --trace or --synth",
		"--trace x --synth zipf":               "exclude each other",
		"--trace x --tokens 9":                 "--tokens is for --synth",
		"--synth zipf --rows 9":                "--rows has no meaning",
		"--synth pareto":                       "choose zipf, drift or burst",
		"--synth zipf --skew -1":               "skew is -1",
		"--synth zipf --ranks 3":               "multiple of the 3 ranks",
		"--synth zipf --pp 3":                  "--pp 3 does not divide 8 layers into stages of 1 chunks",
		"--synth zipf --vpp 2":                 "--vpp 2 interleaves chunks, which needs at least two pipeline ranks",
		"--synth zipf --pp 2 --stage 2":        "--stage 2 is out of range; give a rank from 0 to 1",
		"--synth zipf --rank 4":                "--rank 4 is out of range; give an expert rank from 0 to 3",
		"--synth zipf --sets 0":                "--sets must be between 1 and 64",
		"--synth zipf --device-pool 1":         "--device-pool: ",
		"--synth zipf --max-rows -1":           "--max-rows must be at least 1",
		"--synth zipf --steps 99999999999":     "steps is 99999999999",
		"--synth zipf --device-pool 1MiB,1MiB": "one size",

		"--trace " + bad:                                  `bad.jsonl: line 1: header: unknown key "tokenz"`,
		"--trace " + bad + ".none":                        "bad.jsonl.none: the file cannot be read: no such file or directory",
		"--synth zipf --save-trace " + bad + "/x" + quick: "--save-trace: cannot write ",
		"--synth zipf --max-rows 99999999" + quick:        "--max-rows 99999999 is more than the 128 rows that a rank can get",
	} {
		stdout, stderr, code := command(strings.Fields("bench stash " + line)...)
		if code != exitUsage || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%q: code %d, output %q, errors %q", line, code, stdout, stderr)
		}
	}
	for line, want := range map[string]string{
		"--synth zipf --width 1073741824": "give a smaller --width",
	} {
		stdout, stderr, code := command(strings.Fields("bench stash " + line)...)
		if code != exitFailure || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%q: code %d, output %q, errors %q", line, code, stdout, stderr)
		}
	}
}
