// This file owns the tests of ranks that capture together.

package capture

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// meeting returns the least of what all ranks would do, once all have come.
type meeting struct {
	mu               sync.Mutex
	all              *sync.Cond
	ranks, came, now int
	least, result    Next
}

func newMeeting(ranks int) *meeting {
	m := &meeting{ranks: ranks, least: NextReplay}
	m.all = sync.NewCond(&m.mu)
	return m
}

func (m *meeting) agree(_ Key, next Next) (Next, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.least = min(m.least, next)
	if m.came++; m.came == m.ranks {
		m.result, m.least, m.came = m.least, NextReplay, 0
		m.now++
		m.all.Broadcast()
		return m.result, nil
	}
	for now := m.now; m.now == now; {
		m.all.Wait()
	}
	return m.result, nil
}

// checked is a recording that says before its replay whether addresses moved.
type checked struct{ *take }

func (c checked) Check() error {
	if c.l.failReplay == errMoved {
		return errMoved
	}
	return nil
}

// together is a recorder that makes such recordings.
type together struct{ *lab }

func (r together) Capture(body func() error) (Captured, error) {
	c, err := r.lab.Capture(body)
	if err != nil {
		return nil, err
	}
	return checked{c.(*take)}, nil
}

// SPEC S7.4: whatever happens on one rank, all ranks work eagerly, capture or replay in the
// same call, and each does its work once. Without further events they come to replay.
func TestRanksDoTheSame(t *testing.T) {
	const ranks = 3
	key := Key{Key: memory.Key{Microbatches: 2}, Scope: memory.FullIteration}
	var did [NextReplay + 1]int
	rapid.Check(t, func(t *rapid.T) {
		m := newMeeting(ranks)
		labs := make([]*lab, ranks)
		all := make([]*Scopes, ranks)
		for r := range all {
			l := &lab{}
			labs[r] = l
			all[r] = New(together{l}, Config{
				WarmUp: rapid.IntRange(1, 3).Draw(t, "warm-up"), Agree: m.agree, Generation: func() int { return l.generation },
			})
		}
		step := func(t *rapid.T, eager []bool) (what Next) {
			var done [ranks]Next
			var errs [ranks]error
			var wg sync.WaitGroup
			for r, s := range all {
				wg.Go(func() {
					l := labs[r]
					captures, bodies, pieces := l.captures, l.bodies, l.done
					run := s.Run
					if eager[r] {
						run = s.RunEagerly
					}
					errs[r] = run(key, l.body)
					switch {
					case l.captures > captures:
						done[r] = NextCapture
					case l.bodies == bodies:
						done[r] = NextReplay
					}
					if l.done != pieces+1 {
						errs[r] = errors.Join(errs[r], fmt.Errorf("rank %d did %d pieces of work", r, l.done-pieces))
					}
					l.failReplay = nil
				})
			}
			wg.Wait()
			if err := errors.Join(errs[:]...); err != nil {
				t.Fatal(err)
			}
			if done != [ranks]Next{done[0], done[0], done[0]} {
				t.Fatalf("ranks do different things: %v", done)
			}
			did[done[0]]++
			return done[0]
		}
		none := make([]bool, ranks)
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			eager := make([]bool, ranks)
			r := rapid.IntRange(0, ranks-1).Draw(t, "rank")
			switch rapid.IntRange(0, 7).Draw(t, "event") {
			case 0:
				labs[r].generation++
			case 1:
				labs[r].failReplay = errMoved
			case 2:
				eager[r] = true
			}
			step(t, eager)
		}
		for range 5 {
			step(t, none)
		}
		refused := false
		for _, s := range all {
			refused = refused || s.Status(key).State == StateRefused // addresses moved too often
		}
		if what := step(t, none); what != NextReplay && !refused {
			t.Fatalf("ranks end with %v", what)
		}
		for r, s := range all {
			if err := s.Close(); err != nil || labs[r].open != 0 {
				t.Fatalf("rank %d: %v, %d recordings are left", r, err, labs[r].open)
			}
		}
	})
	t.Log(did)
	for what, n := range did {
		if n == 0 {
			t.Errorf("never reached: %v", what)
		}
	}
}

// Work that cannot be captured is done eagerly; other errors are the step's.
func TestTogether(t *testing.T) {
	body := func() error { return nil }
	for _, err := range []error{&device.CaptureError{Stream: "s", Why: "w", Do: "d"}, errBody} {
		rec := Together(func(func() error) (Captured, error) { return nil, err })
		_, got := rec.Capture(body)
		var u interface{ Undone() bool }
		if undone := errors.As(got, &u) && u.Undone(); undone != (err != errBody) || !errors.Is(got, err) {
			t.Errorf("%v becomes %v", err, got)
		}
	}
	l := &lab{}
	c, err := Together(func(func() error) (Captured, error) { return &take{l: l}, nil }).Capture(body)
	if err != nil || c == nil || l.done != 1 {
		t.Errorf("%v, %v, %d pieces of work", c, err, l.done)
	}
}
