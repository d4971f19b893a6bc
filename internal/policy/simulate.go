// This file owns forecasts: the time and memory of a step under a policy.

package policy

import (
	"time"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// Forecast holds the expected time and memory of a step. Extents are exact, because the
// simulation uses the runtime's own heaps. Times follow from measured times and rates.
type Forecast struct {
	Step    time.Duration `json:"step_ns"`
	Compute time.Duration `json:"compute_ns"` // compute's own work, with recomputation
	Waiting time.Duration `json:"waiting_ns"` // compute's waits for copies
	// Extent is the device memory that the step touches, and Peak the most of it that is in
	// use at once. Both include the profile's Base. Host is the extent of pinned host memory.
	Extent memory.Bytes `json:"extent"`
	Peak   memory.Bytes `json:"peak"`
	Host   memory.Bytes `json:"host"`
	// DevicePages and HostPages are the most pages of rows in each tier at once. Extent and
	// Peak include the device pages. RowBytes is the bytes of rows that go to host pages in
	// a step.
	DevicePages schedule.Pages `json:"device_pages,omitempty"`
	HostPages   schedule.Pages `json:"host_pages,omitempty"`
	RowBytes    memory.Bytes   `json:"row_bytes,omitempty"`
	// Spilled is the most pages of stashed rows that find no device page at once.
	Spilled   schedule.Pages `json:"spilled_pages,omitempty"`
	PageBytes memory.Bytes   `json:"page_bytes,omitempty"` // size of one page
	// Sets is how many sets each workspace has beyond those of the recorded step. Extent
	// and Peak include their SetBytes.
	Sets     int          `json:"sets,omitempty"`
	SetBytes memory.Bytes `json:"set_bytes,omitempty"`
	// OutBusy and InBusy are the time that copies were in flight in each direction.
	OutBusy time.Duration    `json:"out_busy_ns"`
	InBusy  time.Duration    `json:"in_busy_ns"`
	Counts  residency.Counts `json:"counts"`
	Units   []UnitForecast   `json:"units"` // in the order in which they save first

	paid float64 // seconds that the solver compares
}

// Activations returns the part of Extent that holds saved tensors: Extent without the base
// of the recorded step, the device pages and the added sets.
func (f *Forecast) Activations(base memory.Bytes) memory.Bytes {
	return f.Extent - base - memory.Bytes(f.DevicePages)*f.PageBytes - f.SetBytes
}

// UnitForecast is the part of a forecast for one unit.
type UnitForecast struct {
	memory.Unit
	Choice  memory.Choice `json:"choice"`
	Groups  int           `json:"groups"`
	Bytes   memory.Bytes  `json:"bytes"`      // bytes that its largest group saves
	Moved   memory.Bytes  `json:"moved"`      // bytes that are offloaded in the whole step
	Window  time.Duration `json:"window_ns"`  // compute's own work between save and load of a group, at its shortest
	Copies  time.Duration `json:"copies_ns"`  // time of its offloads and reloads
	Waiting time.Duration `json:"waiting_ns"` // compute's waits for its copies
	Again   time.Duration `json:"again_ns"`   // time of its recomputation
	// Hidden is the share of the copies' time that compute did not wait for. It is one if
	// nothing is copied.
	Hidden float64 `json:"hidden"`
}

// Simulate returns the forecast of a step under a policy with a plan. If plan is nil,
// everything stays on the device that fits. Simulate returns an error if the step does not
// fit.
func Simulate(p *Profile, pol memory.Policy, plan *residency.Plan, l memory.Links, cfg residency.Config) (Forecast, error) {
	s := p.step(pol)
	t := s.try(plan, l, cfg)
	if t.err != nil {
		return Forecast{}, t.err
	}
	return t.forecast(), nil
}

// group is a group that a step saves.
type group struct {
	memory.GroupID
	unit       int          // index in the step's units
	save, load int          // positions in the schedule; load is -1 if there is none
	from, to   float64      // compute's own work before them, in seconds
	bytes      memory.Bytes // bytes that it saves
	// out is the bytes of its movable storages that no group saved before it, and in the
	// bytes of those that no group loads before it. A storage is copied once.
	out, in  memory.Bytes
	storages []residency.Item
}

// step is a step under a policy, ready to be tried with plans.
type step struct {
	p        *Profile
	pol      memory.Policy
	tape     residency.Tape
	schedule *schedule.Schedule
	when     []float64      // compute's own work before each position
	groups   []group        // in the order of saving
	byLoad   []int          // the groups that are loaded, with the last load first
	units    []memory.Unit  // in the order in which the recorded step saves them first
	sizes    []memory.Bytes // sizes of storages
	saver    []int          // for each storage, the group that saved it first, or -1
	rows     *rowPlan       // nil if there are no rows
	pages    schedule.Pages // device pages for rows
}

// units returns the units of the recorded step in the order of their first save, and the
// index of each.
func (p *Profile) units() (list []memory.Unit, place map[memory.Unit]int) {
	place = map[memory.Unit]int{}
	for _, op := range p.Tape.Ops {
		if u := op.Group.Unit(); op.Kind == residency.OpSave || op.Kind == residency.OpRowSave {
			if _, known := place[u]; !known {
				place[u] = len(list)
				list = append(list, u)
			}
		}
	}
	return list, place
}

func (p *Profile) step(pol memory.Policy) *step {
	s := &step{p: p, pol: pol, tape: p.Under(pol)}
	s.schedule = s.tape.Schedule()
	var unit map[memory.Unit]int
	s.units, unit = p.units()
	events := s.schedule.Len()
	s.groups, s.when = make([]group, 0, events/2+1), make([]float64, 0, events)
	saved := make([]int, events) // for each position of a save, the group
	var loaded []bool            // for each storage
	scope := -1.0                // where the open scope begins, or -1
	for _, op := range s.tape.Ops {
		switch op.Kind {
		case residency.OpTake, residency.OpBorrow:
			s.sizes, s.saver, loaded = append(s.sizes, op.Bytes), append(s.saver, -1), append(loaded, false)
		case residency.OpSave:
			g := group{GroupID: op.Group, unit: unit[op.Group.Unit()], save: len(s.when), load: -1, from: op.At.Seconds(), storages: op.Items}
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
				g.to = scope // waits in a graph are at its beginning
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
	s.sortLoads()
	s.rows = p.rowPlan()
	s.place(pol)
	return s
}

// place sets the device pages that a policy needs for rows.
func (s *step) place(pol memory.Policy) {
	n := s.rows.devicePages(pol)
	s.pol, s.pages = pol, n+n/spareRows
	if s.rows != nil && s.rows.Fixed {
		s.pages = s.rows.Pages
	}
}

// pageBytes returns the device memory of pages.
func (s *step) pageBytes() memory.Bytes {
	if s.rows == nil {
		return 0
	}
	return memory.Bytes(s.pages) * s.rows.Page
}

// trial is a step under one plan.
type trial struct {
	*step
	plan    *residency.Plan
	score   *score
	machine *residency.Machine
	end     float64
	rowRun  *rowRun
	err     error
}

// try runs a step on the machine and then simulates its times. The machine gets cfg's
// device bytes without those of device pages.
func (s *step) try(plan *residency.Plan, l memory.Links, cfg residency.Config) *trial {
	t := &trial{step: s, plan: plan, score: &score{points: make([]point, 0, len(s.tape.Ops)), after: make([]point, 0, 2*len(s.groups))}}
	for l := residency.Out; l < lanes; l++ {
		t.score.copies[l] = make([]transfer, 0, len(s.groups))
	}
	cfg.Device = max(cfg.Device-s.pageBytes(), 0)
	t.machine = residency.New(cfg, t.score, plan)
	if s.rows != nil {
		t.rowRun = s.rows.run(t.score, s.pol, s.pages)
	}
	t.err = s.tape.Run(t.machine, func(op residency.Op) {
		t.score.now = op.At.Seconds()
		t.score.planned = op.Kind == residency.OpSave || op.Kind == residency.OpEndScope
		switch op.Kind {
		case residency.OpBeginScope:
			t.score.begin()
		case residency.OpEndScope:
			t.score.endScope()
		case residency.OpRowLease, residency.OpRowSave, residency.OpRowReturn, residency.OpRowDone:
			if t.rowRun != nil {
				t.rowRun.call(op)
			}
		}
	})
	if t.err == nil {
		t.end = t.score.play(l, s.tape.Span.Seconds())
	}
	return t
}

// evicted returns the groups whose storages were evicted.
func (t *trial) evicted() (list []int) {
	for _, c := range t.score.copies[residency.Out] {
		if !c.planned {
			list = append(list, t.saver[c.storage])
		}
	}
	return list
}

// forced reports whether storages of units that are not offloaded were evicted.
func (t *trial) forced() bool {
	for _, g := range t.evicted() {
		if t.pol[t.units[t.groups[g].unit]] != memory.Offload {
			return true
		}
	}
	return false
}

// rowDrag is the share of compute's speed that copies of rows take while they cross the
// link. Kernels copy them, and occupy 8 of some 130 multiprocessors; copy engines copy
// everything else. Recorded times include this drag, so forecasts do not add it.
const rowDrag = 1.0 / 16

// paid returns the time that a step costs: its length and the drag of what it copies.
func (t *trial) paid(l memory.Links) float64 {
	rows := float64(t.rowRun.total())
	return t.end + rowDrag*(rows/l.Out+rows/l.In) + t.p.Drag*t.copying(l)
}

// copying returns the time of copies that are not of rows.
func (t *trial) copying(l memory.Links) float64 {
	c := t.machine.Counts()
	return float64(c.OutBytes)/l.Out + float64(c.InBytes)/l.In
}

// cost returns what the solver minimises: what the step costs and a thousandth of the time
// of copies. Of two equally fast choices, the one with fewer copies is therefore better.
func (t *trial) cost(l memory.Links) float64 { return t.paid(l) + 1e-3*t.copying(l) }

func seconds(s float64) time.Duration { return time.Duration(s*1e9 + 0.5) }

func (t *trial) forecast() Forecast {
	f := Forecast{
		Step: seconds(t.end), Compute: t.tape.Span,
		Extent: t.machine.Device().Top() + t.p.Base + t.pageBytes(), Peak: t.machine.Device().Peak() + t.p.Base + t.pageBytes(),
		DevicePages: t.pages, HostPages: t.rows.hostPages(t.pol), RowBytes: t.rowRun.total(),
		Spilled: max(t.rows.devicePages(t.pol)-t.pages, 0),
		Host:    t.machine.Host().Top(), Counts: t.machine.Counts(),
		Units: make([]UnitForecast, len(t.units)),
	}
	if t.rows != nil {
		f.PageBytes = t.rows.Page
		f.Sets, f.SetBytes = t.rows.added, memory.Bytes(t.rows.added)*t.rows.SetBytes
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
		if u.Choice == memory.Recompute {
			u.Again += t.p.Units[u.Unit].Recompute
		}
	}
	t.rowRun.describe(&f)
	for i := range f.Units { // the window of a unit that is never loaded is the rest of the step
		if f.Units[i].Window < 0 {
			f.Units[i].Window = t.tape.Span
		}
	}
	t.lanes(&f)
	return f
}

// lanes adds the times of copies to a forecast.
func (t *trial) lanes(f *Forecast) {
	place := map[memory.Unit]int{}
	for i, u := range f.Units {
		place[u.Unit] = i
	}
	unit := func(c *transfer) int {
		if c.storage < 0 {
			return place[c.group.Unit()]
		}
		return t.groups[t.saver[c.storage]].unit
	}
	of := func(p point) *UnitForecast { return &f.Units[unit(&t.score.copies[p.lane][p.index-1])] }
	held := 0.0
	each := make([]float64, len(f.Units))
	for l := residency.Out; l < lanes; l++ {
		for i := range t.score.copies[l] {
			c := &t.score.copies[l][i]
			g := unit(c)
			each[g] += c.end - c.begin
			if l == residency.Out || l == rowsOut {
				f.Units[g].Moved += memory.Bytes(c.bytes)
			}
		}
	}
	waits := make(map[*UnitForecast]float64)
	for i, w := range t.score.waits {
		held += t.score.held[i]
		if w.on.index > 0 {
			waits[of(w.on)] += t.score.held[i]
		}
	}
	f.OutBusy, f.InBusy = seconds(t.score.busy(residency.Out, rowsOut)), seconds(t.score.busy(residency.In, rowsIn))
	f.Waiting = seconds(held)
	for i := range f.Units {
		u := &f.Units[i]
		u.Copies, u.Waiting = seconds(each[i]), seconds(waits[u])
		if each[i] > 0 {
			u.Hidden = max(0, 1-waits[u]/each[i])
		}
	}
}
