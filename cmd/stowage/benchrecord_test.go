// This file owns the tests of `stowage bench record`.

package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/bench"
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
		"pools.json --command other":             `pools.json says that "stowage bench pools --model=llama-3-8b" printed it, and --command "other"; leave that out`,
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
	for _, files := range []string{"train.json", "pools.json train.json", "train.json pools.json"} { // for the one that lacks a command
		_, stderr, code := command(strings.Fields("bench record " + files + " --to " + files[:1] + ".jsonl --command train")...)
		after, _ := os.ReadFile(files[:1] + ".jsonl")
		if code != exitOK || !strings.Contains(string(after), `"command":"train"`) || strings.Contains(string(after), `"pools"`) != strings.Contains(string(after), `"command":"stowage bench pools `) {
			t.Errorf("%s: code %d, errors %q, the history is %q", files, code, stderr, after)
		}
	}
}

// Every flag has an effect on every kind of result: one that names its hardware is given another,
// and one without a command is given one.
func TestBenchRecordFlags(t *testing.T) {
	t.Chdir(t.TempDir())
	const figures = `"pair_us":5,"gbps":2,"ratio":0.5`
	for i, x := range []struct{ result, flags, want string }{
		{`{` + figures + `,"command":"own","version":"7","device":{"backend":"cuda","name":"H200"}}`, "", `"hardware":"H200","version":"7","command":"own"`},
		{`{` + figures + `,"command":"own","device":{"backend":"cuda","name":"H200"}}`, "--hardware mine", `"hardware":"mine","version":"` + thisVersion().Version + `","command":"own"`},
		{`{` + figures + `,"device":{"backend":"cpu","name":"a CPU"}}`, "--command other", `"hardware":"` + thisProcessor() + `","version":"` + thisVersion().Version + `","command":"other"`},
		{`{"bench":"torch_moe","hardware":"H100","command":"own","figures":{"a":1}}`, "--hardware mine --note why", `"hardware":"mine","version":"` + thisVersion().Version + `","command":"own","note":"why"`},
	} {
		file, to := fmt.Sprintf("%d.json", i), fmt.Sprintf("%d.jsonl", i)
		writeFile(t, file, x.result)
		_, stderr, code := command(append([]string{"bench", "record", file, "--to", to}, strings.Fields(x.flags)...)...)
		text, err := os.ReadFile(to)
		if code != exitOK || err != nil || !strings.Contains(string(text), x.want) {
			t.Errorf("%s %s: code %d, %q, the history is %s, want %s", x.result, x.flags, code, stderr, text, x.want)
		}
	}
}

// Several that record at the same time lose no entry of one another.
func TestBenchRecordTogether(t *testing.T) {
	file := filepath.Join(t.TempDir(), "history.jsonl")
	const all = 16
	var group sync.WaitGroup
	for i := range all {
		group.Go(func() {
			cmd := &cobra.Command{}
			cmd.SetOut(io.Discard)
			e := bench.Entry{Date: "2026-11-15", Bench: "copy", Command: fmt.Sprint(i), Figures: map[string]float64{"a": 1}}
			if err := record(cmd, file, []bench.Entry{e}); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if text, err := os.ReadFile(file); strings.Count(string(text), "\n") != all {
		t.Errorf("of %d entries the history has:\n%s%v", all, text, err)
	}
}
