package fsdp

import (
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/bucket"
)

// A step that departs from the recorded order of its key gets an error that says
// where, and the order stays.
func TestDepartures(t *testing.T) {
	l := open(t, Config{Rank: 3, Units: units(3), Pool: bucket.Max, Prefetch: 1, Behind: 1})
	key := Key{Microbatches: 2, Shape: "4x5"}
	if err := l.uses(key, 0, 1, 2); err != nil {
		t.Fatal(err)
	}
	const named = `rank 3 gathered parameters, where the recorded order of this key (training, 2 microbatches, shape "4x5")`
	for i, c := range []struct {
		order []int
		says  string
	}{
		{[]int{1}, `fsdp: rank 3: the use of unit "unit 1" at event 0 of ` + named + ` has the use of unit "unit 0"; begin a step of another order under another key`},
		{[]int{0, 1}, `fsdp: rank 3: the step ends at event 4 of ` + named + ` has the use of unit "unit 2"; begin a step of another order under another key`},
		{[]int{0, 1, 2, 0}, `fsdp: rank 3: the use of unit "unit 0" at event 6 of ` + named + ` is at its end; begin a step of another order under another key`},
	} {
		err := l.uses(key, c.order...)
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v, want %s", err, c.says)
		}
		if err := l.uses(key, 0, 1, 2); err != nil {
			t.Fatal("the order was lost:", err)
		}
		if err := l.uses(Key{Microbatches: i}, c.order...); err != nil {
			t.Error("another key:", err)
		}
	}
	// A use that is never done, and one that is done too late.
	s := l.p.Begin(key, l.s)
	a, _ := s.Use(0, l.s)
	if _, err := s.Use(1, l.s); err == nil || !strings.Contains(err.Error(), "has the release of unit \"unit 0\"") {
		t.Error(err)
	}
	if _, err := s.Grad(1, l.s); err == nil {
		t.Error("a step that cannot go on goes on")
	}
	if err := s.End(); err == nil {
		t.Error("no error at the end")
	}
	mustPanic(t, "fsdp: a step is used after its end; begin another", a.Done)
	s = l.p.Begin(Key{Shape: "new"}, l.s)
	if _, err := s.Use(0, l.s); err != nil {
		t.Fatal(err)
	}
	if err := s.End(); err == nil || !strings.Contains(err.Error(), `unit "unit 0" is still in use (rank 3 gathered parameters) when the step ends; call Done`) {
		t.Error(err)
	}
	if _, known := l.p.Order(Key{Shape: "new"}); known {
		t.Error("a step that failed left an order")
	}
	if err := l.uses(key, 0, 1, 2); err != nil {
		t.Fatal(err)
	}
}

// SPEC S2.3: what only a programmer can do wrong panics, in one sentence.
func TestStepMisuse(t *testing.T) {
	l := open(t, Config{Units: units(2), Pool: bucket.Arena, Prefetch: 1})
	s := l.p.Begin(Key{}, l.s)
	u, err := s.Use(1, l.s)
	if err != nil {
		t.Fatal(err)
	}
	g, err := s.Grad(1, l.s)
	if err != nil {
		t.Fatal(err)
	}
	mustPanic(t, "fsdp: Begin inside of a step; call it after End", func() { l.p.Begin(Key{}, l.s) })
	mustPanic(t, "fsdp: Load inside of a step; call it after End", func() { _ = l.p.Load(0, 0, nil) })
	mustPanic(t, "fsdp: Read inside of a step; call it after End", func() { _, _ = l.p.Read(0, 0, Weights) })
	mustPanic(t, `fsdp: unit "unit 1" is used again before its use is done`, func() { _, _ = s.Use(1, l.s) })
	mustPanic(t, "fsdp: unit 2 is used, of 2", func() { _, _ = s.Use(2, l.s) })
	g.Done()
	mustPanic(t, `fsdp: use 0 of pool "rank 0 gradients" was put already; its bytes may be another's`, g.Done)
	u.Done()
	mustPanic(t, `fsdp: use 0 of pool "rank 0 gathered parameters" was put already; its bytes may be another's`, u.Done)
	mustPanic(t, `fsdp: use 0 of pool "rank 0 gathered parameters" was put already; its bytes may be another's`, func() { u.Param(0) })
	if err := s.End(); err != nil {
		t.Fatal(err)
	}
	over := s
	mustPanic(t, "fsdp: a step is used after its end; begin another", func() { _, _ = over.Use(0, l.s) })
	s = l.p.Begin(Key{Phase: Evaluate}, l.s)
	mustPanic(t, "fsdp: a step is used after its end; begin another", func() { _, _ = over.Use(0, l.s) })
	mustPanic(t, "fsdp: gradients in a step that is no training; give Begin a key for one", func() { _, _ = s.Grad(0, l.s) })
	if err := s.End(); err != nil {
		t.Fatal(err)
	}
}

// An order that an earlier run recorded is followed from the first step on.
func TestFollow(t *testing.T) {
	l := open(t, Config{Units: units(4), Pool: bucket.Trace, Prefetch: 2})
	if err := l.uses(Key{}, 0, 1, 2, 3); err != nil {
		t.Fatal(err)
	}
	o, known := l.p.Order(Key{})
	if !known || len(o.Params) != 8 || len(o.Grads) != 0 {
		t.Fatal(o, known)
	}
	next := open(t, Config{Units: units(4), Pool: bucket.Trace, Prefetch: 2})
	if err := next.p.Follow(Key{}, o); err != nil {
		t.Fatal(err)
	}
	mine := slices.Clone(o.Params)
	clear(o.Params) // it was the caller's
	o.Params = mine
	s := next.p.Begin(Key{}, next.s)
	u, err := s.Use(0, next.s)
	if err != nil {
		t.Fatal(err)
	}
	if next.comm.gathers != 3 {
		t.Errorf("%d gathers at the first use of the first step, want 3", next.comm.gathers)
	}
	u.Done()
	if err := s.End(); err == nil {
		t.Error("the step ended early")
	}
	if err := next.p.Follow(Key{}, o); err == nil {
		t.Error("an order was replaced")
	}
	if err := next.p.Follow(Key{Shape: "bad"}, Order{Params: []bucket.Event{{Unit: 1, Release: true}}}); err == nil {
		t.Error("an order that begins with a release")
	}
	if err := next.uses(Key{}, 0, 1, 2, 3); err != nil {
		t.Fatal(err)
	}
}
