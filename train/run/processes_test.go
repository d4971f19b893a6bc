// This file owns the tests of runs whose ranks live in several processes. Each process is
// a goroutine with a job of its own.

package run

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/commtest"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/data"
	"github.com/stowage-dev/stowage/train/internal/disk"
	"github.com/stowage-dev/stowage/train/internal/disk/disktest"
)

// inProcesses runs work in a process for each rank of the default layout, with a job that
// change has changed.
func inProcesses(t *testing.T, change func(process int, o *Options), work func(process int, j *Job, p *Progress) error) (said []string, errs []error) {
	t.Helper()
	const n = 4
	ranks := make([][]int, n)
	for i := range ranks {
		ranks[i] = []int{i}
	}
	ps := commtest.Processes(t, func() (device.Device, error) { return cpu.Open(cpu.Options{}) }, ranks...)
	words, errs := make([]strings.Builder, n), make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			j := smallJob(t, func(o *Options) {
				if change != nil {
					change(i, o)
				}
			})
			j.machine.Process, j.config.Process = ps[i], ps[i]
			errs[i] = work(i, j, NewProgress(&words[i], nil, nil))
		})
	}
	all.Wait()
	for i := range words {
		said = append(said, words[i].String())
	}
	return said, errs
}

// A run in processes has the files and the parameters of one in a process, also if it is
// stopped and resumed.
func TestRunInProcesses(t *testing.T) {
	change := func(_ int, o *Options) { o.Policy, o.SaveEvery, o.Pool = "stash", 2, "arena" }
	want, err := smallJob(t, func(o *Options) { change(0, o) }).Run(context.Background(), t.TempDir(), false, NewProgress(io.Discard, nil, nil))
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "run")
	// One process is told to stop, and all do after the first step.
	_, errs := inProcesses(t, change, func(process int, j *Job, p *Progress) error {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		if process == 2 {
			cancel()
		}
		_, err := j.Run(ctx, dir, false, p)
		return err
	})
	for i, err := range errs {
		var stopped *InterruptedError
		if !errors.As(err, &stopped) || stopped.Folder != dir {
			t.Fatalf("process %d: %v", i, err)
		}
	}
	said, errs := inProcesses(t, change, func(_ int, j *Job, p *Progress) error {
		s, err := j.Run(context.Background(), dir, true, p)
		if err == nil && (s.Digest != want.Digest || s.Loss != want.Loss || !s.Finished || s.Ranks != 4) {
			t.Errorf("got %+v; want %+v", s, want)
		}
		return err
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(said[0], "continuing after step 1") {
		t.Errorf("rank 0 said %q", said[0])
	}
	for rank := range 4 {
		for part := range 2 {
			if info, err := os.Stat(filepath.Join(dir, report.TraceName(rank, part))); err != nil || info.Size() == 0 {
				t.Errorf("the trace of rank %d: %v, %v", rank, info, err)
			}
		}
	}
	rep, err := report.Read(dir)
	if err != nil || len(rep.Runs) != 1 {
		t.Fatal(rep, err)
	}
	// A run that has finished has nothing left to do in any process.
	_, errs = inProcesses(t, change, func(_ int, j *Job, p *Progress) error {
		_, err := j.Run(context.Background(), dir, true, p)
		return err
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// Every policy of a comparison in processes comes to the parameters of one in a process.
func TestCompareInProcesses(t *testing.T) {
	want, err := smallJob(t, nil).Compare(context.Background(), "", false, NewProgress(io.Discard, nil, nil))
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "compare")
	_, errs := inProcesses(t, nil, func(process int, j *Job, p *Progress) error {
		c, err := j.Compare(context.Background(), dir, true, p)
		if err != nil {
			return err
		}
		if bad := c.Different(); len(bad) > 0 || len(c.Rows) != len(want.Rows) || !c.Rows[0].sameAs(want.Rows[0]) {
			t.Errorf("process %d: %+v, want %+v", process, c.Rows, want.Rows)
		}
		return nil
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for rank := range 4 {
		if _, err := os.Stat(filepath.Join(dir, "budget", report.TraceName(rank, 0))); err != nil {
			t.Error(err)
		}
	}
}

// A process that sees another last checkpoint than rank 0 does not continue from it.
func TestFollowersContinueFromTheSameCheckpoint(t *testing.T) {
	d := disktest.New().Process("run")
	s, err := checkpoint.Open(checkpoint.Options{Dir: simulated, FS: d})
	if err == nil {
		err = s.Save(simulatedMeta(11, 2), []checkpoint.Rank{{}})
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	lock, err := disk.ReadFile(d, simulated+"/"+disk.LockName, mostConfig)
	if err != nil {
		t.Fatal(err)
	}
	r := &run{Job: &Job{fs: d, machine: Machine{Process: &comm.Process{Ranks: []int{3}}}}}
	for step, want := range map[int]string{-1: "", 2: "", 1: "does not see the folder", 3: "does not see the folder"} {
		from, err := r.follow(simulated, start{Lock: lock, Step: step})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) || (from != nil) != (step == 2) {
			t.Errorf("rank 0 continues from step %d: %v, %v", step, from, err)
		}
	}
	if _, err := r.follow(simulated, start{Lock: append(lock, 'x'), Step: 2}); err == nil {
		t.Error("a folder with another lock is used")
	}
}

// What one process refuses all refuse, with the words of that process, and no file is left.
func TestProcessesRefuse(t *testing.T) {
	for name, x := range map[string]struct {
		change func(process int, o *Options)
		dir    func(process int, dir string) string
		job    func(process int, j *Job)
		want   string
	}{
		"other options": {change: func(process int, o *Options) {
			if process == 2 {
				o.Seed = 9
			}
		}, want: "has other options than rank 0; give the same command to all ranks"},
		"another text": {job: func(process int, j *Job) {
			if process == 2 {
				j.config.Text = data.NewText("book.txt", bytes.Repeat([]byte("another "), 4096))
			}
		}, want: "has another text in book.txt than rank 0; give all ranks the same text"},
		"another held-out text": {change: func(_ int, o *Options) { o.HoldOut = 0.1 }, job: func(process int, j *Job) {
			if process == 1 {
				j.config.HeldOut = data.NewText("book.txt", bytes.Repeat([]byte("another "), 4096))
			}
		}, want: "than rank 0; give all ranks the same text"},
		"no device": {job: func(process int, j *Job) {
			if process == 3 {
				j.config.Device = func(int) (device.Device, error) { return nil, errors.New("the device is busy") }
			}
		}, want: "the device is busy"},
		"another folder": {dir: func(process int, dir string) string {
			if process == 3 {
				return dir + "-elsewhere"
			}
			return dir
		}, want: "give a folder on a file system that all machines share"},
		"a file": {dir: func(_ int, dir string) string {
			_ = os.WriteFile(dir, nil, 0o600)
			return dir
		}, want: "is a file"},
		"a budget": {change: func(_ int, o *Options) { o.Policy, o.Budget = "budget", "64KiB" }, want: "64"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "run")
			_, errs := inProcesses(t, func(process int, o *Options) {
				o.Policy = "stash"
				if x.change != nil {
					x.change(process, o)
				}
			}, func(process int, j *Job, p *Progress) error {
				if x.job != nil {
					x.job(process, j)
				}
				at := dir
				if x.dir != nil {
					at = x.dir(process, dir)
				}
				_, err := j.Run(context.Background(), at, false, p)
				return err
			})
			for i, err := range errs {
				if err == nil || !strings.Contains(err.Error(), x.want) {
					t.Errorf("process %d: %v; want %q", i, err, x.want)
				}
			}
			left, err := filepath.Glob(dir + "*")
			if info, e := os.Stat(dir); e == nil && !info.IsDir() {
				left = nil
			}
			if err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}

// fillingDisk has room for two lines of metrics.
type fillingDisk struct{ disk.FS }

func (d fillingDisk) Append(name string, size int64) (disk.Output, error) {
	f, err := d.FS.Append(name, size)
	if err == nil && filepath.Base(name) == metricsName {
		f = &fillingFile{Output: f, left: 2}
	}
	return f, err
}

type fillingFile struct {
	disk.Output
	left int
}

func (f *fillingFile) Write(p []byte) (int, error) {
	if f.left--; f.left < 0 {
		return 0, errors.New("no space left")
	}
	return f.Output.Write(p)
}

// A process that cannot write ends all of them, and the run goes on from its last
// checkpoint.
func TestProcessFailsToWrite(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	change := func(_ int, o *Options) { o.Policy, o.SaveEvery = "stash", 1 }
	_, errs := inProcesses(t, change, func(process int, j *Job, p *Progress) error {
		if process == 0 {
			j.fs = fillingDisk{j.disk()}
		}
		_, err := j.Run(context.Background(), dir, false, p)
		return err
	})
	for i, err := range errs {
		var told *comm.Told
		if err == nil || !strings.Contains(err.Error(), "no space left") || i > 0 && !errors.As(err, &told) {
			t.Errorf("process %d: %v", i, err)
		}
	}
	want, err := smallJob(t, func(o *Options) { change(0, o) }).Run(context.Background(), "", false, NewProgress(io.Discard, nil, nil))
	if err != nil {
		t.Fatal(err)
	}
	_, errs = inProcesses(t, change, func(_ int, j *Job, p *Progress) error {
		s, err := j.Run(context.Background(), dir, true, p)
		if err == nil && s.Digest != want.Digest {
			err = fmt.Errorf("parameters %s, want %s", s.Digest, want.Digest)
		}
		return err
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
