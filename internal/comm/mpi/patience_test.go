// This file owns the tests of how long calls wait, and for whom. They need no MPI.

package mpi

import (
	"errors"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/letter"
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

// A call waits in vain for a rank that has closed if that one did not make its part of it. Splits, messages there and back,
// and collectives are counted each for itself.
func TestNeedsOfACall(t *testing.T) {
	n := &news{Serial: 2, Sent: 3, Got: 5, Met: 7}
	of := func(k letter.Kind, serial uint64, seqs ...sequence) *op {
		return &op{call: &call{Call: letter.Call{Signature: letter.Signature{Kind: k}}, serial: serial}, seqs: seqs}
	}
	for _, c := range []struct {
		what string
		o    *op
		want bool
	}{
		{"a collective that it made", of(letter.Barrier, 2), false},
		{"one that it did not make", of(letter.Barrier, 3), true},
		{"a split that it made", of(letter.Split, 9, sequence{peer: 1, n: 7}), false},
		{"one that it did not make", of(letter.Split, 0, sequence{peer: 1, n: 8}), true},
		{"a split with others", of(letter.Split, 9, sequence{peer: 2, n: 8}), false},
		{"a split with it and others", of(letter.Split, 0, sequence{peer: 2, n: 1}, sequence{peer: 1, n: 8}), true},
		{"a message that it received", of(letter.Send, 9, sequence{peer: 1, send: true, n: 5}), false},
		{"one that it did not receive", of(letter.Send, 0, sequence{peer: 1, send: true, n: 6}), true},
		{"a message that it sent", of(letter.Recv, 9, sequence{peer: 1, n: 3}), false},
		{"one that it did not send", of(letter.Recv, 0, sequence{peer: 1, n: 4}), true},
		{"a message of another", of(letter.Recv, 9, sequence{peer: 2, n: 4}), false},
	} {
		if got := c.o.needs(1, n); got != c.want {
			t.Errorf("%s: needs it %v, want %v", c.what, got, c.want)
		}
	}
}
