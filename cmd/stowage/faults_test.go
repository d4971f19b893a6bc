// This file owns the tests of runs whose processes die or stop at a call that a test names.
// They skip if a launcher is missing.
//
//	go test -run TestTrainLosesARank ./cmd/stowage -full        # some under each launcher, not only three
//	go test -run TestTrainLosesARank ./cmd/stowage -faults 20   # as many at calls drawn at random, under each launcher

package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

var faults = flag.Int("faults", 0, "make processes fail at so many calls under each launcher")

// faulty says which process fails where: "RANK CALL HOW FILE", such as "1 57 kill /tmp/at".
// Calls are counted by each process from 1. The process writes the words of the call to the
// file. A rank of -1 fails nowhere, and every process writes how many calls it made.
const faulty = "STOWAGE_TEST_FAULT"

// fail makes this process fail as the environment says:
//
//	kill, stop      before anything of the call was sent
//	kill-in, stop-in when its part of the call was sent, and the others have not come
//	exit            as a process does that ends itself
func fail() {
	var rank int
	var call int64
	var how, file string
	if n, _ := fmt.Sscan(os.Getenv(faulty), &rank, &call, &how, &file); n != 4 {
		return
	}
	mine := myRank() == fmt.Sprint(rank)
	var made atomic.Int64
	beforeCall = func(words string) {
		n := made.Add(1)
		if rank < 0 {
			_ = os.WriteFile(file+"-"+myRank(), fmt.Append(nil, n), 0o666)
		}
		if n != call {
			return
		}
		inside := how == "kill-in" || how == "stop-in"
		if !mine {
			if inside {
				time.Sleep(200 * time.Millisecond)
			}
			return
		}
		if err := os.WriteFile(file, []byte(words), 0o666); err != nil {
			panic(err)
		}
		end := func() {
			switch how {
			case "kill", "kill-in":
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			case "stop", "stop-in":
				_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
			case "exit":
				os.Exit(3)
			}
			select {}
		}
		if inside {
			time.AfterFunc(30*time.Millisecond, end)
			return
		}
		end()
	}
}

// myRank returns the rank of this process, as launchers say it.
func myRank() string {
	for _, name := range []string{"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"} {
		if r := os.Getenv(name); r != "" {
			return r
		}
	}
	return ""
}

// torchRun is the torchrun of PyTorch 1.13. That of Debian 12 fails with its own Python.
const torchRun = `import torch.distributed.elastic.multiprocessing.api as api
import torch.distributed.run as run
api.Std.from_str = classmethod(lambda cls, text: cls.NONE)
run.main()
`

// faultStarters returns all launchers, each with what leaves the ranks time to speak.
func faultStarters(t *testing.T) []starter {
	t.Helper()
	all := slices.Clone(starters)
	if *faults == 0 { // mpirun waits so long twice, and by default a second
		all[0].args = append(slices.Clone(all[0].args), "--mca", "odls_base_sigkill_timeout", "5")
	}
	script := filepath.Join(t.TempDir(), "torchrun.py")
	if err := os.WriteFile(script, []byte(torchRun), 0o666); err != nil {
		t.Fatal(err)
	}
	port, err := net.Listen("tcp", "127.0.0.1:0") // a number that is free
	if err != nil {
		t.Fatal(err)
	}
	_, number, _ := net.SplitHostPort(port.Addr().String())
	_ = port.Close()
	torchrun := starter{name: "torchrun", program: "/usr/bin/python3", args: []string{script, "--no_python", "--master_port", number}, count: "--nproc_per_node"}
	if exec.Command("/usr/bin/python3", "-c", "import torch").Run() != nil {
		torchrun.program = "torchrun"
	}
	srun := starter{name: "srun", program: "../../.ci/slurm", args: []string{"srun", "--overcommit", "--kill-on-bad-exit=1"}}
	for _, name := range []string{"slurmctld", "munged"} {
		if _, err := exec.LookPath(name); err != nil {
			srun.program = name
		}
	}
	return append(all, torchrun, srun)
}

// fault is a process that fails.
type fault struct {
	starter
	rank int
	how  string
	part float64 // of all calls
	rows bool    // the host waits for the number of rows: policy none
}

// A rank that is killed or stopped before or in any call ends the others within seconds, and
// one of them says which rank it was. Nothing is left. Resumed, the run comes to what it comes
// to undisturbed, also with fewer replicas. SPEC S7.6.
func TestTrainLosesARank(t *testing.T) {
	if testing.Short() {
		t.Skip("a stopped rank is noticed after seconds")
	}
	const flags = "train --policy stash --micro 1 --seq 32 --microbatches 2 --plain --pp 1 --ep 2 --dp 2 --save-every 1 --keep 9 --steps 5 --out "
	alone := filepath.Join(t.TempDir(), "alone")
	if out, errs, code := command(strings.Fields(flags + alone)...); code != 0 {
		t.Fatal(out, errs)
	}
	all := faultStarters(t)
	openMPI, mpich, variables, torchrun, srun := all[0], all[1], all[2], all[3], all[4]
	cases := []fault{
		{openMPI, 1, "kill", 0.5, false}, {mpich, 0, "kill-in", 0.7, false}, {variables, 0, "kill-in", 0.06, false}, {variables, 1, "stop-in", 0.6, false},
		{torchrun, 1, "kill", 0.8, false}, {srun, 0, "kill", 0.4, false}, {variables, 1, "kill", 0.055, true},
	}
	if *faults > 0 {
		cases = nil
		random := rand.New(rand.NewPCG(1, 2))
		for _, s := range all {
			for range *faults {
				how := []string{"kill", "kill-in", "kill", "kill-in", "stop", "stop-in", "exit"}[random.IntN(7)]
				cases = append(cases, fault{s, random.IntN(2), how, random.Float64(), random.IntN(2) == 0})
			}
		}
	}
	calls := callsOf(t, variables, flags)
	for i, f := range cases {
		if !*allCases && *faults == 0 && i != 1 && i != 3 {
			continue
		}
		flags := flags
		if f.rows {
			flags = strings.Replace(flags, "--policy stash", "--policy none", 1)
		}
		call := 1 + int(f.part*float64(calls))
		t.Run(fmt.Sprintf("%s/%s rank %d at call %d", f.name, f.how, f.rank, call), func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "run")
			at := filepath.Join(t.TempDir(), "at")
			mark := fmt.Sprint(os.Getpid(), "-", i)
			t.Setenv("STOWAGE_TEST_GROUP", mark)
			t.Setenv(faulty, fmt.Sprintf("%d %d %s %s", f.rank, call, f.how, at))
			g := f.start(t, 2, flags+dir)
			err := g.Wait()
			ended := time.Now()
			where, _ := os.ReadFile(at)
			if err == nil || len(where) == 0 {
				t.Fatalf("%v after %q, %s", err, where, g.out.String())
			}
			info, _ := os.Stat(at)
			text := lineOf(g.out.String(), "stowage: ")
			took := ended.Sub(info.ModTime())
			t.Logf("%.1f s, at %s: %s", took.Seconds(), where, text)
			if took > time.Minute && !(f.name == "torchrun" && strings.HasPrefix(f.how, "stop")) { // which waits for its own time
				t.Errorf("the others ended after %v", took)
			}
			if wrong := f.wrong(g.out.String(), string(where)); wrong != "" {
				t.Errorf("%s: %s", wrong, g.out.String())
			}
			if left := alive(mark); len(left) > 0 {
				t.Errorf("processes are left: %v", left)
			}
			t.Setenv(faulty, "")
			f.resume(t, i, flags, dir, alone)
		})
	}
}

// callsOf returns how many calls a process of a run makes.
func callsOf(t *testing.T, s starter, flags string) (n int) {
	t.Helper()
	at := filepath.Join(t.TempDir(), "calls")
	t.Setenv(faulty, "-1 0 none "+at)
	g := s.start(t, 2, flags+filepath.Join(t.TempDir(), "run"))
	if err := g.Wait(); err != nil {
		t.Fatal(err, g.out.String())
	}
	text, err := os.ReadFile(at + "-0")
	if err == nil {
		n, err = strconv.Atoi(string(text))
	}
	if err != nil || n < 100 {
		t.Fatal(n, err)
	}
	return n - 10 // how often ranks look whether a checkpoint is written is chance
}

// lineOf returns the line that contains some words.
func lineOf(text, words string) string {
	for line := range strings.Lines(text) {
		if strings.Contains(line, words) {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

// wrong says what is wrong with what the ranks printed, or "".
func (f fault) wrong(out, call string) string {
	if strings.Contains(out, "goroutine ") {
		return "a rank crashed"
	}
	why := "ended without a word"
	if strings.HasPrefix(f.how, "stop") {
		why = "has not answered for 5s"
	}
	host, _ := os.Hostname()
	want := fmt.Sprintf("stowage: rank %d on %s %s", f.rank, host, why)
	n := strings.Count(out, "stowage: rank")
	if n == 0 && f.name == "mpich" && !strings.HasPrefix(f.how, "stop") {
		return "" // it kills the others before they can speak
	}
	if n != 1 || !strings.Contains(out, want) {
		return fmt.Sprintf("%d sentences, want one with %q", n, want)
	}
	if *faults == 0 || f.how != "kill" && f.how != "stop" {
		return "" // on a busy machine the others may not have come to the call yet
	}
	call = strings.Replace(call, "send", "receive", 1)
	call = strings.Replace(call, fmt.Sprintf(" to rank %d", 1-f.rank), fmt.Sprintf(" from rank %d", f.rank), 1)
	want = fmt.Sprintf("; rank %d is in %s", 1-f.rank, call)
	if !strings.HasPrefix(call, "gather") { // these pass two times messages, and the first have come
		want += fmt.Sprintf(", where rank %d has not come", f.rank)
	}
	if !strings.Contains(out, want) {
		return fmt.Sprintf("want %q", want)
	}
	return ""
}

// alive returns the processes of a group that are left.
func alive(mark string) (left []string) {
	stats, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range stats {
		env, err := os.ReadFile(path)
		words := "\x00" + string(env)
		if err == nil && strings.Contains(words, "\x00STOWAGE_TEST_GROUP="+mark+"\x00") && strings.Contains(words, "\x00"+faulty+"=") {
			left = append(left, filepath.Base(filepath.Dir(path)))
		}
	}
	return left
}

// resume starts the run in a folder again and compares it with one that was not disturbed.
func (f fault) resume(t *testing.T, i int, flags, dir, alone string) {
	t.Helper()
	again := "train --resume --plain --steps 5 --out " + dir
	if _, err := os.Stat(filepath.Join(dir, "config.yaml")); err != nil {
		again = flags + dir // it had not begun
	} else if i%3 == 2 {
		again += " --dp 1 --ep 1 --microbatches 4"
	}
	if i%3 == 1 {
		if g := starters[i%2].start(t, 2, again); g.Wait() != nil {
			t.Fatal(g.out.String())
		}
	} else if out, errs, code := command(strings.Fields(again)...); code != 0 {
		t.Fatal(out, errs)
	}
	if strings.Contains(again, "--dp 1") {
		got, want := lossOf(t, dir), lossOf(t, alone)
		if math.Abs(got-want) > 1e-4*want {
			t.Errorf("with fewer replicas the loss is %v, want %v", got, want)
		}
	} else if got, want := digestOf(t, dir), digestOf(t, alone); got != want {
		t.Errorf("parameters %s, want %s", got, want)
	}
	if half, _ := filepath.Glob(filepath.Join(dir, "checkpoints", "tmp-*")); len(half) > 0 {
		t.Errorf("half a checkpoint is left: %v", half)
	}
}

// lossOf returns the last loss of a run.
func lossOf(t *testing.T, dir string) float64 {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "summary.json"))
	var s struct {
		Loss float64 `json:"final_loss"`
	}
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil || s.Loss == 0 {
		t.Fatal(err, string(text))
	}
	return s.Loss
}
