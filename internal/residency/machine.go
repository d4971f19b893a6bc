// This file owns the machine: the calls of a step, and what follows from each.

package residency

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// Machine follows one step. The caller takes, saves, loads and releases storages and
// groups in the order in which it issues the work of compute. At every point
//
//	bytes live in a heap = bytes of the storages that have a place in it, and of flights
//
// and every user of bytes is ordered after all earlier users that it could disturb:
//
//   - A copy out reads device bytes after compute (written) or a copy in (returned) has
//     written them. It writes host bytes after the copies in that read what lay there
//     before (the host heap's marks; older copies out are in the same lane).
//   - A copy in reads host bytes after their copy out (left). It writes device bytes after
//     the compute work and the copies out that used what lay there before (the device
//     heap's marks: used and left; both come after returned).
//   - Compute uses new bytes after the same marks, and reloaded bytes after their copy in.
type Machine struct {
	// Watch, if it is not nil, is called whenever a storage gets a place on the host or on
	// the device, and before it gives the place back. A borrowed storage has the caller's
	// place on the device.
	Watch func(s *Storage, host, taken bool)

	cfg      Config
	exec     Executor
	device   *Heap
	host     *Heap
	storages []*Storage
	slab     []Storage // for the next ones
	groups   []group   // likewise
	entries  []entry
	saved    map[memory.GroupID]*group // and not released
	order    []*group                  // in the order of their saves; some of them are released
	saves    int
	plan     *Plan
	next     int // position in the plan's schedule
	scope    bool
	leaving  []*group         // groups that are offloaded at the end of the scope
	due      []memory.GroupID // groups that are prefetched at the end of the scope
	lefts    []Mark           // the ends of all copies out
	returned Mark             // the end of the last copy in
	flights  []flight         // borrowed bytes that only their copies out use, in the order of these
	counts   Counts
}

// flight is a copy out of borrowed bytes. They are counted at a place in the heap until
// the copy is over.
type flight struct {
	s     *Storage
	out   int
	place memory.Bytes
	told  bool // Watch knows that the place is given back: the storage was reloaded elsewhere
}

// New returns a machine for one step. Without a plan it evicts only what finds no room.
func New(cfg Config, exec Executor, plan *Plan) *Machine {
	limit := cfg.Device
	if plan != nil && plan.Device > 0 {
		limit = min(limit, plan.Device)
	}
	if plan != nil && plan.Window > 0 {
		cfg.Window = plan.Window
	}
	if cfg.Window == 0 {
		cfg.Window = DefaultWindow
	}
	groups := 0
	if plan != nil && plan.Schedule != nil {
		groups = plan.Schedule.Len() / 2
	}
	m := &Machine{
		cfg: cfg, exec: exec, plan: plan, saved: make(map[memory.GroupID]*group, groups), order: make([]*group, 0, groups),
		device: NewHeap(limit, cfg.Align, cfg.Window), host: NewHeap(cfg.Host, cfg.Align, cfg.Window),
	}
	m.device.account = cfg.Borrowed
	return m
}

// Device returns the heap of device bytes.
func (m *Machine) Device() *Heap { return m.device }

// Host returns the heap of host bytes.
func (m *Machine) Host() *Heap { return m.host }

// Counts returns the counts of the step so far.
func (m *Machine) Counts() Counts { return m.counts }

// Storage returns the storage with a number.
func (m *Machine) Storage(id int) *Storage { return m.storages[id] }

// Take makes a storage for compute to write. It returns a *Full if there is no room.
func (m *Machine) Take(bytes memory.Bytes) (*Storage, error) {
	off, err := m.place(Compute, bytes, 0)
	if err != nil {
		return nil, err
	}
	m.returnBorrowed()
	s := m.add(Storage{Bytes: bytes, Device: off, Host: None, owned: true})
	m.notify(s, false, true)
	return s, nil
}

// Borrow makes a storage of bytes that the caller owns. It returns a *Full only if
// Config.Borrowed is set and there is no room in the account.
func (m *Machine) Borrow(bytes memory.Bytes) (*Storage, error) {
	off := memory.Bytes(None)
	if m.cfg.Borrowed {
		var err error
		if off, err = m.place(Compute, bytes, 0); err != nil {
			return nil, err
		}
		m.returnBorrowed()
	}
	s := m.add(Storage{Bytes: bytes, Borrowed: true, Device: off, Host: None, owned: true, onLoan: true})
	m.notify(s, false, true)
	return s, nil
}

// notify calls Watch.
func (m *Machine) notify(s *Storage, host, taken bool) {
	if m.Watch != nil {
		m.Watch(s, host, taken)
	}
}

func (m *Machine) add(like Storage) *Storage {
	if len(m.slab) == 0 {
		m.slab = make([]Storage, 128)
	}
	s := &m.slab[0]
	m.slab = m.slab[1:]
	*s = like
	s.ID = len(m.storages)
	m.storages = append(m.storages, s)
	return s
}

// Give says that the caller itself no longer needs a storage.
func (m *Machine) Give(id int) {
	s := m.storages[id]
	if !s.owned {
		panic(fmt.Sprintf("residency: %v is given back twice", s))
	}
	s.owned = false
	s.used = m.exec.Record(Compute)
	m.settle(s)
}

// Save says that a group's forward pass has been issued and that its storages are needed
// again. The caller must hold the storages, or have loaded them. With Config.Borrowed it
// may have given them back and still use their memory; a storage whose copy out was
// issued is not copied twice.
func (m *Machine) Save(name memory.GroupID, items ...Item) {
	if m.saved[name] != nil {
		panic("residency: " + name.String() + " is saved twice in one step")
	}
	now := m.exec.Record(Compute)
	g := m.group(len(items))
	if m.plan != nil && m.plan.Schedule != nil {
		if at, ok := m.plan.Schedule.Loaded(name); ok {
			g.need = at
		}
	}
	for i, it := range items {
		s := m.storages[it.ID]
		if !s.owned && s.loaded == 0 && (!m.cfg.Borrowed || s.State == Dead) {
			panic(fmt.Sprintf("residency: %v saves %v, which was given back", name, s))
		}
		if len(s.in) > 0 {
			m.counts.Duplicates++
		}
		s.fixed = s.fixed || it.Stay
		if s.used = now; s.written == 0 {
			s.written = now
		}
		if s.in == nil {
			s.in = s.one[:0]
		}
		s.in = append(s.in, g)
		if g.entries[i] = (entry{s, s.State != Away}); s.State != Away {
			s.keeps++
		}
	}
	m.saved[name] = g
	m.order = append(m.order, g)
	m.saves++
	switch g.leaves = m.plan != nil && m.plan.Offload[name]; {
	case g.leaves && m.scope:
		m.leaving = append(m.leaving, g)
	case g.leaves:
		m.leave(g)
	}
	m.passed(schedule.Event{Group: name})
}

// leave offloads a group's storages, except those that must stay and those that the host
// has no room for.
func (m *Machine) leave(g *group) {
	if g.loaded || g.released {
		return // it was loaded in the scope that ends now
	}
	for i := range g.entries {
		e := &g.entries[i]
		if e.s.fixed || e.s.Bytes < m.cfg.Least || !e.keeps || m.stays(e.s, g) {
			continue
		}
		if e.s.State != Leaving && !m.depart(e.s) {
			m.counts.HostFull++
			continue
		}
		e.keeps = false
		e.s.keeps--
		m.settle(e.s)
	}
}

// stays reports whether a group that is kept holds a storage until after g is loaded, so
// that a copy on the host would never be read.
func (m *Machine) stays(s *Storage, g *group) bool {
	return slices.ContainsFunc(s.in, func(o *group) bool {
		return !o.leaves && !o.loaded && m.needs(o) > m.needs(g) &&
			slices.ContainsFunc(o.entries, func(e entry) bool { return e.s == s && e.keeps })
	})
}

// depart issues a copy out. It reports false if the host has no room for it.
func (m *Machine) depart(s *Storage) bool {
	off, after, ok := m.host.Take(Out, s.Bytes)
	if !ok {
		return false
	}
	if s.returned != 0 {
		m.exec.After(Out, s.returned)
	} else {
		m.exec.After(Out, s.written)
	}
	for _, k := range after {
		m.exec.After(Out, k)
	}
	s.Host, s.State = off, Leaving
	m.notify(s, true, true)
	m.exec.Out(s)
	s.left, s.out = m.exec.Record(Out), m.device.Out()
	m.lefts = append(m.lefts, s.left)
	m.counts.Out++
	m.counts.OutBytes += s.Bytes
	if m.cfg.Cap > 0 {
		m.follow(s.out - m.cfg.Cap)
	}
	// With a limit compute waits for these copies only if there is no room.
	for len(m.flights) > 0 && s.out-m.flights[0].out >= m.cfg.Window && !m.counted() {
		m.follow(m.flights[0].out)
	}
	return true
}

// Flight returns the number of the oldest copy out of borrowed bytes that compute is not
// ordered after, and the mark of its end. The number is zero if there is none.
func (m *Machine) Flight() (n int, end Mark) {
	if len(m.flights) == 0 {
		return 0, 0
	}
	n = m.flights[0].out
	return n, m.lefts[n-1]
}

// Past orders compute after the first n copies out. A caller that knows that they are
// over need not wait until there is no room.
func (m *Machine) Past(n int) { m.follow(n) }

// counted reports whether borrowed bytes are counted and limited.
func (m *Machine) counted() bool { return m.cfg.Borrowed && m.device.Limit() < Unlimited }

// follow orders compute after the first n copies out.
func (m *Machine) follow(n int) {
	if n > m.device.followed[Compute] {
		m.exec.After(Compute, m.lefts[n-1])
		m.device.follow(Compute, n)
		m.returnBorrowed()
	}
}

// returnBorrowed returns borrowed bytes whose copies out compute is ordered after.
func (m *Machine) returnBorrowed() {
	past := 0
	for ; past < len(m.flights) && m.flights[past].out <= m.device.followed[Compute]; past++ {
		f := &m.flights[past]
		m.exec.ReturnMemory(f.s)
		if f.place != None { // the owner orders the use of its memory: no marks
			f.notifyGiven(m)
			m.device.Give(f.place, f.s.Bytes, 0)
		}
	}
	m.flights = slices.Delete(m.flights, 0, past)
}

// notifyGiven calls Watch for a place that is given back, once.
func (f *flight) notifyGiven(m *Machine) {
	if !f.told {
		was := *f.s
		was.Device, f.told = f.place, true
		m.notify(&was, false, false)
	}
}

// settle gives back device bytes that nobody holds, if the copy out of the storage was
// issued or nobody needs the storage. A storage that was reloaded stays until its last
// group is released.
func (m *Machine) settle(s *Storage) {
	if s.held() || len(s.in) > 0 && s.State != Leaving {
		return
	}
	at := s.Device
	if counted := s.onLoan && at != None; !counted && (s.onLoan || at != None) {
		m.notify(s, false, false)
	}
	s.Device, s.State = None, Away
	switch {
	case s.onLoan:
		s.onLoan = false
		m.flights = slices.Insert(m.flights, m.flightsFrom(s.out+1), flight{s, s.out, at, false}) // after its own
		m.returnBorrowed()
	case at != None:
		m.device.Give(at, s.Bytes, s.out, s.used, s.left)
	}
	if len(s.in) == 0 {
		s.State = Dead
		if s.Host != None { // the next copy to write there is in the same lane
			m.notify(s, true, false)
			m.host.Give(s.Host, s.Bytes, 0)
			s.Host = None
		}
	}
}

// Load says that the work which follows needs a group, and orders compute after the
// reload of its storages. It returns a *Full if a storage finds no room; the group is
// then not loaded, but some of its storages may be reloaded.
func (m *Machine) Load(name memory.GroupID) error {
	g := m.saved[name]
	if g == nil || g.loaded {
		panic("residency: " + name.String() + " is loaded but not saved, or loaded before")
	}
	g.load(1)
	for _, e := range g.entries { // before the others need room
		m.reclaim(e.s)
	}
	for _, e := range g.entries {
		if e.s.State == Away {
			off, err := m.place(In, e.s.Bytes, e.s.out)
			if err != nil {
				g.load(-1)
				return err
			}
			m.bring(e.s, off)
			m.counts.Late++
		}
	}
	for _, e := range g.entries {
		if e.s.State == Returning {
			m.exec.After(Compute, e.s.returned)
			m.device.follow(Compute, e.s.out) // its copy in is ordered after its copy out
			e.s.State = Resident
		}
	}
	m.returnBorrowed()
	m.passed(schedule.Event{Group: name, Load: true})
	return nil
}

// Gone reports whether Load has to copy a storage in.
func (m *Machine) Gone(s *Storage) bool { return s.State == Away && m.flying(s) < 0 }

// flying returns the flight that a storage can be taken back from, or a negative number.
// A storage that was reloaded before may not be complete yet.
func (m *Machine) flying(s *Storage) int {
	if s.State != Away || s.returned != 0 || m.plan != nil && m.plan.Strict {
		return -1
	}
	for i := m.flightsFrom(s.out); i < len(m.flights) && m.flights[i].out == s.out; i++ {
		if f := &m.flights[i]; f.s == s && f.place != None {
			return i
		}
	}
	return -1
}

// flightsFrom returns the first flight whose copy out has at least a number.
func (m *Machine) flightsFrom(out int) int {
	i, _ := slices.BinarySearchFunc(m.flights, out, func(f flight, n int) int { return f.out - n })
	return i
}

// reclaim takes back bytes whose copy out is still under way, in place of a reload. It
// does nothing under a strict plan, which counts on their memory.
func (m *Machine) reclaim(s *Storage) {
	if i := m.flying(s); i >= 0 {
		s.Device, s.State, s.onLoan = m.flights[i].place, Leaving, true
		m.flights = slices.Delete(m.flights, i, i+1)
	}
}

// bring issues a copy in. Work that compute was given before may still use memory that
// the owner provides.
func (m *Machine) bring(s *Storage, off memory.Bytes) {
	if m.cfg.Borrowed && s.Borrowed {
		for i := range m.flights {
			if m.flights[i].s == s {
				m.flights[i].notifyGiven(m)
			}
		}
		m.exec.ProvideMemory(s)
		s.onLoan = true
		m.exec.After(In, m.exec.Record(Compute))
	}
	m.exec.After(In, s.left)
	m.device.follow(In, s.out)
	s.Device, s.State = off, Returning
	m.notify(s, false, true)
	m.exec.In(s)
	s.returned = m.exec.Record(In)
	m.returned = s.returned
	m.notify(s, true, false)
	m.host.Give(s.Host, s.Bytes, m.host.Out(), s.returned)
	s.Host, s.left = None, 0
	m.counts.In++
	m.counts.InBytes += s.Bytes
}

// Release says that all work which needed a group has been issued.
func (m *Machine) Release(name memory.GroupID) {
	g := m.saved[name]
	if g == nil || !g.loaded {
		panic("residency: " + name.String() + " is released but not loaded, or released before")
	}
	delete(m.saved, name)
	now := m.exec.Record(Compute)
	g.load(-1)
	g.released = true
	for _, e := range g.entries {
		i := slices.Index(e.s.in, g)
		e.s.in = slices.Delete(e.s.in, i, i+1)
		if e.keeps {
			e.s.keeps--
		}
		e.s.used = now
	}
	for _, e := range g.entries {
		m.settle(e.s)
	}
}

// BeginScope says that the work which follows becomes a graph, which is issued as a
// whole. What Load reloads in the scope is issued before the graph and takes bytes that
// were free before. Nothing is evicted in a scope.
func (m *Machine) BeginScope() {
	if m.scope {
		panic("residency: a scope begins inside of another scope")
	}
	m.scope = true
	m.device.BeginScope()
}

// EndScope says that the graph was issued. The groups that were saved in the scope are
// offloaded now, each after its own mark in the graph.
func (m *Machine) EndScope() {
	if !m.scope {
		panic("residency: a scope ends that did not begin")
	}
	m.scope = false
	m.device.EndScope()
	for _, g := range m.leaving {
		m.leave(g)
	}
	due := m.due
	m.leaving, m.due = m.leaving[:0], nil
	m.fetch(due)
}

// End ends the step: it orders compute after every copy and returns borrowed bytes that
// groups still hold. The machine must not be used afterwards.
func (m *Machine) End() {
	m.follow(len(m.lefts))
	if m.returned != 0 {
		m.exec.After(Compute, m.returned)
	}
	for _, s := range m.storages {
		if s.onLoan {
			s.onLoan = false
			m.exec.ReturnMemory(s)
		}
	}
}
