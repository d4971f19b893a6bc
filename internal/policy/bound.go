// This file owns bounds: the memory and the time that a candidate takes at least. They cost
// a hundredth of a simulation, and most candidates of a search need no more.

package policy

import (
	"time"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// bounds holds the calls of a recorded step for quick sums.
type bounds struct {
	p      *Profile
	least  memory.Bytes // size below which nothing is offloaded
	sizes  []memory.Bytes
	calls  []call
	groups []boundGroup
	unit   map[memory.Unit]int
	again  []time.Duration // for each unit, the time to recompute all its groups
	bytes  []memory.Bytes  // for each unit, what its groups save
	choice []memory.Choice // for each unit, of the candidate
	held   []int           // for each storage, how many hold it
}

// call is one call. Index numbers a storage or a group.
type call struct {
	kind  residency.OpKind
	index int
}

type boundGroup struct {
	unit  int
	items []residency.Item
	bytes memory.Bytes
}

func newBounds(p *Profile, cfg residency.Config) *bounds {
	units, place := p.units()
	b := &bounds{p: p, least: cfg.Least, unit: place, again: make([]time.Duration, len(units)), bytes: make([]memory.Bytes, len(units)), choice: make([]memory.Choice, len(units))}
	number := map[memory.GroupID]int{}
	for _, op := range p.Tape.Ops {
		c := call{op.Kind, op.ID}
		switch op.Kind {
		case residency.OpTake, residency.OpBorrow:
			b.sizes = append(b.sizes, op.Bytes)
		case residency.OpGive:
		case residency.OpSave:
			g := boundGroup{unit: place[op.Group.Unit()], items: op.Items}
			for _, it := range op.Items {
				g.bytes += b.sizes[it.ID]
			}
			b.again[g.unit] += p.Units[op.Group.Unit()].Recompute
			b.bytes[g.unit] += g.bytes
			number[op.Group], c.index = len(b.groups), len(b.groups)
			b.groups = append(b.groups, g)
		case residency.OpLoad, residency.OpRelease:
			c.index = number[op.Group]
		default:
			continue
		}
		b.calls = append(b.calls, c)
	}
	b.held = make([]int, len(b.sizes))
	return b
}

// time returns the time of compute's own work under a policy.
func (b *bounds) time(pol memory.Policy) time.Duration {
	t := b.p.Tape.Span
	for u, c := range pol {
		if i, saves := b.unit[u]; saves && c == memory.Recompute {
			t += b.again[i]
		}
	}
	return t
}

// memory returns the most bytes that storages hold at once under a policy if copies take no
// time. Rows in pages are not counted.
func (b *bounds) memory(pol memory.Policy) (most memory.Bytes) {
	for i := range b.choice {
		b.choice[i] = memory.Keep
	}
	for u, c := range pol {
		if i, saves := b.unit[u]; saves {
			b.choice[i] = c
		}
	}
	clear(b.held)
	live := memory.Bytes(0)
	hold := func(id, by int) {
		was := b.held[id]
		if b.held[id] += by; was == 0 {
			live += b.sizes[id]
		} else if b.held[id] == 0 {
			live -= b.sizes[id]
		}
	}
	for _, c := range b.calls {
		switch c.kind {
		case residency.OpTake, residency.OpBorrow:
			hold(c.index, 1)
		case residency.OpGive:
			hold(c.index, -1)
		default:
			g := &b.groups[c.index]
			b.group(c.kind, g, hold)
			if b.choice[g.unit] == memory.Recompute && c.kind == residency.OpLoad {
				live += g.bytes
			}
			if b.choice[g.unit] == memory.Recompute && c.kind == residency.OpRelease {
				live -= g.bytes
			}
		}
		most = max(most, live)
	}
	return most
}

// group holds the storages of a kept group from its save to its release, and those of an
// offloaded one from its load. A recomputed group has storages of its own.
func (b *bounds) group(kind residency.OpKind, g *boundGroup, hold func(id, by int)) {
	c := b.choice[g.unit]
	if c == memory.Recompute {
		return
	}
	for _, it := range g.items {
		moves := c == memory.Offload && !it.Stay && b.sizes[it.ID] >= b.least
		switch {
		case kind == residency.OpSave && !moves, kind == residency.OpLoad && moves:
			hold(it.ID, 1)
		case kind == residency.OpRelease:
			hold(it.ID, -1)
		}
	}
}
