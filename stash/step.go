// This file owns steps as transactions: what a step did is accepted as a whole
// or undone and done again.

package stash

import (
	"errors"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/trace"
)

// State is something a step changes and a rerun must find as it was: random
// state, router bias, gradients, the position in the data. Save is called before
// the step and Restore before its rerun; both issue device work on s and may
// change host state at once.
type State interface {
	Save(s device.Stream)
	Restore(s device.Stream)
}

// Verdict is how a step went on one rank, or, reduced, on all.
type Verdict struct {
	Failed bool
	Final  bool   // no rerun can help
	Rank   int    // the lowest rank that failed
	Why    string // its reason
}

// Worse is the verdict on two ranks together: final failures come before others,
// lower ranks before higher.
func (v Verdict) Worse(w Verdict) Verdict {
	switch {
	case !w.Failed || v.Final && !w.Final:
		return v
	case !v.Failed || w.Final && !v.Final || w.Rank < v.Rank:
		return w
	}
	return v
}

// Overflow is a step that failed again although everything that can grow has
// grown, or that cannot be given what it needs.
type Overflow struct {
	Rank  int
	Why   string // what was asked for, by which group, and what there was
	Cause error  // what kept a pool from growing, if that was it
}

func (e *Overflow) Error() string {
	s := fmt.Sprintf("rank %d: %s", e.Rank, e.Why)
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s
}

func (e *Overflow) Unwrap() error { return e.Cause }

// Stats count what happened over all steps, those that were undone included.
type Stats struct {
	Steps      int            `json:"steps"`
	Reruns     int            `json:"reruns"`
	Growths    int            `json:"growths"`
	Departures int            `json:"departures"` // steps that left their plan
	Spilled    schedule.Pages `json:"spilled_pages"`
	Stashed    schedule.Pages `json:"stashed_pages"`
	Demand     schedule.Pages `json:"demand_pages"` // the most of any step
	// Low is the fewest free pages of each tier in the step settled last.
	Low [Tiers]schedule.Pages `json:"low_pages"`
}

// transaction is the part of the manager that outlives a step.
type transaction struct {
	transacting bool
	states      []State
	attempt     int
	stats       Stats
	logged      map[string]bool
}

// Protect registers a state that reruns must find as it was.
func (m *Manager) Protect(s State) { m.states = append(m.states, s) }

// Stats are the counts so far.
func (m *Manager) Stats() Stats { return m.stats }

// Generation changes when sets have moved: graphs captured before must be
// captured again. Growing pools leaves it alone.
func (m *Manager) Generation() int { return int(m.store.gen) }

// Step runs one step: body issues all of it between Begin and Finish, and is
// called again with the next attempt if the step overflowed.
func (m *Manager) Step(key Key, body func(attempt int) error) error {
	return m.Transact(key, func(attempt int) error {
		m.Begin(key)
		err := body(attempt)
		m.Finish()
		return err
	})
}

// Transact is Step for work that brings its own Begin and Finish, such as the
// replay of a graph into which both were captured under the same key. If the
// generation changed before the second attempt (see Generation), issue must
// capture the graph again.
func (m *Manager) Transact(key Key, issue func(attempt int) error) error {
	if m.open || m.transacting {
		panic("stash: a step inside of a step")
	}
	m.transacting = true
	defer func() {
		m.transacting = false
		if m.open { // issue failed or panicked in the middle
			m.abandon()
		}
	}()
	for _, s := range m.states {
		s.Save(m.compute.Stream)
	}
	for m.attempt = 0; ; m.attempt++ {
		m.key, m.phase, m.recording, m.broken, m.err = key, key.Phase, nil, "", nil
		if err := issue(m.attempt); err != nil {
			return m.give(err)
		}
		again, err := m.settle()
		if err != nil || !again {
			return err
		}
	}
}

// give ends a step that the caller could not issue: the other ranks must not wait
// for this one.
func (m *Manager) give(err error) error {
	m.recording = nil
	err = errors.Join(err, m.compute.Stream.Sync())
	if m.cfg.Reduce != nil {
		_, failed := m.cfg.Reduce(Verdict{Failed: true, Final: true, Rank: m.cfg.Rank, Why: err.Error()})
		err = errors.Join(err, failed)
	}
	return err
}

// settle waits for the step and reads, once, what it left on the device. A rank
// that overflowed lets its pools grow to what was needed; then the ranks agree.
// If any failed, all undo the step and do it again; a second failure, or one that
// growth cannot mend, is an error on all.
func (m *Manager) settle() (again bool, err error) {
	mine, own := m.examine()
	all := mine
	if m.cfg.Reduce != nil {
		if all, err = m.cfg.Reduce(mine); err != nil {
			return false, err
		}
	}
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
	case m.attempt > 0:
		return false, &Overflow{Rank: all.Rank, Why: "the rerun of a step failed as well: " + all.Why}
	}
	m.once("rerun", "a step is rerun; pools that begin larger avoid it", "rank", all.Rank, "why", all.Why)
	m.stats.Reruns++
	for i := len(m.states) - 1; i >= 0; i-- {
		m.states[i].Restore(m.compute.Stream)
	}
	return true, nil
}

// examine reads the report and does what this rank can about it. The error is one
// that no rerun can mend; the verdict then is final, so that no rank waits for
// another in vain.
func (m *Manager) examine() (Verdict, error) {
	rep, err := m.store.Report(m.compute.Stream)
	if err = errors.Join(m.err, err); err == nil && rep.Stale != 0 && m.broken == "" {
		err = errors.New("stash: a step was replayed that was captured before sets moved, or not completely; capture it again when Generation changes")
	}
	if err != nil {
		return Verdict{Failed: true, Final: true, Rank: m.cfg.Rank, Why: err.Error()}, err
	}
	what := m.current
	if m.recording == nil { // a replay
		what = m.issued[m.key]
	}
	demand := m.demand(rep, what)
	m.count(rep, demand)
	v := m.judge(rep)
	if err := errors.Join(m.resize(rep, what), m.adapt(demand, rep.Overflows > 0)); err != nil {
		err = &Overflow{Rank: m.cfg.Rank, Why: v.Why, Cause: err}
		return Verdict{Failed: true, Final: true, Rank: m.cfg.Rank, Why: v.Why}, err
	}
	if m.broken != "" {
		v.Final = m.cfg.Mode == BumpOnly && m.plain[m.key]
		m.unstack()
	}
	return v, nil
}

// unstack makes the next attempt one that does not break a stack: with pages, or,
// if a stack was asked for, without moving anything ahead of need. What was
// captured is not to be replayed.
func (m *Manager) unstack() {
	m.noStack[m.key], m.plain[m.key] = true, true
	delete(m.plans, m.key)
	m.store.rearrange(m.compute.Stream)
}

// judge puts a report into words.
func (m *Manager) judge(rep Report) Verdict {
	v := Verdict{Rank: m.cfg.Rank, Failed: true}
	switch {
	case rep.OverBudget > 0:
		v.Why = fmt.Sprintf("%v received %d rows and its buffer holds %d; begin with larger sets", m.store.group(rep.OverID), rep.OverRows, rep.OverLimit)
	case rep.Overflows > 0:
		v.Why = fmt.Sprintf("%v asked for %d pages of %v and %d were free (device tier %d of at most %d, host tier %d of at most %d); raise the tiers' maxima or the memory budget",
			m.store.group(rep.OverflowID), rep.OverflowAsked, m.store.cfg.Page, rep.OverflowFree,
			m.store.Pages(Device), m.store.Max(Device), m.store.Pages(Host), m.store.Max(Host))
	case m.broken != "":
		v.Why = "the schedule has changed: " + m.broken
		if m.cfg.Mode == BumpOnly {
			v.Why += "; a stack was asked for, so choose pages"
		}
	default:
		return Verdict{}
	}
	return v
}

// demand is the most pages that the step's groups occupy at once. It follows
// from the schedule and the needs alone, so that no overlap of stash and restore
// makes a rerun need more.
func (m *Manager) demand(rep Report, what *issue) (pages schedule.Pages) {
	known := make([]schedule.Pages, len(rep.Need))
	if what != nil {
		for _, r := range what.records {
			known[r.id] = rep.Need[r.id]
		}
		pages = what.schedule.Peak(func(g schedule.Group) schedule.Pages {
			if r := what.records[g]; r != nil {
				return known[r.id]
			}
			return 0
		})
	}
	if rep.Overflows > 0 && !slices.Equal(known, rep.Need) {
		// Something else was replayed than was last issued under this key: no
		// order of the groups needs more than all of them together.
		pages = 0
		for _, n := range rep.Need {
			pages += n
		}
	}
	return pages
}

// emit traces what is done with a group. How many rows it has is known on the device
// alone.
func (m *Manager) emit(what trace.What, g schedule.Group) {
	if m.cfg.Emit != nil {
		m.cfg.Emit(trace.Event{What: what, Name: g.Name, Chunk: g.Chunk, Layer: g.Layer, Microbatch: g.Microbatch})
	}
}

// emitPages traces the pages of a step that is over.
func (m *Manager) emitPages(rep Report) {
	if m.cfg.Emit == nil {
		return
	}
	page := int64(m.store.cfg.Page)
	for t := range Tiers {
		have := m.store.Pages(t)
		if have > 0 {
			m.cfg.Emit(trace.Event{What: trace.Spill, Tier: trace.Tier(t), Bytes: int64(have-rep.Low[t]) * page, Offset: int64(have) * page})
		}
	}
}

func (m *Manager) count(rep Report, demand schedule.Pages) {
	m.emitPages(rep)
	m.stats.Stashed += schedule.Pages(rep.Stashed)
	m.stats.Demand = max(m.stats.Demand, demand)
	m.stats.Low = rep.Low
	if rep.Spilled > 0 {
		m.stats.Spilled += schedule.Pages(rep.Spilled)
		m.once("spill", "pages spilled to host memory; a larger device tier avoids it",
			"pages", rep.Spilled, "device_pages_needed", demand)
	}
}

// adapt lets the tiers follow the step's demand: the device tier as far as it
// may and can, the host tier for the rest. Growth that a step did not need to
// succeed is no reason to fail.
func (m *Manager) adapt(demand schedule.Pages, must bool) error {
	var refused error
	sizers := [Tiers]schedule.Sizer{m.cfg.Sizer, schedule.DefaultLowWater()}
	for t, sizer := range sizers {
		if demand == 0 {
			return nil
		}
		refused = errors.Join(refused, m.follow(t, sizer, demand))
		demand = max(demand-m.store.Pages(t), 0)
	}
	if !must || demand == 0 {
		return nil
	}
	return errors.Join(fmt.Errorf("the step needs %d pages more than both tiers can have", demand), refused)
}

// follow lets one tier grow to what its sizer wants, or else to what is needed.
func (m *Manager) follow(t int, sizer schedule.Sizer, demand schedule.Pages) error {
	have, most := m.store.Pages(t), m.store.Max(t)
	want := min(sizer.Next(schedule.Seen{Capacity: have, Demand: demand}), most)
	if want <= have {
		return nil
	}
	err := m.store.Grow(m.compute.Stream, t, want)
	if exact := min(demand, most); err != nil && exact > have && exact < want {
		err = m.store.Grow(m.compute.Stream, t, exact)
	}
	if err != nil {
		m.once("grow failed", "a tier could not grow", "tier", kinds[t].String(), "pages", want, "err", err)
		return err
	}
	m.stats.Growths++
	m.once("grow", "a tier grew; beginning with as much avoids reruns", "tier", kinds[t].String(), "pages", m.store.Pages(t))
	return nil
}

// resize gives tensors that received too many rows larger buffers. The records
// say how many: they are read here, outside of the step.
func (m *Manager) resize(rep Report, what *issue) error {
	if rep.OverBudget == 0 || what == nil {
		return nil
	}
	layouts := make([]*Layout, len(m.spaces))
	for i, w := range m.spaces {
		asked, err := m.store.asked(m.compute.Stream, w.layout, what.records)
		if err != nil {
			return err
		}
		if layouts[i], err = w.larger(asked); err != nil {
			return err
		}
	}
	defer m.store.rearrange(m.compute.Stream)
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

// once logs the first occurrence of something.
func (m *Manager) once(what, msg string, args ...any) {
	if m.logged == nil {
		m.logged = map[string]bool{}
	}
	if !m.logged[what] {
		m.logged[what] = true
		m.cfg.Log.Warn("stash: "+msg, args...)
	}
}
