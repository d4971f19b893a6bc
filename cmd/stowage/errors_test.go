// This file owns the tests of the words of errors.

package main

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/run"
)

// Every option of a run has a flag, and every flag of the table exists in a command.
func TestSettingFlags(t *testing.T) {
	train := newTrain()
	for f := range reflect.TypeFor[run.Options]().Fields() {
		if f.IsExported() && flagOf(train, f.Name) == f.Name {
			t.Errorf("option %s has no flag", f.Name)
		}
	}
	commands := append(newBench().Commands(), train, newPlan())
	for setting, flags := range settingFlags {
		found := false
		for _, cmd := range commands {
			found = found || flagOf(cmd, setting) != setting
		}
		if !found {
			t.Errorf("no command has one of the flags %v of %s", flags, setting)
		}
	}
}

// Every choice but keep has a flag that makes it for modules.
func TestModuleFlags(t *testing.T) {
	for c := memory.Keep + 1; c < memory.Choices; c++ {
		if moduleFlags[c] == "" || flagOf(newTrain(), moduleFlags[c]) == moduleFlags[c] {
			t.Errorf("%v has no flag", c)
		}
	}
}

func TestDescribe(t *testing.T) {
	cmd := newTrain()
	small := &memory.SettingError{Setting: "Memory.Budget", Asked: "1 B", Problem: "is too small", Remedy: "raise it"}
	cause := errors.New("no room")
	for _, x := range []struct {
		err  error
		want string
		code int
	}{
		{small, "--budget 1 B is too small; raise it", exitUsage},
		{&run.PolicyError{Policy: "stash", Err: &run.InputError{Err: memory.OnRank(3, small)}}, "policy stash: rank 3: --budget 1 B is too small; raise it", exitUsage},
		{&memory.SettingError{Setting: "Tea", Problem: "is cold"}, "Tea is cold", exitUsage},
		{&memory.SettingError{Setting: "LR", Err: errors.Join(cause, cause)}, "--lr: no room; no room", exitUsage},
		{&memory.ModuleError{Choice: memory.Recompute, Module: "mlp", Problem: "is lazy", Remedy: "rest"}, "--recompute-modules mlp is lazy; rest", exitUsage},
		{memory.OnRank(1, &memory.BudgetError{Rank: 1, Budget: memory.MiB, Need: memory.MiB + 1, HostFull: true}),
			"rank 1: --budget 1.0 MiB is too small for a step with everything offloaded or recomputed that can be; raise it to 1025KiB, allow more host memory, or use smaller microbatches", exitUsage},
		{&memory.BudgetError{Budget: memory.MiB, Held: 2 * memory.MiB}, "rank 0: --budget 1.0 MiB is too small: weights, optimiser and tables alone hold 2.0 MiB; raise it, or shard the parameters", exitUsage},
		{&run.InterruptedError{Folder: "a"}, "the run was interrupted and saved; continue it with --out a --resume", exitInterrupted},
		{&run.InterruptedError{}, "the run was interrupted and not saved, because it has no --out", exitInterrupted},
		{fmt.Errorf("outside: %w", cause), "outside: no room", exitFailure},
		{fmt.Errorf("layer 3: %w", small), "layer 3: --budget 1 B is too small; raise it", exitUsage},
		{memory.OnRank(2, &device.OutOfMemory{Device: "gpu"}), "rank 2: " + (&device.OutOfMemory{Device: "gpu"}).Error(), exitFailure},
		{errors.Join(small, cause), "--budget 1 B is too small; raise it; no room", exitUsage},
		{&run.InputError{Err: &memory.SettingError{Setting: "Folder", Err: fmt.Errorf("cannot write a: %w", syscall.ENOSPC)}}, "--out: cannot write a: no space left on device", exitFailure},
		{&run.InputError{Err: &memory.SettingError{Setting: "Folder", Err: fmt.Errorf("cannot write a: %w", syscall.EACCES)}}, "--out: cannot write a: permission denied", exitUsage},
		{usagef("that is wrong"), "that is wrong", exitUsage},
	} {
		if got := describe(cmd, x.err); got != x.want || exitCode(x.err) != x.code {
			t.Errorf("%#v is described as\n%q with code %d, want\n%q with code %d", x.err, got, exitCode(x.err), x.want, x.code)
		}
	}
}

// Numbers lose the signs and zeros that Go writes into exponents. Paths and what is quoted stay
// as they are.
func TestReadable(t *testing.T) {
	for text, want := range map[string]string{
		"--lr 1e+30 is too large":          "--lr 1e30 is too large",
		"from -1e-05 to 2.5e+06; give 1":   "from -1e-5 to 2.5e6; give 1",
		"1e+30 1e+31, (1e+09), 1e-07: no":  "1e30 1e31, (1e9), 1e-7: no",
		"1e-10 and 1e300":                  "1e-10 and 1e300",
		"no run in runs/lr1e-05":           "no run in runs/lr1e-05",
		"no run in lr1e-05, a-1e-05":       "no run in lr1e-05, a-1e-05",
		"nothing at /a/8f2b1c3e-0451-4a5b": "nothing at /a/8f2b1c3e-0451-4a5b",
		"nothing at 1e-05/b 1e-05.txt":     "nothing at 1e-05/b 1e-05.txt",
		`got "1e+30 1e+30", not 1e+30`:     `got "1e+30 1e+30", not 1e30`,
	} {
		if got := readable(text); got != want {
			t.Errorf("%q became %q, want %q", text, got, want)
		}
	}
}

// A name with line breaks stays one name.
func TestNamesWithLineBreaks(t *testing.T) {
	for _, args := range [][]string{
		{"report", "no\nrun"}, {"plan", "--config", "no\nrun"}, {"plan", "--megatron=no\nrun"}, {"plan", "scan", "no\nrun"}, {"train", "--dry-run", "--data", "no\nrun"},
		{"train", "--resume", "--out", "no\nrun"}, {"bench", "record", "no\nrun"}, {"bench", "stash", "--trace", "no\nrun"}, {"train", "--model", "no\nrun"},
	} {
		_, stderr, code := command(args...)
		if code != exitUsage || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, `no\nrun`) {
			t.Errorf("%q: code %d, errors %q", args, code, stderr)
		}
	}
}
