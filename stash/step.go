// This file owns steps as transactions: what a step did is accepted as a whole
// or undone and done again.

package stash

import (
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/schedule"
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
	Rank   int    // the lowest rank that failed
	Why    string // its reason
}

// Worse is the verdict on two ranks together.
func (v Verdict) Worse(w Verdict) Verdict {
	if !v.Failed || w.Failed && w.Rank < v.Rank {
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
}

// transaction is the part of the manager that outlives a step.
type transaction struct {
	states  []State
	attempt int
	stats   Stats
	logged  map[string]bool
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
	return m.Transact(func(attempt int) error {
		m.Begin(key)
		err := body(attempt)
		m.Finish()
		return err
	})
}

// Transact is Step for work that brings its own Begin and Finish, such as the
// replay of a graph into which both were captured.
func (m *Manager) Transact(issue func(attempt int) error) error {
	for _, s := range m.states {
		s.Save(m.compute.stream)
	}
	for m.attempt = 0; ; m.attempt++ {
		if err := issue(m.attempt); err != nil {
			return errors.Join(err, m.compute.stream.Sync())
		}
		again, err := m.Settle()
		if err != nil || !again {
			return err
		}
	}
}

// Settle waits for the step and reads, once, what it left on the device. If any
// rank overflowed it undoes the step, lets the pools grow to what was needed and
// asks for the step again; a second failure is an error.
func (m *Manager) Settle() (again bool, err error) {
	rep, err := m.store.Report(m.compute.stream)
	if err = errors.Join(m.err, err); err != nil {
		return false, err
	}
	mine := m.judge(rep)
	all := mine
	if m.cfg.Reduce != nil {
		if all, err = m.cfg.Reduce(mine); err != nil {
			return false, err
		}
	}
	if rep.Stale != 0 {
		return false, errors.New("stash: a step was replayed that was captured before buffers moved; capture it again when Generation changes")
	}
	demand := m.demand(rep)
	m.count(rep, demand)
	if !all.Failed {
		m.stats.Steps++
		m.learn()
		return false, m.adapt(demand, false)
	}
	if m.attempt > 0 {
		return false, &Overflow{Rank: all.Rank, Why: "the rerun of a step failed as well: " + all.Why}
	}
	m.once("rerun", "a step is rerun", "why", all.Why, "rank", all.Rank)
	m.stats.Reruns++
	for i := len(m.states) - 1; i >= 0; i-- {
		m.states[i].Restore(m.compute.stream)
	}
	if m.broken != "" {
		delete(m.plans, m.key)
	}
	m.recording = nil
	if err := errors.Join(m.resize(rep), m.adapt(demand, rep.Overflows > 0)); err != nil {
		return false, &Overflow{Rank: m.cfg.Rank, Why: mine.Why, Cause: err}
	}
	return true, nil
}

// judge puts a report into words.
func (m *Manager) judge(rep Report) Verdict {
	v := Verdict{Rank: m.cfg.Rank, Failed: true}
	switch {
	case rep.OverBudget > 0:
		v.Why = fmt.Sprintf("%v received %d rows and its buffer holds %d", m.store.group(rep.OverID), rep.OverRows, rep.OverLimit)
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
func (m *Manager) demand(rep Report) schedule.Pages {
	s := m.recording
	if s == nil { // a replay
		p := m.plans[m.key]
		if p == nil {
			return 0
		}
		s = p.schedule
	}
	return s.Peak(func(g schedule.Group) schedule.Pages { return rep.Need[g] })
}

func (m *Manager) count(rep Report, demand schedule.Pages) {
	m.stats.Stashed += schedule.Pages(rep.Stashed)
	m.stats.Demand = max(m.stats.Demand, demand)
	if rep.Spilled > 0 {
		m.stats.Spilled += schedule.Pages(rep.Spilled)
		m.once("spill", "pages spilled to host memory; a larger device tier avoids it",
			"pages", rep.Spilled, "device_pages_needed", demand)
	}
}

// adapt lets the tiers follow the step's demand: the device tier as far as it
// may, the host tier for the rest. Growth that a step did not need to succeed is
// no reason to fail.
func (m *Manager) adapt(demand schedule.Pages, must bool) error {
	for t := range Tiers {
		have, most := m.store.Pages(t), m.store.Max(t)
		want := min(m.cfg.Sizer.Next(schedule.Seen{Capacity: have, Demand: demand}), most)
		if want > have && demand > 0 {
			switch err := m.store.Grow(m.compute.stream, t, want); {
			case err == nil:
				m.stats.Growths++
				m.once("grow", "a tier grew; beginning with as much avoids reruns", "tier", kinds[t].String(), "pages", want)
			case must:
				return err
			default:
				m.once("grow failed", "a tier could not grow", "tier", kinds[t].String(), "pages", want, "err", err)
			}
		}
		demand = max(demand-m.store.Pages(t), 0)
	}
	if must && demand > 0 {
		return fmt.Errorf("the step needs %d pages more than both tiers may have", demand)
	}
	return nil
}

// resize gives every workspace that received too many rows larger sets. The
// records say how many: they are read here, outside of the step.
func (m *Manager) resize(rep Report) error {
	if rep.OverBudget == 0 {
		return nil
	}
	for _, w := range m.spaces {
		rows, err := m.store.asked(m.compute.stream, w.records)
		if err != nil {
			return err
		}
		if err := w.resize(rows); err != nil {
			return err
		}
	}
	m.store.rearrange(m.compute.stream)
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
