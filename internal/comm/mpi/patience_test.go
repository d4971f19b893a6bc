// This file owns the tests of how long calls wait, which need no MPI.

package mpi

import (
	"errors"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/internal/comm"
)

// A call that waits too long for a rank fails, unless this process stood still meanwhile:
// the others may have stood still as well.
func TestPatienceOfAProcess(t *testing.T) {
	for _, c := range []struct {
		waited, looked time.Duration // ago
		come, fails    bool
	}{
		{waited: 30 * time.Minute, looked: time.Minute},
		{waited: 90 * time.Minute, looked: time.Minute, fails: true},
		{waited: 90 * time.Minute, looked: time.Minute, come: true},
		{waited: 90 * time.Minute, looked: 40 * time.Minute},
		{waited: 110 * time.Minute, looked: 40 * time.Minute, fails: true},
		{waited: 90 * time.Minute, looked: 20 * time.Minute, fails: true},
	} {
		w := &world{o: Options{Patience: time.Hour}, size: 1, hosts: []string{"a", "b"}, active: map[*op]struct{}{}, looked: time.Now().Add(-c.looked)}
		o := &op{g: &group{w: w, ranks: []int{0, 1}}, call: &call{}, heads: []*head{{peer: 1, come: c.come}}, since: time.Now().Add(-c.waited)}
		w.active[o] = struct{}{}
		w.losePatience()
		f := w.failed.Load()
		var a *comm.Absent
		if (f != nil) != c.fails || f != nil && (!errors.As(f.Err, &a) || len(a.Ranks) != 1 || a.Ranks[0] != 1) {
			t.Errorf("%+v: the failure is %v", c, f)
		}
		if time.Since(w.looked) > time.Minute {
			t.Errorf("%+v: the next look begins %v ago", c, time.Since(w.looked))
		}
	}
}

// Every replay of a captured call waits as long as its first did.
func TestPatienceBeginsAnew(t *testing.T) {
	w := &world{active: map[*op]struct{}{}}
	o := &op{g: &group{w: w}, call: &call{}, done: make(chan struct{}, 1)}
	for range 2 {
		o.since = time.Now().Add(-time.Hour)
		o.begin()
		if waited := time.Since(o.since); waited > time.Minute {
			t.Errorf("a call that begins has waited %v", waited)
		}
		<-o.done
	}
}
