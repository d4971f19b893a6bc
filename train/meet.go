// This file owns the agreement of ranks on the outcome of a step.

package train

import (
	"sync"

	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/stash"
)

// meeting combines the outcomes of all ranks. All ranks call reduce the same number of
// times. A rank that cannot calls abort, which ends the meeting for all.
type meeting struct {
	mu     sync.Mutex
	all    *sync.Cond
	ranks  int
	came   int
	round  int
	worst  stash.Outcome
	result stash.Outcome
	err    error
}

func newMeeting(ranks int) *meeting {
	m := &meeting{ranks: ranks}
	m.all = sync.NewCond(&m.mu)
	return m
}

// reduce waits for all ranks and returns the worst outcome to each. A final outcome does
// not wait: other ranks may be waiting for this rank elsewhere, and return only after it
// has failed.
func (m *meeting) reduce(v stash.Outcome) (stash.Outcome, error) {
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
		m.result, m.worst, m.came = m.worst, stash.Outcome{}, 0
		m.round++
		m.all.Broadcast()
		return m.result, nil
	}
	for round := m.round; m.round == round && m.err == nil; {
		m.all.Wait()
	}
	return m.result, m.err
}

// abort makes all ranks return err from reduce.
func (m *meeting) abort(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.end(err)
}

// end ends the meeting. The caller holds mu. Waiting ranks get a comm.Failure, because
// another rank failed.
func (m *meeting) end(err error) {
	if m.err == nil {
		m.err = &comm.Failure{Err: err}
	}
	m.all.Broadcast()
}
