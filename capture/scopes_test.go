// This file owns the life of instances beside an obvious model.

package capture

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/trace"
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

// model is what the type's comment says, written down once more, without graphs.
type model struct {
	warmUp, most int
	keys         []Key // the one used last is last
	state        map[Key]*modelled
	total        Counts
	held         int
}

type modelled struct {
	Status
	generation, moves int
}

// drop takes away a recording.
func (m *model) drop(k *modelled, s State) {
	if k.State == StateCaptured {
		m.held--
		m.total.Closed++
	}
	k.State = s
}

// run says whether a call should do its work, and with which error.
func (m *model) run(key Key, l *lab) (want error) {
	m.total.Calls++
	defer func() {
		if want != nil {
			m.total.Failed++
		}
	}()
	k := m.touch(key)
	moved, generation := l.failReplay == errMoved, l.generation
	if k.State == StateCaptured && k.generation != generation {
		m.drop(k, StateInvalid)
	}
	if k.State == StateCaptured {
		switch {
		case l.failReplay == nil:
			k.moves = 0
			k.Replays++
			m.total.Replays++
			return nil
		case !moved:
			m.drop(k, StateInvalid)
			return l.failReplay
		}
		m.total.Moved++
		m.drop(k, StateInvalid)
		if k.moves++; k.moves == MostMoves {
			m.refuse(k)
		}
	} else if k.State == StateInvalid || k.State == StateWarming && k.Eager >= m.warmUp {
		fails := cmp.Or(l.failBody, l.failCapture)
		switch {
		case fails == nil:
			k.State, k.generation = StateCaptured, generation
			m.held++
			k.Captures++
			m.total.Captures++
			return nil
		case l.spoils:
			m.refuse(k)
			return fails
		case l.failBody == nil:
			m.refuse(k)
		}
	}
	if l.failBody != nil {
		return l.failBody
	}
	k.Eager++
	m.total.Eager++
	return nil
}

func (m *model) refuse(k *modelled) {
	k.State = StateRefused
	m.total.Refused++
}

// touch makes a key the one used last.
func (m *model) touch(key Key) *modelled {
	if i := slices.Index(m.keys, key); i >= 0 {
		m.keys = append(slices.Delete(m.keys, i, i+1), key)
		return m.state[key]
	}
	if len(m.keys) == m.most {
		m.drop(m.state[m.keys[0]], StateWarming)
		delete(m.state, m.keys[0])
		m.keys = m.keys[1:]
		m.total.Evicted++
	}
	m.keys = append(m.keys, key)
	m.state[key] = &modelled{}
	return m.state[key]
}

// someKeys differ in one thing each.
var someKeys = []Key{
	{Microbatches: 2, Scope: Attn},
	{Microbatches: 2, Scope: Attn, Backward: true},
	{Microbatches: 2, Scope: Attn, Phase: Evaluate},
	{Microbatches: 2, Scope: MLP},
	{Microbatches: 2, Scope: Attn, Layer: 1},
	{Microbatches: 3, Scope: Attn, Shape: "2x8"},
	{Microbatches: 2, Scope: FullIteration},
}

// SPEC S4.3: whatever fails, moves or comes in between, each call does its work
// exactly once or fails and does none, and the counts add up.
func TestLifeBesideModel(t *testing.T) {
	var reached Counts
	states := map[State]int{}
	rapid.Check(t, func(t *rapid.T) {
		l := &lab{}
		m := &model{
			warmUp: rapid.IntRange(1, 3).Draw(t, "warm-up"), most: rapid.SampledFrom([]int{len(someKeys), 3, 2, 1}).Draw(t, "most"),
			state: map[Key]*modelled{},
		}
		events := 0
		s := New(l, Config{
			WarmUp: m.warmUp, Most: m.most, Generation: func() int { return l.generation },
			Emit: func(trace.Event) { events++ },
		})
		one := func(t *rapid.T, key Key) {
			before, want := l.done, m.run(key, l)
			err := s.Run(key, l.body)
			if !errors.Is(err, want) || (err == nil) != (want == nil) {
				t.Fatalf("%v: error %v, want %v", key, err, want)
			}
			work := 1
			if want != nil {
				work = 0
			}
			if l.done-before != work {
				t.Fatalf("%v: %d pieces of work were done, error %v", key, l.done-before, err)
			}
			l.failReplay, l.failCapture, l.failBody = nil, nil, nil
		}
		run := func(t *rapid.T) { one(t, rapid.SampledFrom(someKeys).Draw(t, "key")) }
		t.Repeat(map[string]func(*rapid.T){
			"run": run,
			"steps": func(t *rapid.T) { // most calls go well
				keys := rapid.SliceOfN(rapid.SampledFrom(someKeys), 1, 3).Draw(t, "keys")
				for range rapid.IntRange(1, 5).Draw(t, "steps") {
					for _, key := range keys {
						one(t, key)
					}
				}
			},
			"moves": func(t *rapid.T) {
				key := rapid.SampledFrom(someKeys).Draw(t, "key")
				for range rapid.IntRange(1, MostMoves+1).Draw(t, "times") {
					one(t, key)
					l.failReplay = errMoved
					one(t, key)
				}
			},
			"replay fails": func(t *rapid.T) {
				l.failReplay = rapid.SampledFrom([]error{errMoved, errMoved, errStayed, errBroken}).Draw(t, "why")
				run(t)
			},
			"capture fails": func(t *rapid.T) { l.failCapture, l.spoils = errRefuse, rapid.Bool().Draw(t, "spoils"); run(t) },
			"body fails":    func(t *rapid.T) { l.failBody, l.spoils = errBody, rapid.Bool().Draw(t, "spoils"); run(t) },
			"generation":    func(*rapid.T) { l.generation++ },
			"shift":         func(*rapid.T) { l.shift = true },
			"reset": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "really") > 0 {
					t.Skip("seldom, or nothing would grow old")
				}
				if err := s.Reset(); err != nil {
					t.Fatal(err)
				}
				for _, k := range m.keys {
					m.drop(m.state[k], StateWarming)
				}
				m.keys, m.state = nil, map[Key]*modelled{}
			},
			"": func(t *rapid.T) {
				if s.Counts() != m.total || s.Held() != m.held || l.open != m.held {
					t.Fatalf("counts %+v, %d held, %d open; want %+v, %d held", s.Counts(), s.Held(), l.open, m.total, m.held)
				}
				for _, key := range someKeys {
					got, want := s.Status(key), Status{}
					if k := m.state[key]; k != nil {
						want = k.Status
						states[k.State]++
					}
					if (got.Why != "") != (got.State == StateInvalid || got.State == StateRefused) {
						t.Fatalf("%v is %v because of %q", key, got.State, got.Why)
					}
					if got.Why = ""; got != want {
						t.Fatalf("%v: %+v, want %+v", key, got, want)
					}
				}
				c := s.Counts()
				if c.Calls != c.Eager+c.Captures+c.Replays+c.Failed || c.Captures != s.Held()+c.Closed || events != c.Captures+c.Replays {
					t.Fatalf("%+v, %d held, %d events", c, s.Held(), events)
				}
			},
		})
		if err := s.Close(); err != nil || l.open != 0 {
			t.Fatalf("%v, %d open", err, l.open)
		}
		c := s.Counts()
		reached.Moved, reached.Refused, reached.Evicted, reached.Replays = reached.Moved+c.Moved, reached.Refused+c.Refused, reached.Evicted+c.Evicted, reached.Replays+c.Replays
	})
	t.Logf("reached %+v, states %v", reached, states)
}

// SPEC S4.3: evaluation in the middle of training, warm-up included, does not
// change what training does.
func TestEvaluationDisturbsNothing(t *testing.T) {
	train := Key{Microbatches: 4, Scope: Attn, Layer: 3}
	eval := train
	eval.Phase = Evaluate
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
	key := Key{Microbatches: 4, Scope: MoE, Chunk: 1, Layer: 3, Microbatch: 2, Backward: true, Shape: "8x64"}
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
	key := Key{Microbatches: 4, Scope: Attn, Layer: 7, Microbatch: 1}
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
		const want = "the replay of scope attn of layer 7, chunk 0, microbatch 1, forward (train, 4 microbatches) failed: the device is broken; undo the step and run it again, the scope is then captured anew"
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
	key := Key{Microbatches: 1, Scope: FullIteration}
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
