// This file owns the tests of flights: borrowed bytes that are counted until compute
// comes after their copy to the host.

package residency

import (
	"errors"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// hosts is what the host does between two calls: it sees that some of the oldest flights
// are over, or makes compute wait for all of them.
type hosts struct {
	sees  int
	drain bool
}

// flights counts what a program did with them.
type flights struct {
	seen, drained, reclaimed, ahead, followed int
}

// hosts does the host's part.
func (r *rig) hosts(h hosts) {
	for n, end := r.m.Flight(); n > 0 && (h.drain || h.sees > 0); n, end = r.m.Flight() {
		if h.sees--; h.drain {
			r.flights.drained++
		} else {
			r.x.seen(end)
			r.flights.seen++
		}
		if r.m.Past(n); h.drain {
			r.x.flush(Compute)
		}
	}
	r.m.Check()
	r.counted()
}

// seen orders compute's next work after a mark without a wait, because the host issues it
// only now, after the mark was passed.
func (x *clocks) seen(m Mark) { x.lanes[Compute] = x.lanes[Compute].join(x.marks[m-1]) }

// counted compares the account with the caller's memory: memory that is provided and not
// returned is counted, wherever it is needed or read.
func (r *rig) counted() {
	if !r.m.cfg.Borrowed || r.stopped {
		return
	}
	var bytes memory.Bytes
	for _, q := range r.x.borrowed {
		for _, cells := range q {
			bytes += memory.Bytes(len(cells))
		}
	}
	if h := r.m.Device(); h.Live() != bytes || h.Top() != h.Peak() {
		r.x.fail("%d bytes are counted, in an extent of %d for %d, and %d are provided and were not left", h.Live(), h.Top(), h.Peak(), bytes)
	}
}

// placing makes a call in which a storage leaves only for lack of room: no pieces of
// memory are free, and no flight can be waited for.
func (r *rig) placing(op Op, call func() error) error {
	if r.m.cfg.Borrowed {
		r.x.placing = func(s *Storage) {
			if h := r.m.Device(); op.Kind == OpBorrow && h.Live()+op.Bytes <= h.Limit() {
				r.x.fail("%v leaves for %d bytes beside %d of %d", s, op.Bytes, h.Live(), h.Limit())
			}
			for id, q := range r.x.borrowed {
				here := 0
				if r.m.Storage(id).Device != None {
					here = 1
				}
				if len(q) > here {
					r.x.fail("%v leaves, and %d bytes of storage %d need only be waited for", s, len(q[0]), id)
				}
			}
		}
		defer func() { r.x.placing = nil }()
	}
	before, evicted := len(r.m.flights), r.m.Counts().Evicted
	err := call()
	if op.Kind == OpBorrow && r.m.Counts().Evicted == evicted && len(r.m.flights) < before {
		r.flights.followed++
	}
	return err
}

// load loads a group. Storages whose first memory was not returned are still there:
// nothing is provided for them, whatever must be reloaded for others, and they are used
// in place.
func (r *rig) load(name memory.GroupID) error {
	there := map[*Storage][]cell{}
	for _, it := range r.items[name] {
		s := r.m.Storage(it.ID)
		q := r.x.borrowed[s.ID]
		first := r.m.cfg.Borrowed && len(q) == 1 && r.x.provided[s.ID] == 0
		switch {
		case first && s.State == Away:
			there[s] = q[0]
		case first && s.State == Leaving && !s.held():
			r.flights.ahead++
		}
	}
	err := r.m.Load(name)
	for s, cells := range there {
		if q := r.x.borrowed[s.ID]; err == nil && (s.State != Leaving || len(q) != 1 || &q[0][0] != &cells[0]) {
			r.x.fail("%v was there, and is not used where it was", s)
		}
		r.flights.reclaimed++
	}
	return err
}

// borrow runs a layer that saves new storages of the caller, which only the group holds.
func (s stepper) borrow(g memory.GroupID, bytes ...memory.Bytes) {
	s.t.Helper()
	var items []Item
	for _, n := range bytes {
		st, err := s.Borrow(n)
		if err != nil {
			s.t.Fatal(err)
		}
		items = append(items, Item{ID: st.ID})
	}
	s.Save(g, items...)
	for _, it := range items {
		s.Give(it.ID)
	}
	s.Check()
}

// SPEC S6.4: with a limit, memory that is being copied is counted for every window, and
// the machine waits for the oldest copy if there is no room, before anything else leaves.
// Without a limit the window says how many copies may be under way.
func TestFlightsAreCounted(t *testing.T) {
	p := leaving(0, 1, 2)
	p.Device = 45
	m := begin(t, Config{Device: Unlimited, Host: 100, Window: 1, Borrowed: true}, p)
	for i := range 4 { // the last stays
		m.borrow(groupAt(i), 10)
	}
	m.x.said(t, "out 0", "out 1", "out 2")
	if n, _ := m.Flight(); m.Device().Live() != 40 || n != 1 {
		t.Errorf("%d bytes are counted, and flight %d is the oldest", m.Device().Live(), n)
	}
	for i, says := range [][]string{{"compute after copy out 1", "left 0"}, {"compute after copy out 2", "left 1"}, {"compute after copy out 3", "left 2"}} {
		m.borrow(groupAt(4+i), 10)
		if m.x.said(t, says...); m.Device().Live() != 40 || m.Counts().Evicted != 0 {
			t.Errorf("%d bytes are counted, %+v", m.Device().Live(), m.Counts())
		}
	}
	m.borrow(groupAt(7), 10) // no flight is left
	m.x.said(t, "out 3", "compute after copy out 4", "left 3")
	if n, _ := m.Flight(); m.Counts().Evicted != 1 || m.Device().Top() != 40 || n != 0 {
		t.Errorf("extent %d, flight %d, %+v", m.Device().Top(), n, m.Counts())
	}

	m = begin(t, Config{Device: Unlimited, Host: 100, Window: 1, Borrowed: true}, leaving(0, 1, 2))
	for i := range 3 {
		m.borrow(groupAt(i), 10)
	}
	m.x.said(t, "out 0", "out 1", "compute after copy out 1", "left 0", "out 2", "compute after copy out 2", "left 1")
}

// SPEC S6.4: counted bytes fit if their sum does, regardless of places: two holes of ten
// hold twenty. Bytes that must be on the device exceed the limit, and Full reports what
// there is.
func TestAccountHasNoHoles(t *testing.T) {
	m := begin(t, Config{Device: 45, Host: 100, Borrowed: true}, &Plan{Device: 40})
	for range 4 {
		if _, err := m.Borrow(10); err != nil {
			t.Fatal(err)
		}
	}
	m.Give(0)
	m.Give(2)
	s, err := m.Borrow(20)
	if err != nil || m.Device().Top() != 40 || m.Device().Live() != 40 {
		t.Fatalf("%v, extent %d", err, m.Device().Top())
	}
	for id := range 4 {
		if at := m.Storage(id).Device; id%2 == 1 && at == s.Device {
			t.Errorf("storages %d and %d are both at %d", id, s.ID, at)
		}
	}
	var full *Full
	if _, err := m.Borrow(6); !errors.As(err, &full) || *full != (Full{Compute, 6, 40, 45, 5}) {
		t.Errorf("%v", err)
	}
	if _, err := m.Borrow(5); err != nil || m.Device().Top() != 45 {
		t.Errorf("%v, extent %d", err, m.Device().Top())
	}
	m.Check()
	m.device.live = 46
	defer func() {
		if x, _ := recover().(string); !strings.Contains(x, "46 bytes are counted, 45 at most, of 45") {
			t.Error(x)
		}
	}()
	m.Check()
}

// SPEC S6.4: a storage that is still on the device is reclaimed in place, for each of its
// groups, until compute has come after its copy. It is returned once. A storage that was
// reloaded is provided anew.
func TestReclaim(t *testing.T) {
	p := leaving(0, 1, 2)
	p.Device = 100
	m := begin(t, Config{Device: Unlimited, Host: 100, Borrowed: true}, p)
	m.borrow(groupAt(0), 10)
	s := m.Storage(0)
	m.Save(groupAt(1), Item{ID: 0})
	m.Save(groupAt(2), Item{ID: 0})
	m.x.said(t, "out 0")
	for _, g := range []int{2, 1} {
		if err := m.Load(groupAt(g)); err != nil || s.State != Leaving || s.Device != 0 || s.Host == None {
			t.Fatalf("%v at %d: %v", s, s.Device, err)
		}
		if m.Release(groupAt(g)); s.State != Away || m.Device().Live() != 10 {
			t.Errorf("%v, %d bytes are counted", s, m.Device().Live())
		}
		m.Check()
	}
	m.x.said(t)
	m.Past(1)
	if m.x.said(t, "compute after copy out 1", "left 0"); m.Device().Live() != 0 {
		t.Errorf("%d bytes are counted", m.Device().Live())
	}
	m.Save(groupAt(3), Item{ID: 0})
	m.backward(groupAt(0))
	m.x.said(t, "provide 0", "copy in after copy out 1", "in 0", "compute after copy in 1")
	if c := m.Counts(); c.Out != 1 || c.In != 1 || c.Late != 1 {
		t.Errorf("%+v", c)
	}
	for m.evict() { // to leave anew
	}
	m.x.said(t, "copy out after copy in 1", "out 0")
	if m.backward(groupAt(3)); s.State != Dead {
		t.Errorf("%v", s)
	}
	m.x.said(t, "provide 0", "copy in after copy out 2", "in 0", "compute after copy in 2", "left 0", "left 0")
	m.End()
	m.x.said(t)
}

// A storage is gone if a load has to copy it in: not while it is resident, and not while
// its copy out can still be taken back.
func TestGone(t *testing.T) {
	p := leaving(0)
	p.Device = 100
	m := begin(t, Config{Device: Unlimited, Host: 100, Borrowed: true}, p)
	m.borrow(groupAt(1), 10)
	m.borrow(groupAt(0), 10, 10)
	gone := func(want ...bool) {
		t.Helper()
		for id, w := range want {
			if s := m.Storage(id); m.Gone(s) != w {
				t.Errorf("%v is gone: %v", s, !w)
			}
		}
	}
	gone(false, false, false)
	m.Past(1)
	gone(false, true, false)
	n, _ := m.Flight()
	m.Past(n)
	gone(false, true, true)
	if err := m.Load(groupAt(0)); err != nil {
		t.Fatal(err)
	}
	gone(false, false, false)
}

// A load reclaims what it can before it makes room for the rest.
func TestReclaimComesFirst(t *testing.T) {
	p := leaving(0)
	p.Device = 20
	m := begin(t, Config{Device: Unlimited, Host: 100, Borrowed: true}, p)
	m.borrow(groupAt(0), 10, 10)
	m.Past(1)
	if _, err := m.Borrow(10); err != nil { // which the caller holds
		t.Fatal(err)
	}
	m.x.said(t, "out 0", "out 1", "compute after copy out 1", "left 0")
	if err := m.Load(groupAt(0)); err != nil {
		t.Fatal(err)
	}
	m.x.said(t, "provide 0", "copy in after copy out 1", "in 0", "compute after copy in 1")
	m.Check()
}

// A storage that is given up late is not younger for that, because the age of its copy
// counts.
func TestOldestFlightComesFirst(t *testing.T) {
	p := leaving(0, 1)
	p.Device = 25
	m := begin(t, Config{Device: Unlimited, Host: 100, Borrowed: true}, p)
	if _, err := m.Borrow(10); err != nil {
		t.Fatal(err)
	}
	m.Save(groupAt(0), Item{ID: 0})
	m.borrow(groupAt(1), 10)
	m.Give(0)
	m.x.said(t, "out 0", "out 1")
	if n, end := m.Flight(); n != 1 || m.x.marks[end-1] != (place{Out, 1}) {
		t.Errorf("flight %d to %v", n, m.x.marks[end-1])
	}
	m.borrow(groupAt(2), 10)
	m.x.said(t, "compute after copy out 1", "left 0")
	m.flights = nil
	defer func() {
		if x, _ := recover().(string); !strings.Contains(x, "10 device bytes and 0 host bytes belong to no storage") {
			t.Error(x)
		}
	}()
	m.Check()
}
