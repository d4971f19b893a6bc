// This file owns the tests of saving in the background: steps go on, no error is lost, and
// of several processes each may die at any moment.

package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/train/internal/disk"
	"github.com/stowage-dev/stowage/train/internal/disk/disktest"
)

// gated is a disk on which files are created only after the gate was opened.
type gated struct {
	disk.FS
	gate chan struct{}
}

func (g gated) Create(name string) (disk.Output, error) {
	<-g.gate
	return g.FS.Create(name)
}

// A save that the disk holds up holds nothing else up, and does not count before it is
// complete.
func TestSaverDoesNotWait(t *testing.T) {
	_, o, _ := stage(t, true)
	g := gated{o.FS, make(chan struct{})}
	o.FS = g
	store := mustOpen(t, o)
	defer mustClose(t, store)
	synced := 0
	s := &Saver{Options: o, Store: store, Before: func() error { synced++; return nil }}
	if err := s.Save(metaOf(30), ranksOf(30)); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := s.Poll(); err != nil || s.Saved() != -1 {
			t.Fatalf("step %d is saved while the disk is held up: %v", s.Saved(), err)
		}
	}
	close(g.gate)
	if err := s.Save(metaOf(31), ranksOf(31)); err != nil || s.Saved() != 30 {
		t.Errorf("the next save found step %d saved: %v", s.Saved(), err)
	}
	if err := s.Wait(); err != nil || s.Saved() != 31 || synced != 2 {
		t.Errorf("step %d is saved, with %d calls before: %v", s.Saved(), synced, err)
	}
	c, err := store.Latest()
	if err != nil || c.Step != 31 {
		t.Fatal(c, err)
	}
	checkContents(t, c)
}

// patient is a gated disk that notes whether something was removed while a file was being
// written.
type patient struct {
	gated
	under, entered atomic.Int32
	early          atomic.Bool
	came           chan struct{}
	open           sync.Once
}

func (p *patient) Create(name string) (disk.Output, error) {
	p.under.Add(1)
	defer p.under.Add(-1)
	if p.entered.Add(1) == 1 {
		close(p.came)
	}
	return p.gated.Create(name)
}

func (p *patient) RemoveAll(name string) error {
	if p.under.Load() > 0 {
		p.early.Store(true)
	}
	p.open.Do(func() { close(p.gate) })
	return p.gated.RemoveAll(name)
}

// If another process is gone, a save ends only after what it writes in the background has
// ended: nothing is removed or left behind while it is written.
func TestSaverEndsBeforeItReturns(t *testing.T) {
	_, o, _ := stage(t, true)
	before := names(t, o)
	p := &patient{gated: gated{o.FS, make(chan struct{})}, came: make(chan struct{})}
	o.FS = p
	store := mustOpen(t, o)
	defer mustClose(t, store)
	x := newTable(1)
	s := &Saver{Options: o, Store: store, Ranks: 2, Gather: func(b []byte) ([][]byte, error) { return x.gather(0, b) }}
	if err := s.Save(metaOf(30), ranksOf(30)); err != nil {
		t.Fatal(err)
	}
	<-p.came // a file is being written
	x.leave()
	hurried := s.flight.pace.quick
	go func() {
		<-hurried // the save is told to hurry before it is waited for
		p.open.Do(func() { close(p.gate) })
	}()
	if err := s.Poll(); !errors.Is(err, errGone) {
		t.Error(err)
	}
	if p.early.Load() || p.under.Load() > 0 {
		t.Error("the save returned, or removed its files, while it wrote")
	}
	if after := names(t, o); !slices.Equal(after, before) || s.Saved() != -1 {
		t.Errorf("%q became %q, and step %d is saved", before, after, s.Saved())
	}
}

// A step that has a checkpoint already is saved, in one process and in several.
func TestSaverFindsACheckpoint(t *testing.T) {
	for _, processes := range []int{0, 1, 2} { // 0 exchanges no messages
		_, o, _ := stage(t, true) // has step 20
		x := newTable(processes)
		var all sync.WaitGroup
		for i := range max(1, processes) {
			s := &Saver{Options: o, Ranks: 2}
			if processes > 0 {
				s.Gather = func(b []byte) ([][]byte, error) { return x.gather(i, b) }
			}
			if i == 0 {
				s.Store = mustOpen(t, o)
				defer mustClose(t, s.Store)
			}
			mine := ranksOf(20)
			if processes == 2 {
				mine = mine[i : i+1]
			}
			all.Go(func() {
				if err := errors.Join(s.Save(metaOf(20), mine), s.Wait()); err != nil || s.Saved() != 20 {
					t.Errorf("process %d of %d: step %d is saved, %v", i, processes, s.Saved(), err)
				}
			})
		}
		all.Wait()
	}
}

// Every operation fails once. The error is returned once, or the checkpoint is complete.
func TestSaverLosesNoError(t *testing.T) {
	for n, done := 1, false; !done; n++ {
		m, o, _ := stage(t, true)
		store := mustOpen(t, o)
		s := &Saver{Options: o, Store: store, Before: func() error { return nil }}
		m.Arm(n, disktest.Fails)
		err := errors.Join(s.Save(metaOf(30), ranksOf(30)), s.Wait())
		done = m.Ops() < n
		m.Disarm()
		c, latest := store.Latest()
		switch {
		case latest != nil:
			t.Fatal(latest)
		case (err == nil) != (s.Saved() == 30), (err == nil) != (c.Step == 30):
			t.Errorf("operation %d (%s): step %d is said to be saved, the latest is %d: %v", n, m.Hit(), s.Saved(), c.Step, err)
		case err == nil && !done && !mayFail(m.Hit()):
			t.Errorf("operation %d (%s) failed, and nothing says so", n, m.Hit())
		}
		if err := s.Wait(); err != nil {
			t.Errorf("the error came twice: %v", err)
		}
		mustClose(t, store)
		goOn(t, o, c.Step)
	}
	_, o, _ := stage(t, true)
	store := mustOpen(t, o)
	s := &Saver{Options: o, Store: store, Before: func() error { return errTrainer }}
	if err := errors.Join(s.Save(metaOf(30), ranksOf(30)), s.Wait()); !errors.Is(err, errTrainer) {
		t.Error(err)
	}
	mustClose(t, store)
	goOn(t, o, 20)
}

// table is where processes exchange messages. If one leaves, the others get an error.
type table struct {
	mu        sync.Mutex
	processes int
	now       *round // nil if nobody has come; made by the first, on the clock of the processes
	gone      bool
}

type round struct {
	all  [][]byte
	came int
	over chan struct{}
}

func newTable(processes int) *table { return &table{processes: processes} }

var errGone = errors.New("a process is gone")

func (x *table) gather(process int, text []byte) ([][]byte, error) {
	x.mu.Lock()
	if x.gone {
		x.mu.Unlock()
		return nil, errGone
	}
	if x.now == nil {
		x.now = &round{all: make([][]byte, x.processes), over: make(chan struct{})}
	}
	r := x.now
	r.all[process] = text
	if r.came++; r.came == x.processes {
		x.now = nil
		close(r.over)
	}
	x.mu.Unlock()
	<-r.over
	if r.came < x.processes {
		return nil, errGone
	}
	return r.all, nil
}

func (x *table) leave() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.gone = true; x.now != nil {
		close(x.now.over)
		x.now = nil
	}
}

// saveTogether is what a process does: it saves a step, polls, and waits. The first process
// has the last rank.
func saveTogether(p *disktest.Process, x *table, process int, o Options, step, polls int) (err error) {
	defer func() {
		if p.Dead() || err != nil { // others must not wait for it
			x.leave()
		}
	}()
	o.FS = p
	s := &Saver{Options: o, Ranks: 2, Gather: func(b []byte) ([][]byte, error) { return x.gather(process, b) }}
	if process == 0 {
		if s.Store, err = Open(o); err != nil {
			return err
		}
		defer s.Store.Close()
	}
	if err := s.Save(metaOf(step), ranksOf(step)[1-process:2-process]); err != nil {
		return err
	}
	for range polls {
		if err := s.Poll(); err != nil {
			return err
		}
	}
	if err := s.Wait(); err != nil {
		return err
	}
	if s.Saved() != step {
		return fmt.Errorf("step %d is saved", s.Saved())
	}
	return nil
}

// Two processes save together in many orders, and either dies, or fails, at every
// operation: a checkpoint is there as a whole or not at all, the other process ends with an
// error, and the next run leaves nothing of it.
func TestProcessesSaveTogether(t *testing.T) { // SPEC S7.5
	seeds := uint64(40)
	if testing.Short() {
		seeds = 6
	}
	for seed := range seeds {
		for victim := range 3 { // the last one is none
			for n := 1; ; n++ {
				d := disktest.New()
				ps := []*disktest.Process{d.Process("a"), d.Process("b")}
				o := Options{Dir: "/disk/run", FS: ps[0]}
				s := mustOpen(t, o)
				mustSave(t, s, 10)
				mustClose(t, s)
				fault := disktest.Kills
				if seed%3 == 2 {
					fault = disktest.Fails
				}
				if victim < 2 {
					ps[victim].Arm(n, fault)
				}
				x, errs := newTable(2), make([]error, 2)
				work := map[*disktest.Process]func(*disktest.Process){}
				for i, p := range ps {
					work[p] = func(p *disktest.Process) { errs[i] = saveTogether(p, x, i, o, 30, int(seed)%4) }
				}
				log := d.Run(t, disktest.Random(rand.New(rand.NewPCG(seed, uint64(n)))), work)
				hit := victim < 2 && ps[victim].Hit() != ""
				for _, p := range ps {
					p.Disarm()
				}
				switch {
				case ps[0].Dead() || ps[1].Dead():
					if seed%3 == 1 {
						d.Lose(rand.New(rand.NewPCG(seed, uint64(n))))
					}
					ps[0].Kill()
					ps[0].Restart()
				case hit && !mayFail(ps[victim].Hit()) && (errs[0] == nil || errs[1] == nil):
					t.Errorf("%s failed, and the errors are %v", ps[victim].Hit(), errs)
				case errs[0] == nil && errs[1] != nil || errs[0] != nil && errs[1] == nil:
					t.Errorf("one process failed alone: %v", errs)
				}
				c, err := Latest(o)
				switch {
				case err != nil:
					t.Error(err)
				case errs[0] == nil && errs[1] == nil && c.Step != 30:
					t.Errorf("both processes saved, and the latest step is %d", c.Step)
				case c.Step != 10 && c.Step != 30:
					t.Errorf("the latest step is %d", c.Step)
				case c.Step == 30:
					checkContents(t, c)
				}
				if err == nil {
					goOn(t, o, c.Step)
				}
				if t.Failed() {
					t.Fatalf("seed %d, process %d, operation %d:\n%s", seed, victim, n, strings.Join(log, "\n"))
				}
				if !hit {
					if victim < 2 && n <= 8 { // two files are four operations each
						t.Fatalf("process %d has only %d operations: the test sees too little", victim, n)
					}
					break
				}
			}
		}
	}
}

// A process that sees another disk says so in one sentence, and so does the first one.
func TestFolderIsNotShared(t *testing.T) {
	for _, other := range []bool{false, true} { // whether a folder of that name is there
		x, errs := newTable(2), make([]error, 2)
		var wait sync.WaitGroup
		for i := range 2 {
			p := disktest.New().Process("p")
			o := Options{Dir: "/disk/run", FS: p}
			if i == 1 && other {
				mustClose(t, mustOpen(t, o))
			}
			wait.Go(func() { errs[i] = saveTogether(p, x, i, o, 30, 0) })
		}
		wait.Wait()
		for _, err := range errs {
			if err == nil || !strings.Contains(err.Error(), "choose a folder that all machines share") {
				t.Error(err)
			}
			sentence(t, fmt.Sprint(err))
		}
	}
}

// Whichever processes fail, all return the error of the first of them, and that process the
// error itself.
func TestAllTellTheFirstError(t *testing.T) {
	const processes = 3
	for failing := range 1 << processes {
		x := newTable(processes)
		own, got := make([]error, processes), make([]error, processes)
		first := error(nil)
		for i := range processes {
			if failing&(1<<i) != 0 {
				own[i] = fmt.Errorf("process %d failed", i)
				first = cmp.Or(first, own[i])
			}
		}
		var all sync.WaitGroup
		for i := range processes {
			s := &Saver{Ranks: processes, Gather: func(b []byte) ([][]byte, error) { return x.gather(i, b) }}
			all.Go(func() { _, got[i] = s.tell(notice{Done: true}, own[i]) })
		}
		all.Wait()
		for i, err := range got {
			if fmt.Sprint(err) != fmt.Sprint(first) || own[i] == first && err != first {
				t.Errorf("processes %03b fail: process %d returns %v, want %v", failing, i, err, first)
			}
		}
	}
}

// A process that failed returns its own error, and not that it lost the others, which end because of it.
func TestOwnErrorBeforeTheOthers(t *testing.T) {
	x := newTable(2)
	x.leave()
	s := &Saver{Ranks: 2, Gather: func(b []byte) ([][]byte, error) { return x.gather(0, b) }}
	own := errors.New("no space")
	if _, err := s.tell(notice{}, own); err != own {
		t.Errorf("a process with an error of its own returns %v", err)
	}
	if _, err := s.tell(notice{}, nil); !errors.Is(err, errGone) || !strings.Contains(err.Error(), "with the other processes") {
		t.Errorf("a process without one returns %v", err)
	}
}

// Work and rest together take the share of the processors that there are.
func TestRestOf(t *testing.T) {
	for processors, want := range map[int]float64{1: 199, 2: 99, 28: 1/0.14 - 1, 200: 0, 400: 0} {
		if got := restOf(processors); math.Abs(got-want) > 1e-9 {
			t.Errorf("%d processors: rest %v, want %v", processors, got, want)
		}
	}
}

// slowWriter takes a millisecond for each write.
type slowWriter struct{ most int }

func (w *slowWriter) Write(b []byte) (int, error) {
	time.Sleep(time.Millisecond)
	w.most = max(w.most, len(b))
	return len(b), nil
}

// Checksums of all files rest after each burst of work, and no longer when somebody waits.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, slow := newPace(), &slowWriter{}
		p.rest = 9
		files := []pacedWriter{{slow, p}, {slow, p}}
		began := time.Now()
		for i := range 50 { // two bursts and a half
			if n, err := files[i%2].Write(make([]byte, 1+piece/2)); n != 1+piece/2 || err != nil {
				t.Fatal(n, err)
			}
		}
		if took, want := time.Since(began), 50*time.Millisecond+2*9*burst; took != want {
			t.Errorf("50 writes took %v, want %v", took, want)
		}
		p.hurry()
		began = time.Now()
		if n, err := files[0].Write(make([]byte, 50*piece+1)); n != 50*piece+1 || err != nil {
			t.Fatal(n, err)
		}
		if took := time.Since(began); took != 51*time.Millisecond || slow.most != piece {
			t.Errorf("51 pieces of at most %d bytes took %v in a hurry", slow.most, took)
		}
	})
}

// The error of a save comes with the next one, which is not begun.
func TestErrorOfTheSaveBefore(t *testing.T) {
	if s := (*Saver)(nil); s.Saved() != -1 {
		t.Errorf("no saver has saved step %d", s.Saved())
	}
	_, o, _ := stage(t, true)
	store := mustOpen(t, o)
	defer mustClose(t, store)
	fails := true
	s := &Saver{Options: o, Store: store, Before: func() error {
		if fails {
			return errTrainer
		}
		return nil
	}}
	if err := s.Save(metaOf(30), ranksOf(30)); err != nil {
		t.Fatal(err)
	}
	if err := s.Save(metaOf(40), ranksOf(40)); !errors.Is(err, errTrainer) || s.Saved() != -1 {
		t.Errorf("the save of step 40 says %v, and step %d is saved", err, s.Saved())
	}
	fails = false
	if err := errors.Join(s.Wait(), s.Save(metaOf(50), ranksOf(50)), s.Wait()); err != nil || s.Saved() != 50 {
		t.Errorf("step %d is saved: %v", s.Saved(), err)
	}
	if steps, err := Steps(o); err != nil || slices.Contains(steps, 40) || slices.Contains(steps, 30) || !slices.Contains(steps, 50) {
		t.Errorf("steps %v are there: %v", steps, err)
	}
}
