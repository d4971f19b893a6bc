// This file owns the tests of how processes agree.

package comm

import (
	"errors"
	"fmt"
	"testing"
)

// Processes have the value of the first one, or the first error in the words of the
// process that has it.
func TestProcessesShare(t *testing.T) {
	x := ofTest(t, 3, 1, Options{})
	err := Run(x.comms, func(c Comm) error {
		p := &Process{Ranks: []int{c.Rank()}, Control: c}
		v := map[string]int{"rank": c.Rank()}
		if err := p.Share(&v, nil); err != nil || v["rank"] != 0 || len(v) != 1 {
			t.Errorf("rank %d has %v, %v", c.Rank(), v, err)
		}
		if p.Speaks() != (c.Rank() == 0) {
			t.Errorf("rank %d speaks: %v", c.Rank(), p.Speaks())
		}
		p.Describe = func(err error) (string, int) { return "the words for " + err.Error(), 2 }
		var own error
		if c.Rank() > 0 {
			own = fmt.Errorf("rank %d: %w", c.Rank(), errBroken)
		}
		err := p.Share(&v, own)
		var told *Told
		switch {
		case c.Rank() == 1 && err != own:
			t.Errorf("rank 1 has %v", err)
		case c.Rank() != 1 && (!errors.As(err, &told) || *told != Told{1, "the words for rank 1: the disk is full", 2}):
			t.Errorf("rank %d has %v", c.Rank(), err)
		}
		if n, err := p.Most(-c.Rank()); n != 0 || err != nil {
			t.Error(n, err)
		}
		if c.Rank() == 2 {
			return errBroken
		}
		if _, err := p.Most(1); !errors.Is(err, errBroken) {
			t.Errorf("rank %d: %v", c.Rank(), err)
		}
		if err := p.Share(nil, nil); !errors.Is(err, errBroken) {
			t.Errorf("rank %d: %v", c.Rank(), err)
		}
		return nil
	})
	wantError(t, err, "rank 2: the disk is full")
	var alone *Process
	if n, err := alone.Most(3); n != 3 || err != nil || !alone.Speaks() || alone.Share(nil, errBroken) != errBroken {
		t.Error("a program without processes does not agree with itself")
	}
}
