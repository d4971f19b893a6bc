// This file owns rows of experts: in which tier the stash keeps them.

package engine

import (
	"errors"
	"maps"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// moreSets is how many sets a decision may add to a workspace. With two sets a layer
// computes while rows of the layer before cross the link; a third lets rows return ahead
// of need meanwhile.
const moreSets = 2

// configureRows lets the runtime decide where rows go, if a budget or a choice by hand
// asks for it. Under a budget there are no device pages before the first step has
// shown what they are worth.
func (r *Runtime) configureRows(s *stash.ManagerConfig) {
	s.Watch = rowWatch{r}
	if s.Fixed || r.cfg.Budget == 0 && !r.offloadsRows() {
		return
	}
	if s.HostMax == 0 {
		s.HostPages, s.HostMax = s.Store.Pages[stash.Host], s.Store.Max[stash.Host]
	}
	if s.Place = r.placeRows; r.cfg.Budget > 0 && s.HostMax > 0 {
		s.Store.Pages[stash.Device], s.MoreSets = 0, moreSets
		// Rows differ from step to step: what finds no device page needs another.
		s.Store.Max[stash.Host] = max(s.Store.Max[stash.Host], s.HostMax)
	}
}

// offloadsRows reports whether the user puts rows in host pages.
func (r *Runtime) offloadsRows() bool {
	if h := r.cfg.ByHand; h != nil {
		for _, name := range memory.RowModules() {
			if h.RowChoice(name) == memory.Offload {
				return true
			}
		}
	}
	for _, c := range r.cfg.Policy {
		if c == memory.Offload {
			return true // perhaps rows: a workspace may have any name
		}
	}
	return false
}

// placeRows returns the tier for the rows of a group in the step under way.
func (r *Runtime) placeRows(id memory.GroupID) int {
	c := memory.Stash
	switch l := r.step.learned; {
	case l.known:
		c = l.policy[id.Unit()]
	case r.cfg.Budget > 0:
		c = memory.Offload
	case r.cfg.Policy != nil:
		c = r.cfg.Policy[id.Unit()]
	case r.cfg.ByHand != nil:
		c = r.cfg.ByHand.RowChoice(id.Name)
	}
	if c == memory.Offload {
		return stash.Host
	}
	return stash.Device
}

// stashesByHand returns a name that the user chose stash for, or "".
func (r *Runtime) stashesByHand() string {
	if h := r.cfg.ByHand; h != nil && len(h.StashModules) > 0 {
		return h.StashModules[0]
	}
	for _, u := range r.cfg.Policy.Units() {
		if r.cfg.Policy[u] == memory.Stash {
			return u.Name
		}
	}
	return ""
}

func noRows(name string) error {
	return &memory.SettingError{Setting: "StashModules", Asked: name, Problem: "names no rows that are counted on the device", Remedy: "compute the module in a workspace of a runtime with a Stash, or choose keep or offload"}
}

// checkRows returns an error if stash was chosen for what no workspace holds.
func (r *Runtime) checkRows() error {
	holds := func(module string) bool {
		return r.stash != nil && slices.ContainsFunc(r.stash.Names(), func(w string) bool { return policy.RowsNamed(w, module) })
	}
	if h := r.cfg.ByHand; h != nil {
		for _, name := range h.StashModules {
			if !holds(name) {
				return noRows(name)
			}
		}
	}
	for _, u := range r.cfg.Policy.Units() {
		if r.cfg.Policy[u] == memory.Stash && !holds(u.Name) {
			return noRows(u.Name)
		}
	}
	return nil
}

// rowWatch puts what compute does with rows on the tape of a step.
type rowWatch struct{ r *Runtime }

var rowOps = map[stash.Call]residency.OpKind{
	stash.Leased: residency.OpRowLease, stash.Stashed: residency.OpRowSave, stash.Returned: residency.OpRowReturn, stash.Done: residency.OpRowDone,
}

func (w rowWatch) Called(c stash.Call, g memory.GroupID, space int) {
	s := w.r.step
	if s == nil || s.key.Phase != memory.Train {
		return
	}
	op := residency.Op{Kind: rowOps[c], Group: g}
	if c == stash.Leased {
		op.ID = space
	}
	w.r.off.NoteRows(op)
	if c == stash.Stashed {
		s.learned.note(g, func(f *policy.Facts) { f.Rows, f.CanOffload = true, w.r.stash.Placeable() })
	}
}

func (w rowWatch) Waited() {
	if w.r.step != nil {
		w.r.off.NoteWaited()
	}
}

// rows returns what a recorded step says of rows, or nil if there are none.
func (r *Runtime) rows(l *learned) *policy.Rows {
	if r.stash == nil || !slices.ContainsFunc(slices.Collect(maps.Values(l.facts)), func(f policy.Facts) bool { return f.Rows }) {
		return nil
	}
	p := &policy.Rows{Page: r.stash.Page(), Need: maps.Clone(r.stash.Needs()), Sets: r.stash.Sets(), Ahead: r.stash.Ahead()}
	if !r.decidesPages() {
		_, most := r.stash.Most()
		p.Fixed, p.Pages = true, schedule.Pages(most/r.stash.Page())
	}
	for _, other := range r.keys { // what was decided for other keys stays
		if other != l && other.known && other.profile != nil && other.profile.Rows != nil && r.decidesPages() {
			p.Fixed, p.Pages = true, r.stash.Store().Pages(stash.Device)
		}
	}
	return p
}

// freeSets lets the solver choose the number of sets anew: it takes the sets that an earlier
// decision added out of a profile.
func (r *Runtime) freeSets(p *policy.Profile) {
	if p.Rows == nil || p.Rows.Fixed {
		return
	}
	most, added, each := r.stash.MoreSets()
	p.Rows.MoreSets, p.Rows.SetBytes = most, each
	p.Base -= memory.Bytes(added) * each
	for i := range p.Rows.Sets {
		p.Rows.Sets[i] -= added
	}
}

// decidesPages reports whether decisions size the device tier.
func (r *Runtime) decidesPages() bool {
	return r.cfg.Budget > 0 && r.stash != nil && r.stash.Placeable()
}

// undecidedPages returns the device memory of pages if their number follows what steps
// need, and is not decided.
func (r *Runtime) undecidedPages() memory.Bytes {
	if r.stash == nil || r.decidesPages() {
		return 0
	}
	_, most := r.stash.Most()
	return most
}

// holds returns the device memory that counts against the budget now, in a step with a
// profile that has rows.
func (r *Runtime) holds(p *policy.Profile) memory.Bytes {
	held, _ := r.off.Memory()
	_, pages := r.stash.Held()
	n := p.Base + held + pages
	if _, added, each := r.stash.MoreSets(); !p.Rows.Fixed { // their base is without added sets
		n += memory.Bytes(added) * each
	}
	return n
}

// apply gives activations and rows the memory that was decided.
func (r *Runtime) apply(l *learned, d *policy.Decision, p *policy.Profile) error {
	arena := d.Forecast.Activations(p.Base)
	if r.decidesPages() && p.Rows != nil {
		_, added, _ := r.stash.MoreSets()
		before := r.holds(p)
		rows := memory.Bytes(d.Forecast.DevicePages) * r.stash.Page()
		moved, err := r.off.Limit(r.cfg.Budget - p.Base - rows - d.Forecast.SetBytes)
		if err != nil {
			return err
		}
		if moved {
			r.gen++
			l.early, l.extent = max(l.early, before), 0
		}
		if d.Forecast.DevicePages < r.stash.Store().Pages(stash.Device) {
			r.gen++
		}
		sets := d.Forecast.Sets
		if p.Rows.Fixed {
			sets = added
		}
		if sets != added {
			r.gen++
		}
		if err := r.stash.SetMore(min(sets, added)); err != nil { // give back before taking
			return err
		}
		if err := r.stash.SetDevicePages(d.Forecast.DevicePages); err != nil {
			return err
		}
		var full *device.OutOfMemory
		if err := r.stash.SetMore(sets); errors.As(err, &full) {
			r.cfg.Log.Warn("stowage: no memory for more sets; steps take longer than expected", "rank", r.cfg.Rank, "sets", sets)
		} else if err != nil {
			return err
		}
		if err := r.stash.Expect(d.Forecast.DevicePages + d.Forecast.Spilled); err != nil {
			return err
		}
	}
	l.extent = max(l.extent, arena)
	return r.off.Prepare(arena, d.Forecast.Host)
}

// followRows follows a policy under a budget, and places the rows that it does not name
// where the step is shortest.
func (r *Runtime) followRows(p *policy.Profile, pol memory.Policy, follow func(memory.Policy) (*policy.Decision, error)) (*policy.Decision, error) {
	var free []memory.Unit
	for u, f := range p.Units {
		if f.Rows && r.cfg.Policy == nil && r.cfg.ByHand.RowChoice(u.Name) == memory.Stash && len(r.cfg.ByHand.StashModules) == 0 {
			free = append(free, u)
		}
	}
	if !r.decidesPages() || len(free) == 0 {
		return follow(pol)
	}
	slices.SortFunc(free, memory.Unit.Compare)
	var best *policy.Decision
	var failed error
	for i := range 9 { // the first units have the widest windows
		q := maps.Clone(pol)
		for _, u := range free[:len(free)*i/8] {
			q[u] = memory.Offload
		}
		d, err := follow(q)
		if err != nil {
			failed = err
		} else if best == nil || d.Forecast.Step < best.Forecast.Step {
			best = d
		}
	}
	if best == nil {
		return nil, failed
	}
	return best, nil
}
