// This file owns what is said when a rank fails its peers.

package comm

import (
	"fmt"
	"strings"
	"time"
)

// Failure says why a communicator makes no more calls. Ranks are numbered as in
// the first communicator, not as in one made by Split.
type Failure struct {
	Rank int    // who asks
	Call string // its first call that was not made, or nothing
	By   int    // the rank that gave up
	Err  error  // and why
}

func (f *Failure) Error() string {
	if f.Call == "" {
		return fmt.Sprintf("comm: %v", f.Err)
	}
	return fmt.Sprintf("comm: %s of rank %d was not made: %v", f.Call, f.Rank, f.Err)
}

func (f *Failure) Unwrap() error { return f.Err }

// Absent says for whom a rank waited longer than its patience.
type Absent struct {
	Rank   int
	Call   string
	Ranks  []int // that did not come
	Waited time.Duration
}

func (a *Absent) Error() string {
	which := fmt.Sprintf("rank %d", a.Ranks[0])
	if more := a.Ranks[1:]; len(more) > 0 {
		which = "ranks " + strings.ReplaceAll(strings.Trim(fmt.Sprint(a.Ranks), "[]"), " ", ", ")
	}
	return fmt.Sprintf("rank %d waited %v in %s for %s; see what holds them up, or raise Patience", a.Rank, a.Waited, a.Call, which)
}
