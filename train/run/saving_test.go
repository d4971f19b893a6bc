// This file owns the tests of checkpoints that are written while steps go on.

package run

import (
	"context"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

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
