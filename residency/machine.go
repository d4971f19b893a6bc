// This file owns the machine: the calls that a step makes, and what follows.

package residency

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/schedule"
)

// Machine follows one step. The caller says what it takes, saves, loads and
// releases, in the order in which it issues compute's work. At every point
//
//	bytes live in a heap = bytes of the storages that have a place in it, and of flights
//
// and every user of bytes comes after all earlier ones that it could disturb:
//
//   - a copy out reads device bytes after compute has written them (written) or the
//     copy in has (returned), and writes host bytes after the copies in that read
//     what lay there before (the host heap's marks; older copies out are in its lane);
//   - a copy in reads host bytes after their copy out (left), and writes device
//     bytes after the compute work and the copies out that used what lay there
//     before (the device heap's marks: used and left; both come after returned);
//   - compute uses new bytes after the same marks, and returned ones after their
//     copy in.
type Machine struct {
	// Watch, if there is one, is told of every place that a storage gets in a heap and,
	// before it is forgotten, gives back: on the host, or on the device, where foreign
	// ones have the caller's.
	Watch func(s *Storage, host, taken bool)

	cfg      Config
	exec     Executor
	device   *Heap
	host     *Heap
	storages []*Storage
	slab     []Storage // for the next ones
	groups   []group   // likewise
	entries  []entry
	saved    map[schedule.Group]*group // and not released
	order    []*group                  // in the order of saving; some of them released
	saves    int
	plan     *Plan
	next     int // position in the plan's schedule
	scope    bool
	leaving  []*group         // that leave at the end of the scope
	due      []schedule.Group // that come back at the end of the scope
	lefts    []Mark           // the ends of all copies out
	returned Mark             // the end of the last copy in
	lent     []flight         // foreign bytes that only their copies out use, in the order of these
	counts   Counts
}

// flight is a copy out of foreign bytes, which are counted at a place in the heap until
// it is over.
type flight struct {
	s     *Storage
	out   int
	place int64
	told  bool // who watches knows that it is given back: the storage came back elsewhere
}

// New makes a machine for one step. Without a plan everything stays that there is
// room for.
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
		cfg: cfg, exec: exec, plan: plan, saved: make(map[schedule.Group]*group, groups), order: make([]*group, 0, groups),
		device: NewHeap(limit, cfg.Align, cfg.Window), host: NewHeap(cfg.Host, cfg.Align, cfg.Window),
	}
	m.device.account = cfg.Lend
	return m
}

// Device and Host are the heaps.
func (m *Machine) Device() *Heap { return m.device }
func (m *Machine) Host() *Heap   { return m.host }

// Counts are what the step did so far.
func (m *Machine) Counts() Counts { return m.counts }

// Storage is a storage by its number.
func (m *Machine) Storage(id int) *Storage { return m.storages[id] }

// Take makes a storage for compute to write.
func (m *Machine) Take(bytes int64) (*Storage, error) {
	off, err := m.place(Compute, bytes, 0)
	if err != nil {
		return nil, err
	}
	m.let()
	s := m.add(Storage{Bytes: bytes, Device: off, Host: None, owned: true})
	m.saw(s, false, true)
	return s, nil
}

// Foreign makes a storage of bytes that the caller has already. It fails only where
// they are counted, and are too many.
func (m *Machine) Foreign(bytes int64) (*Storage, error) {
	off := int64(None)
	if m.cfg.Lend {
		var err error
		if off, err = m.place(Compute, bytes, 0); err != nil {
			return nil, err
		}
		m.let()
	}
	s := m.add(Storage{Bytes: bytes, Foreign: true, Device: off, Host: None, owned: true, lent: true})
	m.saw(s, false, true)
	return s, nil
}

// saw tells who watches.
func (m *Machine) saw(s *Storage, host, taken bool) {
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

// Give says that the caller itself needs a storage no more.
func (m *Machine) Give(id int) {
	s := m.storages[id]
	if !s.owned {
		panic(fmt.Sprintf("residency: %v is given back twice", s))
	}
	s.owned = false
	s.used = m.exec.Record(Compute)
	m.settle(s)
}

// Save says that a group's forward pass has been issued, and that its storages are
// needed again. The caller has them: they were not given back, or are loaded. Under
// Config.Lend it may have given back its hold of memory that it still uses: storages that
// have left are not copied twice.
func (m *Machine) Save(name schedule.Group, items ...Item) {
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
		if !s.owned && s.loaded == 0 && (!m.cfg.Lend || s.State == Dead) {
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
	switch g.leaves = m.plan != nil && m.plan.Leave[name]; {
	case g.leaves && m.scope:
		m.leaving = append(m.leaving, g)
	case g.leaves:
		m.leave(g)
	}
	m.passed(schedule.Event{Group: name})
}

// leave lets a group's storages go, except those that must stay and those that the
// host has no room for.
func (m *Machine) leave(g *group) {
	if g.loaded || g.released {
		return // inside the scope whose end this is
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

// stays tells whether a group that does not leave holds a storage until after this
// one is loaded: a copy on the host would never be read.
func (m *Machine) stays(s *Storage, g *group) bool {
	return slices.ContainsFunc(s.in, func(o *group) bool {
		return !o.leaves && !o.loaded && m.needs(o) > m.needs(g) &&
			slices.ContainsFunc(o.entries, func(e entry) bool { return e.s == s && e.keeps })
	})
}

// depart issues a copy out, unless the host has no room for it.
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
	m.saw(s, true, true)
	m.exec.Out(s)
	s.left, s.out = m.exec.Record(Out), m.device.Out()
	m.lefts = append(m.lefts, s.left)
	m.counts.Out++
	m.counts.OutBytes += s.Bytes
	if m.cfg.Cap > 0 {
		m.follow(s.out - m.cfg.Cap)
	}
	// What is counted is followed when there is no room, if there is a limit.
	for len(m.lent) > 0 && s.out-m.lent[0].out >= m.cfg.Window && !m.counted() {
		m.follow(m.lent[0].out)
	}
	return true
}

// Flight is the oldest copy out of foreign bytes that compute does not come after, by its
// number and the mark of its end; zero is none.
func (m *Machine) Flight() (n int, end Mark) {
	if len(m.lent) == 0 {
		return 0, 0
	}
	n = m.lent[0].out
	return n, m.lefts[n-1]
}

// Past makes compute come after the first n copies out: whoever knows that they are over
// need not wait until there is no room.
func (m *Machine) Past(n int) { m.follow(n) }

// counted tells whether foreign bytes are counted, and limited.
func (m *Machine) counted() bool { return m.cfg.Lend && m.device.Limit() < Unlimited }

// follow makes compute come after the first n copies out.
func (m *Machine) follow(n int) {
	if n > m.device.followed[Compute] {
		m.exec.After(Compute, m.lefts[n-1])
		m.device.follow(Compute, n)
		m.let()
	}
}

// let lets go of the foreign bytes whose copies out compute comes after.
func (m *Machine) let() {
	m.lent = slices.DeleteFunc(m.lent, func(f flight) bool {
		past := f.out <= m.device.followed[Compute]
		if past {
			m.exec.Left(f.s)
			if f.place != None { // memory is the owner's to order: no marks
				f.tell(m)
				m.device.Give(f.place, f.s.Bytes, 0)
			}
		}
		return past
	})
}

// tell tells who watches that the place is given back.
func (f *flight) tell(m *Machine) {
	if !f.told {
		was := *f.s
		was.Device, f.told = f.place, true
		m.saw(&was, false, false)
	}
}

// settle gives back device bytes that nobody holds: of a storage whose copy out
// was issued, or that nobody needs. One that came back stays until its last group
// is released.
func (m *Machine) settle(s *Storage) {
	if s.held() || len(s.in) > 0 && s.State != Leaving {
		return
	}
	at := s.Device
	if counted := s.lent && at != None; !counted && (s.lent || at != None) {
		m.saw(s, false, false)
	}
	s.Device, s.State = None, Away
	switch {
	case s.lent:
		s.lent = false
		k, _ := slices.BinarySearchFunc(m.lent, s.out+1, func(f flight, n int) int { return f.out - n }) // behind its own
		m.lent = slices.Insert(m.lent, k, flight{s, s.out, at, false})
		m.let()
	case at != None:
		m.device.Give(at, s.Bytes, s.out, s.used, s.left)
	}
	if len(s.in) == 0 {
		s.State = Dead
		if s.Host != None { // the next to write there is a copy out too
			m.saw(s, true, false)
			m.host.Give(s.Host, s.Bytes, 0)
			s.Host = None
		}
	}
}

// Load says that the work which follows needs a group: compute comes after
// whatever brings its storages back. If there is no room for one, the group is as
// it was before, except that others have come back already.
func (m *Machine) Load(name schedule.Group) error {
	g := m.saved[name]
	if g == nil || g.loaded {
		panic("residency: " + name.String() + " is loaded but not saved, or loaded before")
	}
	g.load(1)
	for _, e := range g.entries { // before room is made for the others
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
			m.device.follow(Compute, e.s.out) // its copy in came after its copy out
			e.s.State = Resident
		}
	}
	m.let()
	m.passed(schedule.Event{Group: name, Load: true})
	return nil
}

// Gone tells whether a storage has to be copied in when a group is loaded that saved it.
func (m *Machine) Gone(s *Storage) bool { return s.State == Away && m.flying(s) < 0 }

// flying is which flight a storage can be taken back from, or negative. One that has come
// back before may not be there yet.
func (m *Machine) flying(s *Storage) int {
	if s.State != Away || s.returned != 0 || m.plan != nil && m.plan.Strict {
		return -1
	}
	return slices.IndexFunc(m.lent, func(f flight) bool { return f.s == s && f.place != None })
}

// reclaim takes back bytes that are counted until their copy out is over: they are what
// would come back. A strict plan counts on their being gone.
func (m *Machine) reclaim(s *Storage) {
	if i := m.flying(s); i >= 0 {
		s.Device, s.State, s.lent = m.lent[i].place, Leaving, true
		m.lent = slices.Delete(m.lent, i, i+1)
	}
}

// bring issues a copy in. Memory that is lent may be in use by work that compute was
// given before.
func (m *Machine) bring(s *Storage, off int64) {
	if m.cfg.Lend && s.Foreign {
		for i := range m.lent {
			if m.lent[i].s == s {
				m.lent[i].tell(m)
			}
		}
		m.exec.Lend(s)
		s.lent = true
		m.exec.After(In, m.exec.Record(Compute))
	}
	m.exec.After(In, s.left)
	m.device.follow(In, s.out)
	s.Device, s.State = off, Returning
	m.saw(s, false, true)
	m.exec.In(s)
	s.returned = m.exec.Record(In)
	m.returned = s.returned
	m.saw(s, true, false)
	m.host.Give(s.Host, s.Bytes, m.host.Out(), s.returned)
	s.Host, s.left = None, 0
	m.counts.In++
	m.counts.InBytes += s.Bytes
}

// Release says that the work which needed a group has been issued.
func (m *Machine) Release(name schedule.Group) {
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

// BeginScope says that the work which follows becomes a graph of its own, which is
// issued as a whole. What Load brings back in the scope is issued before it, and
// takes bytes that were free before; no storage leaves to make room.
func (m *Machine) BeginScope() {
	if m.scope {
		panic("residency: a scope is opened inside another")
	}
	m.scope = true
	m.device.BeginScope()
}

// EndScope says that the graph was issued. The groups that were saved in the scope
// leave now, each after its own mark in the graph.
func (m *Machine) EndScope() {
	if !m.scope {
		panic("residency: a scope is ended that was not opened")
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

// End says that the step is over: compute comes after every copy, and foreign
// bytes that groups still hold are let go. Nothing may be asked afterwards.
func (m *Machine) End() {
	m.follow(len(m.lefts))
	if m.returned != 0 {
		m.exec.After(Compute, m.returned)
	}
	for _, s := range m.storages {
		if s.lent {
			s.lent = false
			m.exec.Left(s)
		}
	}
}
