// This file owns the profile of a recorded step, and the step that a policy makes of it.

package policy

import (
	"fmt"
	"time"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// Profile is a recorded step in which everything was kept.
type Profile struct {
	Tape residency.Tape
	// Base is the device memory outside of the arena that counts against the budget.
	Base memory.Bytes
	// Units holds the choices that each unit allows. A missing unit is kept.
	Units map[memory.Unit]Facts
	// Rows describes the rows in the stash. It is nil if there are none.
	Rows *Rows
	// Drag is the part of the time of copies by which compute takes longer beside them. What
	// it costs counts in a choice, and is not part of forecasts.
	Drag float64
}

// Facts are what a unit allows.
type Facts struct {
	CanOffload bool
	// Recompute is the time of its forward pass for one microbatch. It is zero if the unit
	// cannot be recomputed.
	Recompute time.Duration
	// Rows reports that the stash holds the unit's rows: in device pages if the choice
	// is stash, in host pages if it is offload and CanOffload says that there are any.
	// Nothing else can be chosen.
	Rows bool
}

func (f Facts) can(c memory.Choice) bool {
	switch {
	case f.Rows || c == memory.Stash:
		return f.Rows && (c == memory.Stash || c == memory.Offload && f.CanOffload)
	case c == memory.Offload:
		return f.CanOffload
	case c == memory.Recompute:
		return f.Recompute > 0
	}
	return c == memory.Keep
}

// Check returns an error if a unit does not allow its choice.
func (p *Profile) Check(pol memory.Policy) error {
	for _, u := range pol.Units() {
		if c := pol[u]; !p.Units[u].can(c) {
			return fmt.Errorf("policy: %v cannot be chosen for %v in this step; choose keep", c, u)
		}
	}
	return nil
}

// Under returns the step under a policy, for a machine to run.
//
// Kept and offloaded groups are as recorded. The plan decides whether a group is
// offloaded.
//
// Recomputed groups take and give back their storages in the forward pass as recorded,
// and do not save them. At the group's load its forward pass runs again: a Take (or
// Borrow) for each storage of its save, then the time Recompute, then Save, Load, and a
// Give of each, so that only the group holds them until its Release. The caller provides
// the input of that pass. Storages that other groups also saved stay with those groups.
//
// Rows of the stash are as recorded. Their pages are not in the machine's heaps.
func (p *Profile) Under(pol memory.Policy) residency.Tape {
	if !changes(pol) {
		return p.Tape
	}
	x := transform{p: p, pol: pol, saves: map[memory.GroupID][]residency.Item{}}
	x.out.Ops = make([]residency.Op, 0, len(p.Tape.Ops))
	for _, op := range p.Tape.Ops {
		op.At += x.later
		x.add(op)
	}
	x.out.Span = p.Tape.Span + x.later
	return x.out
}

// changes reports whether a step under the policy makes other calls than the recorded one.
func changes(p memory.Policy) bool {
	for _, c := range p {
		if changesTape(c) {
			return true
		}
	}
	return false
}

// changesTape reports whether a unit with the choice makes other calls than the recorded
// ones.
func changesTape(c memory.Choice) bool { return c == memory.Recompute }

// transform turns a recorded step into the step under a policy. It numbers storages anew,
// because there may be more of them.
type transform struct {
	p      *Profile
	pol    memory.Policy
	out    residency.Tape
	made   []residency.Op // the op that made each recorded storage
	number []int          // the new number of each recorded storage
	count  int
	later  time.Duration // work added so far
	saves  map[memory.GroupID][]residency.Item
}

func (x *transform) emit(op residency.Op) { x.out.Ops = append(x.out.Ops, op) }

// storage adds a storage like a recorded one and returns its number.
func (x *transform) storage(like residency.Op, at time.Duration) int {
	like.ID, like.At = x.count, at
	x.count++
	x.emit(like)
	return like.ID
}

func (x *transform) add(op residency.Op) {
	u := op.Group.Unit()
	switch op.Kind {
	case residency.OpTake, residency.OpBorrow:
		x.made = append(x.made, op)
		x.number = append(x.number, x.storage(op, op.At))
		return
	case residency.OpGive:
		op.ID = x.number[op.ID]
	case residency.OpSave:
		x.save(op, x.pol[u])
		return
	case residency.OpLoad:
		if x.pol[u] == memory.Recompute {
			x.again(op, x.p.Units[u].Recompute)
			return
		}
	}
	x.emit(op)
}

func (x *transform) save(op residency.Op, c memory.Choice) {
	x.saves[op.Group] = op.Items
	if c != memory.Recompute {
		items := make([]residency.Item, len(op.Items))
		for i, it := range op.Items {
			items[i] = residency.Item{ID: x.number[it.ID], Stay: it.Stay}
		}
		op.Items = items
		x.emit(op)
	}
}

// again adds the second forward pass of a recomputed group and its load.
func (x *transform) again(load residency.Op, takes time.Duration) {
	ids := x.like(x.saves[load.Group], load.At)
	save := residency.Op{Kind: residency.OpSave, Group: load.Group, At: load.At + takes}
	for i, it := range x.saves[load.Group] {
		save.Items = append(save.Items, residency.Item{ID: ids[i], Stay: it.Stay})
	}
	x.later += takes
	load.At = save.At
	x.emit(save)
	x.emit(load)
	x.give(ids, load.At)
}

// like adds storages like those of a save and returns their numbers.
func (x *transform) like(items []residency.Item, at time.Duration) []int {
	ids := make([]int, len(items))
	for i, it := range items {
		ids[i] = x.storage(x.made[it.ID], at)
	}
	return ids
}

func (x *transform) give(ids []int, at time.Duration) {
	for _, id := range ids {
		x.emit(residency.Op{Kind: residency.OpGive, ID: id, At: at})
	}
}
