// This file owns the search. It looks at every combination of recomputed and offloaded
// modules and finds the fastest one that fits. The result is exact for the linear model of
// memory; verify.go checks it against the full forecast.
//
// There are about ten modules and thus about ten thousand combinations. For each of them,
// the least fraction that every rank must offload follows from the rank's table in closed
// form. Walking the schedule for every combination would take seconds. So the search sorts
// them by a lower bound of their time (fill, work and drain of each rank alone), and walks
// them until the bound exceeds the best time.

package search

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/cost"
)

// parts is the resolution of fractions: 64ths.
const parts = 64

// choice is one policy.
type choice struct {
	rec, off  uint32
	recompute plan.Recompute
	fractions []int     // 64ths by rank
	shares    []float64 // the part of the bytes that is offloaded, by rank, because whole groups are
	passes    []cost.Pass
	bound     cost.Seconds
	total     cost.Seconds // zero until walked
	moved     memory.Bytes // bytes in host memory at the peaks, all ranks
	// heights are the peaks by the full forecast, once it was made. failed reports that the
	// choice does not fit after all, on this rank.
	heights []memory.Bytes
	failed  bool
	unseen  bool // failed without having been predicted
	rank    int
	crowded bool // failed because host memory is too small
}

// size returns how many modules a choice names.
func (c *choice) size() int { return bits.OnesCount32(c.rec) + bits.OnesCount32(c.off) }

// left is what a set of recomputed modules leaves of a kind of layer: the saved bytes, and
// those that each module would offload.
type left struct {
	saved memory.Bytes
	moved []memory.Bytes
}

func (p *problem) left(rec uint32) []left {
	if p.remains == nil {
		p.remains = make([][]left, 1<<len(p.rec))
	}
	if p.remains[rec] != nil {
		return p.remains[rec]
	}
	out := make([]left, len(p.kinds))
	p.remains[rec] = out
	for k := range p.kinds {
		l := left{moved: make([]memory.Bytes, len(p.off))}
		for _, t := range p.kinds[k].tensors {
			if t.freed&rec != 0 {
				continue
			}
			l.saved += t.Bytes
			if t.moved >= 0 {
				l.moved[t.moved] += t.Bytes
			}
		}
		out[k] = l
	}
	return out
}

// fraction returns the least number of 64ths of the offloadable bytes that a rank must
// offload, and what it pins for them. It returns false if all of them are not enough.
func (p *problem) fraction(r int, rec, off uint32, of []left) (n int, host memory.Bytes, ok bool) {
	t := &p.tables[r]
	saved, moved := p.chunkBytes(r, off, of)
	again, stays := float64(mostBeyond(t.again, rec)), float64(mostBeyond(t.stays, off))
	var all float64
	needs := false
	for _, q := range t.points {
		over := float64(q.fixed-p.rooms[r]) + again
		var can float64
		for c, live := range q.live {
			over += float64(live) * saved[c]
			can += float64(live) * moved[c]
		}
		needs = needs || over > 0
		all = max(all, can)
		// Once anything is offloaded, the part that stays counts at every point.
		switch over += stays; {
		case over <= 0:
		case over > can:
			n = parts + 1
		default:
			n = max(n, ceil(parts*over/can))
		}
	}
	if !needs {
		return 0, 0, true
	}
	if n = max(n, 1); n > parts || all == 0 {
		return 0, 0, false
	}
	return n, memory.Bytes(all * float64(n) / parts), true
}

// mostBeyond returns what a set of modules needs beyond the linear model. Modules run one after
// the other, so it is the mostBeyond that one of them needs.
func mostBeyond(by []memory.Bytes, set uint32) (n memory.Bytes) {
	first := true
	for i, b := range by {
		if set&(1<<i) != 0 && (first || b > n) {
			n, first = b, false
		}
	}
	return n
}

// chunkBytes returns what a microbatch of each chunk of a rank saves, and how much of it
// can be offloaded.
func (p *problem) chunkBytes(r int, off uint32, of []left) (saved, moved []float64) {
	chunks := p.setup.Layout.VPP
	saved, moved = make([]float64, chunks), make([]float64, chunks)
	for i := r; i < len(p.stages); i += p.ranks() {
		g := &p.stages[i]
		for k, n := range g.count {
			if n == 0 {
				continue
			}
			saved[g.chunk] += float64(n) * float64(of[k].saved)
			for m, b := range of[k].moved {
				if off&(1<<m) != 0 {
					moved[g.chunk] += float64(n) * float64(b)
				}
			}
		}
	}
	return saved, moved
}

func ceil(x float64) int {
	n := int(x)
	if float64(n) < x {
		n++
	}
	return n
}

// passTimes returns the time of every stage under a choice.
func (p *problem) passTimes(c *choice, of []left) []cost.Pass {
	passes := make([]cost.Pass, len(p.stages))
	for i := range p.stages {
		g := &p.stages[i]
		t := g.pass
		for k, n := range g.count {
			if n == 0 {
				continue
			}
			again := p.kinds[k].again[c.rec]
			t.Backward += cost.Seconds(n) * again
			if c.shares[g.rank] == 0 || c.off == 0 {
				continue
			}
			x := p.time.Copies(p.kinds[k].time, c.bytes(g.rank, of[k]), g.layers, again)
			t.Forward += cost.Seconds(n) * x.LateOut
			t.Backward += cost.Seconds(n) * x.LateBack
		}
		passes[i] = t
	}
	return passes
}

// bytes returns how much of a layer a rank offloads.
func (c *choice) bytes(r int, l left) (n memory.Bytes) {
	for m, b := range l.moved {
		if c.off&(1<<m) != 0 {
			n += b
		}
	}
	return memory.Bytes(float64(n) * c.shares[r])
}

// setFraction sets the fraction that a rank should offload.
func (c *choice) setFraction(r, n int) { c.fractions[r], c.shares[r] = n, float64(n)/parts }

// newChoice returns the choice of sets of modules that offloads nothing yet.
func (p *problem) newChoice(rec, off uint32) *choice {
	return &choice{
		rec: rec, off: off, recompute: plan.Recompute{Modules: names(p.rec, rec)},
		fractions: make([]int, p.ranks()), shares: make([]float64, p.ranks()),
	}
}

// allowed returns the sets of modules that do not clash.
func (p *problem) allowed(list []string, a memory.Choice) (sets []uint32) {
	for set := range uint32(1) << len(list) {
		if p.clashes(names(list, set), a) == "" {
			sets = append(sets, set)
		}
	}
	return sets
}

// clashes says what is wrong with a set. It is empty if nothing is.
func (p *problem) clashes(modules []string, a memory.Choice) string {
	for _, x := range modules {
		m, _ := memory.LookupModule(x)
		for _, need := range m.Requires {
			if a == memory.Offload && !has(modules, need) {
				return x + " can only be offloaded together with " + need
			}
		}
		for _, y := range modules {
			if why := clash(move{module: x, action: a}, move{module: y, action: a}); why != "" {
				return why
			}
		}
	}
	return ""
}

// solve lists the policies that fit, sorted by their bound.
func (p *problem) solve() []*choice {
	var list []*choice
	offs := p.allowed(p.off, memory.Offload)
	for _, rec := range p.allowed(p.rec, memory.Recompute) {
		of := p.left(rec)
		for _, off := range offs {
			if p.clashBetween(rec, off) != "" {
				continue
			}
			if c := p.consider(rec, off, of); c != nil {
				list = append(list, c)
			}
		}
	}
	slices.SortFunc(list, order)
	return list
}

// clashBetween says why recomputed and offloaded modules exclude each other. It is empty if they do
// not.
func (p *problem) clashBetween(rec, off uint32) string {
	for _, x := range names(p.rec, rec) {
		for _, y := range names(p.off, off) {
			if why := clash(move{module: x, action: memory.Recompute}, move{module: y, action: memory.Offload}); why != "" {
				return why
			}
		}
	}
	return ""
}

// consider returns the choice of two sets, or nil if it does not fit.
func (p *problem) consider(rec, off uint32, of []left) *choice {
	c := p.newChoice(rec, off)
	// A rank keeps a layer of what it offloads. This must not drop a choice that fits; the
	// forecast of a choice checks host memory exactly.
	stays := largestMoved(off, of)
	for r := range c.fractions {
		n, host, ok := p.fraction(r, rec, off, of)
		if !ok {
			return nil
		}
		c.setFraction(r, n)
		c.moved += host
		p.pinned[r] = p.clean.Ranks[r].Host + max(host-stays, 0)
	}
	if off != 0 && c.moved == 0 {
		return nil // the same without offloading is in the list
	}
	if c.moved > 0 && p.setup.Node(p.pinned).Missing > 0 {
		p.crowded, p.crowdedOff, p.crowdedRec = true, p.crowdedOff|off, p.crowdedRec|rec
		return nil
	}
	c.passes = p.passTimes(c, of)
	c.bound = p.time.Bound(c.passes)
	return c
}

// largestMoved returns the most bytes that one layer offloads for a microbatch.
func largestMoved(off uint32, of []left) (most memory.Bytes) {
	for _, l := range of {
		var n memory.Bytes
		for m, b := range l.moved {
			if off&(1<<m) != 0 {
				n += b
			}
		}
		most = max(most, n)
	}
	return most
}

// order sorts choices by their bound, then by the number of modules, by the bytes that they
// offload, and by the sets themselves, so the order is unique.
func order(a, b *choice) int {
	return cmp.Or(
		cmp.Compare(a.bound, b.bound), cmp.Compare(a.size(), b.size()), cmp.Compare(a.moved, b.moved),
		cmp.Compare(a.rec, b.rec), cmp.Compare(a.off, b.off))
}

// walked returns the step time of a choice.
func (p *problem) walked(c *choice) cost.Seconds {
	if c.total == 0 {
		c.total = p.time.Step(c.passes).Total
	}
	return c.total
}

// fastest returns the fastest choice of a list that is sorted by bounds. Of equals it takes
// the one with fewer modules, and then the one that offloads less.
func (p *problem) fastest(list []*choice, ok func(*choice) bool) *choice {
	var best *choice
	for _, c := range list {
		if best != nil && c.bound > best.total*(1+rounding) {
			break
		}
		if best != nil && slices.Equal(c.passes, best.passes) {
			c.total = best.total
		}
		if ok(c) && (best == nil || p.beats(c, best)) {
			p.walked(c)
			best = c
		}
	}
	return best
}

// rounding is the relative difference below which two times are equal.
const rounding = 1e-9

func (p *problem) beats(a, b *choice) bool {
	x, y := p.walked(a), p.walked(b)
	if x < y*(1-rounding) || x > y*(1+rounding) {
		return x < y
	}
	return cmp.Or(cmp.Compare(a.size(), b.size()), cmp.Compare(a.moved, b.moved)) < 0
}
