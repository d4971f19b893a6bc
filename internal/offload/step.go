// This file owns the calls of a step.

package offload

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Storage is a run of bytes that tensors are views of.
//
//  1. resident: from Alloc or Borrow. Range says where.
//  2. away: it was saved and offloaded, and nobody holds its place; Range panics.
//  3. resident again, elsewhere: from the Load of a group that saved it.
//  4. dead: it was freed and the groups that saved it are released, or the step has
//     ended; every use panics.
type Storage struct {
	m        *Manager
	step     int
	state    *residency.Storage
	borrowed device.Range // of the caller, or zero
	released func()       // tells the caller, or nil
	fixed    bool         // it cannot leave
	group    memory.GroupID
	saves    int // groups that saved it and have not released it
}

// Begin begins a step under a plan. Without a plan the manager evicts only what finds no
// room. The caller must not change the plan afterwards. A whole step may lie in a capture
// of compute; its replays do not involve the manager.
func (m *Manager) Begin(plan *residency.Plan) { m.begin(plan, false) }

// BeginProfile begins a step whose times are taken: see Times. It panics in a capture.
func (m *Manager) BeginProfile(plan *residency.Plan) {
	if m.lane[residency.Compute].Stream.Capturing() {
		panic("offload: a step is profiled while it is captured; profile one that is not")
	}
	m.begin(plan, true)
}

func (m *Manager) begin(plan *residency.Plan, profile bool) {
	if m.open {
		panic("offload: a step is begun inside of a step")
	}
	m.open, m.err = true, nil
	m.captured = m.cfg.ProvideMemory != nil && m.lane[residency.Compute].Stream.Capturing()
	m.step++
	cfg := m.Config()
	m.machine = residency.New(cfg, executor{m}, plan)
	m.machine.Device().Extend, m.machine.Host().Extend = m.extend(memory.Device), m.extend(memory.Host)
	if m.inUse, m.most = [2]int64{}, [2]int64{}; m.cfg.Trace != nil {
		m.machine.Watch, m.evicted, m.time, m.first = m.watch, 0, device.Now(), m.lane[residency.Compute].Stream.Issued()
	}
	m.storages, m.left, m.borrowed, m.groups = nil, nil, nil, map[memory.GroupID][]*Saved{}
	m.digest.begin(cfg, plan)
	m.tape, m.ended, m.last = &residency.Tape{}, nil, Stats{}
	m.clock.begin(m, profile)
	m.emit(trace.Begin, memory.GroupID{}, nil, 0)
}

// End ends the step: it orders the next work of compute after all copies, and forgets the
// storages. It returns the first error of the step.
func (m *Manager) End() error {
	m.must("end a step")
	if m.scope != nil || m.eager {
		panic("offload: a step is ended inside of a scope")
	}
	c, profiled := m.lane[residency.Compute], false
	m.clock.end(m)
	m.machine.End()
	if m.err != nil && !c.Stream.Capturing() {
		_ = m.lanes.Sync() // its last copy may have no mark
	}
	m.clock.on, profiled = false, m.clock.on
	m.settle()
	m.clock.on = profiled
	m.count()
	m.traceEnd()
	for _, k := range m.plain {
		m.lanes.Drop(k)
	}
	m.open, m.table, m.plain = false, m.table[:0], m.plain[:0]
	m.storages, m.groups, m.ended = nil, nil, m.tape
	return m.err
}

// Calls returns the number of calls on the tape of the step under way.
func (m *Manager) Calls() int { return len(m.tape.Ops) }

// Open reports whether a step is under way.
func (m *Manager) Open() bool { return m.open }

// Tape returns the calls of the step that ended last, or nil. Times fills in their times.
func (m *Manager) Tape() *residency.Tape { return m.ended }

func (m *Manager) must(doing string) {
	if !m.open {
		panic("offload: cannot " + doing + " outside of a step; call Begin first")
	}
}

// call notes a call of the step.
func (m *Manager) call(op residency.Op) {
	m.clock.call(m, op.Kind)
	m.tape.Ops = append(m.tape.Ops, op)
	m.digest.op(op)
}

// NoteRows puts a call for rows of the stash on the tape of the step. Inside of a
// captured scope it does nothing.
func (m *Manager) NoteRows(op residency.Op) {
	if !m.open || m.scope != nil {
		return
	}
	m.clock.point(m, false)
	m.tape.Ops = append(m.tape.Ops, op)
}

// NoteWaited says that compute has waited since the call that was noted last.
func (m *Manager) NoteWaited() {
	if m.open {
		m.clock.point(m, true)
	}
}

// Limit sets how much device memory steps may take from now on, and gives back what
// the manager holds beyond that. It is called between steps. It reports whether
// memory moved: then graphs captured before must not be replayed. If it fails, steps find no
// memory until it succeeds.
func (m *Manager) Limit(n memory.Bytes) (moved bool, err error) {
	if m.open {
		panic("offload: the limit changes inside of a step")
	}
	if m.cfg.ProvideMemory != nil || n <= 0 {
		return false, nil
	}
	n = min(n, m.dev.Info().Capacity[memory.Device])
	if b := m.mem[memory.Device]; b != nil {
		if b.Size() <= n && b.Max() >= n {
			m.limit[memory.Device] = n
			return false, nil
		}
		compute := m.lane[residency.Compute].Stream
		m.mem[memory.Device] = nil
		compute.Free(b)
		if err := compute.Sync(); err != nil {
			return true, err
		}
	}
	m.limit[memory.Device] = n
	m.mem[memory.Device], err = m.dev.Reserve(memory.Device, n, trace.HeapOwner(memory.Device))
	return true, err
}

func (m *Manager) add(s *Storage) *Storage {
	s.m, s.step = m, m.step
	m.storages = append(m.storages, s)
	return s
}

// Alloc allocates a storage for compute to write. It orders the next work of compute after
// the earlier users of the bytes. It panics with Config.ProvideMemory.
func (m *Manager) Alloc(n memory.Bytes) (*Storage, error) {
	m.must("allocate")
	if m.cfg.ProvideMemory != nil {
		panic("offload: memory is allocated where all of it is the caller's; use Borrow")
	}
	s, err := m.take(n)
	if err == nil && m.scope != nil {
		m.scope.made(alloc{n})
	}
	return s, err
}

func (m *Manager) take(n memory.Bytes) (s *Storage, err error) {
	if n < 0 {
		panic(fmt.Sprintf("offload: %d bytes are allocated", n))
	}
	defer m.guard(&err)
	var st *residency.Storage
	if st, err = m.machine.Take(n); err != nil {
		return nil, m.fail(memory.GroupID{}, fmt.Sprintf("place %v", n), err)
	}
	m.call(residency.Op{Kind: residency.OpTake, ID: st.ID, Bytes: st.Bytes})
	s = m.add(&Storage{state: st})
	m.settle()
	return s, nil
}

// Borrow makes a storage of memory that the caller owns. The manager calls released,
// which may be nil, once nobody needs that memory and compute is ordered after the
// copy that read it, so that the caller may free it in compute's order; at End at the
// latest. Memory that a scope borrows is used by every replay, and is never released.
//
// With Config.ProvideMemory the storage is counted, and others may be offloaded for
// it if the step's plan has a limit.
func (m *Manager) Borrow(r device.Range, released func()) (s *Storage, err error) {
	m.must("borrow memory")
	if m.scope != nil && released != nil {
		panic("offload: memory that a scope borrows cannot be released; borrow it before the scope")
	}
	defer m.guard(&err)
	m.poll()
	var st *residency.Storage
	if st, err = m.machine.Borrow(r.Len); err != nil {
		return nil, m.fail(memory.GroupID{}, fmt.Sprintf("count %v", r.Len), err)
	}
	m.call(residency.Op{Kind: residency.OpBorrow, ID: st.ID, Bytes: st.Bytes})
	s = m.add(&Storage{state: st, borrowed: r, released: released, fixed: r.Buf.Kind() != memory.Device})
	if m.cfg.ProvideMemory != nil {
		m.settle()
		return s, nil
	}
	m.borrowed = append(m.borrowed, r)
	if m.scope != nil {
		m.scope.made(borrow{r})
	}
	return s, nil
}

// poll returns borrowed memory whose copies out are over already, so that compute need not
// wait for them. It does nothing in a captured step.
func (m *Manager) poll() {
	for m.cfg.ProvideMemory != nil && !m.captured {
		n, end := m.machine.Flight()
		if n == 0 || !m.table[end-1].Done() {
			return
		}
		m.lane[residency.Compute].Passed(m.table[end-1])
		m.machine.Past(n)
	}
}

// Drain returns all borrowed memory that is being copied: the next work of compute waits
// for these copies.
func (m *Manager) Drain() {
	m.must("drain")
	for {
		n, _ := m.machine.Flight()
		if n == 0 {
			break
		}
		m.machine.Past(n)
	}
	m.settle()
}

// provide asks the caller for memory that a borrowed storage is reloaded into.
func (m *Manager) provide(s *Storage) {
	r, err := m.cfg.ProvideMemory(s)
	if err == nil && r.Len != s.borrowed.Len {
		panic(fmt.Sprintf("offload: ProvideMemory returned %v for %v", r.Len, s.state))
	}
	if err != nil {
		_ = m.fail(s.group, fmt.Sprintf("reload %v of %v", s.borrowed.Len, s.group), err)
		panic(failed{})
	}
	s.borrowed = r
}

// Here reports whether the bytes are on the device.
func (s *Storage) Here() bool {
	return s.state.State == residency.Resident || s.state.State == residency.Leaving
}

// Busy reports whether a copy out may still read the bytes where they are now: it was
// issued, or another group holds the storage, which may be evicted.
func (s *Storage) Busy() bool { return s.state.State == residency.Leaving || s.saves > 1 }

// Over reports whether nobody needs the storage any more.
func (s *Storage) Over() bool { return s.state.State == residency.Dead }

// here returns the place of the bytes on the device.
func (s *Storage) here() device.Range {
	if s.state.Device == residency.None || s.m.cfg.ProvideMemory != nil {
		return s.borrowed
	}
	return s.m.mem[memory.Device].Slice(s.state.Device, s.state.Bytes)
}

// Range returns where the bytes are now. It panics if the storage is offloaded.
func (s *Storage) Range() device.Range {
	s.use()
	if s.state.State == residency.Away || s.state.State == residency.Returning {
		panic(fmt.Sprintf("offload: %v is asked for its place; load a group that saved it first", s.state))
	}
	return s.here()
}

// Size returns the number of bytes.
func (s *Storage) Size() memory.Bytes { return s.state.Bytes }

func (s *Storage) use() {
	if !s.m.open || s.step != s.m.step || s.state.State == residency.Dead {
		panic(fmt.Sprintf("offload: %v is used after it was freed and released, or after its step", s.state))
	}
}

// Free says that the caller no longer needs the storage. Groups that saved it still hold
// it.
func (s *Storage) Free() {
	s.use()
	m := s.m
	m.give(s)
	if m.scope != nil {
		m.scope.made(free{s.state.ID})
	}
}

func (m *Manager) give(s *Storage) {
	defer m.guard(new(error))
	m.call(residency.Op{Kind: residency.OpGive, ID: s.state.ID})
	m.machine.Give(s.state.ID)
	m.settle()
}

// Load makes the tensors of a group available to work that is issued on compute from now
// on. It returns an error if there is no room for them.
func (m *Manager) Load(g memory.GroupID) (err error) {
	m.must("load a group")
	defer m.guard(&err)
	for _, s := range m.distinct(g, "loaded") {
		if m.machine.Gone(s.state) {
			m.emit(trace.Late, g, s.state, int64(s.state.Bytes))
		}
	}
	m.call(residency.Op{Kind: residency.OpLoad, Group: g})
	if err = m.machine.Load(g); err != nil {
		return m.fail(g, "reload "+g.String(), err)
	}
	m.emit(trace.Load, g, nil, 0)
	for _, s := range m.groups[g] {
		s.loaded = true
	}
	m.poll() // not before: what is still there need not come back
	m.settle()
	if m.scope != nil {
		m.scope.made(load{g})
	}
	return nil
}

// Release says that all work which needed a group has been issued.
func (m *Manager) Release(g memory.GroupID) {
	m.must("release a group")
	defer m.guard(new(error))
	storages := m.distinct(g, "released")
	m.call(residency.Op{Kind: residency.OpRelease, Group: g})
	m.machine.Release(g)
	for _, s := range storages {
		s.saves--
	}
	for _, s := range m.groups[g] {
		s.loaded = false
	}
	delete(m.groups, g)
	m.emit(trace.Release, g, nil, 0)
	m.settle()
	if m.scope != nil {
		m.scope.made(release{g})
	}
}

// Saved returns the tensors of a group of this step, in the order of Save.
func (m *Manager) Saved(g memory.GroupID) []*Saved { return m.groups[g] }

// distinct returns the storages of a saved group, each once.
func (m *Manager) distinct(g memory.GroupID, what string) (all []*Storage) {
	saved, ok := m.groups[g]
	if !ok {
		panic(fmt.Sprintf("offload: %v is %s but not saved, or was released", g, what))
	}
	seen := map[*Storage]bool{}
	for _, s := range saved {
		if t := s.tensor.Storage; !seen[t] {
			seen[t] = true
			all = append(all, t)
		}
	}
	return all
}
