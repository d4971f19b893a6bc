// This file owns the forecast. Static memory, saved tensors and the order of passes give
// the memory of each rank.

package plan

import (
	"slices"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// mostMicrobatches is the number of microbatches up to which every pass is walked.
const mostMicrobatches = 4096

// Predict returns the memory that a setup needs on every pipeline rank. It returns an
// error if the setup is not sound; see [Setup.Check].
func Predict(s *Setup) (*Forecast, error) {
	n, err := s.Normalise()
	if err != nil {
		return nil, err
	}
	d := newDims(n)
	p := &Forecast{Setup: n}
	for r := range n.Layout.PP {
		rank, err := d.rank(r, false)
		if err != nil {
			return nil, err
		}
		p.Ranks = append(p.Ranks, *rank)
		if rank.Peak.Expected > p.Ranks[p.Heaviest].Peak.Expected {
			p.Heaviest = r
		}
	}
	p.Peak, p.Reserved = p.Ranks[p.Heaviest].Peak, p.Ranks[p.Heaviest].Reserved
	p.Budget = n.Budget
	if p.Budget == 0 && n.Hardware != nil {
		p.Budget = n.Hardware.Usable
	}
	pinned := make([]memory.Bytes, len(p.Ranks))
	for i, r := range p.Ranks {
		pinned[i] = r.Host
	}
	p.Node = n.Node(pinned)
	p.Fits = p.Budget > 0 && p.Node.Missing == 0
	for _, r := range p.Ranks {
		p.Fits = p.Fits && r.Reserved.High <= p.Budget
	}
	return p, nil
}

// Microbatches returns the number of microbatches of a step.
func (s *Setup) Microbatches() int {
	return max(s.Batch.Global/(s.Batch.Micro*s.Layout.DP()), 1)
}

// ofRank returns the sizes with the offload settings ofRank one rank.
func (d *dims) ofRank(r int) *dims {
	if len(d.s.Offload.Fractions) == 0 {
		return d
	}
	n, s := *d, *d.s
	s.Offload = s.Offload.Rank(r)
	n.s = &s
	return &n
}

// basis is what a rank holds and does under any policy.
type basis struct {
	passes []schedule.Pass
	held   share
	items  []Item
}

func (d *dims) basis(r int) (*basis, error) {
	if b := d.memo.ranks[r]; b != nil {
		return b, nil
	}
	l := d.s.Layout
	passes, err := schedule.Pipeline{Ranks: l.PP, Chunks: l.VPP, Microbatches: d.walked(), GroupSize: l.GroupSize}.Passes(r)
	if err != nil {
		return nil, err
	}
	b := &basis{passes: passes, held: d.holds(r)}
	if b.items = d.parameterItems(b.held); l.FSDP.Shard == ShardParameters {
		b.items = d.shardedItems(b.held)
	}
	b.items = append(b.items, d.fixedItems(r, b.held)...)
	d.memo.ranks[r] = b
	return b, nil
}

// rank predicts one rank. If brief is set, it leaves out the timeline and the groups.
func (d *dims) rank(r int, brief bool) (*Rank, error) {
	d = d.ofRank(r)
	b, err := d.basis(r)
	if err != nil {
		return nil, err
	}
	held := b.held
	w := &walk{passes: b.passes, shards: d.sharded(held), brief: brief, older: d.s.Offload.Older}
	w.sentForward, w.sentBackward = d.boundary()
	rank := &Rank{Rank: r, Items: slices.Clone(b.items)}
	var movable, moved memory.Bytes
	for _, st := range d.s.chunks(r) {
		c := d.chunk(st)
		w.chunks = append(w.chunks, c)
		movable += c.movable
		moved += c.moved
	}
	rank.Share = shareOf(moved, movable)
	buffers, capture, pool := w.graphs()
	if buffers > 0 {
		rank.Items = append(rank.Items, Item{CauseGraphs, "inputs of graphs", buffers, true})
	}
	st := d.stash(w)
	if st.sets > 0 {
		rank.Items = append(rank.Items, Item{CausePools, "working sets of experts", st.sets, true}, Item{CausePools, "stash pages", st.device, true})
	}
	for _, it := range rank.Items {
		w.base += it.Bytes
	}
	w.margin = w.keeps(memory.Bytes(r) * d.s.Offload.Delta)
	d.addUp(rank, w, held, st.host, d.beforeReplay(w, rank, buffers, capture), pool)
	return rank, nil
}

// addUp walks through the step and sets what a rank needs. before has the highest points
// before graphs are replayed, pool is what graphs hold outside of the allocator's counters,
// and host is the stash's host memory.
func (d *dims) addUp(rank *Rank, w *walk, held share, host memory.Bytes, before []early, pool memory.Bytes) {
	points := w.run()
	if w.brief {
		rank.At = w.highest(points)
	} else {
		line, top, uses := newLedger(w).timeline(points)
		rank.points, rank.Groups, rank.At = line, uses, line[top]
	}
	away := w.mostAway(func(u *cost) memory.Bytes { return u.reloaded })
	rank.Host = away - min(w.margin, away) + host + d.hostState(held)
	for _, g := range rank.Groups {
		rank.Items = append(rank.Items, Item{CauseActivations, g.Name, g.Total, false})
	}
	if n := rank.At.Bytes() - w.base - sumGroups(rank.Groups); n != 0 {
		rank.Items = append(rank.Items, Item{CauseTransient, rank.At.What, n, false})
	}
	static := memory.Bytes(0)
	for _, it := range slices.Concat(rank.Items, d.leftBehind(rank.Rank, held)) {
		if it.Static {
			static += it.Bytes
		}
	}
	peak := rank.At.Bytes()
	before = append(before,
		early{"the optimiser's step", d.updatePeak(rank.Items, held) - w.base},
		early{"what the last step left", static - w.base})
	for _, other := range before {
		if more := w.base + other.above - peak; more > 0 {
			rank.Items = append(rank.Items, Item{CauseTransient, other.name, more, false})
			peak += more
		}
	}
	rank.Peak = band(peak, d.spread())
	rank.Static = band(static, staticSpread)
	rank.Reserved = d.reserved(rank.Peak, rank.At.Bytes()+pool+w.copied())
}

// walked returns how many microbatches are walked. Once the pipeline is full, each further
// group repeats the one before, so very large numbers are cut.
func (d *dims) walked() int {
	n, group := d.s.Microbatches(), max(d.s.Layout.GroupSize, d.s.Layout.PP)
	if most := max(mostMicrobatches/group, 3) * group; n > most {
		return most + n%group
	}
	return n
}

func sumGroups(uses []GroupUse) (n memory.Bytes) {
	for _, g := range uses {
		n += g.Total
	}
	return n
}

// updatePeak returns what is allocated while the optimiser runs: all static memory, and the
// optimiser's copy of gradients if the buffer has another format.
func (d *dims) updatePeak(items []Item, s share) memory.Bytes {
	n := d.leftGradients(s)
	for _, it := range items {
		if it.Static {
			n += it.Bytes
		}
	}
	return n
}

// hostState returns the size of the optimiser's state in host memory.
func (d *dims) hostState(s share) memory.Bytes {
	return memory.Bytes(float64(d.optimizerBytes(s)) * d.s.Optimizer.OffloadFraction)
}
