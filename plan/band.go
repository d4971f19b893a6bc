// This file owns the bands of a forecast. They come from the errors of forecasts on
// measured runs, and from what an allocator reserves for allocated memory.

package plan

import "github.com/stowage-dev/stowage/memory"

// spread is how far measured runs were below and above their forecast, as shares of the
// forecast. The figures are the outermost of the cases in docs/PLANNER.md, except for the
// few whose cause is named there.
type spread struct{ below, above float64 }

var (
	denseSpread   = spread{0.025, 0.025}
	moeSpread     = spread{0.06, 0.06}
	skewSpread    = spread{0.05, 0.12} // routing that nothing balances
	fsdpSpread    = spread{0.06, 0.07}
	offloadSpread = spread{0.05, 0.08} // copies that lag behind
	graphSpread   = spread{0.07, 0.05}
	staticSpread  = spread{0.02, 0.03}
)

// spread returns the widest spread that applies.
func (d *dims) spread() spread {
	s := denseSpread
	widen := func(o spread, when bool) {
		if when {
			s.below, s.above = max(s.below, o.below), max(s.above, o.above)
		}
	}
	experts := hasExperts(d.m)
	k := d.s.Kernels
	widen(moeSpread, experts)
	widen(skewSpread, experts && !k.PadToCapacity && d.s.Routing.Imbalance == 1)
	widen(fsdpSpread, d.s.Layout.FSDP.Shard == ShardParameters)
	widen(offloadSpread, len(d.s.Offload.Modules) > 0)
	widen(graphSpread, len(d.s.Graph.Scopes) > 0)
	return s
}

func band(expected memory.Bytes, s spread) Band {
	return Band{
		Low: expected - memory.Bytes(float64(expected)*s.below), Expected: expected,
		High: expected + memory.Bytes(float64(expected)*s.above),
	}
}

// reserved returns what the allocator reserves for a peak. used is what is in use at once,
// including the pools of graphs that do not count as allocated.
//
// The factors are reserved over allocated memory of 31 ranks on B200 (dense, MoE and
// long-context runs) without expandable segments: 1.01 to 1.09, with a median of 1.03 for
// dense and 1.06 for MoE models. Interleaving frees tensors in another order than it
// allocated them; a run with 59 GB allocated ran out of 80 GB. Expandable segments leave
// no holes, and 1.03 covers their runs.
func (d *dims) reserved(peak Band, used memory.Bytes) Band {
	low, middle, high := 1.01, 1.035, 1.09
	if hasExperts(d.m) {
		middle = 1.06
	}
	if d.s.Layout.VPP > 1 {
		high = 1.35
	}
	if d.s.ExpandableSegments {
		low, middle, high = 1.0, 1.01, 1.03
	}
	expected := float64(max(peak.Expected, used))
	return Band{
		Low: memory.Bytes(float64(peak.Low) * low), Expected: memory.Bytes(expected * middle),
		High: memory.Bytes(max(expected*high, float64(peak.High))),
	}
}
