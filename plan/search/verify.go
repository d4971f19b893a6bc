// This file owns the check of the linear model against the full forecast. It calibrates the
// model before the search, module by module. After the search it repeats until the forecast
// of the winner is within the budget on every rank.

package search

import (
	"slices"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/cost"
)

func (p *problem) fits(heights []memory.Bytes) bool { return slices.Max(heights) <= p.budget }

// peak returns a rank's peak by the linear model if it offloads the given number of 64ths.
func (p *problem) peak(r int, rec, off uint32, fraction int) memory.Bytes {
	t := &p.tables[r]
	more := float64(mostBeyond(t.again, rec))
	if fraction > 0 {
		more += float64(mostBeyond(t.stays, off))
	}
	saved, moved := p.chunkBytes(r, off, p.left(rec))
	var peak float64
	for _, q := range t.points {
		h := float64(q.fixed) + more
		for c, live := range q.live {
			h += float64(live) * (saved[c] - moved[c]*float64(fraction)/parts)
		}
		peak = max(peak, h)
	}
	return memory.Bytes(peak)
}

// calibrate predicts the policy of each module alone and notes what it needs beyond the
// linear model. A module that cannot be offloaded alone is offloaded with those that it
// requires.
func (p *problem) calibrate() error {
	for i := range p.rec {
		needs, err := p.needs(p.newChoice(1<<i, 0), 0)
		if err != nil {
			return err
		}
		for r, n := range needs {
			p.tables[r].again[i] = n.Peak.Expected - p.peak(r, 1<<i, 0, 0)
		}
	}
	for i, m := range p.off {
		set := uint32(1) << i
		module, _ := memory.LookupModule(m)
		for _, need := range module.Requires {
			if j := slices.Index(p.off, need); j >= 0 {
				set |= 1 << j
			}
		}
		needs, err := p.needs(p.newChoice(0, set), parts)
		if err != nil {
			return err
		}
		for r, n := range needs {
			p.tables[r].stays[i] += n.Peak.Expected - p.peak(r, 0, set, parts)
		}
	}
	return nil
}

// needs predicts every rank under a choice if each offloads the given number of 64ths.
func (p *problem) needs(c *choice, fraction int) ([]*plan.Rank, error) {
	s := p.withFraction(c, fraction)
	needs := make([]*plan.Rank, p.ranks())
	for r := range needs {
		var err error
		if needs[r], err = p.ahead(r, s.Recompute, s.Offload); err != nil {
			return nil, err
		}
	}
	return needs, nil
}

// reserved returns what the budget is compared with, by rank.
func reserved(needs []*plan.Rank) []memory.Bytes {
	heights := make([]memory.Bytes, len(needs))
	for r, n := range needs {
		heights[r] = n.Reserved.High
	}
	return heights
}

// withFraction returns the setup with a choice, where every rank offloads the given number of
// 64ths.
func (p *problem) withFraction(c *choice, fraction int) *plan.Setup {
	n := *p.setup
	n.Recompute = c.recompute
	if c.off != 0 && fraction > 0 {
		n.Offload.Modules = names(p.off, c.off)
		n.Offload.Fraction = float64(fraction) / parts
		n.Offload.ByBytes = true
	}
	return &n
}

// chosen returns the setup with a choice, where every rank offloads its own share.
func (p *problem) chosen(c *choice) *plan.Setup {
	n := p.withFraction(c, slices.Max(c.fractions))
	if slices.Min(c.fractions) == slices.Max(c.fractions) {
		return n
	}
	for _, x := range c.fractions {
		n.Offload.Fractions = append(n.Offload.Fractions, float64(x)/parts)
	}
	return n
}

// verify finds the fastest choice whose full forecast fits. It predicts a choice only when
// the choice is the fastest left, and the forecast may put others before it. It returns a
// *TooSmall if none fits.
func (p *problem) verify(list []*choice) (*choice, error) {
	list = append(list, p.whole()...)
	slices.SortFunc(list, order)
	for {
		best := p.fastest(list, func(c *choice) bool { return !c.failed })
		if best == nil {
			var err error
			if best, err = p.lowestPolicy(); err != nil {
				return nil, err
			}
		}
		if best.heights != nil {
			return p.reprieve(list, best)
		}
		if err := p.refine(best); err != nil {
			return nil, err
		}
		if best.failed && !best.crowded && !best.recompute.Full {
			p.dropNoLower(list, best)
		}
		slices.SortFunc(list, order)
	}
}

// dropNoLower fails the choices that, by the linear model, are no lower than a failed choice on
// the rank where that one failed. The model lacks the same memory for all of them.
// Otherwise thousands of choices might be predicted in turn. Graphs may hold what the model
// takes for offloaded, so a choice that offloads says nothing about one that does not.
func (p *problem) dropNoLower(list []*choice, c *choice) {
	bar := p.peak(c.rank, c.rec, c.off, parts)
	for _, x := range list {
		if x.heights == nil && !x.failed && !x.recompute.Full && (x.off != 0 || c.off == 0) && p.peak(c.rank, x.rec, x.off, parts) >= bar {
			x.failed, x.unseen = true, true
		}
	}
}

// reprieve predicts choices that were dropped without a forecast and may be faster than the
// best, because the linear model can be wrong about one of them. There may be thousands, so
// it predicts only those with the lowest bounds.
func (p *problem) reprieve(list []*choice, best *choice) (*choice, error) {
	tries := reprieves
	for _, c := range list {
		if tries == 0 || c.bound >= p.walked(best)*(1-rounding) {
			break
		}
		if !c.unseen {
			continue
		}
		tries--
		c.failed, c.unseen = false, false
		if err := p.refine(c); err != nil {
			return nil, err
		}
		if !c.failed && p.beats(c, best) {
			best = c
		}
	}
	return best, nil
}

// floor returns the lowest peak that a policy can reach by the linear model: everything
// that a module can free or offload is gone. Only recomputing whole layers may be lower.
func (p *problem) floor() (memory.Bytes, error) {
	every := uint32(1)<<len(p.rec) - 1
	var lowest memory.Bytes
	for r := range p.ranks() {
		t := &p.tables[r]
		saved, moved := p.chunkBytes(r, uint32(1)<<len(p.off)-1, p.left(every))
		for _, q := range t.points {
			h := float64(q.fixed)
			for c, live := range q.live {
				h += float64(live) * (saved[c] - moved[c])
			}
			if len(p.setup.Graph.Scopes) == 0 { // policies leave less in the pools of graphs
				h *= p.over[r]
			}
			lowest = max(lowest, memory.Bytes(h))
		}
	}
	if lowest <= p.budget || noWhole(p.setup) != "" {
		return lowest, nil
	}
	needs, err := p.needs(&choice{recompute: plan.Recompute{Full: true, Method: "uniform", Layers: 1}}, 0)
	if err != nil {
		return 0, err
	}
	return slices.Max(reserved(needs)), nil
}

// refine predicts a choice in full, and raises its fractions as far as the forecast
// requires.
func (p *problem) refine(c *choice) error {
	if c.recompute.Full {
		return p.refineWhole(c)
	}
	for range refinements {
		heights, err := p.measure(c)
		if err != nil {
			return err
		}
		if p.fits(heights) {
			c.heights = heights
			if err := p.trimFractions(c); err != nil {
				return err
			}
			if c.crowded, err = p.crowds(c); c.crowded {
				c.failed, c.heights = true, nil
			}
			return err
		}
		for r, h := range heights {
			if h <= p.budget {
				continue
			}
			c.rank = r
			if c.setFraction(r, p.further(c, r, h)); c.fractions[r] > parts {
				c.failed = true
				return nil
			}
		}
	}
	c.failed = true
	return nil
}

// trimFractions lowers the fractions of a choice that offloads more than necessary. Whole groups are
// offloaded, which can be more than the fraction asked for.
func (p *problem) trimFractions(c *choice) error {
	for range trims {
		less := p.newChoice(c.rec, c.off)
		for r, n := range c.fractions {
			if slope := p.slope(c, r); n > 0 && slope > 0 {
				n = max(n-int(float64(p.budget-c.heights[r])/slope), 0)
			}
			less.setFraction(r, n)
		}
		if slices.Equal(less.fractions, c.fractions) {
			break
		}
		heights, err := p.measure(less)
		if err != nil {
			return err
		}
		for r, h := range heights {
			if h <= p.budget {
				c.fractions[r], c.shares[r], c.heights[r] = less.fractions[r], less.shares[r], h
			}
		}
	}
	p.settle(c)
	return nil
}

// crowds reports whether a choice needs more host memory than there is. The linear model
// accepted it, but whole groups are offloaded.
func (p *problem) crowds(c *choice) (bool, error) {
	for r, n := range c.fractions {
		p.pinned[r] = p.clean.Ranks[r].Host
		if n == 0 {
			continue
		}
		m, err := p.measureRank(c, r, n)
		if err != nil {
			return true, err
		}
		p.pinned[r] = m.host
	}
	crowded := p.setup.Node(p.pinned).Missing > 0
	if crowded {
		p.crowded, p.crowdedOff, p.crowdedRec = true, p.crowdedOff|c.off, p.crowdedRec|c.rec
	}
	return crowded, nil
}

// trims is how often trim tries. Each time at least halves the slack.
const trims = 2

// reprieves bounds the forecasts for choices that were dropped without one.
const reprieves = 32

// refinements is how often fractions are corrected. Each time a rank offloads at least one
// 64th more, and everything that is missing by the linear model. Two or three times are
// enough unless offloading does not help.
const refinements = 8

// slope returns by how much another offloaded 64th lowers a rank's peak, by the linear
// model.
func (p *problem) slope(c *choice, r int) float64 {
	return p.over[r] * float64(p.peak(r, c.rec, c.off, 0)-p.peak(r, c.rec, c.off, parts)) / parts
}

// further returns how many 64ths a rank must offload if its height with the choice's
// fraction is as given.
func (p *problem) further(c *choice, r int, height memory.Bytes) int {
	if c.off == 0 {
		return parts + 1
	}
	slope := p.slope(c, r)
	if slope <= 0 {
		return parts + 1
	}
	next := c.fractions[r] + max(ceil(float64(height-p.budget)/slope), 1)
	if next > parts && c.fractions[r] < parts {
		return parts // try all of it before giving up
	}
	return next
}

// measure predicts the peaks of a choice, and which part of its bytes is offloaded.
func (p *problem) measure(c *choice) ([]memory.Bytes, error) {
	heights := make([]memory.Bytes, p.ranks())
	for r, n := range c.fractions {
		m, err := p.measureRank(c, r, n)
		if err != nil {
			return nil, err
		}
		heights[r], c.shares[r] = m.height, m.share
	}
	return heights, nil
}

// asked identifies a forecast of one rank, and measured is its result.
type asked struct {
	rec, off       uint32
	rank, fraction int
}

type measured struct {
	height, host memory.Bytes
	share        float64 // the part of the bytes that is offloaded, because whole groups are
}

// measureRank predicts one rank of a choice. It caches results: most ranks stay the same
// while fractions are corrected.
func (p *problem) measureRank(c *choice, r, n int) (m measured, err error) {
	q := asked{c.rec, c.off, r, n}
	if n == 0 {
		q.off = 0
	}
	m, known := p.answers[q]
	if known && !c.recompute.Full {
		return m, nil
	}
	s := p.withFraction(c, n)
	need, err := p.ahead(r, s.Recompute, s.Offload)
	if err != nil {
		return m, err
	}
	if m.height, m.host = need.Reserved.High, need.Host; n > 0 && c.off != 0 {
		m.share = need.Share
	}
	if !c.recompute.Full {
		p.answers[q] = m
	}
	return m, nil
}

// settle updates the times of a choice after its fractions have changed.
func (p *problem) settle(c *choice) {
	c.passes = p.passTimes(c, p.left(c.rec))
	c.bound, c.total, c.moved = p.time.Bound(c.passes), 0, 0
	for r, share := range c.shares {
		c.moved += memory.Bytes(float64(p.hostBytes(r, c)) * share)
	}
}

// hostBytes returns the most bytes of the offloaded modules that are live at once on a
// rank.
func (p *problem) hostBytes(r int, c *choice) memory.Bytes {
	moved := make([]memory.Bytes, p.setup.Layout.VPP)
	of := p.left(c.rec)
	for i := r; i < len(p.stages); i += p.ranks() {
		g := &p.stages[i]
		for k, n := range g.count {
			for m, b := range of[k].moved {
				if c.off&(1<<m) != 0 {
					moved[g.chunk] += memory.Bytes(n) * b
				}
			}
		}
	}
	var most memory.Bytes
	for _, q := range p.tables[r].points {
		var n memory.Bytes
		for chunk, live := range q.live {
			n += memory.Bytes(live) * moved[chunk]
		}
		most = max(most, n)
	}
	return most
}

// whole returns the choices that recompute whole layers: all layers, or the first of each
// stage.
func (p *problem) whole() []*choice {
	if why := noWhole(p.setup); why != "" {
		return nil
	}
	all, some := p.newChoice(0, 0), p.newChoice(0, 0)
	all.recompute = plan.Recompute{Full: true, Method: "uniform", Layers: 1}
	some.recompute = plan.Recompute{Full: true, Method: "block", Layers: 1}
	p.settleWhole(all)
	p.settleWhole(some)
	return []*choice{some, all}
}

// noWhole says why whole layers cannot be recomputed. It is empty if they can.
func noWhole(s *plan.Setup) string {
	if len(s.Graph.Scopes) > 0 && !has(s.Graph.Scopes, "full_iteration") {
		return "parts of layers are captured in graphs; capture the full iteration or nothing"
	}
	if s.Layout.OverlapEP {
		return "expert communication is overlapped with another microbatch; drop the overlap"
	}
	return ""
}

func (p *problem) settleWhole(c *choice) {
	n := p.withFraction(c, 0)
	c.passes = p.time.PolicyOf(n.Recompute, n.Offload).Passes
	c.bound, c.total = p.time.Bound(c.passes), 0
}

// refineWhole finds the least number of layers of each stage that is enough.
func (p *problem) refineWhole(c *choice) error {
	lo, hi := 1, 1
	if c.recompute.Method == "block" {
		for _, g := range p.stages {
			hi = max(hi, g.layers)
		}
	}
	var heights []memory.Bytes
	for lo <= hi {
		mid := (lo + hi) / 2
		c.recompute.Layers = mid
		needs, err := p.needs(c, 0)
		if err != nil {
			return err
		}
		if h := reserved(needs); p.fits(h) {
			heights, hi = h, mid-1
		} else {
			lo = mid + 1
		}
	}
	if c.failed = heights == nil; c.failed {
		return nil
	}
	c.recompute.Layers, c.heights = hi+1, heights
	p.settleWhole(c)
	return nil
}

// lowestPolicy returns the policy with the lowest peaks by the full forecast. It is the answer if
// the linear model finds none and it fits. Else it gives the smallest budget.
func (p *problem) lowestPolicy() (*choice, error) {
	if err := p.overfull(); err != nil {
		return nil, err
	}
	var best *choice
	// If host memory is too small, only the choice that offloads nothing is left.
	for _, c := range append(p.whole(), p.smallest(p.allowed(p.off, memory.Offload)), p.smallest([]uint32{0})) {
		if c.recompute.Method == "block" {
			continue // recomputing all layers leaves less
		}
		if !c.recompute.Full {
			for r := range c.fractions {
				c.setFraction(r, parts)
			}
			p.settle(c)
		}
		var err error
		if c.heights, err = p.measure(c); err != nil {
			return nil, err
		}
		if c.crowded, err = p.crowds(c); err != nil {
			return nil, err
		}
		if !c.crowded && (best == nil || slices.Max(c.heights) < slices.Max(best.heights)) {
			best = c
		}
	}
	if p.fits(best.heights) {
		return best, nil
	}
	least := slices.Max(best.heights)
	return nil, &TooSmall{Budget: p.budget, Least: least, Rank: slices.Index(best.heights, least), Policy: describe(best.recompute, names(p.off, best.off))}
}

// smallest returns the choice with the lowest peak by the linear model among some sets of
// offloaded modules.
func (p *problem) smallest(offs []uint32) *choice {
	best, least := p.newChoice(0, 0), memory.Bytes(-1)
	for _, rec := range p.allowed(p.rec, memory.Recompute) {
		for _, off := range offs {
			if p.clashBetween(rec, off) != "" {
				continue
			}
			var peak memory.Bytes
			for r := range p.ranks() {
				peak = max(peak, p.peak(r, rec, off, parts))
			}
			if least < 0 || peak < least {
				least = peak
				best.rec, best.off, best.recompute = rec, off, plan.Recompute{Modules: names(p.rec, rec)}
			}
		}
	}
	return best
}

// step returns the time of a choice.
func (p *problem) step(c *choice) cost.Step { return p.time.Step(c.passes) }
