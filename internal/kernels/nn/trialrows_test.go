// This file owns the kinds of trials of routing and of moving rows.

package nn

import (
	"encoding/binary"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// coarse rounds numbers to multiples of a step. Such logits are equal or far apart, so
// the order of scores does not depend on their last bits.
func (x *trial) coarse(r device.Range, step float64) {
	for at := int(r.Off); at < int(r.Off+r.Len); at += 4 {
		v := float32(math.Round(numberAt(x.data[at:], kernels.F32, 0)/step) * step)
		binary.LittleEndian.PutUint32(x.data[at:], math.Float32bits(v))
	}
}

// routing draws a routing with random logits. Tokens choose by Scores if those are set,
// or have fixed choices.
func (x *trial) routing(tokens, experts int) Routing {
	r := Routing{TopK: 1 + x.IntN(min(experts, 9)), Sigmoid: x.maybe(), Normalise: x.maybe(), Factor: 2.5}
	r.Logits = x.matrix(kernels.F32, tokens, experts)
	x.coarse(r.Logits.Range, 1./16)
	r.Scores = x.inPlace(r.Logits, kernels.F32)
	return r
}

func (x *trial) experts() int {
	if x.IntN(3) == 0 {
		return 1 + x.IntN(MaxExperts)
	}
	return 1 + x.IntN(70)
}

func routeTrial(x *trial) func(s device.Stream) {
	tokens, experts := x.atMost(40, 2000), x.experts()
	r := x.routing(tokens, experts)
	r.Index, r.Weight = x.waste(memory.Bytes(4*tokens*r.TopK), exact), x.floats(tokens*r.TopK)
	if x.maybe() {
		r.Bias = x.floats(experts)
		x.coarse(r.Bias, 2) // a score is at most one
	}
	if x.maybe() {
		r.Load = x.words(experts, func(i int) uint32 { return uint32(i) })
	}
	return func(s device.Stream) { Route(s, r) }
}

// choices draws different experts for each token.
func (x *trial) choices(tokens, topK, experts int) device.Range {
	var perm []int
	return x.words(tokens*topK, func(i int) uint32 {
		if i%topK == 0 {
			perm = x.Perm(experts)
		}
		return uint32(perm[i%topK])
	})
}

func (x *trial) routingGrad() RoutingGrad {
	tokens, experts := x.atMost(40, 2000), x.experts()
	r := RoutingGrad{Routing: x.routing(tokens, experts), Scale: 0.5}
	// Scores are positive, and logits would not be.
	r.Scores = r.Logits
	r.Scores.Range = x.numbers(kernels.F32, int(r.Logits.Range.Len/4), 1)
	x.positive(r.Scores.Range)
	r.Index, r.DWeight = x.choices(tokens, r.TopK, experts), x.floats(tokens*r.TopK)
	r.DLogits = x.inPlace(r.Scores, kernels.F32)
	if x.maybe() {
		r.Balance = 0.3
		r.Scratch = x.waste(RouteScratch(tokens, experts), scratch)
	}
	return r
}

func routeGradTrial(x *trial) func(s device.Stream) {
	r := x.routingGrad()
	return func(s device.Stream) { RouteGrad(s, r) }
}

func routeLossTrial(x *trial) func(s device.Stream) {
	r := x.routingGrad()
	r.Loss = x.floats(1)
	return func(s device.Stream) { RouteGrad(s, r) }
}

func rebalanceTrial(x *trial) func(s device.Stream) {
	experts := x.experts()
	r := Rebalance{Bias: x.floats(experts), Experts: experts, Ranks: x.IntN(4), Rate: 0.01}
	r.Load = x.words(experts*max(r.Ranks, 1), func(int) uint32 { return uint32(x.IntN(4)) })
	return func(s device.Stream) { UpdateBias(s, r) }
}

// limits draws groups, slots and room for about the given number of rows.
func (x *trial) limits(rows, experts int) (group, slot, room int) {
	group = 1 + x.IntN(experts)
	room = 1 + x.IntN(2*rows)
	if x.maybe() {
		groups := runsOf(experts, group)
		slot = 1 + x.IntN(1+2*rows/groups)
		room = 1 + x.IntN(groups*slot)
	}
	return group, slot, room
}

func sortTrial(x *trial) func(s device.Stream) {
	tokens, all := x.atMost(60, 20000), x.experts()
	if !x.large && x.IntN(4) == 0 {
		tokens = 2000 + x.IntN(2000)
	}
	o := Sorting{Tokens: tokens, TopK: 1 + x.IntN(min(all, 8)), First: x.IntN(all)}
	o.Experts = 1 + x.IntN(all-o.First)
	pairs := tokens * o.TopK
	o.Group, o.Slot, o.Room = x.limits(pairs, o.Experts)
	if x.maybe() {
		o.Capacity = 1 + x.IntN(2*pairs)
	}
	o.Index = x.arrivals(pairs, func(int) uint32 { return uint32(x.IntN(1 + x.IntN(all))) })
	o.Seg = Segments{Range: x.waste(SegmentsBytes(o.Experts), exact), Experts: o.Experts}
	o.Source, o.Place = x.waste(memory.Bytes(4*o.Room), exact), x.waste(memory.Bytes(4*pairs), exact)
	o.Scratch = x.waste(SortScratch(tokens, o.TopK, o.Experts), scratch)
	if x.maybe() {
		o.Count, o.Counts = x.waste(8, exact), x.waste(memory.Bytes(4*o.Experts), exact)
	}
	return func(s device.Stream) { SortRows(s, o) }
}

// arrivals draws words that come from other ranks. A rank that fails leaves any.
func (x *trial) arrivals(n int, draw func(int) uint32) device.Range {
	wild := x.IntN(3) == 0
	return x.words(n, func(i int) uint32 {
		if wild && x.maybe() {
			return x.Uint32()
		}
		return draw(i)
	})
}

func regroupTrial(x *trial) func(s device.Stream) {
	r := Regrouping{Ranks: x.atMost(20, 70), Experts: x.experts(), Part: x.atMost(200, 5000)}
	_, r.Slot, r.Room = x.limits(r.Ranks*r.Part, r.Experts)
	if r.Slot > 0 {
		// Each expert is a group of its own here.
		r.Slot = 1 + x.IntN(1+2*r.Ranks*r.Part/r.Experts)
		r.Room = 1 + x.IntN(r.Experts*r.Slot)
	}
	r.Counts = x.arrivals(r.Ranks*r.Experts, func(int) uint32 { return uint32(x.IntN(1+x.IntN(2*r.Part)) / r.Experts) })
	r.Seg = Segments{Range: x.waste(SegmentsBytes(r.Experts), exact), Experts: r.Experts}
	r.Source, r.Place = x.waste(memory.Bytes(4*r.Room), exact), x.waste(memory.Bytes(4*r.Ranks*r.Part), exact)
	if x.maybe() {
		r.Count = x.waste(8, exact)
	}
	return func(s device.Stream) { Regroup(s, r) }
}

// rowNumbers draws rows of another matrix, or None.
func (x *trial) rowNumbers(n, rows int) device.Range {
	return x.words(n, func(int) uint32 {
		if x.IntN(4) == 0 {
			return None
		}
		return uint32(x.IntN(rows))
	})
}

func takeTrial(x *trial) func(s device.Stream) {
	rows, from, cols, t := x.atMost(60, 1000), x.atMost(60, 1000), x.cols(), x.number()
	if x.IntN(3) == 0 {
		cols = 1 + x.IntN(3)
	}
	k := Taking{Dst: x.matrix(t, rows, cols), Src: x.matrix(t, from, cols), Every: 1 + x.IntN(4), Zero: x.maybe()}
	k.Source = x.rowNumbers(rows, from*k.Every)
	return func(s device.Stream) { TakeRows(s, k) }
}

func spreadTrial(x *trial) func(s device.Stream) {
	rows, cols, t := x.atMost(60, 1000), 8*(1+x.cols()/8), x.number()
	k := Spreading{Every: 1 + x.IntN(5)}
	matrix := func(rows int) Matrix {
		b := make([]byte, rows*(cols+8)*int(t.Size()))
		for i := range b {
			b[i] = byte(x.Uint32())
		}
		return Matrix{Range: x.place(b, exact, 16, 3), Type: t, Rows: rows, Cols: cols, Pitch: cols + 8}
	}
	k.Dst, k.Src = matrix(rows*k.Every+x.IntN(9)), matrix(rows)
	to := x.Perm(k.Dst.Rows)
	k.Place = x.words(rows*k.Every, func(i int) uint32 {
		if x.IntN(5) == 0 {
			return None
		}
		return uint32(to[i])
	})
	return func(s device.Stream) { SpreadRows(s, k) }
}

func combineTrial(x *trial) func(s device.Stream) {
	rows, from, cols := x.atMost(60, 1000), x.atMost(60, 1000), x.cols()
	c := Combining{Dst: x.any(rows, cols), Src: x.any(from, cols), Every: 1 + x.IntN(5)}
	c.Place = x.rowNumbers(rows*c.Every, from)
	if x.maybe() {
		c.Plus = x.inPlace(c.Dst, x.number())
	}
	return func(s device.Stream) { CombineRows(s, c) }
}
