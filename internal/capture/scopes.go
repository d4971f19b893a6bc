// This file owns the life of captured instances.

package capture

import (
	"container/list"
	"errors"
	"fmt"
	"log/slog"

	"github.com/stowage-dev/stowage/observe/trace"
)

// State is the state of an instance.
//
//  1. Warming: the first calls run eagerly, so that code is loaded, plans are made and
//     addresses settle. It ends after WarmUp calls without an error.
//  2. Captured: a call was recorded while it did its work. Later calls replay the
//     recording.
//  3. Invalid: the recording was closed because the generation changed, addresses
//     moved or a replay failed. The next call captures, without another warm-up.
//  4. Refused: a capture failed, and with it the step, or the same call succeeded
//     eagerly; or addresses moved MostMoves times without a replay in between. Every
//     later call runs eagerly.
//
// Reset and Close close the recording and forget the instance, and so does the eviction
// of the key that was used the longest ago. The next call of the key is then its first.
type State uint8

const (
	StateWarming State = iota
	StateCaptured
	StateInvalid
	StateRefused
)

// String returns the state in words.
func (s State) String() string {
	return [...]string{"warming", "captured", "invalid", "refused"}[s]
}

// Next is what a call of Run does.
type Next uint8

// In the order of what they need: ranks that work together do the least of what each of
// them could do.
const (
	NextEager Next = iota
	NextCapture
	NextReplay
)

// MostMoves is how often in a row addresses may move before an instance is refused.
// Every move costs a capture, which takes far longer than an eager call.
const MostMoves = 8

// DefaultMost is enough for 64 layers of 32 microbatches, forward and backward, with two
// scopes each, for training and for evaluation.
const DefaultMost = 64 * 32 * 2 * 2 * 2

// Config configures Scopes.
type Config struct {
	// WarmUp is the number of calls of each key that run eagerly first, at least one.
	WarmUp int
	// Most is the number of keys that are held; zero means DefaultMost. If a step uses
	// more keys, none of them ends its warm-up, and all run eagerly.
	Most int
	// Generation returns another number when recordings that were made before must not
	// be replayed. Nil means that they always may.
	Generation func() int
	// Agree is for ranks whose work is captured together. It is told what this rank would
	// do next under a key, and returns the least of what all of them would do. Nil means
	// that this rank decides alone.
	Agree func(key Key, next Next) (Next, error)
	// Log receives a line for each key that is refused. Nil means no log.
	Log *slog.Logger
	// Emit receives captures and replays, without step, rank and bytes in use. Nil
	// means that nobody receives them.
	Emit func(trace.Event)
}

// Counts counts calls by how they ended. At all times
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

// Status describes one instance.
type Status struct {
	State    State
	Eager    int // calls that ran eagerly and went well
	Captures int
	Replays  int
	Why      string // the reason of Invalid and Refused
}

// instance is what is known of one key.
type instance struct {
	Status
	key        Key
	recording  Captured
	generation int
	moves      int // in a row
}

// Scopes manages captured instances. One goroutine drives it.
type Scopes struct {
	rec    Recorder
	cfg    Config
	known  map[Key]*list.Element // of *instance
	recent *list.List            // the key used last is in front
	held   int                   // recordings
	counts Counts
	inside bool // a call is under way
}

// New returns Scopes that capture with rec. It panics if WarmUp or Most is less than one.
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
	if cfg.Agree == nil {
		cfg.Agree = func(_ Key, next Next) (Next, error) { return next, nil }
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Emit == nil {
		cfg.Emit = func(trace.Event) {}
	}
	return &Scopes{rec: rec, cfg: cfg, known: map[Key]*list.Element{}, recent: list.New()}
}

// Counts returns the counts of all keys since New.
func (s *Scopes) Counts() Counts { return s.counts }

// Status returns the status of a key. It is zero for a key that was never used or was
// forgotten.
func (s *Scopes) Status(key Key) Status {
	if e, ok := s.known[key]; ok {
		return e.Value.(*instance).Status
	}
	return Status{}
}

// Held returns the number of recordings that can be replayed.
func (s *Scopes) Held() int { return s.held }

// Run does the work of body once, by calling body or by replaying what an earlier call
// recorded. It returns body's own error unchanged. It panics inside of another Run.
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

// use returns the instance of a key. It forgets the instance that was used the longest
// ago if there are too many.
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
	next, err := s.next(in)
	if err == nil {
		next, err = s.cfg.Agree(in.key, next)
	}
	switch {
	case err != nil:
		return err
	case next == NextReplay:
		return s.replay(in, body)
	case next == NextEager:
		return s.eager(in, body)
	case in.State == StateCaptured:
		if err := s.invalidate(in, "another rank captures again"); err != nil {
			return err
		}
	}
	recording, err := s.rec.Capture(body)
	if err != nil {
		return s.uncaptured(in, body, err)
	}
	s.held++
	s.counts.Captures++
	in.Captures++
	// The next call notices if the generation has changed meanwhile.
	in.State, in.Why, in.recording, in.generation = StateCaptured, "", recording, now
	s.emit(in, trace.Capture)
	return nil
}

// next returns what this rank would do.
func (s *Scopes) next(in *instance) (Next, error) {
	switch {
	case in.State == StateCaptured:
		if c, ok := in.recording.(interface{ Check() error }); ok {
			if err := c.Check(); err != nil {
				return NextEager, s.moved(in, err)
			}
		}
		return NextReplay, nil
	case in.State == StateRefused || in.State == StateWarming && in.Eager < s.cfg.WarmUp:
		return NextEager, nil
	}
	return NextCapture, nil
}

// RunEagerly calls body in a step that must not be captured or replayed. Other ranks then
// work eagerly too.
func (s *Scopes) RunEagerly(key Key, body func() error) error {
	if _, err := s.cfg.Agree(key, NextEager); err != nil {
		return err
	}
	return body()
}

// uncaptured handles a failed capture.
func (s *Scopes) uncaptured(in *instance, body func() error, err error) error {
	var undone interface{ Undone() bool }
	if !errors.As(err, &undone) || !undone.Undone() {
		s.refuse(in, err)
		return &Failed{Key: in.key, Cause: err}
	}
	if failed := s.eager(in, body); failed != nil {
		return failed // the body fails, not the capture
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

// replay replays a recording, or calls the body if addresses moved.
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
		if err := s.moved(in, err); err != nil {
			return err
		}
		return s.eager(in, body)
	}
	return errors.Join(&Failed{in.key, true, err}, s.invalidate(in, err.Error()))
}

// moved ends a recording whose addresses are no longer those of the step.
func (s *Scopes) moved(in *instance, why error) error {
	s.counts.Moved++
	in.moves++
	if err := s.invalidate(in, why.Error()); err != nil {
		return err
	}
	if in.moves == MostMoves {
		s.refuse(in, fmt.Errorf("addresses moved %d times in a row: %w", MostMoves, why))
	}
	return nil
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

// refuse makes an instance eager for good, and logs that once.
func (s *Scopes) refuse(in *instance, why error) {
	in.State, in.Why = StateRefused, why.Error()
	s.counts.Refused++
	s.cfg.Log.Warn("a scope runs eagerly from now on: it could not be captured", "scope", in.key.String(), "why", in.Why)
}

func (s *Scopes) emit(in *instance, what trace.Kind) {
	k := in.key
	s.cfg.Emit(trace.Event{Kind: what, Name: k.Scope.String(), Chunk: k.Chunk, Layer: k.Layer, Microbatch: k.Microbatch})
}

// forget closes the recording of an instance and drops the instance.
func (s *Scopes) forget(e *list.Element) error {
	in := s.recent.Remove(e).(*instance)
	delete(s.known, in.key)
	if in.recording == nil {
		return nil
	}
	return s.invalidate(in, "")
}

// Reset closes all recordings and forgets all keys, refused ones included. It keeps the
// counts.
func (s *Scopes) Reset() (err error) {
	if s.inside {
		panic("capture: scopes are reset inside of one")
	}
	for s.recent.Len() > 0 {
		err = errors.Join(err, s.forget(s.recent.Back()))
	}
	return err
}

// Close closes all recordings.
func (s *Scopes) Close() error { return s.Reset() }
