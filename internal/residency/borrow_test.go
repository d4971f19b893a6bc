// This file owns the tests of Config.Borrowed: storages in the caller's memory, which the
// machine only counts.

package residency

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"pgregory.net/rapid"
)

// writeBorrowed returns a program whose storages are all borrowed. Mostly the plan limits
// them and the machine does not, as in the runtime. In half of the programs the host
// sometimes looks which flights are over, and in some it drains them.
func writeBorrowed(d draw, steps int) program {
	p := compose(&author{d: d, items: map[int][]Item{}, borrowed: true}, steps)
	p.cfg.Borrowed = true
	if d(2) == 0 {
		p.host = make([]hosts, len(p.tape.Ops))
		drains := d(3) == 0
		for i := range p.host {
			p.host[i] = hosts{sees: max(0, d(5)-2), drain: drains && d(4) == 0}
		}
	}
	if d(4) > 0 {
		limit := p.cfg.Device
		p.cfg.Device = Unlimited
		if p.plan == nil {
			p.plan = &Plan{}
		}
		if d(4) > 0 {
			p.plan.Device = limit
		}
	}
	return p
}

// SPEC S6.4: in every step with memory of the caller, no two users of a byte are
// unordered, a copy into provided memory comes after all work that compute was given
// before, a load returns what was saved, and memory is returned once for each time it is
// provided.
func TestLentUnderClocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := writeBorrowed(func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "") }, rapid.IntRange(30, 100).Draw(t, "steps"))
		if r := p.run(-1); r.x.wrong != "" {
			t.Fatal(r.x.wrong)
		}
	})
}

// SPEC S6.4: the same holds for many seeds, which must do everything that borrowing is
// for.
func TestLentManySeeds(t *testing.T) {
	if raceEnabled {
		t.Skip("one goroutine, which the race detector only makes slow")
	}
	var sum Counts
	var stopped, provided, twice, again, early int
	var f flights
	for seed := range uint64(2000) {
		p := writeBorrowed(rand.New(rand.NewPCG(seed, 3)).IntN, 20+int(seed%120))
		r := p.run(-1)
		if r.x.wrong != "" {
			t.Fatalf("seed %d: %s", seed, r.x.wrong)
		}
		if r.stopped {
			stopped++
		}
		for _, n := range r.x.provided {
			provided += n
			twice += n / 2
		}
		c := r.m.Counts()
		sum.Evicted, sum.Late, sum.In, sum.HostFull = sum.Evicted+c.Evicted, sum.Late+c.Late, sum.In+c.In, sum.HostFull+c.HostFull
		again, early = again+r.again, early+r.early
		f.seen, f.drained, f.reclaimed, f.ahead, f.followed = f.seen+r.flights.seen, f.drained+r.flights.drained, f.reclaimed+r.flights.reclaimed, f.ahead+r.flights.ahead, f.followed+r.flights.followed
	}
	t.Logf("%+v, %d provided, %d twice, %d saved again while away, %d left before the end, %d stopped, %+v", sum, provided, twice, again, early, stopped, f)
	if min(sum.Evicted, sum.Late, sum.In-sum.Late, sum.HostFull, provided, twice, again, early, f.seen, f.drained, f.reclaimed, f.ahead, f.followed) < 100 || stopped < 5 {
		t.Error("the programs leave something out")
	}
}

// SPEC S6.2, S6.4: every wait that nothing else implies is needed, also if the host has
// seen that copies are over, or makes compute wait for them.
func TestEveryWaitIsNeededForBorrowed(t *testing.T) {
	if raceEnabled {
		t.Skip("one goroutine, which the race detector only makes slow")
	}
	caught, in := 0, 0
	for seed := range uint64(250) {
		p := writeBorrowed(rand.New(rand.NewPCG(seed, 4)).IntN, 70)
		base := p.run(-1).x
		for _, call := range base.needed {
			said := base.said[call]
			if p.run(call).x.wrong == "" {
				t.Errorf("seed %d: call %d of After was left out, and nobody noticed: %s", seed, call, said)
			}
			if caught++; strings.HasPrefix(said, "copy in") && strings.Contains(said, "after compute") {
				in++
			}
		}
	}
	t.Logf("caught %d, of them %d of copies in for compute", caught, in)
	if caught < 1000 || in < 100 {
		t.Error("too few waits")
	}
}

// provider provides memory until it has none.
type provider struct {
	notes
	none bool
}

var errNone = errors.New("nothing to provide")

func (x *provider) ProvideMemory(s *Storage) {
	if x.none {
		panic(errNone)
	}
	x.notes.ProvideMemory(s)
}

// SPEC S6.4: memory that could not be provided is not returned.
func TestNothingLentIsNotLeft(t *testing.T) {
	x := &provider{}
	m := New(Config{Device: big, Host: 100, Align: 1, Borrowed: true}, x, leaving(0, 1))
	for i := range 2 {
		if _, err := m.Borrow(10); err != nil {
			t.Fatal(err)
		}
		m.Save(groupAt(i), Item{ID: i})
		m.Give(i)
	}
	m.Past(2) // what is on the device need not be provided
	if err := m.Load(groupAt(0)); err != nil {
		t.Fatal(err)
	}
	x.none = true
	func() {
		defer func() {
			if recover() != errNone {
				t.Error("something was provided")
			}
		}()
		_ = m.Load(groupAt(1))
	}()
	m.End()
	count := func(what string) (n int) {
		for _, said := range x.log {
			if said == what {
				n++
			}
		}
		return n
	}
	if count("left 0") != 2 || count("left 1") != 1 {
		t.Errorf("%q", x.log)
	}
}

// SPEC S6.4: borrowed bytes count against the plan's limit. An offloaded storage is saved
// again without a copy, and stays counted until its last group is released.
func TestBorrowBytesAreCounted(t *testing.T) {
	p := &Plan{Device: 25}
	m := begin(t, Config{Device: big, Host: 100, Borrowed: true}, p)
	borrow := func(i int) {
		s, err := m.Borrow(10)
		if err != nil {
			t.Fatal(err)
		}
		m.Save(groupAt(i), Item{ID: s.ID})
		m.Give(s.ID)
		m.Check()
	}
	for i := range 3 {
		borrow(i)
	}
	m.x.said(t, "out 0", "compute after copy out 1", "left 0")
	if m.Device().Live() != 20 || m.Counts().Evicted != 1 {
		t.Fatalf("%d bytes, %+v", m.Device().Live(), m.Counts())
	}
	m.Save(groupAt(3), Item{ID: 0}) // it is away: no copy
	m.x.said(t)
	m.backward(groupAt(3))
	if s := m.Storage(0); s.State != Resident || s.Device == None {
		t.Fatalf("%v: another group needs it", s)
	}
	if !slices.Contains(m.x.log, "in 0") {
		t.Errorf("%q", m.x.log)
	}
	m.x.log = nil
	m.backward(groupAt(0))
	if m.x.said(t, "left 0"); m.Storage(0).State != Dead {
		t.Errorf("%v", m.Storage(0))
	}
	m.backward(groupAt(1))
	m.backward(groupAt(2))
	if m.Device().Live()+m.Host().Live() != 0 {
		t.Error("something is left")
	}
	defer func() {
		if recover() == nil {
			t.Error("a dead storage was saved")
		}
	}()
	m.Save(groupAt(4), Item{ID: 0})
}

// SPEC S6.4: bytes that must be on the device exceed the plan's limit by their own size,
// with what they are rounded up by, and the new limit holds for what comes next.
func TestLimitHoldsBehindWhatMustBe(t *testing.T) {
	for _, align := range []memory.Bytes{1, 10, 16, 512} {
		each := (10 + align - 1) / align * align // bytes that a storage of 10 takes
		m := begin(t, Config{Device: big, Host: 100 * each, Align: align, Borrowed: true}, &Plan{Device: 2 * each})
		for range 3 { // the caller holds them
			if _, err := m.Borrow(10); err != nil {
				t.Fatalf("aligned to %d: %v", align, err)
			}
		}
		for i := range 10 {
			s, err := m.Borrow(10)
			if err != nil {
				t.Fatalf("aligned to %d: %v", align, err)
			}
			m.Save(groupAt(i), Item{ID: s.ID})
			m.Give(s.ID)
			m.Check()
		}
		if top := m.Device().Top(); top != 4*each || m.Counts().Evicted != 9 {
			t.Errorf("aligned to %d: extent %d, expected %d, %+v", align, top, 4*each, m.Counts())
		}
	}
}
