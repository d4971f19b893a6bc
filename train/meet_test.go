// This file tests that ranks agree on one outcome, and on one error.

package train

import (
	"errors"
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/internal/stash"
)

// The first error is the one that all ranks get, those that wait and those that come later.
func TestFirstErrorOfAMeeting(t *testing.T) {
	m := newMeeting(3)
	first, second := errors.New("first"), errors.New("second")
	var wait sync.WaitGroup
	errs := make([]error, 2)
	for i := range errs {
		wait.Go(func() { _, errs[i] = m.reduce(stash.Outcome{}) })
	}
	m.abort(first)
	m.abort(second)
	wait.Wait()
	_, late := m.reduce(stash.Outcome{Final: true})
	for _, err := range append(errs, late) {
		if !errors.Is(err, first) || errors.Is(err, second) {
			t.Errorf("a rank got %v", err)
		}
	}
}
