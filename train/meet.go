// This file owns the place where the ranks of one process tell each other how a step
// went.

package train

import (
	"sync"

	"github.com/stowage-dev/stowage/comm"
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

// reduce waits for all ranks and gives each the worst verdict. A final one waits for
// nobody: other ranks may be waiting for this one elsewhere, and come back only when it
// has given up.
func (m *meeting) reduce(v stash.Verdict) (stash.Verdict, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err == nil && v.Final {
		m.end(&stash.Overflow{Rank: v.Rank, Why: v.Why})
		return v, nil
	}
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
	m.end(err)
}

// end is abort. To all but the rank that failed it is a failure of the others.
func (m *meeting) end(err error) {
	if m.err == nil {
		m.err = &comm.Failure{Err: err}
	}
	m.all.Broadcast()
}
