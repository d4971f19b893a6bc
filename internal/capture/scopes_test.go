// This file owns a recorder that fails as it is told, and single lives of instances.

package capture

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// lab is a recorder whose work is a number of calls, and which fails as it is
// told to.
type lab struct {
	recording   bool
	done        int // pieces of work done
	open        int // recordings not closed
	failCapture error
	failReplay  error
	failClose   error
	failBody    error
	spoils      bool // a capture that fails takes the step with it
	shift       bool // the generation changes during the next capture
	generation  int
	captures    int
	bodies      int // calls of the body
}

func (l *lab) body() error {
	l.bodies++
	if l.failBody != nil {
		return l.failBody
	}
	if !l.recording {
		l.done++
	}
	return nil
}

func (l *lab) Capture(body func() error) (Captured, error) {
	l.captures++
	l.recording = true
	err := errors.Join(body(), l.failCapture)
	l.recording = false
	switch {
	case err == nil:
	case !l.spoils:
		return nil, undone{err}
	case l.failBody != nil:
		return nil, err
	default:
		return nil, spoilt{err}
	}
	l.done++
	if l.shift {
		l.generation++
		l.shift = false
	}
	l.open++
	return &take{l: l}, nil
}

type take struct {
	l      *lab
	closed bool
}

func (r *take) Replay() error {
	if r.closed {
		panic("a closed recording is replayed")
	}
	if r.l.failReplay == nil {
		r.l.done++
	}
	return r.l.failReplay
}

func (r *take) Close() error {
	if r.closed {
		panic("a recording is closed twice")
	}
	r.closed = true
	r.l.open--
	return r.l.failClose
}

// spoilt is what a recorder says that could undo a capture, and has not.
type spoilt struct{ error }

func (e spoilt) Undone() bool  { return false }
func (e spoilt) Unwrap() error { return e.error }

// movedError is what a recorder says whose addresses moved.
type movedError struct{ moved bool }

func (e *movedError) Error() string { return "the input has moved" }
func (e *movedError) Moved() bool   { return e.moved }

var (
	errMoved  = fmt.Errorf("wrapped: %w", &movedError{true})
	errStayed = fmt.Errorf("wrapped: %w", &movedError{false})
	errBroken = errors.New("the device is broken")
	errBody   = errors.New("no data")
	errRefuse = errors.New("a download cannot be captured")
)

// SPEC S4.3: evaluation in the middle of training, warm-up included, does not
// change what training does.
func TestEvaluationDisturbsNothing(t *testing.T) {
	train := Key{Key: memory.Key{Microbatches: 4}, Scope: memory.Attn, Layer: 3}
	eval := train
	eval.Phase = memory.Evaluate
	history := func(evaluate bool) (h []Status) {
		l := &lab{}
		s := New(l, Config{WarmUp: 2})
		for range 6 {
			if err := s.Run(train, l.body); err != nil {
				t.Fatal(err)
			}
			h = append(h, s.Status(train))
			if evaluate {
				if err := s.Run(eval, l.body); err != nil {
					t.Fatal(err)
				}
			}
		}
		return h
	}
	with, without := history(true), history(false)
	if !slices.Equal(with, without) {
		t.Errorf("with evaluation %+v, without %+v", with, without)
	}
	if want := (Status{State: StateCaptured, Eager: 2, Captures: 1, Replays: 3}); without[5] != want {
		t.Errorf("%+v, want %+v", without[5], want)
	}
}

// A capture that fails is told once, with the scope and the reason, and tried no
// more.
func TestRefusedOnce(t *testing.T) {
	var log bytes.Buffer
	l := &lab{failCapture: errRefuse}
	s := New(l, Config{WarmUp: 1, Log: slog.New(slog.NewTextHandler(&log, nil))})
	key := Key{Key: memory.Key{Microbatches: 4, Shape: "8x64"}, Scope: memory.MoE, Chunk: 1, Layer: 3, Microbatch: 2, Backward: true}
	for range 5 {
		if err := s.Run(key, l.body); err != nil {
			t.Fatal(err)
		}
	}
	if l.done != 5 || l.captures != 1 || s.Counts().Refused != 1 || s.Status(key).Why != errRefuse.Error() {
		t.Errorf("%d done, %d captures, %+v, %+v", l.done, l.captures, s.Counts(), s.Status(key))
	}
	for _, want := range []string{"scope moe of layer 3, chunk 1, microbatch 2, backward (train, 4 microbatches, shape 8x64)", errRefuse.Error()} {
		if n := strings.Count(log.String(), want); n != 1 {
			t.Errorf("%q is logged %d times: %s", want, n, &log)
		}
	}
}

// A body that fails by itself during its capture is no reason to refuse it.
func TestFailingBodyIsNotRefused(t *testing.T) {
	l := &lab{}
	s := New(l, Config{WarmUp: 1})
	key := someKeys[0]
	for i, fail := range []error{nil, errBody, nil, nil} {
		l.failBody = fail
		if err := s.Run(key, l.body); !errors.Is(err, fail) {
			t.Fatalf("call %d: %v", i, err)
		}
	}
	if got := s.Status(key); got.State != StateCaptured || got.Replays != 1 || l.done != 3 {
		t.Errorf("%+v, %d done", got, l.done)
	}
}

// SPEC S4.3: addresses that never settle end in eager work; ones that settle in
// between do not.
func TestMovesInARow(t *testing.T) {
	for _, settle := range []bool{false, true} {
		l := &lab{}
		s := New(l, Config{WarmUp: 1})
		calls := 0
		call := func(fail error) {
			l.failReplay = fail
			if err := s.Run(someKeys[0], l.body); err != nil {
				t.Fatal(err)
			}
			calls++
		}
		call(nil)
		for range MostMoves {
			call(nil) // captures
			if settle {
				call(nil)
			}
			call(errMoved)
		}
		want := StateRefused
		if settle {
			want = StateInvalid
		}
		if got := s.Status(someKeys[0]); got.State != want || l.done != calls {
			t.Errorf("settling %v: %+v, %d done of %d", settle, got, l.done, calls)
		}
	}
}

// A replay that fails says which, and what to do; the next call captures anew.
func TestReplayError(t *testing.T) {
	l := &lab{}
	s := New(l, Config{WarmUp: 1})
	key := Key{Key: memory.Key{Microbatches: 4}, Scope: memory.Attn, Layer: 7, Microbatch: 1}
	for i, fail := range []error{nil, nil, errBroken, nil} {
		l.failReplay = fail
		err := s.Run(key, l.body)
		if i != 2 {
			if err != nil {
				t.Fatal(err)
			}
			continue
		}
		var failed *Failed
		const want = "the replay of scope attn of layer 7, chunk 0, microbatch 1, forward (train, 4 microbatches) failed: the device is broken; undo the step and run it again, the scope is then captured again"
		if !errors.As(err, &failed) || failed.Key != key || !errors.Is(err, errBroken) || failed.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if got := s.Status(key); got.Captures != 2 || got.State != StateCaptured || l.done != 3 || l.open != 1 {
		t.Errorf("%+v, %d done, %d open", got, l.done, l.open)
	}
}

// A capture that takes the step with it says so, and the step that is run again
// does without it.
func TestSpoiledStep(t *testing.T) {
	l := &lab{}
	s := New(l, Config{WarmUp: 1})
	key := Key{Key: memory.Key{Microbatches: 1}, Scope: memory.FullIteration}
	for i := range 4 {
		l.spoils, l.failCapture = i == 1, nil
		if i == 1 {
			l.failCapture = errRefuse
		}
		err := s.Run(key, l.body)
		if i != 1 {
			if err != nil {
				t.Fatal(err)
			}
			continue
		}
		var failed *Failed
		const want = "the capture of scope full_iteration (train, 1 microbatch) failed: a download cannot be captured; undo the step and run it again, the scope then runs eagerly"
		if !errors.As(err, &failed) || failed.Key != key || failed.Replay || !errors.Is(err, errRefuse) || failed.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if got := s.Status(key); got.State != StateRefused || got.Eager != 3 || l.done != 3 {
		t.Errorf("%+v, %d done", got, l.done)
	}
}

// A graph that cannot be closed is an error of the call that wanted to, and of no
// other.
func TestCloseFails(t *testing.T) {
	l := &lab{}
	s := New(l, Config{WarmUp: 1, Most: 1, Generation: func() int { return l.generation }})
	run := func(key Key) error { return s.Run(key, l.body) }
	must := func(err error, fails bool) {
		t.Helper()
		if (err != nil) != fails || fails && (!errors.Is(err, errBroken) || !strings.Contains(err.Error(), "closing the graph of scope attn")) {
			t.Errorf("error %v, want one: %v", err, fails)
		}
	}
	must(run(someKeys[0]), false)
	must(run(someKeys[0]), false)
	l.failClose, l.generation = errBroken, 1
	must(run(someKeys[0]), true)
	must(run(someKeys[0]), false)
	must(run(someKeys[1]), true) // which evicts
	l.failClose = nil
	must(run(someKeys[1]), false)
	must(run(someKeys[1]), false)
	l.failClose = errBroken
	if err := s.Close(); !errors.Is(err, errBroken) || s.Held() != 0 || l.open != 0 {
		t.Errorf("%v, %d held, %d open", err, s.Held(), l.open)
	}
	if c := s.Counts(); c.Failed != 2 || c.Calls != c.Eager+c.Captures+c.Replays+c.Failed {
		t.Errorf("%+v", c)
	}
}

func TestMisuse(t *testing.T) {
	mustPanic(t, "0 warm-up calls", func() { New(&lab{}, Config{}) })
	mustPanic(t, "at most -1 keys", func() { New(&lab{}, Config{WarmUp: 1, Most: -1}) })
	s := New(&lab{}, Config{WarmUp: 1})
	nothing := func() error { return nil }
	mustPanic(t, "scopes do not nest", func() {
		_ = s.Run(someKeys[0], func() error { return s.Run(someKeys[1], nothing) })
	})
	mustPanic(t, "reset inside", func() { _ = s.Run(someKeys[0], s.Reset) })
	if err := s.Run(someKeys[0], nothing); err != nil {
		t.Errorf("after panics: %v", err)
	}
}
