// This file owns the manager: it learns the schedule of a step and issues
// stashes and restores from it.

package stash

import (
	"cmp"
	"fmt"
	"log/slog"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/trace"
)

// Phase says what a step is for.
type Phase uint8

const (
	Train Phase = iota
	Evaluate
)

// Key tells plans apart: a schedule holds for one phase, number of microbatches
// and shape of the inputs. A step under another key never disturbs a plan.
type Key struct {
	Phase        Phase
	Microbatches int
	Shape        string
}

// Mode says how pages are handed out.
type Mode uint8

const (
	// Auto uses a stack where the recorded schedule is one, else pages.
	Auto Mode = iota
	// PagesOnly and BumpOnly force one of them.
	PagesOnly
	BumpOnly
)

// ManagerConfig configures a manager.
type ManagerConfig struct {
	Store Config
	Mode  Mode
	// Ahead is how many loads ahead of need a restore may be issued; zero
	// stands for one.
	Ahead int
	// Sizer says how the pools follow what steps needed; nil stands for
	// schedule.DefaultLowWater. It sizes the device tier; the host tier takes
	// what does not fit there, by low water.
	Sizer schedule.Sizer
	// Rank names this rank in errors, and Reduce combines the verdicts of all
	// ranks; nil stands for a single rank.
	Rank   int
	Reduce func(Verdict) (Verdict, error)
	// Log takes a line on the first rerun, spill and growth; nil is silent.
	Log *slog.Logger
	// Emit takes the events of groups, and of pages at the end of a step; nil is nobody.
	Emit func(trace.Event)
}

// Manager moves the groups of a training loop through a store. One goroutine
// drives it. Work is issued on the caller's compute stream and on two streams of
// its own: out for stashes, in for restores (out again while the store is a
// stack). Inside a step the host waits for nothing and reads nothing.
type Manager struct {
	dev     device.Device
	cfg     ManagerConfig
	store   *Store
	lanes   *order.Set
	compute *order.Lane
	out     *order.Lane
	back    *order.Lane // restores, while the store has pages
	in      *order.Lane // out or back, for this step
	spaces  []*Workspace
	own     []device.Stream // all but the caller's

	prep device.Stream // writes records; never captured
	made device.Event  // external: records are written

	plans     map[Key]*schedule.Plan
	issued    map[Key]*issue // what a replay under a key runs
	current   *issue         // what was issued last
	used      map[schedule.Group]*Record
	noStack   map[Key]bool // keys under which a stack did not hold
	plain     map[Key]bool // keys whose plan made a stack fail
	home      map[schedule.Group]*Workspace
	key       Key
	phase     Phase
	open      bool
	recording *schedule.Schedule
	plan      *schedule.Plan // followed in this step, or nil
	next      int            // position in the plan
	stack     []schedule.Group
	broken    string // why the stack cannot serve this step, or empty
	err       error
	leases    uint64

	transaction
}

// issue is what the host knows of a step that was issued.
type issue struct {
	schedule *schedule.Schedule
	records  map[schedule.Group]*Record // of all groups, also those that were dropped
}

// NewManager makes a manager and its store. Work that the caller issues on
// compute is what groups are saved from and loaded for.
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
		return nil, fmt.Errorf("stash: a manager in mode %d that restores %d loads ahead", cfg.Mode, cfg.Ahead)
	}
	if c, ok := cfg.Sizer.(interface{ Check() error }); ok {
		if err := c.Check(); err != nil {
			return nil, err
		}
	}
	m := &Manager{
		dev: dev, cfg: cfg, home: map[schedule.Group]*Workspace{},
		plans: map[Key]*schedule.Plan{}, issued: map[Key]*issue{}, noStack: map[Key]bool{}, plain: map[Key]bool{},
		lanes: order.NewSet(dev),
	}
	m.compute = m.lanes.Lane(compute)
	if err := m.make(); err != nil {
		_ = m.Close()
		return nil, err
	}
	return m, nil
}

// make takes what the manager needs of the device.
func (m *Manager) make() (err error) {
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
	m.store, err = NewStore(m.dev, m.compute.Stream, m.cfg.Store)
	return err
}

// prepared makes compute come after what was written to records. The event crosses
// the border of a capture: records are written at once, whoever captures.
func (m *Manager) prepared() {
	m.prep.Record(m.made)
	m.compute.Stream.Wait(m.made)
}

// Most is the device memory that workspaces and pages may come to take.
func (m *Manager) Most() device.Bytes {
	n := device.Bytes(m.store.Max(Device)) * m.store.cfg.Page
	for _, w := range m.spaces {
		n += w.buf.Max()
	}
	return n
}

// Store is the manager's store.
func (m *Manager) Store() *Store { return m.store }

// Close frees the store and the workspaces once the work issued is done, also in
// the middle of a step.
func (m *Manager) Close() (first error) {
	m.abandon()
	for _, w := range m.spaces {
		m.compute.Stream.Free(w.buf)
	}
	if m.store != nil {
		m.store.Close(m.compute.Stream)
	}
	for _, s := range m.own {
		first = cmp.Or(first, s.Close())
	}
	if m.made != nil {
		first = cmp.Or(first, m.made.Close())
	}
	return cmp.Or(first, m.lanes.Close())
}

// abandon waits for the streams and gives up a step that was not finished. What
// went wrong comes back from where the work is settled.
func (m *Manager) abandon() {
	for _, s := range m.own {
		_ = s.Sync()
	}
	m.lanes.Settle()
	m.open, m.recording = false, nil
}

// Begin opens a step: pages are free, sets are free. It may be captured.
//
// Nothing waits for the reset by name: the other streams come after it because
// all their work in a step comes after something that compute did.
func (m *Manager) Begin(key Key) {
	if m.open {
		panic("stash: a step is begun inside of a step")
	}
	m.open, m.key, m.phase, m.err = true, key, key.Phase, nil
	m.plan, m.next, m.stack, m.broken = m.plans[key], 0, m.stack[:0], ""
	m.recording, m.used = &schedule.Schedule{}, map[schedule.Group]*Record{}
	m.in = m.back
	bump := m.cfg.Mode == BumpOnly || m.cfg.Mode == Auto && m.plan != nil && m.plan.Stack && !m.noStack[key]
	if bump {
		m.in = m.out
	}
	for _, w := range m.spaces {
		for _, s := range w.slots {
			s.state, s.idle = slotFree, nil
		}
	}
	m.store.Reset(m.compute.Stream, bump)
}

// Finish ends the issuing of a step: what is issued on compute from now on
// comes after all of it. It may be captured.
func (m *Manager) Finish() {
	if !m.open {
		panic("stash: a step is finished that was not begun")
	}
	m.open = false
	m.join()
	if m.broken != "" || m.err != nil {
		m.store.spoil(m.compute.Stream) // a replay must not be accepted either
	}
	m.current = &issue{m.recording, m.used}
	if m.transacting {
		return
	}
	// A capture, to be replayed; or to be made again, without a stack.
	m.issued[m.key] = m.current
	if m.broken != "" {
		m.noStack[m.key], m.plain[m.key] = true, true
		delete(m.plans, m.key)
	}
}

// join makes what compute is given from now on come after the other streams' work.
func (m *Manager) join() {
	m.compute.Join(m.out)
	m.compute.Join(m.back)
	m.compute.Flush()
}

func (m *Manager) mustBeOpen() {
	if !m.open {
		panic("stash: a set is leased outside of a step; call Begin or Step first")
	}
}

// keep tells whether a group stays in its set.
func (m *Manager) keep(g schedule.Group) bool { return m.plan != nil && m.plan.Keep[g] }

// passed issues the restores that are due after an event. A step that departs
// from its plan goes on without one and leaves a new one behind.
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
		// No set is free if several passes run at once: it can wait.
		if s := w.take(); s != nil {
			s.restore(g)
		}
	}
}

// A stack is the host's picture of one on the device. Restores ahead of need keep
// to it; a step whose own order does not is issued to the end without touching
// the store, and rerun with pages.
func (m *Manager) pushed(g schedule.Group) {
	if m.store.bump {
		m.stack = append(m.stack, g)
	}
}

func (m *Manager) onTop(g schedule.Group) bool {
	return !m.store.bump || len(m.stack) > 0 && m.stack[len(m.stack)-1] == g
}

// popped tells whether a group may be restored, and takes it off the stack.
func (m *Manager) popped(g schedule.Group) bool {
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

// learn makes the plan for the schedule that was just recorded.
func (m *Manager) learn() {
	s := m.recording
	m.recording = nil
	if s == nil || m.phase != Train {
		return
	}
	if p := m.plans[m.key]; p != nil && p.Schedule.Equal(s) {
		return
	}
	pools := map[*Workspace]int{}
	for i, w := range m.spaces {
		pools[w] = i
	}
	m.plans[m.key] = s.Plan(m.cfg.Ahead, func(g schedule.Group) (int, int) {
		w := m.home[g]
		if m.plain[m.key] {
			return pools[w], 0
		}
		return pools[w], len(w.slots) - 1
	})
}
