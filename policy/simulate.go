// This file owns forecasts: what a step under a policy takes in time and memory.

package policy

import (
	"time"

	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
)

// Forecast is what a step comes to. The heaps are the runtime's own, so extents
// are what will be; times are what measured times and rates make of them.
type Forecast struct {
	Step    time.Duration `json:"step_ns"`
	Compute time.Duration `json:"compute_ns"` // compute's own work, recomputing included
	Waiting time.Duration `json:"waiting_ns"` // compute's, for copies
	// Extent is the device bytes that the step touches, Peak what of them is in
	// use at most; both with the profile's Base. Host is the pinned bytes.
	Extent int64 `json:"extent"`
	Peak   int64 `json:"peak"`
	Host   int64 `json:"host"`
	// OutBusy and InBusy are how long copies were under way in each direction.
	OutBusy time.Duration    `json:"out_busy_ns"`
	InBusy  time.Duration    `json:"in_busy_ns"`
	Counts  residency.Counts `json:"counts"`
	Units   []UnitForecast   `json:"units"` // in the order in which they save first
}

// UnitForecast is the part of one unit.
type UnitForecast struct {
	Unit
	Choice  Choice        `json:"choice"`
	Groups  int           `json:"groups"`
	Bytes   int64         `json:"bytes"`      // that its largest group saves
	Moved   int64         `json:"moved"`      // that leave in the whole step
	Window  time.Duration `json:"window_ns"`  // compute's own work between save and load of a group, at least
	Copies  time.Duration `json:"copies_ns"`  // the time of its copies, out and in
	Waiting time.Duration `json:"waiting_ns"` // compute's, for its copies
	Again   time.Duration `json:"again_ns"`   // its recomputing
	// Hidden is the share of the copies' time that compute did not wait for; one
	// where nothing is copied.
	Hidden float64 `json:"hidden"`
}

// Simulate runs a step under a policy and a plan for it. Without a plan
// everything stays that there is room for.
func Simulate(p *Profile, pol Policy, plan *residency.Plan, l Links, cfg residency.Config) (Forecast, error) {
	s := p.step(pol)
	t := s.try(plan, l, cfg)
	if t.err != nil {
		return Forecast{}, t.err
	}
	return t.forecast(), nil
}

// group is one that a step saves.
type group struct {
	schedule.Group
	unit       int     // in the step's list
	save, load int     // positions in the schedule; load is -1 without one
	from, to   float64 // compute's own work before them, in seconds
	bytes      int64   // that it saves
	// Of its storages that may move, the bytes of those that no group saved before
	// it, and of those that no group loads before it: storages are copied once.
	out, in  int64
	storages []residency.Item
}

// step is a step under a policy, ready to be tried with plans.
type step struct {
	p        *Profile
	pol      Policy
	tape     residency.Tape
	schedule *schedule.Schedule
	when     []float64 // by position: compute's own work before it
	groups   []group   // in the order of saving
	units    []Unit    // in the order in which the recorded step saves them first
	sizes    []int64   // of storages
	saver    []int     // by storage: the group that saved it first, or -1
}

// units are those of the recorded step in the order of saving first, and their
// places in it.
func (p *Profile) units() (list []Unit, place map[Unit]int) {
	place = map[Unit]int{}
	for _, op := range p.Tape.Ops {
		if u := UnitOf(op.Group); op.Kind == residency.OpSave {
			if _, known := place[u]; !known {
				place[u] = len(list)
				list = append(list, u)
			}
		}
	}
	return list, place
}

func (p *Profile) step(pol Policy) *step {
	s := &step{p: p, pol: pol, tape: p.Under(pol)}
	s.schedule = s.tape.Schedule()
	var unit map[Unit]int
	s.units, unit = p.units()
	events := s.schedule.Len()
	s.groups, s.when = make([]group, 0, events/2+1), make([]float64, 0, events)
	saved := make([]int, events) // by position of the save: the group
	var loaded []bool            // by storage
	scope := -1.0                // where the open one begins
	for _, op := range s.tape.Ops {
		switch op.Kind {
		case residency.OpTake, residency.OpForeign:
			s.sizes, s.saver, loaded = append(s.sizes, op.Bytes), append(s.saver, -1), append(loaded, false)
		case residency.OpSave:
			g := group{Group: op.Group, unit: unit[UnitOf(op.Group)], save: len(s.when), load: -1, from: op.At.Seconds(), storages: op.Items}
			for _, it := range op.Items {
				n := s.sizes[it.ID]
				if g.bytes += n; s.saver[it.ID] < 0 {
					s.saver[it.ID] = len(s.groups)
					if !it.Stay {
						g.out += n
					}
				}
			}
			saved[g.save] = len(s.groups)
			s.groups = append(s.groups, g)
			s.when = append(s.when, op.At.Seconds())
		case residency.OpBeginScope:
			scope = op.At.Seconds()
		case residency.OpEndScope:
			scope = -1
		case residency.OpLoad:
			at, _ := s.schedule.Saved(op.Group)
			g := &s.groups[saved[at]]
			g.load, g.to = len(s.when), op.At.Seconds()
			if scope >= 0 {
				g.to = scope // a graph waits at its beginning
			}
			for _, it := range g.storages {
				if !loaded[it.ID] && !it.Stay {
					g.in += s.sizes[it.ID]
				}
				loaded[it.ID] = true
			}
			s.when = append(s.when, g.to)
		}
	}
	return s
}

// trial is a step under one plan.
type trial struct {
	*step
	plan    *residency.Plan
	score   *score
	machine *residency.Machine
	end     float64
	err     error
}

// try runs a step on the machine, and then in time.
func (s *step) try(plan *residency.Plan, l Links, cfg residency.Config) *trial {
	return s.attempt(plan, l, cfg, nil)
}

// attempt is try with a witness, or nil.
func (s *step) attempt(plan *residency.Plan, l Links, cfg residency.Config, w *witness) *trial {
	t := &trial{step: s, plan: plan, score: &score{points: make([]point, 0, len(s.tape.Ops)), after: make([]point, 0, 2*len(s.groups))}}
	for l := residency.Out; l <= residency.In; l++ {
		t.score.copies[l] = make([]transfer, 0, len(s.groups))
	}
	t.machine = residency.New(cfg, t.score, plan)
	if w != nil {
		w.begin(t)
	}
	t.err = s.tape.Run(t.machine, func(op residency.Op) {
		t.score.now = op.At.Seconds()
		t.score.planned = op.Kind == residency.OpSave || op.Kind == residency.OpEndScope
		switch op.Kind {
		case residency.OpBeginScope:
			t.score.begin()
		case residency.OpEndScope:
			t.score.endScope()
		}
		if w != nil {
			w.call(op)
		}
	})
	if w != nil {
		t.score.now = s.tape.Span.Seconds()
		w.end()
	}
	if t.err == nil {
		t.end = t.score.play(l, s.tape.Span.Seconds())
	}
	return t
}

// evicted are the groups whose storages left without the plan saying so.
func (t *trial) evicted() (list []int) {
	for _, c := range t.score.copies[residency.Out] {
		if !c.planned {
			list = append(list, t.saver[c.storage])
		}
	}
	return list
}

// forced tells whether storages of units had to leave that are not offloaded.
func (t *trial) forced() bool {
	for _, g := range t.evicted() {
		if t.pol[t.units[t.groups[g].unit]] != Offload {
			return true
		}
	}
	return false
}

// cost is what the solver minimises: time, and a thousandth of that of the copies,
// so that of two choices as fast the one with fewer copies wins.
func (t *trial) cost(l Links) float64 {
	c := t.machine.Counts()
	return t.end + 1e-3*(float64(c.OutBytes)/l.Out+float64(c.InBytes)/l.In)
}

func seconds(s float64) time.Duration { return time.Duration(s*1e9 + 0.5) }

func (t *trial) forecast() Forecast {
	f := Forecast{
		Step: seconds(t.end), Compute: t.tape.Span,
		Extent: t.machine.Device().Top() + t.p.Base, Peak: t.machine.Device().Peak() + t.p.Base,
		Host: t.machine.Host().Top(), Counts: t.machine.Counts(),
		Units: make([]UnitForecast, len(t.units)),
	}
	for i, u := range t.units {
		f.Units[i] = UnitForecast{Unit: u, Choice: t.pol[u], Hidden: 1, Window: -1}
	}
	for _, g := range t.groups {
		u := &f.Units[g.unit]
		u.Groups++
		u.Bytes = max(u.Bytes, g.bytes)
		if w := seconds(g.to - g.from); g.load >= 0 && (u.Window < 0 || w < u.Window) {
			u.Window = w
		}
		if u.Choice == Recompute {
			u.Again += t.p.Units[u.Unit].Recompute
		}
	}
	for i := range f.Units { // a unit that nobody loads has the rest of the step
		if f.Units[i].Window < 0 {
			f.Units[i].Window = t.tape.Span
		}
	}
	t.lanes(&f)
	return f
}

// lanes adds what the copies did.
func (t *trial) lanes(f *Forecast) {
	of := func(p point) *UnitForecast {
		return &f.Units[t.groups[t.saver[t.score.copies[p.lane][p.index-1].storage]].unit]
	}
	var copies, held [residency.Lanes]float64
	each := make([]float64, len(f.Units))
	for l := residency.Out; l <= residency.In; l++ {
		for _, c := range t.score.copies[l] {
			g := t.groups[t.saver[c.storage]].unit
			copies[l] += c.end - c.begin
			each[g] += c.end - c.begin
			if l == residency.Out {
				f.Units[g].Moved += int64(c.bytes)
			}
		}
	}
	waits := make(map[*UnitForecast]float64)
	for i, w := range t.score.waits {
		held[residency.Compute] += t.score.held[i]
		if w.on.index > 0 {
			waits[of(w.on)] += t.score.held[i]
		}
	}
	f.OutBusy, f.InBusy = seconds(copies[residency.Out]), seconds(copies[residency.In])
	f.Waiting = seconds(held[residency.Compute])
	for i := range f.Units {
		u := &f.Units[i]
		u.Copies, u.Waiting = seconds(each[i]), seconds(waits[u])
		if each[i] > 0 {
			u.Hidden = max(0, 1-waits[u]/each[i])
		}
	}
}
