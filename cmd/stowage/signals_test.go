package main

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/train/run"
)

// begun waits until a run has done a step.
func begun(t *testing.T, dir string) {
	t.Helper()
	recorded(t, dir, 500)
}

// recorded waits until the metrics of a run have more than so many bytes, and returns
// how many they have.
func recorded(t *testing.T, dir string, bytes int64) int64 {
	t.Helper()
	for begun := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		if info, err := os.Stat(filepath.Join(dir, "metrics.jsonl")); err == nil && info.Size() > bytes {
			return info.Size()
		}
		if time.Since(begun) > 5*time.Minute {
			t.Fatal("no step was done")
		}
	}
}

// sendSignal sends a signal to a program. The exit code of one that has ended says why.
func sendSignal(t *testing.T, cmd *exec.Cmd, sig os.Signal) {
	t.Helper()
	if err := cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatal(err)
	}
}

// resumes wants a run that was interrupted to go on to what it would have come to.
func resumes(t *testing.T, words, dir string) {
	t.Helper()
	done := len(losses(t, dir))
	more := trained(t, fmt.Sprintf("train --out %s --resume --steps %d", dir, done+2))
	whole := trained(t, words+fmt.Sprintf("--policy none --steps %d", done+2))
	if more.Digest != whole.Digest || more.Tokens != 2*whole.Tokens/int64(done+2) {
		t.Errorf("after %d steps: resumed %+v, whole %+v", done, more, whole)
	}
}

// Ctrl-C and other signals finish the step, save and end the program with 128 and their
// number. Two SIGHUP are one: the shell and the system both send it. So are two that a
// scheduler sends ahead of a time limit. SPEC S9.4
func TestTrainIsInterrupted(t *testing.T) {
	words := inFolder(t)
	for dir, signals := range map[string][]syscall.Signal{
		"int": {syscall.SIGINT}, "term": {syscall.SIGTERM}, "hup": {syscall.SIGHUP, syscall.SIGHUP}, "pipe": {syscall.SIGPIPE}, "both": {syscall.SIGTERM, syscall.SIGHUP},
		"quit": {syscall.SIGQUIT}, "usr1": {syscall.SIGUSR1, syscall.SIGUSR1}, "usr2": {syscall.SIGUSR2, syscall.SIGUSR2}, "xcpu": {syscall.SIGXCPU},
		"alrm": {syscall.SIGALRM, syscall.SIGALRM}, "vtalrm": {syscall.SIGVTALRM},
	} {
		cmd := program(t, words+"--policy none --steps 1000000 --save-every 0 --out "+dir)
		var said strings.Builder
		cmd.Stderr = &said
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		begun(t, dir)
		for _, sig := range signals {
			sendSignal(t, cmd, sig)
		}
		_ = cmd.Wait()
		// Of two at once either may come first.
		if code := cmd.ProcessState.ExitCode(); !slices.Contains(signals, syscall.Signal(code-128)) || !strings.Contains(said.String(), "--resume") {
			t.Fatalf("%v: code %d; errors %q", signals, code, said.String())
		}
		if dir == "int" || dir == "hup" {
			resumes(t, words, dir)
		}
	}
}

// A program that nohup started does not mind that its terminal is gone.
func TestTrainWithNohup(t *testing.T) {
	words := inFolder(t)
	cmd := program(t, words+"--policy none --steps 1000000 --save-every 0 --out run")
	cmd.Args = append([]string{"sh", "-c", `trap "" HUP; exec "$0" "$@"`, cmd.Path}, cmd.Args[1:]...)
	cmd.Path = "/bin/sh"
	var said strings.Builder
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	begun(t, "run")
	sendSignal(t, cmd, syscall.SIGHUP)
	size := recorded(t, "run", 0)
	recorded(t, "run", size+500) // it goes on
	sendSignal(t, cmd, syscall.SIGTERM)
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 128+int(syscall.SIGTERM) {
		t.Errorf("code %d, errors %q", code, said.String())
	}
}

// Nobody reads the output any more, as in `stowage train 2>&1 | head`: the run is saved.
// So it is with viewers, whose sockets cause the same signal when they leave. SPEC S9.4
func TestTrainIntoAClosedPipe(t *testing.T) {
	words := inFolder(t)
	for dir, more := range map[string]string{"plain": "", "served": " --serve 127.0.0.1:0"} {
		cmd := program(t, words+"--policy none --steps 1000000 --save-every 0 --trace=false --out "+dir+more)
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stdout, cmd.Stderr = w, w
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		w.Close()
		begun(t, dir)
		r.Close()
		_ = cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 128+int(syscall.SIGPIPE) {
			t.Fatalf("%s: code %d, %v", dir, code, cmd.ProcessState)
		}
		done := len(losses(t, dir))
		if more := trained(t, fmt.Sprintf("train --out %s --resume --trace=false --steps %d", dir, done+1)); more.Steps != done+1 || more.Tokens != 64 {
			t.Errorf("%s: after %d steps it went on to %+v", dir, done, more)
		}
	}
}

// The last words of a run that is done go to a pipe that nobody reads.
func TestTrainAndNobodyReads(t *testing.T) {
	words := inFolder(t)
	cmd := program(t, words+"--policy none --steps 2 --out run")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	cmd.Stdout = w
	_ = cmd.Run()
	w.Close()
	if code := cmd.ProcessState.ExitCode(); code != 128+int(syscall.SIGPIPE) {
		t.Errorf("code %d", code)
	}
	if s := trained(t, "train --out run --resume"); s.Steps != 2 || !s.Finished {
		t.Errorf("%+v", s)
	}
}

// Ctrl-C in a second comparison leaves the first one as it was. SPEC S9.5
func TestTrainInterruptedComparison(t *testing.T) {
	words := inFolder(t)
	trained(t, words+"--steps 2")
	before := contents(t, "runs")
	if len(before) < 20 {
		t.Fatalf("the comparison wrote %d files", len(before))
	}
	cmd := program(t, words+"--steps 1000000")
	var said strings.Builder
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	begun(t, "runs/compare/.new/compare/none")
	sendSignal(t, cmd, os.Interrupt)
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != exitInterrupted || !strings.Contains(said.String(), "the one before is as it was") {
		t.Errorf("code %d, errors %q", code, said.String())
	}
	if !maps.Equal(contents(t, "runs"), before) {
		t.Error("the first comparison changed")
	}
}

// A second Ctrl-C does not wait for the step, and leaves no summary. On a busy machine the
// step may end before the second one comes; then a longer step is tried.
func TestTrainLeavesAtOnce(t *testing.T) {
	inFolder(t)
	for micro := 64; ; micro *= 2 {
		dir := fmt.Sprint("run", micro)
		code := interruptTwice(t, fmt.Sprintf("train --policy none --micro %d --out %s", micro, dir), dir)
		_, err := os.Stat(filepath.Join(dir, "summary.json"))
		switch {
		case code != exitInterrupted:
			t.Fatalf("code %d, the summary: %v", code, err)
		case errors.Is(err, os.ErrNotExist):
			return
		case err != nil || micro >= 512:
			t.Fatalf("with --micro %d the program waited for the step; the summary: %v", micro, err)
		}
	}
}

// interruptTwice starts a program, sends it two signals after its run has begun, and
// returns its code.
func interruptTwice(t *testing.T, words, dir string) int {
	t.Helper()
	cmd := program(t, words)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for begun := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(filepath.Join(dir, "metrics.jsonl")); err == nil {
			break
		}
		if time.Since(begun) > 5*time.Minute {
			t.Fatal("the run did not begin")
		}
	}
	for range 2 { // two of a kind at once are one
		sendSignal(t, cmd, os.Interrupt)
		time.Sleep(100 * time.Millisecond)
	}
	_ = cmd.Wait()
	return cmd.ProcessState.ExitCode()
}

// A signal at which Go would print its stacks ends a command as any other does.
func TestCommandsEndQuietly(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGQUIT, syscall.SIGABRT} {
		cmd := program(t, "plan --gpu h100 --megatron -")
		var said strings.Builder
		cmd.Stderr = &said
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := in.Write(make([]byte, 1<<18)); err != nil { // more than a pipe holds: the command reads
			t.Fatal(err)
		}
		sendSignal(t, cmd, sig)
		_ = cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 128+int(sig) || said.Len() > 0 {
			t.Errorf("%v: code %d, errors %.200q", sig, code, said.String())
		}
	}
}

// A stopper that has ended takes no more signals, and one that runs takes all.
func TestStopperEnds(t *testing.T) {
	others := make(chan os.Signal, 4)
	signal.Notify(others, syscall.SIGUSR1)
	defer signal.Stop(others)
	raise := func() {
		if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
		<-others
	}
	s := newStopper(false)
	s.catch()
	raise()
	<-s.ctx.Done()
	if got := s.because(&run.InterruptedError{}); !errors.As(got, new(*signalError)) {
		t.Errorf("the signal is %v", got)
	}
	s.stop()
	raise()
	raise() // the one before has been handed out to all
	if n := len(s.signals); n > 0 {
		t.Errorf("%d signals were taken after the end", n)
	}
}

// The first signal says why a run ends, whatever comes after it and however output fails then. A viewer
// that leaves ends nothing.
func TestFirstSignalCounts(t *testing.T) {
	ends := func(sig os.Signal) bool { return sig == syscall.SIGINT || sig == syscall.SIGTERM }
	for _, first := range stops {
		for _, second := range append([]os.Signal{nil}, stops...) {
			if ends(first) && ends(second) {
				continue // which ends the program at once
			}
			for _, sockets := range []bool{false, true} {
				s := newStopper(sockets)
				s.catching = true
				var want syscall.Signal
				for _, sig := range []os.Signal{first, second} {
					if sig == nil { // nobody reads the output
						sig = syscall.SIGPIPE
						if _, err := s.watched(brokenPipe{}).Write(nil); err == nil {
							t.Error("the output did not fail")
						}
					} else if s.got(sig.(syscall.Signal)); sig == syscall.SIGPIPE && sockets {
						continue
					}
					want = cmp.Or(want, sig.(syscall.Signal))
				}
				var got syscall.Signal
				if e := (*signalError)(nil); errors.As(s.because(&run.InterruptedError{}), &e) {
					got = e.signal
				}
				if got != want || (s.ctx.Err() != nil) != (want != 0) {
					t.Errorf("%v, then %v, with sockets %v: %v ended it and not %v; the context has %v", first, second, sockets, got, want, s.ctx.Err())
				}
				s.cancel()
			}
		}
	}
}

// notIgnored makes a test see signals where the process was started to ignore them, as below nohup
// or behind a shell's &. Processes that it starts do not ignore them either.
func notIgnored(t *testing.T, signals ...os.Signal) {
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, signals...)
	t.Cleanup(func() { signal.Stop(caught) })
}

// brokenPipe is an output whose reader is gone.
type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, syscall.EPIPE }

// A signal that ends a program before a file is complete leaves nothing of it behind, and
// the old one as it was.
func TestCreateUntilSignal(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		notIgnored(t, sig)
		writeFile(t, "trace", "old")
		before, ended := files(t), make(chan syscall.Signal, 1)
		f, stop, err := createUntilSignal("trace", func(sig syscall.Signal) { ended <- sig })
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(os.Getpid(), sig); err != nil {
			t.Fatal(err)
		}
		if got := <-ended; got != sig {
			t.Errorf("%v ended it, want %v", got, sig)
		}
		if after := files(t); after != before {
			t.Errorf("%v: the files are\n%s\nand were\n%s", sig, after, before)
		}
		stop()
		f.Discard()
	}
	// What nohup ignores stays ignored.
	if !signal.Ignored(syscall.SIGHUP) {
		signal.Ignore(syscall.SIGHUP)
		defer signal.Reset(syscall.SIGHUP)
	}
	f, stop, err := createUntilSignal("trace", raise)
	if err != nil {
		t.Fatal(err)
	}
	if !signal.Ignored(syscall.SIGHUP) || signal.Ignored(syscall.SIGTERM) {
		t.Error("a signal that was ignored is caught, or one that was not is ignored")
	}
	if err := f.Commit(); err != nil {
		t.Error(err)
	}
	stop()
}

// afterSignals has a process catch signals, as a command does, and end that.
var afterSignals = map[string]func() error{
	"a file that was refused": func() error {
		if f, _, err := createUntilSignal("nowhere/trace", raise); err == nil {
			f.Discard()
			return errors.New("a file in a folder that is not there was created")
		}
		return nil
	},
	"a file that was written": func() error {
		f, stop, err := createUntilSignal("trace", func(syscall.Signal) {})
		if err != nil {
			return err
		}
		stop()
		return f.Commit()
	},
	"a run": func() error {
		s := newStopper(false)
		s.catch()
		s.stop()
		return nil
	},
}

// Once a command catches signals no more, or has refused a file for which it would have, they end the program
// as those of others.
func TestSignalsEndTheProgramAgain(t *testing.T) {
	const variable = "STOWAGE_AFTER_SIGNALS"
	if what := os.Getenv(variable); what != "" {
		err := afterSignals[what]()
		for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGTERM} {
			err = errors.Join(err, syscall.Kill(os.Getpid(), sig))
			time.Sleep(10 * time.Second)
		}
		t.Fatalf("the program goes on after its signals, %v", err)
	}
	notIgnored(t, syscall.SIGHUP, syscall.SIGTERM)
	for what := range afterSignals {
		cmd := exec.Command(os.Args[0], "-test.run=^TestSignalsEndTheProgramAgain$")
		cmd.Dir, cmd.Env = t.TempDir(), append(os.Environ(), variable+"="+what)
		said, _ := cmd.CombinedOutput()
		if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() || status.Signal() != syscall.SIGHUP {
			t.Errorf("after %s: %v, %s", what, cmd.ProcessState, said)
		}
	}
}
