// This file owns the end of the tests, and the processes that some of them start.

package rendezvous

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/internal/launcher"
	"github.com/stowage-dev/stowage/internal/leak"
)

// asRank makes the test binary a rank: it runs the named body and exits.
const asRank = "STOWAGE_TEST_RANK"

// patienceOf is how long the ranks of waitForFailure may be silent.
const patienceOf = "STOWAGE_TEST_PATIENCE"

var bodies = map[string]func() error{"wait": waitForFailure, "mpich": runMPICH}

func TestMain(m *testing.M) {
	if body := bodies[os.Getenv(asRank)]; body != nil {
		if err := body(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	flag.Parse()
	_ = flag.Set("test.parallel", "16") // tests that wait do so side by side, however few the cores
	leak.Main(m)
}

// waitForFailure joins as the environment says, and prints "ready" and what fails.
func waitForFailure() error {
	place, err := launcher.Find(os.Getenv)
	if err != nil {
		return err
	}
	patience, err := time.ParseDuration(os.Getenv(patienceOf))
	if err != nil {
		return err
	}
	s, err := Join(context.Background(), place, Options{Version: "v", Patience: patience})
	if err != nil {
		return err
	}
	s.Note(fmt.Sprintf("all-reduce %d of all ranks", 10+place.Rank/2), nil)
	if err := s.Barrier(context.Background(), "start"); err != nil {
		return err
	}
	for { // until rank 0 knows what this rank does, and this one what rank 0 does
		states, err := s.States(context.Background())
		if err != nil {
			return err
		}
		s.mu.Lock()
		lead := s.lead.Collective
		s.mu.Unlock()
		if states[place.Rank].Collective != "" && lead != "" {
			break
		}
		time.Sleep(time.Millisecond)
	}
	fmt.Println("ready")
	select {
	case <-s.Failed():
	case <-time.After(5 * time.Minute):
		return errors.New("nothing failed")
	}
	fmt.Println(s.Err())
	return s.Close()
}

// freePort returns a port of loopback that nobody listens on. Another process may take it
// before it is used.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

// process is a rank in a process of its own.
type process struct {
	*exec.Cmd
	first string      // what it printed first, unless expect has read it
	lines chan string // what it prints
}

// start starts ranks that run a body, and returns when rank 0 has printed a line. If another
// process took the port it tries another one.
func start(t *testing.T, body string, size int, env ...string) (ranks []*process) {
	t.Helper()
	runtime.LockOSThread() // its end would be the end of the ranks
	t.Cleanup(runtime.UnlockOSThread)
	for again := true; ; again = false {
		ranks = startAt(t, freePort(t), body, size, env...)
		ranks[0].first = ranks[0].next(t)
		if !again || !strings.Contains(ranks[0].first, "cannot listen on port") {
			return ranks
		}
		for _, p := range ranks {
			_ = p.Process.Kill()
		}
	}
}

// startAt starts ranks that meet at a port, with the variables that torchrun sets.
func startAt(t *testing.T, port, body string, size int, env ...string) (ranks []*process) {
	t.Helper()
	job := rand.Text()
	for rank := range size {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), asRank+"="+body, fmt.Sprintf("RANK=%d", rank), fmt.Sprintf("WORLD_SIZE=%d", size), "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port, "TORCHELASTIC_RUN_ID="+job)
		cmd.Env = append(cmd.Env, env...)
		cmd.SysProcAttr = leak.Child(syscall.SIGKILL)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		p := &process{Cmd: cmd, lines: make(chan string, 100)}
		go func() {
			defer close(p.lines)
			for sc := bufio.NewScanner(out); sc.Scan(); {
				p.lines <- sc.Text()
			}
		}()
		t.Cleanup(func() {
			_ = p.Process.Kill()
			for range p.lines {
			}
			_ = p.Wait()
		})
		ranks = append(ranks, p)
	}
	return ranks
}

// expect reads a line that contains all of some words.
func (p *process) expect(t *testing.T, words ...string) {
	t.Helper()
	line := p.first
	if p.first = ""; line == "" {
		line = p.next(t)
	}
	for _, w := range words {
		if !strings.Contains(line, w) {
			t.Errorf("got %q, want %q in it", line, w)
		}
	}
}

// next returns the next line, or "" after the last.
func (p *process) next(t *testing.T) string {
	t.Helper()
	select {
	case line := <-p.lines:
		return line
	case <-time.After(5 * time.Minute):
		t.Fatal("no line within minutes")
	}
	return ""
}

// A process that is killed or stopped is named by all others, whichever it is.
func TestProcessesFail(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes and waits for heartbeats")
	}
	t.Parallel()
	host, _ := os.Hostname()
	for _, c := range []struct {
		name     string
		signal   syscall.Signal
		patience string // long, because ranks are slow on a busy machine
		why      string
	}{{"kill", syscall.SIGKILL, "1m", "ended without a word"}, {"stop", syscall.SIGSTOP, "20s", "has not answered for 20s"}} {
		for _, victim := range []int{0, 2} {
			t.Run(fmt.Sprintf("%s rank %d", c.name, victim), func(t *testing.T) {
				t.Parallel()
				ranks := start(t, "wait", 4, patienceOf+"="+c.patience)
				for _, p := range ranks {
					p.expect(t, "ready")
				}
				since := time.Now()
				if err := ranks[victim].Process.Signal(c.signal); err != nil {
					t.Fatal(err)
				}
				for rank, p := range ranks {
					if rank != victim {
						p.expect(t, fmt.Sprintf("rank %d on %s %s", victim, host, c.why), fmt.Sprintf("it was last in all-reduce %d of all ranks", 10+victim/2))
					}
				}
				t.Logf("all others knew after %v", time.Since(since))
				if c.signal == syscall.SIGSTOP { // it learns what happened when it wakes up
					_ = ranks[victim].Process.Signal(syscall.SIGCONT)
					ranks[victim].expect(t, "has not answered")
				}
			})
		}
	}
}
