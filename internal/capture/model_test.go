// This file owns an obvious model of the life of instances, and random calls beside
// it.

package capture

import (
	"cmp"
	"errors"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
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
	{Key: memory.Key{Microbatches: 2}, Scope: memory.Attn},
	{Key: memory.Key{Microbatches: 2}, Scope: memory.Attn, Backward: true},
	{Key: memory.Key{Microbatches: 2, Phase: memory.Evaluate}, Scope: memory.Attn},
	{Key: memory.Key{Microbatches: 2}, Scope: memory.MLP},
	{Key: memory.Key{Microbatches: 2}, Scope: memory.Attn, Layer: 1},
	{Key: memory.Key{Microbatches: 3, Shape: "2x8"}, Scope: memory.Attn},
	{Key: memory.Key{Microbatches: 2}, Scope: memory.FullIteration},
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
