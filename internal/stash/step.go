// This file owns steps as transactions: a step is accepted as a whole, or undone and
// rerun.

package stash

import (
	"errors"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// State is something that a step changes and that a rerun needs unchanged, such as random
// state, router bias, gradients or the position in the data. The manager calls Save
// before the step and Restore before its rerun. Both issue device work on s and may
// change host state at once.
type State interface {
	Save(s device.Stream)
	Restore(s device.Stream)
}

// Outcome says how a step ended on one rank, or on all ranks after a reduction.
type Outcome struct {
	Failed bool   // the step must be rerun or fails
	Final  bool   // the step fails, because no rerun can succeed
	Rank   int    // the lowest rank that failed
	Why    string // the reason of that rank
	Broke  bool   // a stack did not hold, so that the rerun is the first to show what the step needs
}

// Worse returns the worse of two outcomes. A final failure is worse than another one, and
// among equals the failure of the lower rank is returned.
func (v Outcome) Worse(w Outcome) Outcome {
	worse := v
	if w.Failed && (!v.Failed || w.Final && !v.Final || w.Final == v.Final && w.Rank < v.Rank) {
		worse = w
	}
	worse.Broke = v.Broke || w.Broke
	return worse
}

// Overflow reports that a step failed although it was rerun with more room, or that it
// cannot be given the room that it needs.
type Overflow struct {
	Rank  int
	Why   string // which group asked for how much, and how much there was
	Cause error  // the error that kept a tier from growing, or nil
}

// Error returns the rank, the reason and the cause.
func (e *Overflow) Error() string {
	s := fmt.Sprintf("rank %d: %s", e.Rank, e.Why)
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s
}

// Unwrap returns the cause.
func (e *Overflow) Unwrap() error { return e.Cause }

// Stats counts what happened in all steps, with those that were undone.
type Stats struct {
	Steps      int            `json:"steps"`
	Reruns     int            `json:"reruns"`
	Growths    int            `json:"growths"`
	Departures int            `json:"departures"` // steps that departed from their plan
	Spilled    schedule.Pages `json:"spilled_pages"`
	Host       schedule.Pages `json:"host_pages"` // pages of groups that Place put in host pages
	Stashed    schedule.Pages `json:"stashed_pages"`
	Demand     schedule.Pages `json:"demand_pages"` // the most pages that any step needed
	// Low is the fewest free pages of each tier in the last step.
	Low [Tiers]schedule.Pages `json:"low_pages"`
}

// transaction is the part of the manager that lives longer than a step.
type transaction struct {
	transacting bool
	states      []State
	attempt     int
	blind       bool // an attempt of this step broke a stack, on any rank
	stats       Stats
	logged      map[string]bool
}

// Protect registers a state that the manager saves before steps and restores before
// reruns.
func (m *Manager) Protect(s State) { m.states = append(m.states, s) }

// Stats returns the counts of all steps so far.
func (m *Manager) Stats() Stats { return m.stats }

// Generation returns a number that changes when sets move. Graphs that were captured
// before must then be captured again. It does not change when pools grow.
func (m *Manager) Generation() int { return int(m.store.gen) }

// Step runs one step. It calls body between Begin and Finish to issue the step, and again
// with the next attempt if the step overflowed. It returns an *Overflow if the rerun
// fails too. An attempt that breaks its stack does not count.
func (m *Manager) Step(key memory.Key, body func(attempt int) error) error {
	return m.Transact(key, func(attempt int) error {
		m.Begin(key)
		err := body(attempt)
		m.Finish()
		return err
	})
}

// Transact is like Step for work that calls Begin and Finish itself, such as the replay of
// a graph into which both were captured under the same key. If Generation changed before
// the second attempt, issue must capture the graph again.
func (m *Manager) Transact(key memory.Key, issue func(attempt int) error) error {
	if m.open || m.transacting {
		panic("stash: Step was called inside a step")
	}
	m.transacting = true
	defer func() {
		m.transacting = false
		if m.open { // issue failed or panicked in the middle
			m.abandon()
		}
	}()
	m.awaitRecords()
	for _, s := range m.states {
		s.Save(m.compute.Stream)
	}
	m.blind = false
	for m.attempt = 0; ; m.attempt++ {
		m.key, m.phase, m.recording, m.broken, m.err = key, key.Phase, nil, "", nil
		if err := issue(m.attempt); err != nil {
			return m.giveUp(err)
		}
		again, err := m.settle()
		if err != nil || !again {
			return err
		}
	}
}

// giveUp ends a step that the caller could not issue. It tells the other ranks, so that
// they do not wait for this one.
func (m *Manager) giveUp(err error) error {
	m.recording = nil
	err = errors.Join(err, m.compute.Stream.Sync())
	if m.cfg.Reduce != nil {
		_, failed := m.cfg.Reduce(Outcome{Failed: true, Final: true, Rank: m.cfg.Rank, Why: err.Error()})
		err = errors.Join(err, failed)
	}
	return err
}

// settle waits for the step and reads its reports once. A rank that overflowed grows its
// pools to the demand. Then the ranks agree. If a rank failed, all ranks undo the step
// and rerun it. A second failure, or a failure that growth cannot mend, is an error on
// all ranks. An attempt that broke a stack is no failure of that kind: it did not show
// what its step needs, and each key has at most one.
func (m *Manager) settle() (again bool, err error) {
	mine, own := m.examine()
	all := mine
	if m.cfg.Reduce != nil {
		if all, err = m.cfg.Reduce(mine); err != nil {
			return false, err
		}
	}
	before := m.attempt > 1 || m.attempt > 0 && !m.blind // the step failed before
	m.blind = m.blind || all.Broke
	switch {
	case !all.Failed:
		m.stats.Steps++
		if m.recording != nil {
			m.issued[m.key] = m.current
		}
		m.learn()
		return false, nil
	case own != nil:
		return false, own
	case all.Final:
		return false, &Overflow{Rank: all.Rank, Why: all.Why}
	case before:
		return false, &Overflow{Rank: all.Rank, Why: "the rerun of a step failed as well: " + all.Why}
	}
	m.once("rerun", "a step is rerun; pools that begin larger avoid it", "rank", all.Rank, "why", all.Why)
	m.stats.Reruns++
	for i := len(m.states) - 1; i >= 0; i-- {
		m.states[i].Restore(m.compute.Stream)
	}
	return true, nil
}

// examine reads the reports and gives this rank the room that it lacked. It returns an
// error if no rerun can succeed. The outcome is then final, so that no rank waits for
// another in vain.
func (m *Manager) examine() (Outcome, error) {
	what := m.current
	if m.recording == nil { // the step was replayed
		what = m.issued[m.key]
	}
	reports, err := m.reports()
	if err != nil {
		return Outcome{Failed: true, Final: true, Rank: m.cfg.Rank, Why: err.Error()}, err
	}
	m.count(reports, what)
	v := m.judge(reports)
	if v.Broke { // groups that could not be restored left other rows in sets, so nothing that it asked for counts
		v.Final = m.cfg.Mode == BumpOnly && m.plain[m.key]
		m.unstack()
		return v, nil
	}
	if err := m.mend(reports, what); err != nil {
		err = &Overflow{Rank: m.cfg.Rank, Why: v.Why, Cause: err}
		return Outcome{Failed: true, Final: true, Rank: m.cfg.Rank, Why: v.Why}, err
	}
	return v, nil
}

// reports returns the report of each store.
func (m *Manager) reports() (list []Report, err error) {
	if list, err = m.read(); err != nil || m.err != nil {
		return nil, errors.Join(m.err, err)
	}
	for _, rep := range list {
		if rep.Stale != 0 && m.broken == "" {
			return nil, errors.New("stash: the replayed step was captured before sets moved, or not completely; capture it again when Generation changes")
		}
	}
	return list, nil
}

// read downloads the reports of all stores at once. This is the only read of device memory
// in a step.
func (m *Manager) read() ([]Report, error) {
	s := m.compute.Stream
	if m.host == nil {
		rep, err := m.store.Report(s)
		return []Report{rep}, err
	}
	if err := m.dev.Grow(m.desk, m.reportBytes()); err != nil {
		return nil, err
	}
	var all memory.Bytes
	for _, st := range m.stores() {
		from := st.reported()
		s.Copy(m.desk.Slice(all, from.Len), from)
		all += align(from.Len)
	}
	raw := make([]byte, all)
	if err := s.Download(raw, m.desk.Slice(0, all)); err != nil {
		return nil, err
	}
	var list []Report
	for _, st := range m.stores() {
		n := st.reported().Len
		list = append(list, st.report(raw[:n]))
		raw = raw[align(n):]
	}
	return list, nil
}

// mend gives sets and tiers the room that the step lacked.
func (m *Manager) mend(reports []Report, what *issue) error {
	over := false
	for _, rep := range reports {
		over = over || rep.OverCapacity > 0
	}
	var err error
	if over && what != nil {
		err = m.resize(what)
	}
	for i, st := range m.stores() {
		err = errors.Join(err, m.adapt(st, m.demand(st, reports[i], what), reports[i].Overflows > 0))
	}
	return err
}

// unstack makes the next attempt use pages from a ring or, in the mode BumpOnly, restore
// nothing ahead of need. Captured steps become stale.
func (m *Manager) unstack() {
	m.noStack[m.key], m.plain[m.key] = true, true
	delete(m.plans, m.key)
	m.rearrange()
}

// rearrange makes steps captured so far stale.
func (m *Manager) rearrange() {
	for _, st := range m.stores() {
		st.rearrange(m.compute.Stream)
	}
}

// judge returns the outcome that the reports describe.
func (m *Manager) judge(reports []Report) Outcome {
	v := Outcome{Rank: m.cfg.Rank, Failed: true}
	if m.broken != "" {
		v.Broke, v.Why = true, "the schedule has changed: "+m.broken
		if m.cfg.Mode == BumpOnly {
			v.Why += "; a stack was asked for, so choose pages"
		}
		return v
	}
	for i, st := range m.stores() {
		rep := reports[i]
		switch {
		case rep.OverCapacity > 0:
			v.Why = fmt.Sprintf("%v received %d rows and its buffer holds %d; begin with larger sets", st.group(rep.OverID), rep.OverRows, rep.OverLimit)
			return v
		case rep.Overflows > 0:
			v.Why = fmt.Sprintf("%v asked for %d pages of %v and %d were free (device tier %d of at most %d, host tier %d of at most %d); raise the tiers' maxima or the memory budget",
				st.group(rep.OverflowID), rep.OverflowAsked, st.cfg.Page, rep.OverflowFree,
				st.Pages(Device), st.Max(Device), st.Pages(Host), st.Max(Host))
			return v
		}
	}
	return Outcome{}
}

// demand returns the most pages that the step's groups occupy at once. It depends only on
// the schedule and the needs, so that a rerun with that many pages succeeds whatever
// stashes and restores overlap.
func (m *Manager) demand(st *Store, rep Report, what *issue) (pages schedule.Pages) {
	known := make([]schedule.Pages, len(rep.Need))
	if what != nil {
		for _, r := range what.records {
			if r.store == st {
				known[r.id] = rep.Need[r.id]
			}
		}
		pages = what.schedule.Peak(func(g memory.GroupID) schedule.Pages {
			if r := what.records[g]; r != nil && r.store == st {
				return known[r.id]
			}
			return 0
		})
	}
	if rep.Overflows > 0 && !slices.Equal(known, rep.Need) {
		// The replayed step is not the one that was last issued under this key. No order
		// of the groups needs more pages than all of them together.
		pages = 0
		for _, n := range rep.Need {
			pages += n
		}
	}
	return pages
}

// emit traces an event of a group. The event has no size, because only the device knows
// the number of rows.
func (m *Manager) emit(what trace.Kind, g memory.GroupID) {
	if m.cfg.Emit != nil {
		m.cfg.Emit(trace.Event{Kind: what, Name: g.Name, Chunk: g.Chunk, Layer: g.Layer, Microbatch: g.Microbatch})
	}
}

// emitPages traces the pages of a finished step.
func (m *Manager) emitPages(low [Tiers]schedule.Pages) {
	if m.cfg.Emit == nil {
		return
	}
	page := int64(m.store.cfg.Page)
	for t := range Tiers {
		var have schedule.Pages
		for _, st := range m.stores() {
			have += st.Pages(t)
		}
		if have > 0 {
			m.cfg.Emit(trace.Event{Kind: trace.Spill, Tier: memory.Kind(t), Bytes: int64(have-low[t]) * page, Offset: int64(have) * page})
		}
	}
}

// count adds a step to the statistics.
func (m *Manager) count(reports []Report, what *issue) {
	var low [Tiers]schedule.Pages
	var all schedule.Pages
	for i, st := range m.stores() {
		rep := reports[i]
		for t := range low {
			low[t] += rep.Low[t]
		}
		demand := m.demand(st, rep, what)
		all += demand
		m.stats.Stashed += schedule.Pages(rep.Stashed)
		if st == m.host {
			m.stats.Host += schedule.Pages(rep.Stashed)
		} else if rep.Spilled > 0 {
			m.stats.Spilled += schedule.Pages(rep.Spilled)
			m.once("spill", "pages spilled to host memory; a larger device tier avoids it",
				"pages", rep.Spilled, "device_pages_needed", demand)
		}
		if what == nil || m.broken != "" {
			continue
		}
		for g, r := range what.records {
			if r.store == st && rep.Need[r.id] > 0 {
				m.needs[g] = rep.Need[r.id]
			}
		}
	}
	m.stats.Low = low
	if m.broken == "" {
		m.stats.Demand = max(m.stats.Demand, all)
	}
	m.emitPages(low)
}

// adapt grows the tiers to the step's demand: the device tier as far as it can grow, and
// the host tier for the rest. It returns an error only if must is set and both tiers
// together stay too small.
func (m *Manager) adapt(st *Store, demand schedule.Pages, must bool) error {
	if demand == 0 {
		return nil
	}
	refused := m.follow(st, Device, m.cfg.Sizer, demand, 0)
	if on := st.Pages(Device); demand > on || on == st.Max(Device) {
		// Rows that vary by a tenth vary the rest by far more. So what is spare is a share of
		// all pages, not of the rest.
		refused = errors.Join(refused, m.follow(st, Host, schedule.HostLowWater(), demand, on))
	}
	if missing := demand - st.Pages(Device) - st.Pages(Host); must && missing > 0 {
		return errors.Join(fmt.Errorf("the step needs %d more pages than both tiers can have", missing), refused)
	}
	return nil
}

// follow grows one tier to the size that its sizer wants, or else to the demand. Other
// pages than the tier's hold a part of the demand.
func (m *Manager) follow(st *Store, t int, sizer schedule.Sizer, demand, others schedule.Pages) error {
	have, most := st.Pages(t), st.Max(t)
	want := min(sizer.Next(schedule.Seen{Capacity: others + have, Demand: demand})-others, most)
	if want <= have {
		return nil
	}
	err := st.Grow(m.compute.Stream, t, want)
	if exact := min(demand-others, most); err != nil && exact > have && exact < want {
		err = st.Grow(m.compute.Stream, t, exact)
	}
	if err != nil {
		m.once("grow failed", "a tier could not grow", "tier", kinds[t].String(), "pages", want, "err", err)
		return err
	}
	m.stats.Growths++
	m.once("grow", "a tier grew; beginning with as much avoids reruns", "tier", kinds[t].String(), "pages", st.Pages(t))
	return nil
}

// resize gives larger buffers to tensors that were over capacity. It reads the numbers of
// rows from the records, outside the step.
func (m *Manager) resize(what *issue) error {
	layouts := make([]*Layout, len(m.spaces))
	for i, w := range m.spaces {
		asked, err := w.asked(what.records)
		if err != nil {
			return err
		}
		if layouts[i], err = w.larger(asked); err != nil {
			return err
		}
	}
	defer m.rearrange()
	for i, w := range m.spaces {
		if layouts[i] == nil {
			continue
		}
		if err := w.move(layouts[i]); err != nil {
			return err
		}
	}
	return nil
}

// once logs a message the first time that it is called with what.
func (m *Manager) once(what, msg string, args ...any) {
	if m.logged == nil {
		m.logged = map[string]bool{}
	}
	if !m.logged[what] {
		m.logged[what] = true
		m.cfg.Log.Info("stash: "+msg, args...) // no warning, because pools find their size by growing
	}
}
