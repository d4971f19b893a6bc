// This file owns the life of captured instances.

package capture

import (
	"container/list"
	"errors"
	"fmt"
	"log/slog"

	"github.com/stowage-dev/stowage/trace"
)

// State is where an instance is in its life.
//
//  1. Warming: its first calls run eagerly, so that code is loaded, plans are
//     learned and addresses settle. WarmUp calls that went well end it.
//  2. Captured: a call has been recorded while it did its work, and later ones
//     replay the recording.
//  3. Invalid: the recording was closed because the generation changed, addresses
//     moved or a replay failed; the next call captures, without another warm-up.
//  4. Refused: a capture failed and took the step with it, or failed where the same
//     call went well eagerly; or addresses moved MostMoves times without a replay
//     in between. Every later call is eager.
//
// Reset, Close and the eviction of the key that was used the longest ago close the
// recording and forget the instance: its next call is its first.
type State uint8

const (
	StateWarming State = iota
	StateCaptured
	StateInvalid
	StateRefused
)

func (s State) String() string {
	return [...]string{"warming", "captured", "invalid", "refused"}[s]
}

// MostMoves is how often in a row addresses may move before an instance gives up:
// each costs a capture, which is far dearer than an eager call.
const MostMoves = 8

// DefaultMost holds 64 layers of 32 microbatches, forward and backward, with two
// scopes each, twice: for training and for evaluation.
const DefaultMost = 64 * 32 * 2 * 2 * 2

// Config configures Scopes.
type Config struct {
	// WarmUp is how many calls of each key run eagerly first, at least one.
	WarmUp int
	// Most is how many keys are held; zero stands for DefaultMost. Where more come
	// round than that, none ends its warm-up and all run eagerly.
	Most int
	// Generation changes when recordings made before must not be replayed; nil is
	// for never.
	Generation func() int
	// Log takes a line for each key that is refused; nil is silent.
	Log *slog.Logger
	// Emit takes captures and replays, without step, rank and bytes in use; nil
	// drops them.
	Emit func(trace.Event)
}

// Counts are what the calls came to. Always
//
//	Calls = Eager + Captures + Replays + Failed
//	Captures = recordings held + Closed
type Counts struct {
	Calls    int `json:"calls"`
	Eager    int `json:"eager"`    // ended by a body that was called eagerly and went well
	Replays  int `json:"replays"`  // ended by a replay
	Failed   int `json:"failed"`   // ended by an error
	Captures int `json:"captures"` // ended by a capture
	Closed   int `json:"closed"`
	Moved    int `json:"moved"`   // replays that found addresses moved
	Refused  int `json:"refused"` // instances that run eagerly for ever
	Evicted  int `json:"evicted"` // keys forgotten to make room
}

// Status is one instance.
type Status struct {
	State    State
	Eager    int // calls that ran eagerly and went well
	Captures int
	Replays  int
	Why      string // of Invalid and Refused
}

// instance is one key's.
type instance struct {
	Status
	key        Key
	recording  Captured
	generation int
	moves      int // in a row
}

// Scopes leads instances through their lives. One goroutine drives it.
type Scopes struct {
	rec    Recorder
	cfg    Config
	known  map[Key]*list.Element // of *instance
	recent *list.List            // the key used last is in front
	held   int                   // recordings
	counts Counts
	inside bool // a call is under way
}

// New makes Scopes that capture with rec.
func New(rec Recorder, cfg Config) *Scopes {
	if cfg.Most == 0 {
		cfg.Most = DefaultMost
	}
	if cfg.WarmUp < 1 || cfg.Most < 1 {
		panic(fmt.Sprintf("capture: scopes with %d warm-up calls and at most %d keys", cfg.WarmUp, cfg.Most))
	}
	if cfg.Generation == nil {
		cfg.Generation = func() int { return 0 }
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Emit == nil {
		cfg.Emit = func(trace.Event) {}
	}
	return &Scopes{rec: rec, cfg: cfg, known: map[Key]*list.Element{}, recent: list.New()}
}

// Counts are over all keys since New.
func (s *Scopes) Counts() Counts { return s.counts }

// Status is an instance's; that of a key never used, or forgotten, is zero.
func (s *Scopes) Status(key Key) Status {
	if e, ok := s.known[key]; ok {
		return e.Value.(*instance).Status
	}
	return Status{}
}

// Held is how many recordings are held.
func (s *Scopes) Held() int { return s.held }

// Run does the work of body once: by calling it, or by replaying what an earlier
// call recorded. A body's own error comes back as it is. Calls do not nest.
func (s *Scopes) Run(key Key, body func() error) error {
	if s.inside {
		panic("capture: " + key.String() + " begins inside another scope; scopes do not nest")
	}
	s.inside = true
	defer func() { s.inside = false }()
	s.counts.Calls++
	in, err := s.use(key)
	if err == nil {
		err = s.run(in, body)
	}
	if err != nil {
		s.counts.Failed++
	}
	return err
}

// use finds or makes a key's instance, and forgets the one used the longest ago
// if there are too many.
func (s *Scopes) use(key Key) (*instance, error) {
	if e, ok := s.known[key]; ok {
		s.recent.MoveToFront(e)
		return e.Value.(*instance), nil
	}
	var err error
	if s.recent.Len() >= s.cfg.Most {
		err = s.forget(s.recent.Back())
		s.counts.Evicted++
	}
	in := &instance{key: key}
	s.known[key] = s.recent.PushFront(in)
	return in, err
}

func (s *Scopes) run(in *instance, body func() error) error {
	now := s.cfg.Generation()
	if in.State == StateCaptured && in.generation != now {
		if err := s.invalidate(in, "the generation changed"); err != nil {
			return err
		}
	}
	switch {
	case in.State == StateCaptured:
		return s.replay(in, body)
	case in.State == StateRefused || in.State == StateWarming && in.Eager < s.cfg.WarmUp:
		return s.eager(in, body)
	}
	recording, err := s.rec.Capture(body)
	if err != nil {
		return s.uncaptured(in, body, err)
	}
	s.held++
	s.counts.Captures++
	in.Captures++
	// If the generation has changed meanwhile, the next call finds out.
	in.State, in.Why, in.recording, in.generation = StateCaptured, "", recording, now
	s.emit(in, trace.Capture)
	return nil
}

// uncaptured ends a call whose capture failed.
func (s *Scopes) uncaptured(in *instance, body func() error, err error) error {
	var undone interface{ Undone() bool }
	if !errors.As(err, &undone) || !undone.Undone() {
		s.refuse(in, err)
		return &Failed{Key: in.key, Cause: err}
	}
	if failed := s.eager(in, body); failed != nil {
		return failed // it was not the capture
	}
	s.refuse(in, err)
	return nil
}

func (s *Scopes) eager(in *instance, body func() error) error {
	if err := body(); err != nil {
		return err
	}
	in.Eager++
	s.counts.Eager++
	return nil
}

// replay falls back to the body if addresses moved.
func (s *Scopes) replay(in *instance, body func() error) error {
	err := in.recording.Replay()
	var moved interface{ Moved() bool }
	switch {
	case err == nil:
		in.moves = 0
		in.Replays++
		s.counts.Replays++
		s.emit(in, trace.Replay)
		return nil
	case errors.As(err, &moved) && moved.Moved():
		s.counts.Moved++
		in.moves++
		if closed := s.invalidate(in, err.Error()); closed != nil {
			return closed
		}
		if in.moves == MostMoves {
			s.refuse(in, fmt.Errorf("addresses moved %d times in a row: %w", MostMoves, err))
		}
		return s.eager(in, body)
	}
	return errors.Join(&Failed{in.key, true, err}, s.invalidate(in, err.Error()))
}

// invalidate closes an instance's recording.
func (s *Scopes) invalidate(in *instance, why string) error {
	recording := in.recording
	in.State, in.Why, in.recording = StateInvalid, why, nil
	s.held--
	s.counts.Closed++
	if err := recording.Close(); err != nil {
		return fmt.Errorf("capture: closing the graph of %v: %w", in.key, err)
	}
	return nil
}

// refuse makes an instance eager for ever, and says so once.
func (s *Scopes) refuse(in *instance, why error) {
	in.State, in.Why = StateRefused, why.Error()
	s.counts.Refused++
	s.cfg.Log.Warn("a scope runs eagerly from now on: it could not be captured", "scope", in.key.String(), "why", in.Why)
}

func (s *Scopes) emit(in *instance, what trace.What) {
	k := in.key
	s.cfg.Emit(trace.Event{What: what, Name: k.Scope.String(), Chunk: k.Chunk, Layer: k.Layer, Microbatch: k.Microbatch})
}

// forget closes what an instance holds and drops it.
func (s *Scopes) forget(e *list.Element) error {
	in := s.recent.Remove(e).(*instance)
	delete(s.known, in.key)
	if in.recording == nil {
		return nil
	}
	return s.invalidate(in, "")
}

// Reset closes all recordings and forgets all keys, those that were refused
// included. The counts stay.
func (s *Scopes) Reset() (err error) {
	if s.inside {
		panic("capture: scopes are reset inside of one")
	}
	for s.recent.Len() > 0 {
		err = errors.Join(err, s.forget(s.recent.Back()))
	}
	return err
}

// Close is Reset. Nothing else is held.
func (s *Scopes) Close() error { return s.Reset() }
