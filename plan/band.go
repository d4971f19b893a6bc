// This file owns how sure a forecast is: bands that come from how far
// forecasts were off on measured runs, and what an allocator takes from the
// device for what is allocated.

package plan

// spread is how far below and above a forecast measured runs have been, as
// shares of the forecast. The figures are the outer ones of the cases that
// docs/PLANNER.md lists, without the few whose cause is named there.
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

// spread is the widest that applies.
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

func band(expected int64, s spread) Band {
	return Band{
		Low: expected - int64(float64(expected)*s.below), Expected: expected,
		High: expected + int64(float64(expected)*s.above),
	}
}

// Reserved over allocated memory on B200, 31 ranks of dense, MoE and long-context
// runs without expandable segments: 1.01 to 1.09, 1.03 for dense and 1.06 for MoE
// models in the middle. Interleaving frees what it saved in another order than it
// was allocated, and has been seen to run out of 80 GB with 59 allocated. With
// expandable segments, which leave no holes, 1.03 covers what was seen. used is
// what is in use at once, with the pools of graphs that are not counted as
// allocated.
func (d *dims) reserved(peak Band, used int64) Band {
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
		Low: int64(float64(peak.Low) * low), Expected: int64(expected * middle),
		High: int64(max(expected*high, float64(peak.High))),
	}
}
