// This file tests what commands leave behind if the disk is full.

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// A file that the disk has no room for is a failure in one sentence. An old file of the
// same name stays as it was, and nothing else is left behind. The limit on the size of
// files acts as a full disk: writes behind the first KiB fail.
func TestFilesOnFullDisk(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs ulimit -f")
	}
	t.Chdir(t.TempDir())
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for i, line := range []string{
		"bench pools --model tiny-moe --svg",
		"bench pools --model tiny-moe --json --report",
		"plan --model llama-3-8b --gpu h100 --gpus 8 --html",
		"bench stash --synth zipf --ranks 1 --layers 2 --microbatches 8 --steps 2 --tokens 16 --width 16 --page 4KiB --save-trace",
		"bench offload --model qwen3-30b-a3b --layers 1 --seq 1 --microbatches 1 --steps 1 --link-gbps 99 --tflops 1000 --memory-gbps 1000 --trace",
	} {
		if i > 0 {
			writeFile(t, "file", "old")
		}
		before := files(t)
		flag := line[strings.LastIndexByte(line, ' ')+1:]
		args := append([]string{"-c", `ulimit -f 1; exec "$0" "$@"`, self}, append(strings.Fields(line), "file")...)
		cmd := exec.Command("bash", args...)
		cmd.Env = append(os.Environ(), asProgram+"=1")
		var errs bytes.Buffer
		cmd.Stderr = &errs
		_ = cmd.Run()
		text := errs.String()
		if code := cmd.ProcessState.ExitCode(); code != exitFailure || strings.Count(text, "\n") != 1 || !strings.Contains(text, flag+": cannot write file: file too large") {
			t.Errorf("%s: code %d, errors %q", line, code, text)
		}
		if after := files(t); after != before {
			t.Errorf("%s: the files are\n%s\nand were\n%s", line, after, before)
		}
	}
}

// A limit on memory under which the program cannot start is named, with advice that is
// true: no other limit would do for every command, because devices reserve addresses.
func TestTooLittleToStart(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs ulimit -d")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("bash", "-c", `ulimit -d 1000000; exec "$0" "$@"`, self, "version")
	cmd.Env = append(os.Environ(), asProgram+"=1")
	said, _ := cmd.CombinedOutput()
	text := string(said)
	if strings.Contains(text, "ThreadSanitizer") {
		t.Skip("the race detector does not start under the limit")
	}
	if code := cmd.ProcessState.ExitCode(); code != exitFailure || !strings.HasPrefix(text, "stowage: this process may map 976.56 MiB of memory (ulimit -d)") ||
		!strings.HasSuffix(text, "; that is too little to start, run it without this limit\n") {
		t.Errorf("code %d, %q", code, text)
	}
}

// A limit on open files under which the program cannot start is named.
func TestTooFewFilesToStart(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ends := 0
	for limit := 4; limit < 12; limit++ {
		// What the tests themselves were given is closed, or there may not even be room for the loader.
		cmd := exec.Command("bash", "-c", fmt.Sprintf(`exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; ulimit -n %d && exec "$0" "$@"`, limit), self, "version")
		cmd.Env = append(os.Environ(), asProgram+"=1")
		said, _ := cmd.CombinedOutput()
		text := string(said)
		switch code := cmd.ProcessState.ExitCode(); {
		case strings.HasPrefix(text, "stowage: this process may not open enough files to start (ulimit -n)") && strings.Count(text, "\n") == 1 && code == exitFailure:
			ends++
		case !strings.HasPrefix(text, "stowage ") || code != exitOK:
			t.Errorf("ulimit -n %d: code %d, %.300q", limit, code, text)
		}
	}
	if ends == 0 {
		t.Error("the program started under every limit: the test sees too little")
	}
}

// Two flags for one file, and a file that the command reads, are refused.
func TestSameFile(t *testing.T) {
	t.Chdir(t.TempDir())
	writeFile(t, "a", "")
	if err := os.Mkdir("dir", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("dir", "link"); err != nil {
		t.Fatal(err)
	}
	for _, link := range []string{"b", "c"} {
		if err := os.Symlink("a", link); err != nil {
			t.Fatal(err)
		}
	}
	for _, x := range []struct {
		writes, reads []flagFile
		want          string
	}{
		{[]flagFile{{"x", "a"}}, nil, ""},
		{[]flagFile{{"x", "a"}, {"y", "d"}, {"z", ""}}, []flagFile{{"in", ""}, {"", "e"}}, ""},
		{[]flagFile{{"x", "b"}, {"y", "c"}}, nil, "--y and --x name the same file, c; give another file to write"},
		{[]flagFile{{"x", "new"}, {"y", "new"}}, nil, "--y and --x name the same file, new; give another file to write"},
		{[]flagFile{{"x", "new"}, {"y", "./new"}}, nil, "--y and --x name the same file, ./new; give another file to write"},
		{[]flagFile{{"x", "dir/new"}, {"y", "link/new"}}, nil, "--y and --x name the same file, link/new; give another file to write"},
		{[]flagFile{{"x", "dir/new"}, {"y", "new"}}, nil, ""},
		{[]flagFile{{"x", "b"}}, []flagFile{{"", "a"}}, "--x and an argument name the same file, b; give another file to write"},
		{[]flagFile{{"x", "/dev/null"}, {"y", "/dev/null"}}, nil, ""},
	} {
		got := ""
		if err := checkFiles(x.writes, x.reads...); err != nil {
			got = err.Error()
		}
		if got != x.want {
			t.Errorf("%v, %v: %q, want %q", x.writes, x.reads, got, x.want)
		}
	}
}

// A file that was written is named, on the output that people read. A device is not.
func TestWrittenFiles(t *testing.T) {
	file := filepath.Join(t.TempDir(), "page.html")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		file        string
		forProgram  bool
		out, errors string
	}{
		{file, false, "it is " + file + "\n", ""}, {file, true, "", "it is " + file + "\n"},
		{"", false, "", ""}, {"", true, "", ""}, {os.DevNull, false, "", ""}, {os.DevNull, true, "", ""},
	} {
		var out, errs bytes.Buffer
		cmd := &cobra.Command{}
		cmd.SetOut(&out)
		cmd.SetErr(&errs)
		if written(cmd, x.forProgram, "it is", x.file); out.String() != x.out || errs.String() != x.errors {
			t.Errorf("%+v: %q and %q", x, out.String(), errs.String())
		}
	}
}

// A comparison that finds no room while it trains is printed, and fails if somebody wanted it to be written.
func TestComparisonWithoutRoom(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs ulimit -f")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	words := inFolder(t) + "--steps 1 "
	for more, want := range map[string]int{"": exitOK, "--policy all --out c": exitFailure, "--policy all --out c --json": exitFailure} {
		cmd := exec.Command("bash", append([]string{"-c", `ulimit -f 3; exec "$0" "$@"`, self}, strings.Fields(words+more)...)...)
		cmd.Env = append(os.Environ(), asProgram+"=1")
		var out, said strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &said
		_ = cmd.Run() // the code tells
		failed := strings.Contains(said.String(), "\nstowage: the comparison was not written: cannot write ")
		if code := cmd.ProcessState.ExitCode(); code != want || failed != (want != exitOK) || !strings.Contains(out.String(), "offload+recompute") {
			t.Errorf("%q: code %d, output %q, errors %q", more, code, out.String(), said.String())
		}
		if strings.Contains(said.String(), "resume") || strings.Count(said.String(), "warning") != 1 {
			t.Errorf("%q: errors %q", more, said.String())
		}
		if _, err := os.Stat("c/report.html"); err == nil {
			t.Errorf("%q: it was written all the same", more)
		}
	}
}
