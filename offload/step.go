// This file owns the calls of a step.

package offload

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/trace"
)

// Storage is a run of bytes that tensors are views of.
//
//  1. resident: from Alloc or Import. Range says where.
//  2. away: it was saved, left, and nobody holds its place any more; Range panics.
//  3. resident again, elsewhere: from the Load of a group that saved it.
//  4. dead: it was freed and the groups that saved it are released, or the step has
//     ended; every use panics.
type Storage struct {
	m        *Manager
	step     int
	state    *residency.Storage
	foreign  device.Range // of the caller, or zero
	released func()       // tells the caller, or nil
	fixed    bool         // it cannot leave
	group    schedule.Group
	saves    int // groups that saved it and have not released it
	pair     int // of its checksums
}

// Begin opens a step under a plan; nil is none: everything stays that there is room
// for. The plan is not changed afterwards. A step may lie in one capture of compute,
// and is then replayed without the manager.
func (m *Manager) Begin(plan *residency.Plan) { m.begin(plan, false) }

// BeginProfile is Begin for a step whose times are wanted: see Times. It cannot be
// captured.
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
	m.captured = m.cfg.Lend != nil && m.lane[residency.Compute].Stream.Capturing()
	m.step++
	cfg := m.Config()
	m.machine = residency.New(cfg, executor{m}, plan)
	m.machine.Device().Extend, m.machine.Host().Extend = m.extend(device.Accel), m.extend(device.Host)
	if m.inUse, m.most = [2]int64{}, [2]int64{}; m.cfg.Trace != nil {
		m.machine.Watch, m.evicted, m.time, m.first = m.watch, 0, device.Now(), m.lane[residency.Compute].Stream.Issued()
	}
	m.storages, m.left, m.foreign, m.groups = nil, nil, nil, map[schedule.Group][]*Saved{}
	m.sums.outs, m.sums.back = 0, nil
	m.digest.begin(cfg, plan)
	m.tape, m.ended, m.last = &residency.Tape{}, nil, Stats{}
	m.clock.begin(m, profile)
	m.emit(trace.Begin, schedule.Group{}, nil, 0)
}

// End closes the step: what is issued on compute from now on comes after all of its
// copies, and its storages are forgotten. The error is the step's first.
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
	if m.err == nil && m.cfg.Checksums && !c.Stream.Capturing() {
		m.err = m.Verify()
	}
	return m.err
}

// Calls is how many calls of the step under way its tape holds so far.
func (m *Manager) Calls() int { return len(m.tape.Ops) }

// Open tells whether a step is under way.
func (m *Manager) Open() bool { return m.open }

// Tape is the calls of the step that ended last, or nil. Its times are those of
// Times.
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

func (m *Manager) add(s *Storage) *Storage {
	s.m, s.step = m, m.step
	m.storages = append(m.storages, s)
	return s
}

// Alloc takes memory for compute to write. Work that is issued on compute from now
// on comes after whoever had the bytes before.
func (m *Manager) Alloc(n device.Bytes) (*Storage, error) {
	m.must("allocate")
	if m.cfg.Lend != nil {
		panic("offload: memory is allocated where all of it is the caller's; use Borrow")
	}
	s, err := m.take(n)
	if err == nil && m.scope != nil {
		m.scope.made(alloc{n})
	}
	return s, err
}

func (m *Manager) take(n device.Bytes) (s *Storage, err error) {
	if n < 0 {
		panic(fmt.Sprintf("offload: %d bytes are allocated", n))
	}
	defer m.guard(&err)
	var st *residency.Storage
	if st, err = m.machine.Take(int64(n)); err != nil {
		return nil, m.fail(schedule.Group{}, fmt.Sprintf("place %v", n), err)
	}
	m.call(residency.Op{Kind: residency.OpTake, ID: st.ID, Bytes: st.Bytes})
	s = m.add(&Storage{state: st})
	m.settle()
	return s, nil
}

// Import makes a storage of memory that the caller has. Released, which may be nil,
// is called once nobody needs that memory and compute comes after the copy that
// read it, so that the caller may free it in compute's order; at End at the latest.
// A scope's memory is used by every replay, so that none is released in one.
func (m *Manager) Import(r device.Range, released func()) *Storage {
	m.must("import memory")
	if m.scope != nil && released != nil {
		panic("offload: memory imported inside of a scope cannot be released; import it before the scope")
	}
	if m.cfg.Lend != nil {
		panic("offload: memory is imported that would be lent; use Borrow")
	}
	st, _ := m.machine.Foreign(int64(r.Len)) // which is not counted, so that it fits
	m.call(residency.Op{Kind: residency.OpForeign, ID: st.ID, Bytes: st.Bytes})
	m.foreign = append(m.foreign, r)
	s := m.add(&Storage{state: st, foreign: r, released: released, fixed: r.Buf.Kind() != device.Accel})
	if m.scope != nil {
		m.scope.made(imported{r})
	}
	return s
}

// Borrow is Import under Config.Lend. Other storages may have to leave for it, if the
// step's plan has a limit.
func (m *Manager) Borrow(r device.Range, released func()) (s *Storage, err error) {
	m.must("borrow memory")
	if m.cfg.Lend == nil || m.scope != nil {
		panic("offload: memory is borrowed without Config.Lend, or inside of a scope")
	}
	defer m.guard(&err)
	m.poll()
	var st *residency.Storage
	if st, err = m.machine.Foreign(int64(r.Len)); err != nil {
		return nil, m.fail(schedule.Group{}, fmt.Sprintf("count %v", r.Len), err)
	}
	m.call(residency.Op{Kind: residency.OpForeign, ID: st.ID, Bytes: st.Bytes})
	s = m.add(&Storage{state: st, foreign: r, released: released})
	m.settle()
	return s, nil
}

// poll lets go of borrowed memory whose copies out are over already: compute comes after
// them at no cost. A captured step has no such moments, and keeps to what the machine says.
func (m *Manager) poll() {
	for m.cfg.Lend != nil && !m.captured {
		n, end := m.machine.Flight()
		if n == 0 || !m.table[end-1].Done() {
			return
		}
		m.lane[residency.Compute].Passed(m.table[end-1])
		m.machine.Past(n)
	}
}

// Drain lets go of all borrowed memory that is being copied: what compute is given next
// waits for that.
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

// lend asks for memory that a storage comes back to.
func (m *Manager) lend(s *Storage) {
	r, err := m.cfg.Lend(s)
	if err == nil && r.Len != s.foreign.Len {
		panic(fmt.Sprintf("offload: %v is lent %v", s.state, r.Len))
	}
	if err != nil {
		_ = m.fail(s.group, fmt.Sprintf("bring back %v of %v", s.foreign.Len, s.group), err)
		panic(failed{})
	}
	s.foreign = r
}

// Here tells whether the bytes are on the device, and nothing has to bring them back.
func (s *Storage) Here() bool {
	return s.state.State == residency.Resident || s.state.State == residency.Leaving
}

// Busy tells whether a copy out may still read the bytes where they are now: it was
// issued, or another group needs the storage, which may leave for want of room.
func (s *Storage) Busy() bool { return s.state.State == residency.Leaving || s.saves > 1 }

// Over tells whether nobody needs the storage any more.
func (s *Storage) Over() bool { return s.state.State == residency.Dead }

// here is where the bytes are, as the machine has it.
func (s *Storage) here() device.Range {
	if s.state.Device == residency.None || s.m.cfg.Lend != nil {
		return s.foreign
	}
	return s.m.mem[device.Accel].Slice(device.Bytes(s.state.Device), device.Bytes(s.state.Bytes))
}

// Range is where the bytes are now.
func (s *Storage) Range() device.Range {
	s.use()
	if s.state.State == residency.Away || s.state.State == residency.Returning {
		panic(fmt.Sprintf("offload: %v is asked for its place; load a group that saved it first", s.state))
	}
	return s.here()
}

// Size is its number of bytes.
func (s *Storage) Size() device.Bytes { return device.Bytes(s.state.Bytes) }

func (s *Storage) use() {
	if !s.m.open || s.step != s.m.step || s.state.State == residency.Dead {
		panic(fmt.Sprintf("offload: %v is used after it was freed and released, or after its step", s.state))
	}
}

// Free says that the caller needs the storage no more; groups that saved it do.
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

// Load makes the tensors of a group usable by work that is issued on compute from
// now on.
func (m *Manager) Load(g schedule.Group) (err error) {
	m.must("load a group")
	defer m.guard(&err)
	for _, s := range m.distinct(g, "loaded") {
		if m.machine.Gone(s.state) {
			m.emit(trace.Late, g, s.state, s.state.Bytes)
		}
	}
	m.call(residency.Op{Kind: residency.OpLoad, Group: g})
	if err = m.machine.Load(g); err != nil {
		return m.fail(g, "bring back "+g.String(), err)
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

// Release says that the work which needed a group has been issued.
func (m *Manager) Release(g schedule.Group) {
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

// Saved are the tensors of a group of this step, in the order of Save.
func (m *Manager) Saved(g schedule.Group) []*Saved { return m.groups[g] }

// distinct is the storages of a saved group, each once.
func (m *Manager) distinct(g schedule.Group, what string) (all []*Storage) {
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
