// This file owns rows of experts in a simulated step: the tier of their pages, and the
// waits of compute for them.

package policy

import (
	"slices"
	"time"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// Rows describes the rows that the stash holds in a recorded step. Their units allow two
// choices. Stash keeps the rows in device pages, which count against the budget and use no
// link. Offload puts them in host pages, which use the link both ways and no device
// memory.
type Rows struct {
	Page memory.Bytes                      // bytes of a page
	Need map[memory.GroupID]schedule.Pages // the pages that each group asked for
	Sets []int                             // the sets of each workspace
	// MoreSets is how many sets the solver may add to each workspace, and SetBytes the
	// device memory of one more set of every workspace. With more sets, compute goes on
	// while rows cross the link.
	MoreSets int
	SetBytes memory.Bytes
	added    int // the sets that this profile has beyond the recorded ones
	Ahead    int // how many loads ahead of need a group may be restored
	// Fixed reports that the number of device pages is Pages, whatever is chosen.
	// Otherwise the choices decide the number.
	Fixed bool
	Pages schedule.Pages
}

// spareRows is the share of device pages beyond those that the recorded step needed.
// Routing differs from step to step, and rows that find no device page cost time.
const spareRows = 20

// rowPlan holds the moves of the stash in a step, which do not depend on tiers.
type rowPlan struct {
	*Rows
	schedule *schedule.Schedule
	plan     *schedule.Moves
	units    map[memory.Unit]bool
	ops      []residency.Op // the calls for rows, as recorded
}

// rowPlan returns the stash's plan for a recorded step, or nil if it has no rows.
func (p *Profile) rowPlan() *rowPlan {
	if p.Rows == nil {
		return nil
	}
	x := &rowPlan{Rows: p.Rows, schedule: &schedule.Schedule{}, units: map[memory.Unit]bool{}}
	space := map[memory.GroupID]int{}
	for _, op := range p.Tape.Ops {
		if op.Kind >= residency.OpRowLease && op.Kind <= residency.OpRowDone {
			x.ops = append(x.ops, op)
		}
		switch op.Kind {
		case residency.OpRowLease:
			space[op.Group] = op.ID
		case residency.OpRowSave:
			x.schedule.Save(op.Group)
			x.units[op.Group.Unit()] = true
		case residency.OpRowReturn:
			x.schedule.Load(op.Group)
		}
	}
	x.plan = x.schedule.Moves(p.Rows.Ahead, func(g memory.GroupID) (int, int) { return space[g], p.Rows.Sets[space[g]] - 1 })
	return x
}

// withSets returns the profile of a step whose workspaces have n more sets.
func (p *Profile) withSets(n int) *Profile {
	q, rows := *p, *p.Rows
	rows.Sets, rows.added = slices.Clone(rows.Sets), n
	for i := range rows.Sets {
		rows.Sets[i] += n
	}
	q.Rows, q.Base = &rows, p.Base+memory.Bytes(n)*rows.SetBytes
	return &q
}

// devicePages returns the device pages that a policy needs.
func (x *rowPlan) devicePages(pol memory.Policy) schedule.Pages {
	if x == nil {
		return 0
	}
	n := x.schedule.Peak(func(g memory.GroupID) schedule.Pages {
		if x.plan.Keep[g] || pol[g.Unit()] == memory.Offload {
			return 0
		}
		return x.Need[g]
	})
	return n
}

// hostPages returns the most pages that rows of offloaded units take at once.
func (x *rowPlan) hostPages(pol memory.Policy) schedule.Pages {
	if x == nil {
		return 0
	}
	return x.schedule.Peak(func(g memory.GroupID) schedule.Pages {
		if x.plan.Keep[g] || pol[g.Unit()] != memory.Offload {
			return 0
		}
		return x.Need[g]
	})
}

// rowSet is a set of a workspace in a simulated step.
type rowSet struct {
	group memory.GroupID
	state rowState
	lease int
	idle  []point // the points that the next user waits for
	ready []point // the points that compute waits for to use the rows
}

type rowState uint8

const (
	rowsFree rowState = iota
	rowsUsed
	rowsKept
	rowsBack
)

// rowRun simulates the stash in a step. It makes the same decisions as the runtime, on
// sets without memory.
type rowRun struct {
	*rowPlan
	score   *score
	pol     memory.Policy
	spaces  [][]*rowSet
	home    map[memory.GroupID]int
	stashed map[memory.GroupID][]point
	next    int // position in the plan
	leases  int
	unused  schedule.Pages                    // free pages of the device tier
	held    map[memory.GroupID]schedule.Pages // device pages by group
	moved   map[memory.Unit]memory.Bytes      // bytes that went to the host, by unit
}

func (x *rowPlan) run(sc *score, pol memory.Policy, pages schedule.Pages) *rowRun {
	r := &rowRun{rowPlan: x, score: sc, pol: pol, unused: pages, held: map[memory.GroupID]schedule.Pages{}, home: map[memory.GroupID]int{}, stashed: map[memory.GroupID][]point{}, moved: map[memory.Unit]memory.Bytes{}}
	for _, n := range x.Sets {
		var sets []*rowSet
		for range n {
			sets = append(sets, &rowSet{})
		}
		r.spaces = append(r.spaces, sets)
	}
	return r
}

// call simulates one of the calls for rows.
func (r *rowRun) call(op residency.Op) {
	g := op.Group
	switch op.Kind {
	case residency.OpRowLease:
		r.home[g] = op.ID
		s := r.free(op.ID)
		r.score.hold(s.idle)
		r.lease(s, g, rowsUsed)
	case residency.OpRowSave:
		s := r.holding(g, rowsUsed)
		if s == nil {
			return
		}
		if s.ready = []point{r.score.at(residency.Compute)}; r.plan.Keep[g] {
			s.state = rowsKept
		} else {
			r.stash(s)
		}
		r.passed()
	case residency.OpRowReturn:
		s := r.holding(g, rowsKept)
		if s == nil {
			s = r.holding(g, rowsBack)
		}
		if s == nil {
			s = r.free(r.home[g])
			r.restore(s, g)
		}
		if s.state == rowsBack {
			r.score.hold(s.ready)
		}
		r.lease(s, g, rowsUsed)
		r.passed()
	case residency.OpRowDone:
		if s := r.holding(g, rowsUsed); s != nil {
			s.state, s.idle = rowsFree, []point{r.score.at(residency.Compute)}
		}
	}
}

func (r *rowRun) lease(s *rowSet, g memory.GroupID, state rowState) {
	r.leases++
	s.group, s.state, s.lease = g, state, r.leases
}

// passed restores the groups that are due after the last call.
func (r *rowRun) passed() {
	due := r.plan.Ahead[r.next]
	r.next++
	for _, g := range due {
		if r.holding(g, rowsKept) != nil || r.holding(g, rowsBack) != nil {
			continue
		}
		if s := r.idle(r.home[g]); s != nil {
			r.restore(s, g)
		}
	}
}

// idle returns the free set that was leased first, or nil.
func (r *rowRun) idle(space int) (best *rowSet) {
	for _, s := range r.spaces[space] {
		if s.state == rowsFree && (best == nil || s.lease < best.lease) {
			best = s
		}
	}
	return best
}

// free returns a free set, or stashes the rows of another set to free it.
func (r *rowRun) free(space int) *rowSet {
	if s := r.idle(space); s != nil {
		return s
	}
	for _, s := range r.spaces[space] {
		if s.state == rowsKept || s.state == rowsBack {
			r.stash(s)
			return s
		}
	}
	return r.spaces[space][0] // the runtime would have panicked
}

func (r *rowRun) holding(g memory.GroupID, state rowState) *rowSet {
	for _, s := range r.spaces[r.home[g]] {
		if s.group == g && s.state == state {
			return s
		}
	}
	return nil
}

// bytes returns the bytes of a group that are in host pages.
func (r *rowRun) bytes(g memory.GroupID) memory.Bytes {
	return memory.Bytes(r.Need[g]-r.held[g]) * r.Page
}

// stash copies a set's rows to pages. The simulation ignores the time of copies within the
// device.
func (r *rowRun) stash(s *rowSet) {
	s.state, s.idle = rowsFree, s.ready
	if r.pol[s.group.Unit()] != memory.Offload { // rows that find no device page go to the host
		r.held[s.group] = min(r.unused, r.Need[s.group])
		r.unused -= r.held[s.group]
	}
	if n := r.bytes(s.group); n > 0 {
		s.idle = r.score.rows(rowsOut, s.group, n, s.ready)
		r.moved[s.group.Unit()] += n
	}
	r.stashed[s.group] = s.idle
}

func (r *rowRun) restore(s *rowSet, g memory.GroupID) {
	r.lease(s, g, rowsBack)
	after := append(append([]point(nil), s.idle...), r.stashed[g]...)
	if s.ready = after; r.bytes(g) > 0 {
		s.ready = r.score.rows(rowsIn, g, r.bytes(g), after)
	}
	r.unused += r.held[g]
	delete(r.held, g)
}

// hold makes compute wait for points of other lanes.
func (s *score) hold(on []point) {
	for _, p := range on {
		if p.lane == residency.Compute {
			continue
		}
		at := s.now
		if s.scope {
			at = s.from
		}
		s.waits = append(s.waits, wait{at, p})
	}
}

// rows notes a copy of rows that waits for some points, and returns the point after it.
func (s *score) rows(l residency.Lane, g memory.GroupID, bytes memory.Bytes, after []point) []point {
	n := len(s.after)
	for _, p := range after {
		if p.lane != l {
			s.after = append(s.after, p)
		}
	}
	s.copies[l] = append(s.copies[l], transfer{storage: -1, group: g, bytes: float64(bytes), after: s.after[n:len(s.after):len(s.after)], planned: true})
	return []point{{lane: l, index: len(s.copies[l])}}
}

// total returns the bytes of rows that went to the host.
func (r *rowRun) total() (n memory.Bytes) {
	if r == nil {
		return 0
	}
	for _, x := range r.moved {
		n += x
	}
	return n
}

// describe sets the part of a forecast about units with rows.
func (r *rowRun) describe(f *Forecast) {
	if r == nil {
		return
	}
	saved := map[memory.GroupID]time.Duration{}
	window := map[memory.Unit]time.Duration{}
	bytes, groups := map[memory.Unit]memory.Bytes{}, map[memory.Unit]int{}
	for _, op := range r.ops {
		u := op.Group.Unit()
		switch op.Kind {
		case residency.OpRowSave:
			saved[op.Group] = op.At
			bytes[u] = max(bytes[u], memory.Bytes(r.Need[op.Group])*r.Page)
			groups[u]++
		case residency.OpRowReturn:
			if w, known := window[u]; !known || op.At-saved[op.Group] < w {
				window[u] = op.At - saved[op.Group]
			}
		}
	}
	for i := range f.Units {
		x := &f.Units[i]
		if !r.units[x.Unit] {
			continue
		}
		if x.Choice != memory.Offload {
			x.Choice = memory.Stash
		}
		x.Bytes, x.Groups = bytes[x.Unit], groups[x.Unit]
		if w, known := window[x.Unit]; known {
			x.Window = w
		}
	}
}
