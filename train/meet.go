// This file owns the place where the ranks of one process tell each other how a step
// went.

package train

import (
	"sync"

	"github.com/stowage-dev/stowage/stash"
)

// meeting brings the verdicts of all ranks together. All ranks come the same number of
// times; one that cannot breaks it for all.
type meeting struct {
	mu     sync.Mutex
	all    *sync.Cond
	ranks  int
	came   int
	round  int
	worst  stash.Verdict
	result stash.Verdict
	err    error
}

func newMeeting(ranks int) *meeting {
	m := &meeting{ranks: ranks}
	m.all = sync.NewCond(&m.mu)
	return m
}

// reduce waits for all ranks and gives each the worst verdict.
func (m *meeting) reduce(v stash.Verdict) (stash.Verdict, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return v, m.err
	}
	m.worst = m.worst.Worse(v)
	if m.came++; m.came == m.ranks {
		m.result, m.worst, m.came = m.worst, stash.Verdict{}, 0
		m.round++
		m.all.Broadcast()
		return m.result, nil
	}
	for round := m.round; m.round == round && m.err == nil; {
		m.all.Wait()
	}
	return m.result, m.err
}

// abort lets everybody go.
func (m *meeting) abort(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err == nil {
		m.err = err
	}
	m.all.Broadcast()
}
