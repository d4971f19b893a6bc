// This file tests reports of several folders.

package report

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func namesOf(r *Report) (out []string) {
	for _, x := range r.Runs {
		out = append(out, x.Name)
	}
	return out
}

// Runs keep the names of their policies if these tell them apart; otherwise they are named
// after their folders. A run that is given twice is shown once.
func TestNamesOfRuns(t *testing.T) {
	t.Chdir(t.TempDir())
	for dir, policy := range map[string]string{"compare/none": "none", "compare/stash": "stash", "a": "stash", "b": "offload", "c": "stash", "deep/c": "stash", "offload": "budget"} {
		folder(t, dir, policy)
	}
	put(t, []byte(`{"runs":["none","stash"]}`), "compare", EnvironmentFile)
	if err := os.Symlink("a", "link"); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]string{
		"a":                    "stash",
		"a b":                  "stash offload",
		"a c":                  "a c",
		"c deep/c":             "c deep/c",
		"b offload":            "b offload",
		"compare a":            "compare/none compare/stash a",
		"compare b":            "none stash offload",
		"a ./a link":           "stash",
		"compare compare/none": "none stash",
		"compare/none compare": "none stash",
	} {
		r, err := Read(strings.Fields(line)...)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(namesOf(r), " "); got != want {
			t.Errorf("%s: runs are %q, want %q", line, got, want)
		}
	}
	if r, err := Read("a", "./a"); err != nil || !slices.Equal(r.Missing, []string{"./a is named twice; it is shown once"}) || r.Title != "a" {
		t.Errorf("%v, %q, missing are %q", err, r.Title, r.Missing)
	}
}

// A folder without a run is left out with a sentence. It is an error if there is no other.
func TestReadLeavesOut(t *testing.T) {
	t.Chdir(t.TempDir())
	folder(t, "run", "stash")
	r, err := Read("missing", "run")
	if err != nil || len(r.Runs) != 1 || r.Title != "run" || len(r.Missing) != 1 || !strings.HasPrefix(r.Missing[0], "missing is not there; ") || !strings.HasSuffix(r.Missing[0], "; it is left out") {
		t.Errorf("%v, %+v", err, r)
	}
	if _, err = Read("missing", "lost"); err == nil || !strings.HasPrefix(err.Error(), "missing is not there") {
		t.Errorf("it says %v", err)
	}
}

// Runs with different policies can be compared if they trained the same. Ratios from other
// comparisons are removed.
// Runs trained the same if they differ only in options that change no result.
func TestOptionsWithoutResult(t *testing.T) {
	with := func(line string) string { return (&Run{Options: "seed: 1\n" + line + "\nsteps: 2\n"}).training() }
	for _, name := range []string{"policy", "budget", "offload_modules", "offload_fraction", "recompute_modules", "stash_modules", "graph", "pool", "prefetch", "eval_every", "trace", "save_every", "keep"} {
		if with(name+": 1") != with(name+":\n- a\n- b: c") {
			t.Errorf("%s sets runs apart", name)
		}
	}
	for _, name := range []string{"seed", "data", "hold_out", "pp", "micro", "bf16", "lr", "grad_comm_dtype", "device"} {
		if with(name+": 1") == with(name+": 2") {
			t.Errorf("%s sets no runs apart", name)
		}
	}
}

func TestRunsApart(t *testing.T) {
	t.Chdir(t.TempDir())
	for dir, options := range map[string]string{
		"first": "seed: 1\noffload_modules:\n- a\nsteps: 2\npolicy: x\n", "policy": "seed: 1\nsteps: 2\npolicy: y\n", "seed": "seed: 2\nsteps: 2\n", "steps": "seed: 1\nsteps: 3\n", "model": "seed: 1\nsteps: 2\n",
	} {
		folder(t, dir, dir)
		put(t, []byte(options), dir, ConfigFile)
		put(t, []byte(`{"model":"`+map[bool]string{true: "other", false: "one"}[dir == "model"]+`","policy":"`+dir+`","step_ratio":1,"step_ms":5}`), dir, SummaryFile)
	}
	r, err := Read("first", "policy", "seed", "steps", "model")
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range r.Runs {
		if want := x.Name != "first" && x.Name != "policy"; x.Apart != want || figureOf(x, "step_ratio") != nil || figureOf(x, "step_ms") == nil {
			t.Errorf("%s is apart: %v, with %+v", x.Name, x.Apart, x.Figures)
		}
	}
	if r, err = Read("first"); err != nil || r.Runs[0].Apart || figureOf(r.Runs[0], "step_ratio") == nil {
		t.Errorf("%v, %+v", err, r)
	}
	// The runs of a comparison trained the same.
	for _, name := range []string{"none", "stash"} {
		folder(t, filepath.Join("compare", name), name)
		if err := errors.Join(os.Remove(filepath.Join("compare", name, ConfigFile)), os.Remove(filepath.Join("compare", name, EnvironmentFile))); err != nil {
			t.Fatal(err)
		}
	}
	put(t, []byte(`{"command":"stowage train","runs":["none","stash"]}`), "compare", EnvironmentFile)
	if r, err = Read("compare/none", "compare/stash", "first"); err != nil || r.Runs[1].Apart || !r.Runs[2].Apart {
		t.Errorf("%v, %+v", err, r)
	}
}
