// This file owns the errors of a communicator.

package comm

import (
	"fmt"
	"strings"
	"time"
)

// Failure reports why a communicator makes no more calls. Ranks are numbered as in the
// first communicator, not as in one made by Split.
type Failure struct {
	Rank int    // the rank that reports the failure
	Call string // its first call that was not made, or empty
	By   int    // the rank that gave up
	Err  error  // why it gave up
}

func (f *Failure) Error() string {
	if f.Call == "" {
		return fmt.Sprintf("comm: %v", f.Err)
	}
	return fmt.Sprintf("comm: %s of rank %d was not made: %v", f.Call, f.Rank, f.Err)
}

func (f *Failure) Unwrap() error { return f.Err }

// Absent reports the ranks that a rank waited for longer than Options.Patience.
type Absent struct {
	Rank   int
	Call   string
	Ranks  []int // the ranks that did not make the call
	Waited time.Duration
}

func (a *Absent) Error() string {
	which := fmt.Sprintf("rank %d", a.Ranks[0])
	if more := a.Ranks[1:]; len(more) > 0 {
		which = "ranks " + strings.ReplaceAll(strings.Trim(fmt.Sprint(a.Ranks), "[]"), " ", ", ")
	}
	return fmt.Sprintf("rank %d waited %v in %s for %s; find out what delays them, or raise Patience", a.Rank, a.Waited, a.Call, which)
}
