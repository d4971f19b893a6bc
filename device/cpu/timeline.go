// This file owns how one queue of work waits for another.

package cpu

import (
	"sync"
	"sync/atomic"
)

// timeline counts the pieces of work that one queue has done. A queue works in
// order, so the count alone tells which pieces are done, and it only grows.
type timeline struct {
	done    atomic.Uint64
	waiters atomic.Int32
	mu      sync.Mutex
	cond    sync.Cond
}

func newTimeline() *timeline {
	t := &timeline{}
	t.cond.L = &t.mu
	return t
}

// advance notes that the first n pieces are done. A waiter announces itself before it
// reads done, and done is set before the waiters are counted, so a waiter either sees the
// new count or is woken.
func (t *timeline) advance(n uint64) {
	t.done.Store(n)
	if t.waiters.Load() > 0 {
		t.mu.Lock()
		t.cond.Broadcast()
		t.mu.Unlock()
	}
}

func (t *timeline) wait(n uint64) {
	if t.done.Load() >= n {
		return
	}
	t.waiters.Add(1)
	t.mu.Lock()
	for t.done.Load() < n {
		t.cond.Wait()
	}
	t.mu.Unlock()
	t.waiters.Add(-1)
}

// ticket is a point in a timeline: its first n pieces. The zero ticket is always done. An
// event holds the ticket of its last recording, and a wait copies it, so later recordings
// do not change earlier waits.
type ticket struct {
	t *timeline
	n uint64
}

func (k ticket) done() bool { return k.t == nil || k.t.done.Load() >= k.n }

func (k ticket) wait() {
	if k.t != nil {
		k.t.wait(k.n)
	}
}
