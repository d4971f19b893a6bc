// This file owns the tests of `stowage bench record`.

package main

import (
	"os"
	"strings"
	"testing"
)

func TestBenchRecord(t *testing.T) {
	t.Chdir(t.TempDir())
	stdout, stderr, code := command(strings.Fields("bench pools --model llama-3-8b --json")...)
	if code != exitOK {
		t.Fatalf("code %d, errors %q", code, stderr)
	}
	writeFile(t, "pools.json", stdout)
	for i, want := range []string{"the first entry", "weights_arena_over_bound"} {
		stdout, stderr, code = command("bench", "record", "pools.json", "--to", "history.jsonl", "--hardware", "a machine", "--date", "2026-11-15", "--note", "a note")
		if code != exitOK || stderr != "" || !strings.Contains(stdout, want) || strings.Contains(stdout, "same") != (i > 0) {
			t.Fatalf("code %d, errors %q, output %q", code, stderr, stdout)
		}
	}
	text, err := os.ReadFile("history.jsonl")
	want := `{"date":"2026-11-15","bench":"pools","hardware":"a machine","version":"` + thisVersion().Version + `","command":"stowage bench pools --model=llama-3-8b","note":"a note","figures":{`
	if err != nil || strings.Count(string(text), want) != 2 || strings.Count(string(text), "\n") != 2 {
		t.Fatalf("the history is %q, %v", text, err)
	}
	writeFile(t, "train.json", `[{"policy":"none","peak_device_bytes":8,"step_ratio":1,"params_sha256":"a"}]`)
	writeFile(t, "bad.json", `{"ratio":1}`)
	writeFile(t, "bad.jsonl", "no\n")
	for line, want := range map[string]string{
		"":                                       "expected the file of a result",
		"nope.json":                              "nope.json: no such file or directory",
		"bad.json":                               "bad.json: expected the JSON of a benchmark",
		"pools.json bad.json --to history.jsonl": "bad.json: expected",
		"train.json":                             "give it with --command",
		"pools.json --date soon":                 `--date expects a day such as 2026-11-15, got "soon"`,
		"pools.json --to bad.jsonl":              "--to bad.jsonl: line 1 is no entry",
	} {
		stdout, stderr, code := command(append([]string{"bench", "record"}, strings.Fields(line)...)...)
		if code != exitUsage || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%q: code %d, output %q, errors %q", line, code, stdout, stderr)
		}
	}
	if _, stderr, code := command(strings.Fields("bench record pools.json --to nowhere/h.jsonl")...); code != exitUsage || !strings.Contains(stderr, "nowhere/h.jsonl") {
		t.Errorf("code %d, errors %q", code, stderr)
	}
	if after, _ := os.ReadFile("history.jsonl"); string(after) != string(text) {
		t.Errorf("a refused result changed the history to %q", after)
	}
	if _, stderr, code := command(strings.Fields("bench record train.json --to history.jsonl --command train")...); code != exitOK {
		t.Errorf("code %d, errors %q", code, stderr)
	}
}
