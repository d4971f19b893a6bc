// This file owns the manager, which learns the schedule of a step and issues stashes and
// restores.

package stash

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Mode selects how the store hands out pages.
type Mode uint8

const (
	// Auto uses a stack if the recorded schedule is one, and else pages from a ring.
	Auto Mode = iota
	// PagesOnly always uses pages from a ring.
	PagesOnly
	// BumpOnly always uses a stack.
	BumpOnly
)

// ManagerConfig configures a manager.
type ManagerConfig struct {
	Store Config
	// HostPages and HostMax size a second store with host pages only, for the groups that
	// Place puts there. There is no such store if HostMax is zero.
	HostPages, HostMax schedule.Pages
	// Fixed keeps the number of device pages that Store gives. Otherwise a runtime decides
	// the number under a budget.
	Fixed bool
	// KeepAll says that workspaces have a set for every group that is saved at once, so that
	// groups stay in theirs from the first step on. A group that finds none free has
	// another moved to pages.
	KeepAll bool
	// MoreSets is how many sets SetMore may add to each workspace.
	MoreSets int
	// Place returns the tier for the rows of a group: Device or Host. In the tier Device,
	// rows that find no device page spill to host pages. Nil places all groups in Device.
	// The manager calls Place once for a group in every issued step.
	Place func(memory.GroupID) int
	// Watch is told what compute does with sets; it may be nil.
	Watch Watcher
	// Tables is the device memory that the page tables of groups will take. Unseen returns
	// the part that is not allocated yet, so that callers can count it beforehand.
	Tables memory.Bytes
	// Mode selects how the store hands out pages.
	Mode Mode
	// Ahead is how many loads ahead of need a restore may be issued. Zero selects 1.
	Ahead int
	// Sizer decides how the device tier follows the demand of steps. Nil selects
	// schedule.DefaultLowWater. The host tier takes the rest, by schedule.HostLowWater.
	Sizer schedule.Sizer
	// Rank is the number of this rank in errors.
	Rank int
	// Reduce returns the worst outcome of all ranks. Nil means that there is one rank.
	Reduce func(Outcome) (Outcome, error)
	// Log receives a line on the first rerun, spill and growth. Nil discards them.
	Log *slog.Logger
	// Emit receives the events of groups, and of pages at the end of a step; it may be nil.
	Emit func(trace.Event)
}

// Call says what compute does with a set.
type Call uint8

const (
	Leased   Call = iota // the set was leased for a forward pass
	Stashed              // the forward pass is done
	Returned             // the rows are needed again
	Done                 // the backward pass is done
)

// Watcher is told the calls of a step in order, so that it can record the step.
type Watcher interface {
	// Called is called before compute waits for what the call needs. space is the index
	// of the workspace.
	Called(c Call, g memory.GroupID, space int)
	// Waited is called after the waits of Leased and Returned.
	Waited()
}

// Manager stashes and restores the groups of a training loop. Only one goroutine may use
// it. It issues work on the caller's compute stream and on two streams of its own: one
// for stashes and one for restores. While the store is a stack, restores use the stream
// of stashes. During a step the host waits for nothing and reads nothing.
type Manager struct {
	dev     device.Device
	cfg     ManagerConfig
	store   *Store
	host    *Store         // for groups that Place puts in host pages, or nil
	desk    *device.Buffer // the reports of both stores, if there is a host store
	lanes   *order.Set
	compute *order.Lane
	out     *order.Lane
	back    *order.Lane // for restores while the store is a ring
	in      *order.Lane // out or back, for this step
	spaces  []*Workspace
	own     []device.Stream // the manager's own streams

	prep device.Stream // writes records; never captured
	made device.Event  // recorded after records are written; external to captures
	// written says that records were written in a capture, and that compute has not waited for
	// them since.
	written bool

	needs     map[memory.GroupID]schedule.Pages
	plans     map[memory.Key]*schedule.Moves
	issued    map[memory.Key]*issue // the step that a replay under a key runs
	current   *issue                // the step that was issued last
	used      map[memory.GroupID]*Record
	noStack   map[memory.Key]bool // keys whose steps broke a stack
	plain     map[memory.Key]bool // keys whose plan must not restore ahead of need
	home      map[memory.GroupID]*Workspace
	key       memory.Key
	phase     memory.Phase
	open      bool
	recording *schedule.Schedule
	plan      *schedule.Moves // the plan that this step follows, or nil
	next      int             // position in the plan
	stack     []memory.GroupID
	broken    string // why this step broke the stack, or ""
	err       error
	leases    uint64

	transaction
}

// issue is what the host knows about an issued step.
type issue struct {
	schedule *schedule.Schedule
	records  map[memory.GroupID]*Record // the records of all groups, with those that were dropped
}

// NewManager returns a manager with its store. The caller issues the forward and backward
// passes of groups on compute. NewManager returns an error if a setting is out of range or
// the device has too little memory.
func NewManager(dev device.Device, compute device.Stream, cfg ManagerConfig) (*Manager, error) {
	if cfg.Ahead == 0 {
		cfg.Ahead = 1
	}
	if cfg.Sizer == nil {
		cfg.Sizer = schedule.DefaultLowWater()
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Ahead < 0 || cfg.Mode > BumpOnly {
		return nil, fmt.Errorf("stash: expected a known mode and at least one load ahead, got mode %d and %d loads", cfg.Mode, cfg.Ahead)
	}
	if c, ok := cfg.Sizer.(interface{ Check() error }); ok {
		if err := c.Check(); err != nil {
			return nil, err
		}
	}
	m := &Manager{
		dev: dev, cfg: cfg, home: map[memory.GroupID]*Workspace{},
		needs: map[memory.GroupID]schedule.Pages{}, plans: map[memory.Key]*schedule.Moves{}, issued: map[memory.Key]*issue{}, noStack: map[memory.Key]bool{}, plain: map[memory.Key]bool{},
		lanes: order.NewSet(dev),
	}
	m.compute = m.lanes.Lane(compute)
	if err := m.allocate(); err != nil {
		_ = m.Close()
		return nil, err
	}
	return m, nil
}

// allocate allocates the manager's streams, events and stores.
func (m *Manager) allocate() (err error) {
	for _, name := range []string{"stash", "restore", "stash records"} {
		s, err := m.dev.NewStream(name)
		if err != nil {
			return err
		}
		m.own = append(m.own, s)
	}
	m.out, m.back, m.prep = m.lanes.Lane(m.own[0]), m.lanes.Lane(m.own[1]), m.own[2]
	if m.made, err = m.dev.NewEvent(device.External); err != nil {
		return err
	}
	if m.store, err = NewStore(m.dev, m.compute.Stream, m.cfg.Store); err != nil || m.cfg.HostMax == 0 {
		return err
	}
	c := m.cfg.Store
	c.Pages, c.Max = [Tiers]schedule.Pages{0, m.cfg.HostPages}, [Tiers]schedule.Pages{0, m.cfg.HostMax}
	if m.host, err = NewStore(m.dev, m.compute.Stream, c); err != nil {
		return err
	}
	if m.desk, err = m.dev.Reserve(memory.Device, m.store.meta.Max()+m.host.meta.Max()+2*device.Align, "stash report"); err != nil {
		return err
	}
	return m.dev.Grow(m.desk, m.reportBytes()) // a budget counts what is held before the first step
}

// reportBytes returns the size of the reports of all stores.
func (m *Manager) reportBytes() (n memory.Bytes) {
	for _, st := range m.stores() {
		n += align(st.reported().Len)
	}
	return n
}

// stores returns all stores of the manager.
func (m *Manager) stores() []*Store {
	if m.host == nil {
		return []*Store{m.store}
	}
	return []*Store{m.store, m.host}
}

// storeOf returns the store that a group's rows go to.
func (m *Manager) storeOf(g memory.GroupID) *Store {
	if m.host != nil && m.cfg.Place != nil && m.cfg.Place(g) == Host {
		return m.host
	}
	return m.store
}

// Placeable reports whether Place can put rows in either tier.
func (m *Manager) Placeable() bool { return m.host != nil }

// prepared makes compute wait until records are written. The event is external to
// captures: records are written at once, even while a step is being captured. Then only that
// step waits; another that uses the same records may be replayed before it, or be issued
// because the capture failed, so the next transaction and the next issued step wait, too.
func (m *Manager) prepared() {
	m.prep.Record(m.made)
	m.compute.Stream.Wait(m.made)
	m.written = m.written || m.compute.Stream.Capturing()
}

// awaitRecords makes compute wait for records that a capture has written.
func (m *Manager) awaitRecords() {
	if m.written && !m.compute.Stream.Capturing() {
		m.compute.Stream.Wait(m.made)
		m.written = false
	}
}

// Most returns the most device memory that workspaces and device pages may take.
func (m *Manager) Most() (spaces, pages memory.Bytes) {
	for _, w := range m.spaces {
		spaces += w.widest.Size * memory.Bytes(len(w.slots))
	}
	return spaces, memory.Bytes(m.store.Max(Device)) * m.store.cfg.Page
}

// Held returns the device memory that workspaces and device pages take now.
func (m *Manager) Held() (spaces, pages memory.Bytes) {
	for _, w := range m.spaces {
		if w.buf != nil {
			spaces += w.buf.Size()
		}
	}
	return spaces, m.store.pool[Device].Size()
}

// Unseen returns the device memory of page tables that are expected and not allocated
// yet.
func (m *Manager) Unseen() memory.Bytes {
	n := m.cfg.Tables
	for _, st := range m.stores() {
		n -= st.recs.Size() + st.meta.Size()
	}
	if m.desk != nil {
		n -= m.desk.Size()
	}
	return max(n, 0)
}

// Store returns the store with device pages.
func (m *Manager) Store() *Store { return m.store }

// Page returns the size of a page.
func (m *Manager) Page() memory.Bytes { return m.store.cfg.Page }

// Names returns the names of the workspaces.
func (m *Manager) Names() (names []string) {
	for _, w := range m.spaces {
		names = append(names, w.name)
	}
	return names
}

// Expect grows the host tier that takes spills, so that it holds with the device pages what
// a step will ask for at once, and some more if there is memory. It stays within its maximum.
func (m *Manager) Expect(demand schedule.Pages) error {
	return m.adapt(m.store, min(demand, m.store.Max(Device)+m.store.Max(Host)), true)
}

// Sets returns the number of sets of every workspace.
func (m *Manager) Sets() (sets []int) {
	for _, w := range m.spaces {
		sets = append(sets, len(w.slots))
	}
	return sets
}

// MoreSets returns how many sets SetMore may add to each workspace, how many it has added,
// and the most memory that one more set of every workspace takes.
func (m *Manager) MoreSets() (most, added int, each memory.Bytes) {
	for _, w := range m.spaces {
		added = len(w.slots) - w.least
		each += w.widest.Size
	}
	return m.cfg.MoreSets, added, each
}

// SetMore gives each workspace n sets beyond those that it was made with. Call it between
// steps while no work is in flight. Plans follow the new number. Steps captured before
// become stale. If there is no memory for more sets, SetMore returns an error and the
// number stays as it was.
func (m *Manager) SetMore(n int) error {
	_, had, _ := m.MoreSets()
	if n == had {
		return nil
	}
	for i, w := range m.spaces {
		if err := w.setSlots(w.least + n); err != nil {
			for _, x := range m.spaces[:i] { // all workspaces have as many more sets
				err = errors.Join(err, x.setSlots(x.least+had))
			}
			return err
		}
	}
	for key, p := range m.plans {
		m.plans[key] = m.movesOf(p.Schedule, key)
	}
	m.rearrange()
	return nil
}

// Ahead returns how many loads ahead of need a restore may be issued.
func (m *Manager) Ahead() int { return m.cfg.Ahead }

// Needs returns the pages that each group asked for when it was stashed last.
func (m *Manager) Needs() map[memory.GroupID]schedule.Pages { return m.needs }

// SetDevicePages gives the device tier exactly n pages. Rows that find no page there spill
// to the host tier. Call it between steps.
func (m *Manager) SetDevicePages(n schedule.Pages) error {
	return m.store.Resize(m.compute.Stream, Device, n)
}

// Close frees the stores and the workspaces after the issued work is done. It may be
// called in the middle of a step.
func (m *Manager) Close() (first error) {
	m.abandon()
	for _, w := range m.spaces {
		if w.buf != nil {
			m.compute.Stream.Free(w.buf)
		}
	}
	for _, st := range []*Store{m.store, m.host} {
		if st != nil {
			st.Close(m.compute.Stream)
		}
	}
	if m.desk != nil {
		m.compute.Stream.Free(m.desk)
	}
	for _, s := range m.own {
		first = cmp.Or(first, s.Close())
	}
	if m.made != nil {
		first = cmp.Or(first, m.made.Close())
	}
	return cmp.Or(first, m.lanes.Close())
}

// abandon waits for the streams and gives up a step that was not finished. It ignores
// errors, because the next synchronisation returns them again.
func (m *Manager) abandon() {
	for _, s := range m.own {
		_ = s.Sync()
	}
	m.lanes.Settle()
	m.open, m.recording = false, nil
}

// Begin begins a step. It frees all pages and all sets, and may be captured. It panics
// inside a step. Which sets groups get, and which groups leave theirs, follows from the
// step alone: a rerun asks for the pages that the first attempt has shown.
//
// No stream waits for the reset explicitly, because all work of other streams in a step
// waits for some work of compute in that step.
func (m *Manager) Begin(key memory.Key) {
	if m.open {
		panic("stash: Begin was called inside a step; call Finish first")
	}
	m.open, m.key, m.phase, m.err = true, key, key.Phase, nil
	m.plan, m.next, m.stack, m.broken = m.plans[key], 0, m.stack[:0], ""
	m.recording, m.used = &schedule.Schedule{}, map[memory.GroupID]*Record{}
	m.in = m.back
	bump := m.cfg.Mode == BumpOnly || m.cfg.Mode == Auto && m.plan != nil && m.plan.Stack && !m.noStack[key]
	if bump {
		m.in = m.out
	}
	for _, w := range m.spaces {
		for _, s := range w.slots {
			s.state, s.idle, s.lease = slotFree, nil, 0
		}
	}
	m.awaitRecords()
	for _, st := range m.stores() {
		st.Reset(m.compute.Stream, bump)
	}
}

// Finish ends the issuing of a step. Work that is issued on compute from now on runs after
// the whole step. Finish may be captured. It panics outside a step.
func (m *Manager) Finish() {
	if !m.open {
		panic("stash: Finish was called outside a step; call Begin first")
	}
	m.open = false
	m.join()
	if m.broken != "" || m.err != nil { // mark the step, so that a replay of it is refused too
		for _, st := range m.stores() {
			st.spoil(m.compute.Stream)
		}
	}
	m.current = &issue{m.recording, m.used}
	if m.transacting {
		return
	}
	// The step was captured. It will be replayed, or captured again without a stack.
	m.issued[m.key] = m.current
	if m.broken != "" {
		m.noStack[m.key], m.plain[m.key] = true, true
		delete(m.plans, m.key)
	}
}

// join makes compute wait for the work of the other streams.
func (m *Manager) join() {
	m.compute.Join(m.out)
	m.compute.Join(m.back)
	m.compute.Flush()
}

func (m *Manager) mustBeOpen() {
	if !m.open {
		panic("stash: a set was leased outside a step; call Begin or Step first")
	}
}

// keep reports whether a group stays in its set.
func (m *Manager) keep(g memory.GroupID) bool {
	return m.cfg.KeepAll || m.plan != nil && m.plan.Keep[g]
}

// passed issues the restores that are due after an event. A step that departs from its
// plan continues without one, and a new plan is made after it.
func (m *Manager) passed(e schedule.Event) {
	if m.plan == nil {
		return
	}
	if m.next >= m.plan.Schedule.Len() || m.plan.Schedule.At(m.next) != e {
		m.plan = nil
		m.stats.Departures++
		return
	}
	due := m.plan.Ahead[m.next]
	m.next++
	for _, g := range due {
		w := m.home[g]
		if w.holding(g) != nil || !m.onTop(g) {
			continue
		}
		// If several passes run at once, no set may be free. Then Backward restores it.
		if s := w.freeSlot(); s != nil {
			s.restore(g)
		}
	}
}

// pushed notes a group on the host's copy of the device's stack. Restores ahead of need
// follow its order. A step whose own order breaks the stack is issued to its end without
// using the store, and is rerun with pages from a ring.
func (m *Manager) pushed(g memory.GroupID) {
	if m.store.bump {
		m.stack = append(m.stack, g)
	}
}

func (m *Manager) onTop(g memory.GroupID) bool {
	return !m.store.bump || len(m.stack) > 0 && m.stack[len(m.stack)-1] == g
}

// popped takes a group off the stack and reports whether it may be restored.
func (m *Manager) popped(g memory.GroupID) bool {
	if m.broken == "" && !m.onTop(g) {
		m.broken = fmt.Sprintf("%v is needed while it is not on top of the stack", g)
	}
	if m.broken != "" {
		return false
	}
	if m.store.bump {
		m.stack = m.stack[:len(m.stack)-1]
	}
	return true
}

// learn makes the plan for the recorded schedule.
func (m *Manager) learn() {
	s := m.recording
	m.recording = nil
	if s == nil || m.phase != memory.Train {
		return
	}
	if p := m.plans[m.key]; p != nil && p.Schedule.Equal(s) {
		return
	}
	m.plans[m.key] = m.movesOf(s, m.key)
}

// movesOf returns the plan for a schedule under a key.
func (m *Manager) movesOf(s *schedule.Schedule, key memory.Key) *schedule.Moves {
	return s.Moves(m.cfg.Ahead, func(g memory.GroupID) (int, int) {
		w := m.home[g]
		if m.plain[key] {
			return w.index, 0
		}
		return w.index, len(w.slots) - 1
	})
}
