//go:build linux

// This file tests `stowage train` as those see it who watch: at a terminal, and over
// HTTP.

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stowage-dev/stowage/internal/browser"
	"github.com/stowage-dev/stowage/internal/pseudoterm"
	"github.com/stowage-dev/stowage/observe/report"
)

// shown is what a terminal got.
type shown struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *shown) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *shown) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// watched is the program with standard error on a terminal.
type watched struct {
	cmd    *exec.Cmd
	stdout bytes.Buffer
	err    shown
	tty    *os.File
	modes  unix.Termios
	read   chan struct{}
	close  func()
}

func atTerminal(t *testing.T, line string, env ...string) *watched {
	t.Helper()
	master, tty := pseudoterm.Open(t)
	modes, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	passSignals(t)
	w := &watched{cmd: exec.Command(os.Args[0], strings.Fields(line)...), tty: tty, modes: *modes, read: make(chan struct{})}
	w.cmd.Env = append(append(os.Environ(), asProgram+"=1", "TERM=xterm", "LANG=C.UTF-8", "LC_ALL=C.UTF-8", "NO_COLOR="), env...)
	w.cmd.Stdout, w.cmd.Stderr = &w.stdout, tty
	if err := w.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(w.read)
		_, _ = io.Copy(&w.err, master)
	}()
	// Closed first, the other end would take what was not read yet with it.
	w.close = func() { tty.Close(); <-w.read; master.Close() }
	return w
}

// until waits for something on the terminal.
func (w *watched) until(t *testing.T, pattern string) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Minute); !regexp.MustCompile(pattern).MatchString(w.err.String()); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			_ = w.cmd.Process.Kill()
			t.Fatalf("no %s in %q", pattern, w.err.String())
		}
	}
}

// end waits for the program, and is what is behind the last picture; the terminal must
// be in the mode that it was in.
func (w *watched) end(t *testing.T, code int) string {
	t.Helper()
	_ = w.cmd.Wait() // the code is looked at below
	modes, err := unix.IoctlGetTermios(int(w.tty.Fd()), unix.TCGETS)
	if err != nil || *modes != w.modes {
		t.Errorf("the terminal's mode was %v, is %v: %v", w.modes, modes, err)
	}
	// What the program wrote last may still be on its way, and is lost when a side closes.
	const last = "THE PROGRAM HAS ENDED"
	if _, err := w.tty.WriteString(last); err != nil {
		t.Fatal(err)
	}
	w.until(t, last)
	w.close()
	text := strings.TrimSuffix(w.err.String(), last)
	if got := w.cmd.ProcessState.ExitCode(); got != code {
		t.Errorf("code %d, shown %q", got, text)
	}
	for _, hides := range []string{"\x1b[?25l", "\x1b[?1049h", "\x1b[?7l"} { // the cursor, the other screen, wrapping
		if strings.Contains(text, hides) {
			t.Errorf("%q is used, which a kill would leave behind", hides)
		}
	}
	return text[strings.LastIndex(text, "\x1b[J")+len("\x1b[J"):]
}

var inColour = regexp.MustCompile(`\x1b\[[0-9;]*m`)

// A run at a terminal has a picture, which leaves what others get as plain lines; the
// result is not touched.
func TestTrainAtTerminal(t *testing.T) {
	words := inFolder(t)
	w := atTerminal(t, words+"--policy stash --steps 20 --hold-out 0.1 --eval-every 10", "NO_COLOR=1")
	rest := w.end(t, exitOK)
	if all := w.err.String(); !strings.Contains(all, "0 %") || inColour.MatchString(all) {
		t.Errorf("without colour it is %q", all)
	}
	// A line that stays is above the picture, of which there may be one more behind it. It is
	// wider than the terminal.
	stays := regexp.MustCompile(`stash step 20/20 loss [0-9.]+ .*\r\n  .*out [0-9.]+\r\n`)
	if rest = regexp.MustCompile(`^stash +step 10/20 .*\r\n  .*\r\n`).ReplaceAllString(rest, ""); rest != "" && stays.FindString(rest) != rest || len(stays.FindAllString(w.err.String(), -1)) != 1 {
		t.Errorf("left is %q of %q", rest, w.err.String())
	}
	if !strings.HasPrefix(w.stdout.String(), "small under stash: 20 steps") || strings.Contains(w.stdout.String(), "\x1b") {
		t.Errorf("the result is %q", w.stdout.String())
	}
}

// A signal finishes the step and says so below an orderly terminal.
func TestTrainAtTerminalStopped(t *testing.T) {
	words := inFolder(t)
	w := atTerminal(t, words+"--policy none --steps 1000000")
	w.until(t, `step \d+/1000000.*\n.*loss.*\n.*rank 0 .*█`)
	sendSignal(t, w.cmd, syscall.SIGTERM)
	rest := w.end(t, 128+int(syscall.SIGTERM))
	if !regexp.MustCompile(`^none +step .*\r\nstowage: the run was interrupted and not saved, because it has no --out\r\n$`).MatchString(rest) {
		t.Errorf("left is %q", rest)
	}
	if !inColour.MatchString(w.err.String()) {
		t.Errorf("there is no colour in %q", w.err.String())
	}
}

// Where there is no use for a picture there are lines, as everywhere else.
func TestTrainPlain(t *testing.T) {
	words := inFolder(t)
	for _, x := range []struct{ flag, env string }{{"--plain", ""}, {"", "TERM=dumb"}} {
		w := atTerminal(t, words+"--policy none --steps 3 "+x.flag, x.env)
		w.end(t, exitOK)
		if text := w.err.String(); strings.Contains(text, "\x1b") || !strings.Contains(text, "none               step 3/3  loss") {
			t.Errorf("%v: %q", x, text)
		}
	}
}

// serving runs the program, which serves, and gives the address. The run waits after its
// first steps, because nobody reads its lines, until goOn is called. over gives its code
// and what it printed.
func serving(t *testing.T, line string) (url string, goOn func(), over func() (code int, stdout string)) {
	t.Helper()
	errs, in := io.Pipe()
	var stdout bytes.Buffer
	code := make(chan int)
	go func() {
		c := execute(strings.Fields(line), &stdout, in)
		in.Close()
		code <- c
	}()
	lines := bufio.NewReader(errs)
	first, err := lines.ReadString('\n')
	url, ok := strings.CutPrefix(strings.TrimSpace(first), "live at ")
	if err != nil || !ok {
		t.Fatalf("it says %q, %v", first, err)
	}
	gate := make(chan struct{})
	go func() {
		for {
			text, err := lines.ReadString('\n')
			if err != nil {
				return
			}
			if strings.Contains(text, " step ") {
				break
			}
		}
		<-gate
		_, _ = io.Copy(io.Discard, lines)
	}()
	return url, func() { close(gate) }, func() (int, string) { return <-code, stdout.String() }
}

func fetch(t *testing.T, url string) string {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusOK {
		t.Fatalf("%s: %d, %v", url, r.StatusCode, err)
	}
	return string(text)
}

// SPEC S6.5
// A run and a comparison are served while they go on, and viewers learn the end.
func TestTrainServe(t *testing.T) {
	words := inFolder(t)
	defer http.DefaultClient.CloseIdleConnections()
	for name, line := range map[string]string{"a run": "--policy stash --steps 40 --out run", "a comparison": "--steps 2"} {
		if testing.Short() && name == "a comparison" {
			continue // it takes long under the race detector
		}
		url, goOn, over := serving(t, words+line+" --serve :0")
		r, err := http.Get(url + "events")
		if err != nil {
			t.Fatal(err)
		}
		for !strings.Contains(fetch(t, url+"metrics"), "stowage_loss{") {
			time.Sleep(10 * time.Millisecond)
		}
		if page := fetch(t, url); !strings.Contains(page, "<html") {
			t.Errorf("%s: the page is %.100q", name, page)
		}
		var live report.Report
		if err := json.Unmarshal([]byte(fetch(t, url+"report.json")), &live); err != nil || !live.Live {
			t.Errorf("%s: %v, %+v", name, err, live)
		}
		goOn()
		for events := bufio.NewScanner(r.Body); events.Scan() && events.Text() != "event: done"; {
		}
		var last report.Report
		if err := json.Unmarshal([]byte(fetch(t, url+"report.json")), &last); err != nil || last.Live || len(last.Runs) == 0 {
			t.Fatalf("%s: %v, %+v", name, err, last)
		}
		if steps := last.Runs[0].Steps.Step; steps[len(steps)-1] != map[string]int{"a run": 40, "a comparison": 2}[name] {
			t.Errorf("%s: the last steps are %v", name, steps)
		}
		r.Body.Close()
		if code, stdout := over(); code != exitOK || stdout == "" {
			t.Errorf("%s: code %d, %q", name, code, stdout)
		}
	}
}

// A port that is in use is said before anything is trained.
func TestTrainServeErrors(t *testing.T) {
	words := inFolder(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	_, port, _ := net.SplitHostPort(taken.Addr().String())
	for line, want := range map[string]string{
		"--serve :" + port: "is in use; give another", "--serve nowhere": "no port", "--serve :0 --dry-run": "nothing to show", "--serve :0 --pp 300": "--pp",
		"--serve \a:0": `expected a port such as :8080, or a host and a port such as 0.0.0.0:8080, got "\a:0"`,
	} {
		stdout, stderr, code := command(strings.Fields(words + "--policy none --steps 1 " + line)...)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("%s: code %d, %q", line, code, stderr)
		}
	}
	_, stderr, code := command(strings.Fields(words + "--policy none --steps 1 --serve 0.0.0.0:0")...)
	if code != exitOK || !strings.Contains(stderr, "warning: anyone on the network can see this run") {
		t.Errorf("for everybody: code %d, %q", code, stderr)
	}
}

// SPEC S6.5
// A browser shows a real run under way, to two at once and after a reload, and its end.
func TestTrainInBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a browser")
	}
	notIgnored(t, syscall.SIGINT) // which ends the run
	words := inFolder(t)
	b := browser.Start(t)
	url, goOn, over := serving(t, words+"--micro 8 --seq 256 --policy offload --steps 1000000 --out run --save-every 0 --serve :0")
	goOn()
	b.Open(url)
	b.Until(`document.querySelector(".live")?.textContent.match(/^live . 0 % . .*[0-9][hms] left$/) && document.querySelectorAll("canvas").length > 0`)
	first := browser.Eval[string](b, `document.getElementById("about").textContent`)
	b.Until(`document.getElementById("about").textContent !== ` + strconv.Quote(first)) // it goes on
	second := b.Another()
	second.Open(url)
	second.Until(`document.querySelector(".live")?.textContent.startsWith("live")`)
	b.Open(url)
	b.Until(`document.querySelector(".live")?.textContent.startsWith("live")`)
	if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	for _, tab := range []*browser.Tab{b, second} {
		tab.Until(`document.querySelector(".live").textContent === "finished"`)
	}
	if code, _ := over(); code != exitInterrupted {
		t.Errorf("code %d", code)
	}
	for _, text := range b.Complaints(url, url+"report.json", url+"events") {
		t.Error(text)
	}
}
