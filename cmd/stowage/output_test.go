// This file tests what a terminal and a locale make of the output.

package main

import (
	"encoding/json"
	"io"
	"os"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/stowage-dev/stowage/internal/pseudoterm"
)

const planned = "plan --model mixtral-8x7b --gpu h100 --gpus 32 --pp 4 --ep 8 --gbs 64 --seq 4096"

// printing returns command lines that print something, and print the same again.
func printing(t *testing.T) (lines []string) {
	planFiles(t, map[string]string{"Größe.sh": strings.TrimSpace(launchFile) + " --frobnicate µ\n", "rl.sh": strings.TrimSpace(launchFile) + " --perform-rl-step\n"})
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Name() != "help" {
			lines = append(lines, strings.TrimPrefix(c.CommandPath()+" --help", "stowage "))
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(newRoot())
	return append(lines, planned, planned+" --json", planned+" --flags megatron", planned+" --offload moe_act --flags stowage",
		"plan --megatron Größe.sh --gpu h100", "plan --megatron rl.sh --gpu h100", "plan --model größe", "plan --compare Größe.sh Größe.sh --gpu h100", "plan explain moe_act "+strings.TrimPrefix(planned, "plan "),
		"plan ring", "plan scan .", "plan scan . --json", "bench pools", "bench pools --json", "completion bash", "completion zsh", "completion fish",
		"train --polcy stash", "report größe", "nonsense", "plan --budget "+strings.Repeat("9", 5000), "version")
}

// In a locale without other characters all output is ASCII, and JSON means the same.
func TestASCIILocale(t *testing.T) {
	more := false
	for _, line := range append(printing(t), "train --dry-run --policy stash") {
		t.Setenv("LC_ALL", "C")
		after, errs, code := command(strings.Fields(line)...)
		if !utf8ASCII(after) || !utf8ASCII(errs) {
			t.Errorf("%.80s: the output is not ASCII: %q", line, after+errs)
		}
		if code == exitOK && after == "" {
			t.Errorf("%.80s: nothing is printed", line)
		}
		if !strings.HasPrefix(line, "plan") {
			continue
		}
		t.Setenv("LC_ALL", "C.UTF-8")
		before, errs, again := command(strings.Fields(line)...)
		if more = more || !utf8ASCII(before+errs); code != again {
			t.Errorf("%.80s: code %d, then %d", line, again, code)
		}
		if !strings.HasSuffix(line, "--json") {
			continue
		}
		var a, b any
		if err := json.Unmarshal([]byte(before), &a); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal([]byte(after), &b); err != nil || !reflect.DeepEqual(a, b) {
			t.Errorf("%s: the JSON means something else: %v", line, err)
		}
	}
	if !more {
		t.Error("nothing is more than ASCII anyway")
	}
	t.Setenv("LC_ALL", "")
	t.Setenv("LC_CTYPE", "POSIX")
	if out, _, _ := command(strings.Fields(planned)...); !utf8ASCII(out) || !strings.Contains(out, "  +/-  ") {
		t.Errorf("LC_CTYPE=POSIX: %.400s", out)
	}
	// A file has all characters.
	if _, errs, code := command(strings.Fields("plan --megatron Größe.sh --gpu h100 --html page.html")...); code != exitOK {
		t.Fatal(errs)
	}
	if page, err := os.ReadFile("page.html"); err != nil || !strings.Contains(string(page), "Größe") {
		t.Errorf("the page lacks the name: %v", err)
	}
}

func utf8ASCII(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r >= utf8.RuneSelf })
}

// onTerminal runs a command whose output is a terminal of that width, and returns what the
// terminal got.
func onTerminal(t *testing.T, width int, line string) string {
	t.Helper()
	master, tty := pseudoterm.Open(t)
	if err := unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: uint16(width)}); err != nil {
		t.Fatal(err)
	}
	const last = "\x04END\x04"
	got := make(chan string)
	go func() {
		var all strings.Builder
		buffer := make([]byte, 4096)
		for !strings.Contains(all.String(), last) {
			n, err := master.Read(buffer)
			all.Write(buffer[:n])
			if err != nil {
				break
			}
		}
		got <- all.String()
	}()
	execute(strings.Fields(line), tty, tty)
	if _, err := io.WriteString(tty, last); err != nil {
		t.Fatal(err)
	}
	text, _, _ := strings.Cut(<-got, last)
	return strings.ReplaceAll(text, "\r\n", "\n")
}

// On a terminal no line is longer than it is wide, except for a single word.
func TestFitsTerminal(t *testing.T) {
	t.Setenv("TERM", "dumb")
	t.Setenv("COLUMNS", "")
	for _, line := range printing(t) {
		if strings.Contains(line, "--json") || strings.HasPrefix(line, "completion b") || strings.HasPrefix(line, "completion z") || strings.HasPrefix(line, "completion f") || strings.Contains(line, "--flags") {
			continue
		}
		for _, width := range []int{60, 80, 120} {
			text := onTerminal(t, width, line)
			if text == "" {
				t.Errorf("%.80s: nothing is printed", line)
			}
			for _, l := range strings.Split(text, "\n") {
				if n := utf8.RuneCountInString(l); n > width && len(strings.Fields(strings.TrimSuffix(l, `\`))) > 1 {
					t.Errorf("%.80s: %d columns at a width of %d: %s", line, n, width, l)
				}
			}
		}
	}
}

// Output for programs is the same on a terminal, and text elsewhere does not ask for COLUMNS.
func TestWholeOutput(t *testing.T) {
	t.Setenv("TERM", "dumb")
	t.Setenv("COLUMNS", "50")
	for _, line := range []string{planned + " --json", planned + " --flags megatron", "completion bash"} {
		stdout, stderr, _ := command(strings.Fields(line)...)
		// A terminal writes blanks for tabs.
		got := onTerminal(t, 50, line)
		if strings.Count(got, "\n") != strings.Count(stdout+stderr, "\n") || strings.Join(strings.Fields(got), " ") != strings.Join(strings.Fields(stdout+stderr), " ") {
			t.Errorf("%s: the terminal got %.300q, not %.300q", line, got, stdout+stderr)
		}
	}
	plain, _, _ := command("help")
	if narrow := onTerminal(t, 200, "help"); longestLine(narrow) > 50 || longestLine(plain) <= 50 {
		t.Errorf("COLUMNS=50 makes lines of %d columns, and %d where there is no terminal", longestLine(narrow), longestLine(plain))
	}
}

func longestLine(text string) (n int) {
	for l := range strings.Lines(text) {
		n = max(n, utf8.RuneCountInString(strings.TrimSpace(l)))
	}
	return n
}

// Every command whose output cannot be written says so, and fails.
func TestOutputThatCannotBeWritten(t *testing.T) {
	lines := append(printing(t), "train --dry-run --policy stash", "doctor --help")
	for name, want := range map[string]string{
		os.DevNull:  "stowage: cannot write the output: standard output is open for reading only; redirect it with >\n",
		"/dev/full": "stowage: cannot write the output: no space left on device\n",
	} {
		flag := os.O_RDONLY
		if name != os.DevNull {
			flag = os.O_WRONLY
		}
		file, err := os.OpenFile(name, flag, 0)
		if err != nil {
			t.Log(err) // only Linux has it
			continue
		}
		for _, line := range lines {
			_, wrong, code := command(strings.Fields(line)...)
			if code != exitOK || wrong != "" {
				continue
			}
			var said strings.Builder
			if code := execute(strings.Fields(line), file, &said); code != exitFailure || said.String() != want {
				t.Errorf("%.80s: code %d, errors %q", line, code, said.String())
			}
		}
		file.Close() // nothing was written
	}
}
