// This file owns the tests of small functions whose mistakes whole commands hardly show.

package main

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bench"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/run"
)

// A disk that fails or is full, or too many open files, is no wrong command line, whatever names
// the setting. Everything else about a file is.
func TestExitCodesOfFiles(t *testing.T) {
	for no, want := range map[syscall.Errno]int{
		syscall.ENOSPC: exitFailure, syscall.EDQUOT: exitFailure, syscall.EFBIG: exitFailure, syscall.EIO: exitFailure, syscall.EMFILE: exitFailure, syscall.ENFILE: exitFailure,
		syscall.EACCES: exitUsage, syscall.ENOENT: exitUsage, syscall.ENOTDIR: exitUsage, syscall.EROFS: exitUsage, syscall.ELOOP: exitUsage,
		syscall.EPIPE: 128 + int(syscall.SIGPIPE),
	} {
		if got := exitCode(&run.InputError{Err: &memory.SettingError{Setting: "Folder", Err: fmt.Errorf("cannot write: %w", no)}}); got != want {
			t.Errorf("%v has code %d, want %d", no, got, want)
		}
	}
}

// Of several reasons in one error the first of this list decides: what another process said, a
// signal, a reader that left, the disk, a wrong command line, the machine, a wrong setting.
func TestExitCodesOfChains(t *testing.T) {
	reasons := []struct {
		err  error
		code int
	}{
		{&comm.Told{Text: "told", Code: 7}, 7},
		{&signalError{syscall.SIGTERM, errors.New("ended")}, 128 + int(syscall.SIGTERM)},
		{&run.InterruptedError{}, exitInterrupted},
		{syscall.EPIPE, 128 + int(syscall.SIGPIPE)},
		{syscall.ENOSPC, exitFailure},
		{&usageError{text: "usage"}, exitUsage},
		{&device.Unsupported{What: "a GPU"}, exitFailure},
		{&device.OutOfMemory{}, exitFailure},
		{&memory.SettingError{Setting: "Budget"}, exitUsage},
		{&memory.ModuleError{}, exitUsage},
		{&memory.BudgetError{}, exitUsage},
		{errors.New("anything else"), exitFailure},
	}
	for i, a := range reasons {
		for _, b := range reasons[i:] {
			for _, err := range []error{errors.Join(a.err, b.err), errors.Join(b.err, a.err), fmt.Errorf("rank 1: %w", errors.Join(b.err, a.err))} {
				if got := exitCode(err); got != a.code {
					t.Errorf("%T and %T have code %d, want %d", a.err, b.err, got, a.code)
				}
			}
			if _, other := b.err.(*memory.SettingError); other {
				if got := exitCode(&memory.SettingError{Setting: "Device", Err: a.err}); got != a.code {
					t.Errorf("a setting that %T is about has code %d, want %d", a.err, got, a.code)
				}
			}
		}
	}
	if got := exitCode(&run.InputError{Err: errors.New("input")}); got != exitUsage {
		t.Errorf("an input has code %d", got)
	}
}

func TestDivisors(t *testing.T) {
	for n := 1; n <= 300; n++ {
		var want []int
		for d := 1; d <= n; d++ {
			if n%d == 0 {
				want = append(want, d)
			}
		}
		if got := divisorsOf(n); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%d: %v, want %v", n, got, want)
		}
		for m := 1; m <= 20; m++ {
			least := max(n, m)
			for least%n != 0 || least%m != 0 {
				least++
			}
			if got := leastMultiple(n, m); got != least {
				t.Errorf("%d and %d: %d, want %d", n, m, got, least)
			}
		}
	}
}

// A plain number counts units, up to what two of them can add up to.
func TestParseBytes(t *testing.T) {
	for _, x := range []struct {
		text string
		unit int64
		want int64 // -1 if it is refused
	}{
		{"0", 1, 0}, {"3", 1, 3}, {"3", 2, 6}, {"3KiB", 2, 3 << 10}, {"-1", 1, -1}, {"x", 1, -1}, {"", 1, -1},
		{fmt.Sprint(math.MaxInt64 / 2), 1, math.MaxInt64 / 2}, {fmt.Sprint(math.MaxInt64/2 + 1), 1, -1},
		{fmt.Sprint(math.MaxInt64 / 4), 2, math.MaxInt64 / 4 * 2}, {fmt.Sprint(math.MaxInt64/4 + 1), 2, -1}, {fmt.Sprint(math.MaxInt64 / 2), 2, -1},
	} {
		if got, err := parseBytes(x.text, x.unit); (err != nil) != (x.want < 0) || err == nil && got != x.want {
			t.Errorf("%q of %d bytes: %d, %v", x.text, x.unit, got, err)
		}
	}
}

// Files that hold a run are its part, in any folder below it; pages beside it are not.
func TestPartsOfARun(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.MkdirAll("run/trace", 0o755); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]bool{
		"run/config.yaml": true, "run/environment.json": true, "run/metrics.jsonl": true, "run/summary.json": true, "run/lock": true, "run/trace/rank-0.trace": true,
		"run/checkpoints/step-00000001/checkpoint.json": true, "run/checkpoints/step-00000001/model-00001-of-00001.safetensors": true, "run/../run/lock": true,
		"run/report.html": false, "run/trace.pftrace": false, "lock": false, "other/lock": false, "runs/lock": false, "run": false,
	} {
		if isPartOf("run", file) != want {
			t.Errorf("%s: %v", file, !want)
		}
	}
	for want, runs := range map[string][]string{"run/report.html": {"run"}, "report.html": {"run", "run"}} {
		if got := defaultPage(runs); got != filepath.FromSlash(want) {
			t.Errorf("%q: %s, want %s", runs, got, want)
		}
	}
	if got := defaultPage([]string{"run/trace/rank-0.trace"}); got != "report.html" {
		t.Errorf("a trace: %s", got)
	}
}

// Every file that a command reads is compared with every one that it writes.
func TestFilesThatAreRead(t *testing.T) {
	t.Chdir(t.TempDir())
	reads := []flagFile{{"a", "1"}, {"b", "2"}, {"", "3"}}
	for _, x := range reads {
		if err := checkFiles([]flagFile{{"out", x.name}}, reads...); err == nil || !strings.HasPrefix(err.Error(), fmt.Sprintf("--out and %s name the same file, %s;", x, x.name)) {
			t.Errorf("%s: %v", x.name, err)
		}
	}
	if err := checkFiles([]flagFile{{"out", "4"}, {"html", ""}, {"svg", "5"}}, reads...); err != nil {
		t.Error(err)
	}
	if err := checkFiles([]flagFile{{"out", "4"}, {"html", "5"}, {"svg", "./4"}}); err == nil {
		t.Error("two flags write one file")
	}
}

// Text for a terminal is held up to the next empty line, and all of it comes out once.
func TestHeldOutput(t *testing.T) {
	var b bytes.Buffer
	o := &output{w: &b, columns: 40}
	for _, x := range []struct{ write, want string }{{"a\n", ""}, {"b\n\nc", "a\nb\n\n"}, {"d\n", "a\nb\n\n"}, {"\ne\n\nf", "a\nb\n\ncd\n\ne\n\n"}} {
		if n, err := o.Write([]byte(x.write)); n != len(x.write) || err != nil || b.String() != x.want {
			t.Errorf("after %q: %q, want %q, %d, %v", x.write, b.String(), x.want, n, err)
		}
	}
	if o.flush(); b.String() != "a\nb\n\ncd\n\ne\n\nf" && b.String() != "a\nb\n\ncd\n\ne\n\nf\n" {
		t.Errorf("at the end: %q", b.String())
	}
}

// More work than was announced is all of it.
func TestMeterBeyondTheEnd(t *testing.T) {
	m := &meter{what: "x", began: time.Unix(0, 0), done: 5, all: 4}
	if got := m.line(time.Unix(60, 0)); got != "x, 100 % done, about 0s left" {
		t.Error(got)
	}
}

// What doctor found free replaces what hardware usually leaves, and never gives more than that.
func TestExamined(t *testing.T) {
	for free, want := range map[memory.Bytes]memory.Bytes{70: 60, 79: 69, 80: 70, 500: 70, 11: 1, 10: -1} {
		s := &plan.Setup{Hardware: &hardware.GPU{Memory: 80, Usable: 70, NodeGPUs: 8, NodeMemory: 1000}}
		before := s.Hardware
		err := (&examined{gpu: "g", gpus: 3, free: free, host: 50}).apply(s, "f")
		switch h := s.Hardware; {
		case want < 0 && (err == nil || h != before):
			t.Errorf("%d free: %+v, %v", free, h, err)
		case want >= 0 && (err != nil || h.Free != free || h.Usable != want || h.NodeGPUs != 3 || h.NodeMemory != 50 || h == before || before.Usable != 70):
			t.Errorf("%d free: %+v, want %d, %v", free, h, want, err)
		}
	}
}

// A sequence as long as a file says needs no other flag.
func TestMorePositions(t *testing.T) {
	x := &askedValue{f: &planFlags{largest: "seq"}, base: &plan.Setup{Model: &model.Model{MaxPositions: 4096}}, args: map[string]any{"max-position-embeddings": 4096}}
	for value, want := range map[int]string{4095: "--seq 4095", 4096: "--seq 4096", 4097: "--seq 4097 --max-position-embeddings 4097"} {
		if got := x.flags(value); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

// Copies need room for the largest of them, half of it on a GPU, unless the room is not known.
func TestFits(t *testing.T) {
	need := bench.Footprint(64)
	for _, x := range []struct {
		backend string
		room    memory.Bytes
		want    bool
	}{{"cpu", need, true}, {"cpu", need - 1, false}, {"cuda", need / 2, true}, {"cuda", need/2 - 1, false}, {"cpu", 0, true}, {"cuda", 0, true}} {
		if err := fits(device.Info{Backend: x.backend}, []memory.Bytes{4, 64, 8}, x.room); (err == nil) != x.want {
			t.Errorf("%s with %d bytes of room: %v", x.backend, x.room, err)
		}
	}
}

// A command line is what a shell would have to read.
func TestCommandLine(t *testing.T) {
	cmd := newTrain()
	if got := commandLine(cmd, []string{"--a", "b c", "", "it's", "$x", "d,e", "ü", "-1"}); got != `train --a 'b c' '' 'it'\''s' '$x' d,e ü -1` {
		t.Error(got)
	}
	for word, want := range map[string]bool{"": false, "-": false, "x": false, "-1": false, "-.5": false, "-9x": false, "-x": true, "--": true, "--x": true, "---": true} {
		if isFlag(word) != want {
			t.Errorf("%q: %v", word, !want)
		}
	}
	if got := fmt.Sprint(joinLists(cmd.Flags(), []string{"--graph", "a", "b", "--lr", "1", "x", "--offload-modules", "--graph=a", "b"})); got != "[--graph a,b --lr 1 x --offload-modules --graph=a b]" {
		t.Error(got)
	}
}

// Numbers of pools may reach their limits, and no more.
func TestLimitsOfPools(t *testing.T) {
	for line, ok := range map[string]bool{
		"--prefetch 1": true, "--prefetch 1000": true, "--prefetch 1001": false, "--prefetch 0": false, "--prefetch -1": false, "--recompute 0": true, "--recompute -1": false,
		"--dp 1": true, "--dp 0": false, "--dp 1048576": true, "--tp 1048577": false, "--ep 1048576": true, "--etp 1048577": false, "--grad-comm-dtype fp8": false,
	} {
		cmd := newBenchPools()
		words := strings.Fields(line)
		if err := cmd.ParseFlags(words); err != nil {
			t.Fatal(err)
		}
		o := bench.PoolOptions{Prefetch: 1, DP: 1, TP: 1, EP: 1, ETP: 1}
		grads, n := "bf16", 0
		if _, err := fmt.Sscan(words[1], &n); err != nil {
			grads = words[1]
		}
		switch words[0] {
		case "--prefetch":
			o.Prefetch = n
		case "--recompute":
			o.Recompute = n
		case "--dp":
			o.DP = n
		case "--tp":
			o.TP = n
		case "--ep":
			o.EP = n
		case "--etp":
			o.ETP = n
		}
		if err := checkPools(cmd, &o, grads, "persistent"); (err == nil) != ok {
			t.Errorf("%s: %v", line, err)
		}
	}
}

// A file that a disk does not give is a failure, and one that is not there or may not be read a wrong command line.
func TestExitCodesOfUnreadableFiles(t *testing.T) {
	for no, want := range map[syscall.Errno]int{syscall.EIO: exitFailure, syscall.EMFILE: exitFailure, syscall.ENOENT: exitUsage, syscall.EACCES: exitUsage, syscall.EISDIR: exitUsage} {
		setting := &memory.SettingError{Setting: "Model", Asked: "x", Err: fmt.Errorf("the file cannot be read: %w", no)}
		for _, err := range []error{usagef("--model x: the file cannot be read: %w", no), planError(setting), (&jobFlags{}).asTyped(planError(setting), nil)} {
			if code := exitCode(err); code != want || describe(nil, err) != "--model x: the file cannot be read: "+no.Error() {
				t.Errorf("%v: code %d and %q, want %d", no, code, describe(nil, err), want)
			}
		}
	}
}
