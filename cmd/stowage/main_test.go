// This file tests the commands as a user meets them: what is printed where, and
// with which exit code.

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bench"
	"github.com/stowage-dev/stowage/internal/doctor"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/leak"
	"github.com/stowage-dev/stowage/internal/version"
)

// asProgram makes the test binary the program itself, for tests that kill it.
const asProgram = "STOWAGE_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		hang()
		fail()
		differ()
		main()
	}
	leak.Main(m)
}

// command runs the program in-process.
func command(args ...string) (stdout, stderr string, code int) {
	var out, errs bytes.Buffer
	code = execute(args, &out, &errs)
	return out.String(), errs.String(), code
}

func TestHelp(t *testing.T) {
	for name, args := range map[string][]string{
		"help.txt":            nil,
		"help-train.txt":      {"train", "--help"},
		"help-doctor.txt":     {"doctor", "--help"},
		"help-bench.txt":      {"help", "bench"},
		"help-bench-copy.txt": {"help", "bench", "copy"},
		"help-version.txt":    {"version", "-h"},
		"help-report.txt":     {"report", "--help"},

		"help-bench-stash.txt":  {"bench", "stash", "--help"},
		"help-bench-record.txt": {"bench", "record", "--help"},
		"help-completion.txt":   {"completion", "--help"},
	} {
		stdout, stderr, code := command(args...)
		if code != exitOK || stderr != "" {
			t.Errorf("%v: code %d, errors %q", args, code, stderr)
		}
		if !strings.Contains(stdout, "Examples:") {
			t.Errorf("%v: the help has no example", args)
		}
		golden.Check(t, name, stdout)
	}
}

// -h asks for the help of a command wherever it stands.
func TestHelpBeforeACommand(t *testing.T) {
	for after, before := range map[string]string{
		"train -h": "-h train", "bench copy -h": "-h bench copy", "bench stash -h": "bench -h stash", "plan explain -h": "plan -h explain", "doctor --help": "--help doctor",
	} {
		want, _, _ := command(strings.Fields(after)...)
		stdout, stderr, code := command(strings.Fields(before)...)
		if code != exitOK || stderr != "" || stdout != want {
			t.Errorf("%s: code %d, errors %q, output %.60q, want %.60q", before, code, stderr, stdout, want)
		}
	}
}

// Every command line below is wrong in one way; the answer is one sentence on
// standard error, nothing on standard output, and code 2.
func TestUsageErrors(t *testing.T) {
	var all strings.Builder
	for _, line := range []string{
		"trian",
		"frobnicate",
		"help trian",
		"help bench cpoy",
		"bench",
		"bench cpy",
		"bench cpy --help",
		"help train x",
		"frobnicate --help",
		"--help trian",
		"train fast --help",
		"--jsn",
		"version --jsno",
		"version -x",
		"version now",
		"doctor --json=perhaps",
		"train fast",
		"bench copy --devise cpu",
		"bench copy --device gpu",
		"bench copy --device cdua",
		"bench copy --device cpu:1",
		"bench copy --device cuda:x",
		"bench copy --device",
		"bench copy --size 64XB",
		"bench copy --size 64",
		"bench copy --size 0B",
		"bench copy --size -1MiB",
		"bench copy --size 9999999TiB",
		"bench copy --size 99999999999999999999B",
		"bench copy --size 1MiB,,2MiB",
		"bench copy --size=",
		"bench copy --time 5",
		"bench copy --time 0s",
		"bench stash --width 0",
		"bench stash --rows 0",
		"bench stash --skew -1",
		"bench stash --skew NaN",
		"bench stash --page 5000B",
		"bench stash --page 2GiB",
		"bench stash --groups 0",
		"bench stash --tensors 33",
		"bench stash --rows 10 --max-rows 9",
	} {
		stdout, stderr, code := command(strings.Fields(line)...)
		if code != exitUsage || stdout != "" || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%q: code %d, output %q, errors %q", line, code, stdout, stderr)
		}
		all.WriteString("$ stowage " + line + "\n" + stderr)
	}
	golden.Check(t, "usage-errors.txt", all.String())
}

func TestVersion(t *testing.T) {
	stdout, _, code := command("version")
	if code != exitOK || !strings.HasPrefix(stdout, "stowage ") || !strings.Contains(stdout, runtime.Version()) {
		t.Errorf("code %d, %q", code, stdout)
	}
	if short, _, code := command("--version"); code != exitOK || short != stdout {
		t.Errorf("--version: code %d, %q", code, short)
	}
	stdout, _, code = command("version", "--json")
	var v buildVersion
	if err := json.Unmarshal([]byte(stdout), &v); err != nil || code != exitOK || v != thisVersion() {
		t.Errorf("code %d, %v, %q", code, err, stdout)
	}

	built := versionOf(&debug.BuildInfo{
		Main: debug.Module{Version: "v1.2.3"}, // the file VERSION counts, not the module's
		Settings: []debug.BuildSetting{
			{Key: "vcs.revision", Value: "0123456789abcdef"}, {Key: "vcs.time", Value: "2026-01-02T03:04:05Z"}, {Key: "vcs.modified", Value: "true"},
		},
	})
	want := "stowage " + version.Number() + ", commit 0123456789ab with changes of 2026-01-02T03:04:05Z, " + runtime.Version() + ", " + runtime.GOOS + "/" + runtime.GOARCH
	if built.String() != want {
		t.Errorf("%q, want %q", built, want)
	}
}

// SPEC S6.3: the doctor works on any machine, GPU or not.
func TestDoctor(t *testing.T) {
	stdout, stderr, code := command("doctor", "--json")
	if code != exitOK || stderr != "" {
		t.Fatalf("code %d, errors %q", code, stderr)
	}
	var r doctor.Report
	if err := json.Unmarshal([]byte(stdout), &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Devices) == 0 || r.Devices[0].Name != "cpu:0" || r.Devices[0].Link == nil {
		t.Fatalf("no CPU device was measured: %s", stdout)
	}
	if l := r.Devices[0].Link; l.Out <= 0 || l.In <= 0 || l.Both <= 0 || l.Local <= 0 {
		t.Errorf("implausible speeds %+v", *l)
	}
	if len(r.Devices) == 1 && len(r.Missing) == 0 {
		t.Error("there is no GPU, and nothing says so")
	}
}

func TestBenchCopy(t *testing.T) {
	stdout, stderr, code := command("bench", "copy", "--size", "64KiB,1MiB", "--time", "10ms", "--json")
	if code != exitOK || stderr != "" {
		t.Fatalf("code %d, errors %q", code, stderr)
	}
	var r bench.Result
	if err := json.Unmarshal([]byte(stdout), &r); err != nil {
		t.Fatal(err)
	}
	seen := map[bench.Direction]int{}
	for _, c := range r.Copies {
		if c.GBps <= 0 {
			t.Errorf("implausible: %+v", c)
		}
		if c.Via == "stream" {
			seen[c.Direction]++
			if c.PlainGBps <= 0 || c.Ratio < r.Ratio || c.Plain == "" {
				t.Errorf("no plain copy beside %+v", c)
			}
		}
	}
	for _, d := range bench.Directions() {
		if seen[d] != 2 {
			t.Errorf("direction %s was measured %d times, not 2", d, seen[d])
		}
	}
	if len(r.Overheads) == 0 {
		t.Error("no overheads")
	}
}

// A measurement that no machine has the memory for is refused in figures that people read.
func TestBenchStashBeyondMemory(t *testing.T) {
	_, stderr, code := command("bench", "stash", "--rows", "99999999", "--width", "99999999")
	if code != exitFailure || !strings.Contains(stderr, "needs about 8") || goWords.MatchString(stderr) || strings.Contains(stderr, "e0") {
		t.Errorf("code %d, errors %q", code, stderr)
	}
}

// The measurement prints ratio, speeds and launches.
func TestBenchStash(t *testing.T) {
	line := "bench stash --rows 50 --width 700 --tensors 5 --skew 1 --time 5ms"
	stdout, stderr, code := command(strings.Fields(line + " --json")...)
	if code != exitOK || stderr != "" {
		t.Fatalf("code %d, errors %q", code, stderr)
	}
	var r bench.Stash
	if err := json.Unmarshal([]byte(stdout), &r); err != nil {
		t.Fatal(err)
	}
	if r.Ratio <= 0 || r.GBps <= 0 || r.CopyGBps <= 0 || r.Launches != 2 || r.Skew != 1 || r.Width != 700 {
		t.Errorf("implausible: %+v", r)
	}
	stdout, stderr, code = command(strings.Fields(line)...)
	if code != exitOK || stderr != "" || !strings.Contains(stdout, "launches") || !strings.Contains(stdout, "ratio") {
		t.Errorf("code %d, errors %q, printed %q", code, stderr, stdout)
	}
	for _, line := range []string{"--rows 1099511627776 --width 1073741824 --tensors 32", "--rows 99999999"} {
		if _, stderr, code := command(strings.Fields("bench stash --groups 10000 " + line)...); code != exitFailure || !strings.Contains(stderr, "give fewer --rows") {
			t.Errorf("%s: code %d, errors %q", line, code, stderr)
		}
	}
}

// Copies this small say nothing about speed, and the table says so.
func TestBenchCopyOfAFewBytes(t *testing.T) {
	for size, small := range map[string]bool{"1B": true, "64KiB": false} {
		stdout, stderr, code := command("bench", "copy", "--size", size, "--time", "1ms")
		if code != exitOK || stderr != "" || strings.Contains(stdout, "the cost of issuing") != small {
			t.Errorf("%s: code %d, errors %q, printed %q", size, code, stderr, stdout)
		}
	}
}

// On a machine without a GPU asking for one is a failure, not wrong usage, and
// the sentence says what to install. SPEC S6.3
func TestBenchWithoutGPU(t *testing.T) {
	if _, err := openGPU(0); err == nil {
		t.Skip("this machine has a GPU")
	}
	stdout, stderr, code := command("bench", "copy", "--device", "cuda")
	if code != exitFailure || stdout != "" || strings.Count(stderr, "\n") != 1 {
		t.Errorf("code %d, output %q, errors %q", code, stdout, stderr)
	}
	var unsupported *device.Unsupported
	if _, err := openGPU(0); !errors.As(err, &unsupported) || !strings.Contains(stderr, unsupported.Need) {
		t.Errorf("%q does not say what to do", stderr)
	}
}

func TestBenchTooLarge(t *testing.T) {
	_, stderr, code := command("bench", "copy", "--size", "512TiB")
	if code != exitFailure || !strings.Contains(stderr, "give a smaller --size") {
		t.Errorf("code %d, errors %q", code, stderr)
	}
}

// full is a disk without room.
type full struct{ room int }

func (f *full) Write(p []byte) (int, error) {
	if f.room -= len(p); f.room < 0 {
		return 0, errors.New("no space left on device")
	}
	return len(p), nil
}

func TestFullDisk(t *testing.T) {
	for _, args := range [][]string{{}, {"version"}, {"version", "--json"}, {"help", "bench"}, {"bench", "copy", "--size", "64KiB"}} {
		var errs bytes.Buffer
		code := execute(args, &full{room: 10}, &errs)
		if want := "stowage: cannot write the output: no space left on device\n"; code != exitFailure || errs.String() != want {
			t.Errorf("%v: code %d, errors %q", args, code, errs.String())
		}
	}
}

// The program as a process: exit codes as a shell sees them, and a reader that goes
// away early.
func TestBinary(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(asProgram, "1")
	for line, want := range map[string]int{
		"version":      exitOK,
		"bench corpse": exitUsage,
	} {
		cmd := exec.Command(self, strings.Fields(line)...)
		_ = cmd.Run()
		if got := cmd.ProcessState.ExitCode(); got != want {
			t.Errorf("%s: exit code %d, want %d", line, got, want)
		}
	}
	if runtime.GOOS != "linux" {
		return
	}
	script := `"$0" version >/dev/full; echo $?; "$0" help | head -n 1`
	var errs bytes.Buffer
	sh := exec.Command("sh", "-c", script, self)
	sh.Stderr = &errs
	out, err := sh.Output()
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Split(string(out), "\n"); lines[0] != "1" || !strings.HasPrefix(lines[1], "Stowage trains large models") {
		t.Errorf("printed %q", out)
	}
	if n := strings.Count(errs.String(), "cannot write the output"); n != 1 || strings.Contains(errs.String(), "goroutine") {
		t.Errorf("errors %q", errs.String())
	}
}
