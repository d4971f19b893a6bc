// This file owns the tests of `stowage train` under launchers. They skip if a launcher is
// missing. Each case runs under one launcher, or all under every one:
//
//	go test -run Launchers ./cmd/stowage -full

package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/internal/launcher"
	"github.com/stowage-dev/stowage/internal/leak"
	"github.com/stowage-dev/stowage/internal/rendezvous"
	"github.com/stowage-dev/stowage/train/run"
)

var allCases = flag.Bool("full", false, "run every test with processes under every launcher, and those in which ranks wait for seconds")

// chosen reports whether case i runs under launcher j.
func chosen(i, j int) bool { return *allCases || (i+j)%len(starters) == 0 }

// starter starts the program in several processes.
type starter struct {
	name    string
	program string // that must be there
	args    []string
	count   string // the flag before the number of processes, or "" for -n
}

var starters = []starter{
	{name: "openmpi", program: "mpirun.openmpi", args: []string{"--allow-run-as-root", "--oversubscribe", "--bind-to", "none"}},
	{name: "mpich", program: "mpiexec.hydra"},
	{name: "variables", program: "mpiexec.hydra"}, // what torchrun sets; the library is MPICH's
}

// started is a group of processes.
type started struct {
	*exec.Cmd
	out   bytes.Buffer
	again func() *started // starts the group with another port, if the port may be taken
}

// Wait waits for the group. If another process took its port, the group starts once more.
func (g *started) Wait() error {
	err := g.Cmd.Wait()
	if err == nil || g.again == nil || !strings.Contains(g.out.String(), "cannot listen on port") {
		return err
	}
	other := g.again()
	err = other.Cmd.Wait()
	g.Cmd = other.Cmd
	g.out.Reset()
	_, _ = g.out.Write(other.out.Bytes())
	return err
}

// start starts n processes with the words of a line. Nothing is left when the test ends.
func (s starter) start(t *testing.T, n int, line string) *started {
	t.Helper()
	path, err := exec.LookPath(s.program)
	if err != nil {
		t.Skipf("%s is not installed (packages openmpi-bin, mpich, slurm-wlm and python3-torch have the launchers)", s.program)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	runtime.LockOSThread() // its end would be the end of the group
	t.Cleanup(runtime.UnlockOSThread)
	words := append(append([]string{}, s.args...), cmp.Or(s.count, "-n"), strconv.Itoa(n), self)
	g := new(started)
	env := append(os.Environ(), asProgram+"=1", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
	if s.name == "variables" {
		port, err := net.Listen("tcp", "127.0.0.1:0") // a number that is free
		if err != nil {
			t.Fatal(err)
		}
		_, number, _ := net.SplitHostPort(port.Addr().String())
		_ = port.Close()
		path = "bash"
		// If one fails, the others have time to end, except those that are stopped.
		words = []string{"-c", fmt.Sprintf(`trap 'kill -KILL 0' TERM
			for r in $(seq %d -1 0); do RANK=$r LOCAL_RANK=$r "$0" "$@" & all+=($!); done
			wait -n "${all[@]}"; code=$?
			for _ in $(seq 100); do
				[ $code != 0 ] && grep -qs '^State:\s[RSD]' $(printf "/proc/%%d/status " "${all[@]}") || break
				sleep 0.1
			done
			[ $code = 0 ] || kill -KILL "${all[@]}" 2>/dev/null
			wait ${all[-1]}; code=$?; wait; exit $code`, n-1), self}
		env = append(env, "WORLD_SIZE="+strconv.Itoa(n), "LOCAL_WORLD_SIZE="+strconv.Itoa(n), "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+number, "TORCHELASTIC_RUN_ID="+rand.Text())
		g.again = func() *started { return s.start(t, n, line) }
	}
	g.Cmd = exec.CommandContext(ctx, path, append(words, strings.Fields(line)...)...)
	g.Env = env
	g.Stdout, g.Stderr = &g.out, &g.out
	g.SysProcAttr = leak.Child(syscall.SIGTERM)
	g.Cancel = func() error { return syscall.Kill(-g.Process.Pid, syscall.SIGTERM) }
	g.WaitDelay = 10 * time.Second
	if err := g.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-g.Process.Pid, syscall.SIGKILL) // whatever is left
		cancel()
	})
	return g
}

// smallRun is a run whose flags lack the layout.
const smallRun = "train --policy stash --steps 3 --micro 1 --seq 32 --microbatches 2 --plain "

// digestOf returns the parameters that a run in a folder came to.
func digestOf(t *testing.T, dir string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "summary.json"))
	if err != nil {
		t.Fatal(err)
	}
	var s struct {
		Digest string `json:"params_sha256"`
	}
	if err := json.Unmarshal(text, &s); err != nil || s.Digest == "" {
		t.Fatal(err, string(text))
	}
	return s.Digest
}

// Under every launcher a run comes to the parameters of the run in one process, one rank
// prints, and every rank leaves a trace.
func TestTrainUnderLaunchers(t *testing.T) {
	for i, x := range []struct {
		n     int
		flags string
	}{
		{2, "--pp 2 --ep 1 --dp 1"}, {2, "--pp 1 --ep 2 --dp 2 --dispatch ring"}, {4, "--pp 2 --ep 2 --dp 2"}, {4, "--pp 2 --ep 2 --dp 2 --pool arena"},
	} {
		if testing.Short() && x.n > 2 {
			continue // under the race detector they take minutes
		}
		alone := filepath.Join(t.TempDir(), "alone")
		if out, errs, code := command(strings.Fields(smallRun + x.flags + " --out " + alone)...); code != 0 {
			t.Fatal(out, errs)
		}
		want := digestOf(t, alone)
		for j, s := range starters {
			if !chosen(i, j) {
				continue
			}
			t.Run(fmt.Sprintf("%s/%d %s", s.name, x.n, x.flags), func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), "run")
				g := s.start(t, x.n, smallRun+x.flags+" --out "+dir)
				if err := g.Wait(); err != nil {
					t.Fatal(err, g.out.String())
				}
				if got := digestOf(t, dir); got != want || strings.Count(g.out.String(), "parameters "+want) != 1 {
					t.Errorf("parameters %s, want %s; printed %s", got, want, g.out.String())
				}
				for rank := range x.n {
					if _, err := os.Stat(filepath.Join(dir, "trace", fmt.Sprintf("rank-%d.trace", rank))); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
}

// An engine of collectives that only one rank names is refused by all of them at once.
func TestEngineOfOneRank(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	const line = smallRun + "--pp 1 --ep 2 --dp 2"
	s := starters[1]
	s.args = slices.Concat([]string{"-n", "1", "-env", engineVariable, "mpi", self}, strings.Fields(line), []string{":"})
	g := s.start(t, 1, line)
	err = g.Wait()
	if text := g.out.String(); g.ProcessState.ExitCode() != exitUsage || strings.Count(text, `is "mpi" on rank 0 and "" on rank 1; set it alike everywhere`) != 1 {
		t.Errorf("%v: %s", err, text)
	}
}

// One rank says what is wrong with a command, and the exit code is that of one process.
func TestLaunchersAndBadInput(t *testing.T) {
	for j, s := range starters {
		t.Run(s.name, func(t *testing.T) {
			for i, x := range []struct{ line, want string }{
				{smallRun + "--pp 1 --ep 2 --dp 4", "started 2 processes, but the layout has 4 ranks (pp 1 x dp 4); start as many, or give --pp 1 --dp 2"},
				{smallRun + "--pp 1 --ep 1 --dp 2 --data gone", "--data"},
				{"train --policy budget --budget 1KiB --steps 1 --pp 1 --dp 2", "--budget 1.0 KiB is too small"},
			} {
				if !chosen(i, j) {
					continue
				}
				g := s.start(t, 2, x.line)
				err := g.Wait()
				if g.ProcessState.ExitCode() != 2 || strings.Count(g.out.String(), x.want) != 1 || strings.Contains(g.out.String(), "goroutine ") {
					t.Errorf("%s: %v, %s; want %q once", x.line, err, g.out.String(), x.want)
				}
			}
		})
	}
}

// differs says which rank differs from the others in what: "1 library" or "1 folder".
const differs = "STOWAGE_TEST_DIFFERS"

// differ gives this process a library that is not there, or another working folder, if it is to
// differ.
func differ() {
	rank, what, _ := strings.Cut(os.Getenv(differs), " ")
	if what == "" || myRank() != rank {
		return
	}
	err := os.Setenv("STOWAGE_MPI", "libgone.so")
	if what == "folder" {
		err = errors.Join(os.Unsetenv("STOWAGE_MPI"), os.Chdir("/"))
	}
	if err != nil {
		panic(err)
	}
}

// One rank says it if something is wrong on any of them, before the processes have met and after.
func TestLaunchersAndRanksThatDiffer(t *testing.T) {
	if testing.Short() {
		t.Skip("ranks wait for each other")
	}
	t.Chdir(t.TempDir())
	for j, s := range starters {
		for i, x := range []struct{ what, want string }{
			{"0 library", "no MPI library was found (libgone.so"},
			{"1 library", "no MPI library was found (libgone.so"},
			{"1 folder", "does not see the folder run of rank 0; give a folder on a file system that all machines share"},
		} {
			if !chosen(i, j) {
				continue
			}
			t.Run(s.name+"/"+x.what, func(t *testing.T) {
				t.Setenv(differs, x.what)
				g := s.start(t, 2, smallRun+"--pp 1 --ep 2 --dp 2 --out run")
				err := g.Wait()
				if text := g.out.String(); err == nil || strings.Count(text, "stowage: ") != 1 || strings.Count(text, x.want) != 1 {
					t.Errorf("%v, %s; want %q once", err, text, x.want)
				}
			})
		}
	}
}

// hangs is the rank that a test makes hang, or "start" behind it, for one that hangs before it
// meets the others.
const hangs = "STOWAGE_TEST_HANGS"

// hang makes a process that is to hang read its options from a pipe that stays empty. It
// still says that it is alive.
func hang() {
	rank, atStart := strings.CutSuffix(os.Getenv(hangs), "start")
	if rank == "" || myRank() != rank {
		return
	}
	if atStart {
		time.Sleep(time.Hour)
	}
	r, w, err := os.Pipe()
	if err != nil {
		panic(err)
	}
	os.Args = append(os.Args, "--config", fmt.Sprintf("/dev/fd/%d", r.Fd()))
	time.AfterFunc(time.Hour, func() { _ = w.Close() })
}

// A rank that hangs is named after a while, and all processes end.
func TestTrainAndARankThatHangs(t *testing.T) {
	if !*allCases {
		t.Skip("ranks wait for seconds; give -full")
	}
	t.Setenv(hangs, "1")
	t.Setenv(patienceVariable, "4s")
	g := starters[0].start(t, 2, smallRun+"--pp 1 --ep 2 --dp 2")
	err := g.Wait()
	text := g.out.String()
	if err == nil || g.ProcessState.ExitCode() < 0 || strings.Count(text, "stowage: ") != 1 || !strings.Contains(text, "for rank 1; find out what delays them, or raise STOWAGE_PATIENCE") {
		t.Errorf("%v, %s", err, text)
	}
}

// So is one that does not come to the start, as far as the launcher lets the others know it.
func TestTrainAndARankThatNeverStarts(t *testing.T) {
	if !*allCases {
		t.Skip("ranks wait for seconds; give -full")
	}
	t.Setenv(patienceVariable, "3s")
	for _, x := range []struct {
		starter
		rank int
		want string
	}{
		{starters[0], 1, "rank 0 on HOST waited 3s in the start of MPI for the other processes; find out what delays them, or raise STOWAGE_PATIENCE"},
		{starters[1], 0, "rank 1 on HOST waited 3s in the start of MPI for the other processes; find out what delays them, or raise STOWAGE_PATIENCE"},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Setenv(hangs, fmt.Sprint(x.rank, "start"))
			g := x.start(t, 2, smallRun+"--pp 1 --ep 2 --dp 2")
			err := g.Wait()
			host, _ := os.Hostname()
			text := g.out.String()
			if err == nil || g.ProcessState.ExitCode() < 0 || strings.Count(text, "stowage: ") != 1 || !strings.Contains(text, strings.ReplaceAll(x.want, "HOST", host)) {
				t.Errorf("%v, %s", err, text)
			}
		})
	}
}

// A call that nothing can end is given up.
func TestBounded(t *testing.T) {
	c := &cluster{place: launcher.Place{Rank: 2, Host: "h"}, wait: time.Nanosecond}
	never := make(chan error)
	err := c.bounded("the opening of a communicator", func() error { return <-never })
	if want := "rank 2 on h waited 1ns in the opening of a communicator for the other processes; find out"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
	never <- nil
	c.wait = 0
	if err := c.bounded("x", func() error { return nil }); err != nil {
		t.Error(err)
	}
}

// A stopped process of this program goes on, and no other one.
func TestWake(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	state := func(id int) string {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", id))
		if err != nil {
			t.Skip("there is no /proc")
		}
		_, after, _ := strings.Cut(string(text), ") ")
		return after[:1]
	}
	for program, goesOn := range map[string]bool{self: true, "/bin/sleep": false} {
		cmd := exec.Command(program, "3600")
		cmd.Env = append(os.Environ(), asProgram+"=1", hangs+"=0start", "RANK=0")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		id := cmd.Process.Pid
		_ = syscall.Kill(id, syscall.SIGSTOP)
		for state(id) != "T" {
			time.Sleep(time.Millisecond)
		}
		wake(id)
		if goesOn {
			for state(id) == "T" { // hangs if it does not go on
				time.Sleep(time.Millisecond)
			}
		} else if state(id) != "T" {
			t.Errorf("%s goes on", program)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	wake(1 << 30)
}

func TestPatience(t *testing.T) {
	for text, want := range map[string]time.Duration{"": 10 * time.Minute, "0": 0, "90s": 90 * time.Second} {
		if got, err := patience(func(string) string { return text }); got != want || err != nil {
			t.Errorf("%q: %v, %v; want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"-1s", "10", "long"} {
		if _, err := patience(func(string) string { return text }); exitCode(err) != exitUsage || !strings.Contains(err.Error(), "expected a duration such as 30m") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// Processes on the same processors share them, and each has one at least.
func TestProcessorsOf(t *testing.T) {
	for _, x := range [][3]int{{2, 2, 1}, {8, 2, 4}, {8, 3, 2}, {2, 4, 1}} {
		if got := processorsOf(x[0], x[1]); got != x[2] {
			t.Errorf("%d processes on %d processors: %d for each, want %d", x[1], x[0], got, x[2])
		}
	}
}

// What is suggested to processes whose number does not suit the layout does suit it, for any
// numbers.
func TestSuggestedLayoutFits(t *testing.T) {
	for n := 2; n <= 12; n++ {
		c := &cluster{place: launcher.Place{Size: n}}
		for pp := 1; pp <= 4; pp++ {
			for ep := 1; ep <= 4; ep++ {
				for dp := ep; dp <= 3*ep; dp += ep {
					err := c.fits(&run.Options{PP: pp, EP: ep, DP: dp})
					if pp*dp == n {
						if err != nil {
							t.Errorf("pp %d, dp %d of %d processes: %v", pp, dp, n, err)
						}
						continue
					}
					if err == nil {
						t.Fatalf("pp %d, dp %d of %d processes is accepted", pp, dp, n)
					}
					_, give, _ := strings.Cut(err.Error(), "or give ")
					o := run.Options{PP: pp, EP: ep, DP: dp}
					flags := pflag.NewFlagSet("", pflag.ContinueOnError)
					addTrainOptions(flags, &o)
					o.PP, o.EP, o.DP = pp, ep, dp
					if err := flags.Parse(strings.Fields(give)); err != nil || c.fits(&o) != nil || o.DP%o.EP != 0 {
						t.Errorf("pp %d, ep %d, dp %d of %d processes: %q makes %d x %d with %d expert ranks, %v", pp, ep, dp, n, give, o.PP, o.DP, o.EP, err)
					}
				}
			}
		}
	}
}

// A communicator that opens after a process has failed is kept, and its rank is told.
func TestCommunicatorsAfterAFailure(t *testing.T) {
	s, err := rendezvous.Join(t.Context(), &launcher.Place{Size: 1, Host: "here"}, rendezvous.Options{Exchange: func(text string) (string, error) { return text, nil }})
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{session: s}
	if err := c.keep(nil); err != nil {
		t.Error(err)
	}
	s.Abort(errors.New("no memory"))
	if err := c.keep(nil); err == nil || !strings.Contains(err.Error(), "no memory") || len(c.comms) != 2 {
		t.Errorf("%v, and %d communicators", err, len(c.comms))
	}
	_ = s.Close() // it says the same
}

// Processes share cores if they may run on the same ones of the same machine, and can signal each other
// if their numbers mean the same there.
func TestProcessesBeside(t *testing.T) {
	me := hello{Host: "a", Cores: "0-3", Processes: "pid:[1]", ID: 10}
	all := []hello{
		{Host: "a", Cores: "0-3", Processes: "pid:[1]", ID: 11}, me,
		{Host: "a", Cores: "4-7", Processes: "pid:[1]", ID: 12}, // bound to cores of its own
		{Host: "b", Cores: "0-3", Processes: "pid:[1]", ID: 13}, // on another machine
		{Host: "a", Cores: "0-3", Processes: "pid:[2]", ID: 14}, // in another container
	}
	if cores, near := me.beside(all); cores != 3 || !maps.Equal(near, map[int]int{0: 11, 1: 10, 2: 12}) {
		t.Errorf("%d processes are on the same cores, and these are near: %v", cores, near)
	}
	me.Processes = ""
	if cores, near := me.beside([]hello{me, {Host: "a"}}); cores != 1 || len(near) != 0 {
		t.Errorf("%d processes are on the same cores, and these are near: %v", cores, near)
	}
}
