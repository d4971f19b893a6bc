package fsdp

import (
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/memory"
)

// A step that departs from the recorded order of its key gets an error that names the
// place, and the order stays.
func TestDepartures(t *testing.T) {
	l := openLone(t, Config{Rank: 3, Units: units(3), Pool: bucket.Max, Prefetch: 1, Behind: 1})
	key := memory.Key{Microbatches: 2, Shape: "4x5"}
	if err := l.uses(key, 0, 1, 2); err != nil {
		t.Fatal(err)
	}
	const recorded = `of the order recorded for this key (train, 2 microbatches, shape 4x5), got `
	const remedy = `; run steps of another order under another key`
	for i, c := range []struct {
		order []int
		says  string
	}{
		{[]int{1}, `fsdp: rank 3: gathered parameters: expected the use of FSDP unit "unit 0" at entry 0 ` + recorded + `the use of FSDP unit "unit 1"` + remedy},
		{[]int{0, 1}, `fsdp: rank 3: gathered parameters: expected the use of FSDP unit "unit 2" at entry 4 ` + recorded + `the end of the step` + remedy},
		{[]int{0, 1, 2, 0}, `fsdp: rank 3: gathered parameters: expected the end of the step at entry 6 ` + recorded + `the use of FSDP unit "unit 0"` + remedy},
	} {
		err := l.uses(key, c.order...)
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v, want %s", err, c.says)
		}
		if err := l.uses(key, 0, 1, 2); err != nil {
			t.Fatal("the order was lost:", err)
		}
		if err := l.uses(memory.Key{Microbatches: i}, c.order...); err != nil {
			t.Error("another key:", err)
		}
	}
	// A use that is never done, and one that is done too late.
	s := l.p.Begin(key, l.s)
	a, _ := s.Use(0, l.s)
	if _, err := s.Use(1, l.s); err == nil || !strings.Contains(err.Error(), `expected the release of FSDP unit "unit 0"`) {
		t.Error(err)
	}
	if _, err := s.Grad(1, l.s); err == nil {
		t.Error("a step that cannot go on goes on")
	}
	if err := s.End(); err == nil {
		t.Error("no error at the end")
	}
	mustPanic(t, "fsdp: a step is used after its end; begin another step", a.Done)
	s = l.p.Begin(memory.Key{Shape: "new"}, l.s)
	if _, err := s.Use(0, l.s); err != nil {
		t.Fatal(err)
	}
	if err := s.End(); err == nil || !strings.Contains(err.Error(), `FSDP unit "unit 0" is still in use (gathered parameters) at the end of the step; call Done first`) {
		t.Error(err)
	}
	if _, _, known := l.p.plans(memory.Key{Shape: "new"}); known {
		t.Error("a step that failed left an order")
	}
	if err := l.uses(key, 0, 1, 2); err != nil {
		t.Fatal(err)
	}
}

// SPEC S2.3: a programmer's error panics with one sentence.
func TestStepMisuse(t *testing.T) {
	l := openLone(t, Config{Units: units(2), Pool: bucket.Arena, Prefetch: 1})
	s := l.p.Begin(memory.Key{}, l.s)
	u, err := s.Use(1, l.s)
	if err != nil {
		t.Fatal(err)
	}
	g, err := s.Grad(1, l.s)
	if err != nil {
		t.Fatal(err)
	}
	mustPanic(t, "fsdp: Begin is called inside a step; call it after End", func() { l.p.Begin(memory.Key{}, l.s) })
	mustPanic(t, "fsdp: Load is called inside a step; call it after End", func() { _ = l.p.Load(0, 0, nil) })
	mustPanic(t, "fsdp: Read is called inside a step; call it after End", func() { _, _ = l.p.Read(0, 0, Weights) })
	mustPanic(t, `fsdp: FSDP unit "unit 1" is used again before its use is done; call Done first`, func() { _, _ = s.Use(1, l.s) })
	mustPanic(t, "fsdp: FSDP unit 2 is used, but there are only 2", func() { _, _ = s.Use(2, l.s) })
	g.Done()
	mustPanic(t, `fsdp: use 0 of pool "rank 0 gradients" was released; its bytes may belong to another use; use them before Done`, g.Done)
	u.Done()
	mustPanic(t, `fsdp: use 0 of pool "rank 0 gathered parameters" was released; its bytes may belong to another use; use them before Done`, u.Done)
	mustPanic(t, `fsdp: use 0 of pool "rank 0 gathered parameters" was released; its bytes may belong to another use; use them before Done`, func() { u.Param(0) })
	if err := s.End(); err != nil {
		t.Fatal(err)
	}
	over := s
	mustPanic(t, "fsdp: a step is used after its end; begin another step", func() { _, _ = over.Use(0, l.s) })
	s = l.p.Begin(memory.Key{Phase: memory.Evaluate}, l.s)
	mustPanic(t, "fsdp: a step is used after its end; begin another step", func() { _, _ = over.Use(0, l.s) })
	mustPanic(t, "fsdp: Grad is called in a step that does not train; give Begin a key with the phase Train", func() { _, _ = s.Grad(0, l.s) })
	if err := s.End(); err != nil {
		t.Fatal(err)
	}
}
