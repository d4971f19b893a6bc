// This file owns the tests of what may go wrong while a checkpoint is written: a
// kill, a loss of power, a failed operation, a full disk, at every moment.

package checkpoint

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stowage-dev/stowage/train/internal/disk/disktest"
)

// memory is a disk in memory with one process that uses it.
type memory struct {
	*disktest.Disk
	*disktest.Process
}

func newMemory() *memory {
	d := disktest.New()
	return &memory{d, d.Process("run")}
}

// restart is a new process on the same machine: nothing is lost but the lock.
func (m *memory) restart() {
	m.Kill()
	m.Restart()
}

// lose is a loss of power and the next boot.
func (m *memory) lose(r *rand.Rand) {
	m.Lose(r)
	m.Restart()
}

// stage is a store in memory with two checkpoints, of steps 10 and 20, and what
// warned. Without checkpoints not even the folders are there.
func stage(t *testing.T, saved bool) (*memory, Options, *[]string) {
	t.Helper()
	m, warnings := newMemory(), &[]string{}
	o := Options{Dir: "/disk/run", FS: m, Warn: func(s string) { *warnings = append(*warnings, s) }}
	if saved {
		s := mustOpen(t, o)
		mustSave(t, s, 10)
		mustSave(t, s, 20)
		mustClose(t, s)
	}
	return m, o, warnings
}

// attempt is what a run does: it locks and saves. A process that was killed does
// not get to close.
func attempt(o Options, step int) error {
	s, err := Open(o)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.Save(metaOf(step), ranksOf(step))
}

// goOn is the next run: it must find a whole checkpoint, go on and leave nothing
// of the one before.
func goOn(t *testing.T, o Options, allowed ...int) {
	t.Helper()
	found := 0
	c, err := Latest(o)
	switch {
	case err == nil:
		found = c.Step
		checkContents(t, c)
	case !errors.Is(err, ErrNone):
		t.Fatal(err)
	}
	if !slices.Contains(allowed, found) {
		t.Fatalf("found step %d, want one of %v", found, allowed)
	}
	s := mustOpen(t, o)
	defer mustClose(t, s)
	mustSave(t, s, found+5)
	c, err = s.Latest()
	if err != nil || c.Step != found+5 {
		t.Fatalf("after the next save: %v, %v", c, err)
	}
	checkContents(t, c)
	for _, name := range names(t, o) {
		if strings.HasPrefix(name, temporary) {
			t.Errorf("%s was left", name)
		}
	}
}

// Kills at every operation, with all, none or some of the unsynced data on the
// disk: the last good checkpoint always opens.
func TestKillAnywhere(t *testing.T) {
	seeds := uint64(8)
	if testing.Short() {
		seeds = 3
	}
	for name, c := range map[string]struct{ last, next int }{
		"first":  {0, 30},
		"third":  {20, 30},
		"repair": {10, 20}, // step 20 is there, but damaged
	} {
		for seed := range seeds {
			t.Run(fmt.Sprintf("%s/seed=%d", name, seed), func(t *testing.T) { killEverywhere(t, c.last, c.next, seed) })
		}
	}
}

func killEverywhere(t *testing.T, last, next int, seed uint64) {
	for n := 1; ; n++ {
		m, o, _ := stage(t, last > 0)
		if last == 10 {
			spoil(t, m, o, 20, newest[2], func(b []byte) []byte { return b[:len(b)-1] })
		}
		m.Arm(n, disktest.Kills)
		err := attempt(o, next)
		dead := m.Dead()
		switch seed {
		case 0: // a kill alone: the machine goes on
			m.restart()
			wholeByName(t, o, last != 10)
		case 1:
			m.lose(nil)
		default:
			m.lose(rand.New(rand.NewPCG(seed, uint64(n))))
		}
		if err != nil {
			goOn(t, o, last, next)
		} else {
			goOn(t, o, next)
		}
		if t.Failed() {
			t.Fatalf("killed at operation %d", n)
		}
		if !dead {
			if n < 30 {
				t.Fatalf("a save has only %d operations: the test sees too little", n)
			}
			return
		}
	}
}

// wholeByName wants what has the name of a checkpoint to be one: without a loss of
// power, neither writing nor removing leaves a half under that name.
func wholeByName(t *testing.T, o Options, want bool) {
	t.Helper()
	steps, err := Steps(o)
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range steps {
		if _, err := open(o, step); err != nil && want {
			t.Errorf("step %d: %v", step, err)
		}
	}
}

// The run's folder was made by someone else just before.
func TestFolderNotSynced(t *testing.T) {
	m, o, _ := stage(t, false)
	if err := m.Mkdir(o.Dir); err != nil {
		t.Fatal(err)
	}
	if err := m.Mkdir(o.folder()); err != nil {
		t.Fatal(err)
	}
	if err := attempt(o, 30); err != nil {
		t.Fatal(err)
	}
	m.lose(nil)
	goOn(t, o, 30)
}

// Every operation fails once: either the checkpoint is written all the same, or
// all is as before and one sentence says why.
func TestFailAnywhere(t *testing.T) {
	for _, f := range []disktest.Fault{disktest.Fails, disktest.Shorts} {
		for n, done := 1, false; !done; n++ {
			m, o, warnings := stage(t, true)
			before := names(t, o)
			m.Arm(n, f)
			err := attempt(o, 30)
			done = m.Ops() < n
			m.Disarm()
			c, e := Latest(o)
			if e != nil {
				t.Fatalf("operation %d: %v", n, e)
			}
			checkContents(t, c)
			if open := m.OpenFiles(); len(open) > 0 {
				t.Errorf("operation %d (%s) leaves %v open", n, m.Hit(), open)
			}
			if err == nil {
				if c.Step != 30 {
					t.Errorf("operation %d: the save was well, but the latest is step %d", n, c.Step)
				}
				if hit := m.Hit(); !done && !mayFail(hit) {
					t.Errorf("operation %d (%s) failed, and the save was well", n, hit)
				}
			} else {
				sentence(t, err.Error())
				if after := names(t, o); c.Step != 20 || !slices.Equal(before, after) && len(*warnings) == 0 {
					t.Errorf("operation %d: latest is step %d, and %v became %v: %v", n, c.Step, before, after, err)
				}
			}
			for _, w := range *warnings {
				sentence(t, w)
			}
			goOn(t, o, c.Step)
		}
	}
}

// mayFail reports whether a checkpoint is whole without an operation: one that looks for
// or removes what is old, or that ends the lock.
func mayFail(operation string) bool {
	what, name, _ := strings.Cut(operation, " ")
	switch what {
	case "list", "removeall", "writelock", "unlock":
		return true
	case "rename":
		return strings.Contains(name, " ") && strings.Contains(name[strings.Index(name, " "):], temporary+"old-")
	}
	return false
}

// The disk runs full after any number of bytes.
func TestFullDisk(t *testing.T) {
	m, o, _ := stage(t, true)
	used := m.Used()
	if err := attempt(o, 30); err != nil {
		t.Fatal(err)
	}
	size := used / 2 // two were there
	for room := 0; room < size+size/4; room += 97 {
		m, o, warnings := stage(t, true)
		before := names(t, o)
		m.Limit(m.Used() + max(room, 1))
		err := attempt(o, 30)
		if err == nil {
			if room < size-16 {
				t.Errorf("a checkpoint of about %d bytes went into %d", size, room)
			}
			continue
		}
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "needs 1 MiB") {
			t.Errorf("the error is %v", err)
		}
		sentence(t, err.Error())
		if after := names(t, o); !slices.Equal(before, after) || m.Used() != used || len(*warnings) > 0 {
			t.Errorf("%v became %v, %d bytes became %d, with %v", before, after, used, m.Used(), *warnings)
		}
		m.Limit(0)
		goOn(t, o, 20)
	}
}

// An error of the trainer while it gives its tensors ends the checkpoint too.
func TestWriterFails(t *testing.T) {
	_, o, _ := stage(t, true)
	s := mustOpen(t, o)
	defer mustClose(t, s)
	before := names(t, o)
	ranks := ranksOf(30)
	ranks[1].Optim.Write = failing
	err := s.Save(metaOf(30), ranks)
	if !errors.Is(err, errTrainer) {
		t.Errorf("got %v", err)
	}
	if after := names(t, o); !slices.Equal(before, after) {
		t.Errorf("%v became %v", before, after)
	}
}

// Every operation of reading fails once, and every file is damaged behind the check: one
// sentence says so, and nothing stays open.
func TestReadAnywhere(t *testing.T) {
	read := func(o Options, damage func()) (err error) {
		c, err := Latest(o)
		if err != nil {
			return err
		}
		damage()
		for rank := range c.Ranks {
			for _, open := range []func(int) (*Tensors, error){c.Model, c.Optim} {
				ts, e := open(rank)
				if err = errors.Join(err, e); e != nil {
					continue
				}
				for _, x := range ts.Tensors() {
					if x.Bytes() == 0 {
						continue // nothing is read
					}
					err = errors.Join(err, ts.ReadAt(x.Name, make([]byte, x.Bytes()), 0))
				}
				err = errors.Join(err, ts.Close())
			}
		}
		return err
	}
	for n, done := 1, false; !done; n++ {
		m, o, warnings := stage(t, true)
		m.Arm(n, disktest.Fails)
		err := read(o, func() {})
		if done = m.Ops() < n; !done && err == nil && len(*warnings) == 0 && !strings.HasPrefix(m.Hit(), "close ") {
			t.Errorf("operation %d (%s) failed, and nothing says so", n, m.Hit())
		}
		if open := m.OpenFiles(); len(open) > 0 {
			t.Errorf("operation %d (%s) leaves %v open", n, m.Hit(), open)
		}
	}
	for _, name := range newest {
		if !strings.HasSuffix(name, ".safetensors") {
			continue
		}
		m, o, _ := stage(t, true)
		err := read(o, func() { spoil(t, m, o, 20, name, func(b []byte) []byte { return b[:9] }) })
		if open := m.OpenFiles(); err == nil || len(open) > 0 {
			t.Errorf("%s is damaged: %v, and %v stays open", name, err, open)
		}
	}
}
