// This file owns what is known of a recorded step, and the step that the choices
// make of it.

package policy

import (
	"fmt"
	"time"

	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
)

// Profile is a recorded step in which everything was kept.
type Profile struct {
	Tape residency.Tape
	// Base is device bytes outside of the arena that count against the budget.
	Base int64
	// Units is what can be done with the units. One that is missing is kept.
	Units map[Unit]Facts
}

// Facts are what a unit allows.
type Facts struct {
	CanOffload bool
	// Recompute is the time of doing its forward pass again for one microbatch;
	// zero: it cannot be recomputed.
	Recompute time.Duration
	CanStash  bool
	// Expected is the bytes of the live rows of one group in a stash, rounded to
	// pages. What the tape takes for it is the worst case.
	Expected int64
}

func (f Facts) can(c Choice) bool {
	switch c {
	case Keep:
		return true
	case Stash:
		return f.CanStash
	case Offload:
		return f.CanOffload
	default:
		return f.Recompute > 0
	}
}

// Links are the measured rates between device and host, in bytes a second.
type Links struct {
	Out float64 `json:"out"` // alone
	In  float64 `json:"in"`  // alone
	// Both is what passes in both directions together while both are busy; they
	// share it in the ratio of Out to In, and neither is faster than alone. Zero
	// stands for Out + In: the directions do not disturb each other.
	Both    float64       `json:"both"`
	Latency time.Duration `json:"latency"` // of one copy, before its bytes move
}

// Check refuses links that are none.
func (l Links) Check() error {
	if !(l.Out > 0 && l.In > 0 && l.Both >= 0) || l.Latency < 0 {
		return fmt.Errorf("policy: links of %g bytes/s out, %g in, %g both ways and a latency of %v; measure them again, all rates must be above zero", l.Out, l.In, l.Both, l.Latency)
	}
	return nil
}

// Check refuses choices that the units do not allow.
func (p *Profile) Check(pol Policy) error {
	for _, u := range pol.Units() {
		if c := pol[u]; !p.Units[u].can(c) {
			return fmt.Errorf("policy: %v cannot be chosen for %v in this step; choose keep", c, u)
		}
	}
	return nil
}

// Under is the step under a policy, for a machine to run.
//
// Kept and offloaded groups: as recorded; whether a group leaves is the plan's.
//
// Recomputed groups: their storages are taken and given back in forward as
// recorded, and not saved. Where the recorded step loads the group, its forward
// pass runs again: a Take (or Foreign) for each storage of its save, then the
// time Recompute, then Save, Load, and a Give of each, so that the group alone
// holds them until its Release. What that pass needs as input is the caller's
// affair. A storage that other groups saved too is theirs as before.
//
// Stashed groups: their storages are taken and given back in forward as recorded;
// the save is of one storage of Expected bytes that stays (the group's pages).
// At the load the worst-case storages are taken for what comes out of the pages,
// and given back at the release. Stashing takes no time of compute's own.
func (p *Profile) Under(pol Policy) residency.Tape {
	if !pol.changes() {
		return p.Tape
	}
	x := transform{p: p, pol: pol, saves: map[schedule.Group][]residency.Item{}, worst: map[schedule.Group][]int{}}
	x.out.Ops = make([]residency.Op, 0, len(p.Tape.Ops))
	for _, op := range p.Tape.Ops {
		op.At += x.later
		x.add(op)
	}
	x.out.Span = p.Tape.Span + x.later
	return x.out
}

// changes tells whether a step under the policy makes other calls than recorded.
func (p Policy) changes() bool {
	for _, c := range p {
		if c == Recompute || c == Stash {
			return true
		}
	}
	return false
}

// transform is the making of a step under a policy. Storages are numbered anew,
// because there may be more of them.
type transform struct {
	p      *Profile
	pol    Policy
	out    residency.Tape
	made   []residency.Op // how recorded storages were made
	number []int          // what they are now
	count  int
	later  time.Duration // work added so far
	saves  map[schedule.Group][]residency.Item
	worst  map[schedule.Group][]int
}

func (x *transform) emit(op residency.Op) { x.out.Ops = append(x.out.Ops, op) }

// storage makes one like a recorded one, and is its number.
func (x *transform) storage(like residency.Op, at time.Duration) int {
	like.ID, like.At = x.count, at
	x.count++
	x.emit(like)
	return like.ID
}

func (x *transform) add(op residency.Op) {
	u := UnitOf(op.Group)
	switch op.Kind {
	case residency.OpTake, residency.OpForeign:
		x.made = append(x.made, op)
		x.number = append(x.number, x.storage(op, op.At))
		return
	case residency.OpGive:
		op.ID = x.number[op.ID]
	case residency.OpSave:
		x.save(op, x.pol[u])
		return
	case residency.OpLoad:
		switch x.pol[u] {
		case Recompute:
			x.again(op, x.p.Units[u].Recompute)
			return
		case Stash:
			x.emit(op)
			x.worst[op.Group] = x.like(x.saves[op.Group], op.At)
			return
		}
	case residency.OpRelease:
		x.emit(op)
		x.give(x.worst[op.Group], op.At)
		return
	}
	x.emit(op)
}

func (x *transform) save(op residency.Op, c Choice) {
	x.saves[op.Group] = op.Items
	switch c {
	case Recompute:
	case Stash:
		id := x.storage(residency.Op{Kind: residency.OpTake, Bytes: x.p.Units[UnitOf(op.Group)].Expected}, op.At)
		op.Items = []residency.Item{{ID: id, Stay: true}}
		x.emit(op)
		x.give([]int{id}, op.At)
	default:
		items := make([]residency.Item, len(op.Items))
		for i, it := range op.Items {
			items[i] = residency.Item{ID: x.number[it.ID], Stay: it.Stay}
		}
		op.Items = items
		x.emit(op)
	}
}

// again is the forward pass of a group for the second time, and its load.
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

// like makes storages like those of a save.
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
