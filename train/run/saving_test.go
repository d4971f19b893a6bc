// This file owns the tests of checkpoints that are written while steps go on.

package run

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/disk"
)

// slowDisk is a disk on which the files of the first checkpoint are created only after the
// metrics have so many lines, and then perhaps fail.
type slowDisk struct {
	disk.FS
	mu    sync.Mutex
	lines int
	wait  int
	there chan struct{} // closed when the lines are there
	fail  error
}

func newSlowDisk(wait int, fail error) *slowDisk {
	return &slowDisk{FS: disk.OS{}, wait: wait, there: make(chan struct{}), fail: fail}
}

func (d *slowDisk) Create(name string) (disk.Output, error) {
	if strings.Contains(name, ".safetensors") {
		<-d.there
		if d.fail != nil {
			return nil, d.fail
		}
	}
	return d.FS.Create(name)
}

func (d *slowDisk) Append(name string, size int64) (disk.Output, error) {
	out, err := d.FS.Append(name, size)
	if filepath.Base(name) == metricsName {
		out = &countedLines{out, d}
	}
	return out, err
}

type countedLines struct {
	disk.Output
	d *slowDisk
}

func (c *countedLines) Write(b []byte) (int, error) {
	n, err := c.Output.Write(b)
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	if c.d.lines++; c.d.lines == c.d.wait {
		close(c.d.there)
	}
	return n, err
}

// The checkpoint of step 3 is held up until step 5 is done, so steps do not wait for it. The
// next one does, and the end of the run does. What comes out is the same.
func TestStepsGoOnBesideASave(t *testing.T) { // SPEC S7.5
	change := func(o *Options) { o.Policy, o.SaveEvery, o.Steps, o.Keep = "stash", 3, 8, 9 }
	want, err := smallJob(t, change).Run(context.Background(), t.TempDir(), false, NewProgress(io.Discard, nil, nil))
	if err != nil {
		t.Fatal(err)
	}
	j, dir := smallJob(t, change), t.TempDir()
	j.fs = newSlowDisk(5, nil)
	got, err := j.Run(context.Background(), dir, false, NewProgress(io.Discard, nil, nil))
	if err != nil || got.Digest != want.Digest || !got.Finished {
		t.Fatalf("got %+v, want %+v: %v", got, want, err)
	}
	steps, err := checkpoint.Steps(checkpoint.Options{Dir: dir})
	if err != nil || len(steps) != 3 || steps[0] != 3 || steps[1] != 6 || steps[2] != 8 {
		t.Errorf("checkpoints of steps %v: %v", steps, err)
	}
}

// A checkpoint that cannot be written ends the run with that error, whether it is found
// after a step or at the end. The run goes on from its start.
func TestSaveFailsBesideSteps(t *testing.T) {
	for _, steps := range []int{3, 100} { // the last step comes first, or an error does
		change := func(o *Options) { o.Policy, o.SaveEvery, o.Steps = "stash", 2, steps }
		j, dir := smallJob(t, change), t.TempDir()
		j.fs = newSlowDisk(3, syscall.ENOSPC)
		_, err := j.Run(context.Background(), dir, false, NewProgress(io.Discard, nil, nil))
		if !errors.Is(err, syscall.ENOSPC) || strings.Count(err.Error(), "not enough space") != 1 {
			t.Errorf("the error is %v", err)
		}
		if steps, err := checkpoint.Steps(checkpoint.Options{Dir: dir}); err != nil || len(steps) != 0 {
			t.Errorf("checkpoints of steps %v: %v", steps, err)
		}
		change = func(o *Options) { o.Policy, o.SaveEvery, o.Steps = "stash", 2, 3 }
		if s, err := smallJob(t, change).Run(context.Background(), dir, true, NewProgress(io.Discard, nil, nil)); err != nil || !s.Finished {
			t.Errorf("resumed: %+v, %v", s, err)
		}
	}
}

// unlockedDisk is a disk on which somebody removes the lock of the run once the third line of its
// metrics is written.
type unlockedDisk struct {
	disk.FS
	dir   string
	lines int
}

type unlockingLines struct {
	disk.Output
	d *unlockedDisk
}

func (d *unlockedDisk) Append(name string, size int64) (disk.Output, error) {
	out, err := d.FS.Append(name, size)
	return unlockingLines{out, d}, err
}

func (o unlockingLines) Write(b []byte) (int, error) {
	n, err := o.Output.Write(b)
	if o.d.lines++; o.d.lines == 3 {
		err = errors.Join(err, os.Remove(filepath.Join(o.d.dir, disk.LockName)))
	}
	return n, err
}

// A run whose lock somebody removes ends with one sentence before it writes another line, and
// writes no summary and no report: the folder may be another process's.
func TestLockIsLostBesideASave(t *testing.T) {
	for _, every := range []int{3, 100} { // a save that fails, too, or none
		dir := t.TempDir()
		j := smallJob(t, func(o *Options) { o.Policy, o.SaveEvery, o.Steps = "stash", every, 8 })
		j.fs = &unlockedDisk{FS: disk.OS{}, dir: dir}
		_, err := j.Run(context.Background(), dir, false, NewProgress(io.Discard, nil, nil))
		var lost *disk.LostError
		if !errors.As(err, &lost) || strings.Count(err.Error(), "somebody removed") != 1 {
			t.Errorf("the error is %v", err)
		}
		text, err := os.ReadFile(filepath.Join(dir, metricsName))
		if lines := strings.Count(string(text), "\n"); err != nil || lines != 3 {
			t.Errorf("%d lines were written: %v", lines, err)
		}
		for _, name := range []string{summaryName, report.PageFile, report.PerfettoFile} {
			if exists(filepath.Join(dir, name)) {
				t.Errorf("%s was written", name)
			}
		}
	}
}

// failing is a device whose ranks cannot read the figures of a step once fail is set.
type failing struct {
	device.Device
	fail *atomic.Pointer[error]
}

func (d failing) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	return failingStream{s, d.fail}, err
}

type failingStream struct {
	device.Stream
	fail *atomic.Pointer[error]
}

// figuresBytes is what a rank of the small model reads after a step: two losses, the router's and the norm.
const figuresBytes = 4 * 4

func (s failingStream) Download(dst []byte, src device.Range) error {
	if err := s.fail.Load(); err != nil && len(dst) == figuresBytes {
		return *err
	}
	return s.Stream.Download(dst, src)
}

// arming is a disk that calls then when the metrics have so many lines.
type arming struct {
	disk.FS
	lines int
	then  func()
}

func (d *arming) Append(name string, size int64) (disk.Output, error) {
	out, err := d.FS.Append(name, size)
	if err == nil && filepath.Base(name) == metricsName {
		out = armingFile{out, d}
	}
	return out, err
}

type armingFile struct {
	disk.Output
	d *arming
}

func (f armingFile) Write(b []byte) (int, error) {
	n, err := f.Output.Write(b)
	if f.d.lines--; f.d.lines == 0 {
		f.d.then()
	}
	return n, err
}

// A step fails after two others. What the user can correct leaves nothing behind, so that the corrected run can begin in
// the same folder; but a run that has saved, or that failed for another reason, stays, and goes on.
func TestStepFailsLate(t *testing.T) {
	small, broken := &memory.BudgetError{Budget: 1 << 30, Need: 2 << 30}, errors.New("the device is broken")
	for _, x := range []struct {
		every int
		fails error
		stays bool
	}{{0, small, false}, {0, broken, true}, {1, small, true}} {
		change := func(o *Options) {
			o.Policy, o.Budget, o.SaveEvery, o.Steps, o.Micro, o.Seq = "stash", "1GiB", x.every, 3, 1, 8
		}
		j, dir := smallJob(t, change), filepath.Join(t.TempDir(), "run")
		var fail atomic.Pointer[error]
		open := j.machine.Open
		j.machine.Open = func(rank int, o device.Observer) (device.Device, error) {
			d, err := open(rank, o)
			return failing{d, &fail}, err
		}
		j.fs = &arming{disk.OS{}, 2, func() { fail.Store(&x.fails) }}
		_, err := j.Run(context.Background(), dir, false, NewProgress(io.Discard, nil, nil))
		if !errors.Is(err, x.fails) || isInput(err) != (x.fails == error(small)) {
			t.Errorf("saved every %d steps: %v, want %v", x.every, err, x.fails)
		}
		steps, stepsErr := checkpoint.Steps(checkpoint.Options{Dir: dir})
		if stepsErr != nil || len(steps) != 2*x.every {
			t.Errorf("saved every %d steps, %v: checkpoints of %v, %v", x.every, x.fails, steps, stepsErr)
		}
		if there := exists(dir); there != x.stays {
			t.Errorf("saved every %d steps, %v: the folder is there: %v", x.every, x.fails, there)
		}
		if !x.stays {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, metricsName))
		if err != nil || bytes.Count(text, []byte("\n")) != 2 || !exists(filepath.Join(dir, configName)) {
			t.Errorf("saved every %d steps, %v: metrics %q, options there: %v; %v", x.every, x.fails, text, exists(filepath.Join(dir, configName)), err)
		}
		if s, err := smallJob(t, change).Run(context.Background(), dir, true, NewProgress(io.Discard, nil, nil)); err != nil || !s.Finished {
			t.Errorf("saved every %d steps, %v: resumed: %+v, %v", x.every, x.fails, s, err)
		}
	}
}
