// This file owns saving in the background, by one process or by several.

package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"time"
)

// Target takes what a trainer saves: a [Store] before it returns, a [Saver] in the
// background.
type Target interface {
	Save(meta Meta, ranks []Rank) error
}

// Saver saves checkpoints while the run goes on, one at a time:
//
//  1. Save begins to write what it is given, which must not change until it is written. It
//     first waits for the save before.
//  2. Poll looks whether the checkpoint is complete, without waiting for the disk. Wait
//     waits. Each returns the error of a save once, and Saved changes only here.
//
// All processes of a run call the methods in the same order. They exchange messages in the
// call alone, never in the background, so that messages of others keep their order.
type Saver struct {
	Options        // where the checkpoints are, in every process
	Store   *Store // prepares and commits; nil in processes other than the first
	Ranks   int    // of the run
	// Gather passes a message to all processes and returns theirs in order. Nil is a run
	// of one process.
	Gather func([]byte) ([][]byte, error)
	// Before is called in the background before a commit, by the first process: the run
	// syncs what must be on the disk before the checkpoint. Nil does nothing.
	Before func() error

	saved  int // the step of the last complete checkpoint, plus one
	flight *flight
}

// flight is a save that has begun.
type flight struct {
	step  int
	draft *Draft
	pace  *pace
	// done is closed when the work in the background has ended, which is first writing,
	// and then, in the first process, the commit.
	done      chan struct{}
	committed bool // the commit has begun
	files     []File
	err       error
}

// notice is what a process tells the others of a save.
type notice struct {
	Draft *Draft
	Done  bool
	Files []File
	Err   string
}

// Saved returns the step of the last complete checkpoint, or -1 if there is none or s is
// nil.
func (s *Saver) Saved() int {
	if s == nil {
		return -1
	}
	return s.saved - 1
}

// Save begins to save.
func (s *Saver) Save(meta Meta, ranks []Rank) error {
	if err := s.Wait(); err != nil {
		return err
	}
	f := &flight{step: meta.Step, pace: newPace(), done: make(chan struct{})}
	if s.Gather == nil {
		s.flight = f
		s.background(f, func() error {
			d, err := s.Store.Prepare(meta, len(ranks))
			if d == nil || err != nil {
				return err
			}
			files, err := s.paced(f).Write(d, ranks)
			return s.commit(d, files, err)
		})
		return nil
	}
	var mine notice
	var err error
	if s.Store != nil {
		mine.Draft, err = s.Store.Prepare(meta, s.Ranks)
	}
	all, err := s.tell(mine, err)
	if err != nil || all[0].Draft == nil {
		if err == nil { // the checkpoint was there
			s.saved = meta.Step + 1
		}
		return err
	}
	if f.draft = mine.Draft; f.draft == nil {
		f.draft = all[0].Draft
	}
	s.flight = f
	s.background(f, func() (err error) {
		f.files, err = s.paced(f).Write(f.draft, ranks)
		return err
	})
	return nil
}

// background runs work and ends the stage of a flight.
func (s *Saver) background(f *flight, work func() error) {
	done := f.done
	go func() {
		defer close(done)
		f.err = work()
	}()
}

// paced returns the options with the pace of a flight.
func (s *Saver) paced(f *flight) Options {
	o := s.Options
	o.pace = f.pace
	return o
}

// commit completes a draft, or removes it.
func (s *Saver) commit(d *Draft, files []File, failed error) error {
	if failed == nil && s.Before != nil {
		failed = s.Before()
	}
	return s.Store.Commit(d, files, failed)
}

// Poll looks whether the save that was begun is complete. A nil Saver saves nothing.
func (s *Saver) Poll() error { return s.settle(false) }

// Wait waits until no save is under way. A nil Saver saves nothing.
func (s *Saver) Wait() error { return s.settle(true) }

func (s *Saver) settle(wait bool) error {
	for s != nil && s.flight != nil {
		f := s.flight
		if wait {
			f.pace.hurry()
			<-f.done
		}
		over, err := s.look(f)
		if over {
			s.flight = nil
			if err == nil {
				s.saved = f.step + 1
			}
			return err
		}
		if !wait {
			return nil
		}
	}
	return nil
}

// look reports whether a flight is over, and its error. It begins the commit if all
// processes have written.
func (s *Saver) look(f *flight) (over bool, err error) {
	done := false
	select {
	case <-f.done:
		done = true
	default:
	}
	if s.Gather == nil {
		if !done {
			return false, nil
		}
		return true, f.err
	}
	mine := notice{Done: done}
	if done && !f.committed {
		mine.Files = f.files
	}
	if done {
		err = f.err
	}
	all, err := s.tell(mine, err)
	if err != nil {
		f.pace.hurry()
		<-f.done
		if s.Store != nil && !f.committed {
			_ = s.Store.Commit(f.draft, nil, err) // removes what is there; processes that still write leave it to the next run
		}
		return true, err
	}
	for _, n := range all {
		if !n.Done {
			return false, nil
		}
	}
	if f.committed {
		return true, nil
	}
	f.committed = true
	if s.Store != nil {
		files := s.inOrder(all)
		f.done = make(chan struct{})
		s.background(f, func() error { return s.commit(f.draft, files, nil) })
	}
	return false, nil
}

// inOrder returns the files of all processes in the order of ranks.
func (s *Saver) inOrder(all []notice) (files []File) {
	of := map[string]File{}
	for _, n := range all {
		for _, f := range n.Files {
			of[f.Name] = f
		}
	}
	for rank := range s.Ranks {
		for k := range kinds {
			files = append(files, of[fileName(k, rank, s.Ranks)])
		}
	}
	return files
}

// tell passes a notice and the error of this process to all. If processes have errors, it
// returns that of the first.
func (s *Saver) tell(mine notice, own error) ([]notice, error) {
	if own != nil {
		mine.Err = own.Error()
	}
	text, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	texts, err := s.Gather(text)
	if err != nil {
		if own != nil {
			return nil, own
		}
		return nil, fmt.Errorf("cannot complete the checkpoint with the other processes: %w%s", err, s.earlier(-1))
	}
	all := make([]notice, len(texts))
	for i, text := range texts {
		if err := json.Unmarshal(text, &all[i]); err != nil {
			return nil, fmt.Errorf("checkpoint: cannot read what process %d says: %w; run the same version of the program everywhere", i, err)
		}
	}
	for _, n := range all {
		switch {
		case n.Err != "" && own != nil && n.Err == own.Error():
			return nil, own
		case n.Err != "":
			return nil, errors.New(n.Err)
		}
	}
	return all, nil
}

// pace limits the processor time that checksums take from the steps beside them. They are
// nearly all of the computing in a save. Waiting for the disk takes no processor, so it does
// not count.
type pace struct {
	once  sync.Once
	quick chan struct{} // closed if somebody waits for the writer
	turn  chan struct{} // holds a token while a file computes or rests
	owed  time.Duration // work since the last rest; who holds the token uses it
	rest  float64       // for each nanosecond of work
}

// share is the part of all processors that checksums may take. The system's work for the disk
// takes about half as much again. Steps that use all processors wait for the one that a
// checksum takes, so that time counts once for each processor; all of it is to stay below 3 % of a few steps.
const share = 0.005

// burst is the work between two rests. Threads of a step that gave way to a checksum take a while to
// meet again, so a few long bursts cost steps less than many short ones of the same length in all.
const burst = 20 * time.Millisecond

// piece is how much is summed before a look whether somebody waits, or a rest is due.
const piece = 1 << 20

func newPace() *pace {
	return &pace{quick: make(chan struct{}), turn: make(chan struct{}, 1), rest: restOf(runtime.GOMAXPROCS(0))}
}

// restOf returns how long one processor rests for each nanosecond of work, to take the share
// of so many.
func restOf(processors int) float64 { return 1/min(1, share*float64(processors)) - 1 }

// hurry ends the limit.
func (p *pace) hurry() { p.once.Do(func() { close(p.quick) }) }

// pacedWriter writes to a checksum in pieces and rests after each burst.
type pacedWriter struct {
	io.Writer
	*pace
}

func (w pacedWriter) Write(b []byte) (n int, err error) {
	for len(b) > 0 && err == nil {
		m, k := min(len(b), piece), 0
		k, err = w.some(b[:m])
		n, b = n+k, b[m:]
	}
	return n, err
}

func (w pacedWriter) some(b []byte) (int, error) {
	select {
	case <-w.quick:
		return w.Writer.Write(b)
	case w.turn <- struct{}{}:
	}
	defer func() { <-w.turn }()
	began := time.Now()
	n, err := w.Writer.Write(b)
	if w.owed += time.Since(began); w.owed < burst {
		return n, err
	}
	rest := time.NewTimer(time.Duration(float64(w.owed) * w.rest))
	w.owed = 0
	defer rest.Stop()
	select {
	case <-w.quick:
	case <-rest.C:
	}
	return n, err
}
