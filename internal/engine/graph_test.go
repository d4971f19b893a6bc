// This file owns captured steps: graphs give what eager steps give, and the host
// stays out of their replays.

package engine

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

var (
	whole  = memory.ScopesOf(memory.FullIteration)
	scopes = memory.ScopesOf(memory.Attn, memory.MLP, memory.MoERouter)
)

// store is a stash of few pages that may become many.
func store(pages, most schedule.Pages) *stash.ManagerConfig {
	return &stash.ManagerConfig{Store: stash.Config{Page: 4096,
		Pages: [stash.Tiers]schedule.Pages{stash.Device: pages}, Max: [stash.Tiers]schedule.Pages{stash.Device: most}}}
}

// graphed are captured loops: with everything in one graph, with scopes, and with
// copies behind their graphs; with a stash and without.
func graphed(yield func(string, loopConfig) bool) {
	delay := func(h *policy.ByHand) { h.Delay = true }
	for i, p := range pipelines {
		for name, c := range map[string]Config{
			"whole":           {Scopes: whole, ByHand: hand(everyModule...)},
			"whole, redone":   {Scopes: whole, ByHand: byHand["mixed"]},
			"whole, stash":    {Scopes: whole, ByHand: hand("attn_norm", "qkv_linear", "core_attn", "moe_act"), Stash: store(400, 400)},
			"scopes":          {Scopes: scopes, ByHand: hand("qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")},
			"scopes, delayed": {Scopes: scopes, ByHand: change(hand("core_attn", "mlp_norm", "expert_fc1"), delay)},
			"scopes, redone":  {Scopes: scopes, ByHand: byHand["recompute"]},
			"scopes, stash":   {Scopes: scopes, ByHand: hand("core_attn", "moe_act"), Stash: store(400, 400), WarmUp: 2},
			"router":          {Scopes: memory.ScopesOf(memory.MoERouter), ByHand: hand("attn_norm", "core_attn", "mlp_norm")},
		} {
			l := on(i, c)
			if c.Stash != nil {
				l.most = 40
			}
			if !yield(p.name+", "+name, l) {
				return
			}
		}
	}
}

// SPEC S4.1, S4.2, S4.6, S1.2: replays with other inputs give the exact results, and
// the host neither reads nor waits in them, except for the one reading of a stash.
func TestGraphsAreExact(t *testing.T) {
	onDevices(t, func(t *testing.T, dev device.Device) {
		for name, c := range graphed {
			t.Run(name, func(t *testing.T) {
				if err := run(dev, c, (*loop).replays); err != nil {
					t.Fatal(err)
				}
			})
		}
	})
}

// replays trains until graphs are replayed, and on.
func (l *loop) replays(rng *rand.Rand) error {
	if err := l.train(3, rng); err != nil {
		return err
	}
	before := l.rt.Summary(l.key())
	calls := l.calls
	for range 3 {
		l.feed(rng)
		if err := l.still(func() error { return l.step(l.key()) }); err != nil {
			return err
		}
		if err := l.compare(); err != nil {
			return err
		}
	}
	g := l.rt.Summary(l.key()).Graphs
	switch {
	case g.Replays <= before.Graphs.Replays || g.Captures != before.Graphs.Captures || g.Moved+g.Refused+g.Failed > 0:
		return fmt.Errorf("the graphs: %+v, and before %+v", *g, *before.Graphs)
	case l.Scopes.Has(memory.FullIteration) && l.calls != calls:
		return errors.New("the body of a captured step was called")
	}
	return nil
}

// still runs a step in which the host must not wait, and reads once if it has a
// stash.
func (l *loop) still(f func() error) error {
	before := l.dev.Counters()
	err := f()
	after, reads := l.dev.Counters(), uint64(0)
	if l.space != nil {
		reads = 1
	}
	if err == nil && (after.HostReads-before.HostReads != reads || after.HostSyncs != before.HostSyncs) {
		err = fmt.Errorf("the host read %d times and waited %d times", after.HostReads-before.HostReads, after.HostSyncs-before.HostSyncs)
	}
	return err
}

// SPEC S4.1, S5.5: a budget and graphs together: the forecast is that of the step
// with its graphs, the extent never exceeds the budget, and the results are exact.
func TestBudgetsInGraphs(t *testing.T) {
	t.Parallel()
	for i, p := range pipelines {
		for _, set := range []memory.Scopes{whole, scopes} {
			c := on(i, Config{Scopes: set})
			all := extent(t, c)
			for _, share := range shares(100, 70, 85) {
				c.SavedLimit = all * share / 100 / 256 * 256
				t.Run(fmt.Sprintf("%s, %v, %d%%", p.name, set, share), func(t *testing.T) {
					must(t, c, func(l *loop, rng *rand.Rand) error { return l.within(rng, c.SavedLimit, all) })
				})
			}
		}
	}
}

// SPEC S1.6, S4.1: a captured step that overflows is replayed again with more pages,
// and gives the result of one that never overflowed. Growth leaves the graph valid.
func TestRerunInAGraph(t *testing.T) {
	onDevices(t, func(t *testing.T, dev device.Device) {
		c := on(1, Config{Scopes: whole, ByHand: hand("core_attn", "moe_act"), Stash: store(9, 400)})
		c.most, c.layers = 40, 6
		err := run(dev, c, func(l *loop, rng *rand.Rand) error {
			for i, most := range []stash.Rows{1, 1, 1, 40, 40, 2} {
				if err := l.rowed(most, rng); err != nil {
					return err
				}
				if n := l.rt.Summary(l.key()).Stash.Reruns; i < 3 && n > 0 {
					return fmt.Errorf("step %d was rerun, before there was a graph to replay", i)
				}
			}
			s := l.rt.Summary(l.key())
			if s.Stash.Reruns == 0 || s.Stash.Growths == 0 || s.Graphs.Captures != 1 || s.Graphs.Replays < 4 {
				t.Errorf("%+v, %+v", s.Stash, s.Graphs)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	})
}

// SPEC S1.6, S4.1: sets that move, because a tensor has more rows than they hold, make
// graphs invalid. The step is captured again from the larger sets and gives the exact result.
func TestMovedSetsInAGraph(t *testing.T) {
	for _, set := range []memory.Scopes{whole, scopes} {
		c := on(1, Config{Scopes: set, ByHand: hand("core_attn", "moe_act"), Stash: store(400, 400)})
		c.most, c.limit, c.layers = 8, 40, 4
		must(t, c, func(l *loop, rng *rand.Rand) error {
			for range 4 {
				if err := l.rowed(8, rng); err != nil {
					return fmt.Errorf("%v: before sets moved: %w", set, err)
				}
			}
			before, generation := *l.rt.Summary(l.key()).Graphs, l.rt.generation()
			l.most = 40 // the sets hold eight
			for i := range 4 {
				if err := l.rowed(40, rng); err != nil {
					return fmt.Errorf("%v: step %d with more rows than the sets held: %w", set, i, err)
				}
			}
			g := *l.rt.Summary(l.key()).Graphs
			if l.rt.stash.Generation() == 0 || l.rt.generation() == generation {
				return fmt.Errorf("%v: no set has moved", set)
			}
			if before.Replays == 0 || g.Replays == before.Replays || g.Captures == before.Captures || g.Closed == before.Closed || g.Failed > 0 {
				return fmt.Errorf("%v: the graphs: %+v, and before %+v", set, g, before)
			}
			return nil
		})
	}
}

// SPEC S4.3: evaluation and steps with another number of microbatches in between do
// not disturb plans or graphs.
func TestKeysInBetween(t *testing.T) {
	t.Parallel()
	for _, set := range []memory.Scopes{0, whole, scopes} {
		c := on(0, Config{Scopes: set, ByHand: hand("core_attn", "moe_act"), Stash: store(400, 400)})
		c.most = 40
		must(t, c, func(l *loop, rng *rand.Rand) error {
			long, short := l.passes, schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 1}
			half, err := short.Passes(0)
			if err != nil {
				return err
			}
			for i := range 5 {
				if err := l.one(l.key(), rng); err != nil {
					return fmt.Errorf("%v: step %d: %w", set, i, err)
				}
				d, s := l.rt.Decision(l.key()), l.rt.Summary(l.key())
				if err := l.one(memory.Key{Phase: memory.Evaluate, Microbatches: 2}, rng); err != nil {
					return fmt.Errorf("%v: evaluation %d: %w", set, i, err)
				}
				l.passes = half
				if i < 4 {
					err = l.one(memory.Key{Microbatches: 1}, rng)
				}
				l.passes = long
				if err != nil {
					return fmt.Errorf("%v: short step %d: %w", set, i, err)
				}
				if again := l.rt.Summary(l.key()); l.rt.Decision(l.key()) != d || again.Extent != s.Extent || again.Counts.OutBytes != s.Counts.OutBytes {
					return fmt.Errorf("%v: the plan was disturbed: %+v, before %+v", set, again, s)
				}
			}
			if a, b := l.rt.Summary(l.key()), l.rt.Summary(memory.Key{Microbatches: 1}); a.Counts.OutBytes <= b.Counts.OutBytes {
				return fmt.Errorf("the summaries of both keys are one: %+v and %+v", a, b)
			}
			if g := l.rt.Summary(l.key()).Graphs; set != 0 && (g.Moved > 0 || g.Closed > 0 || g.Replays == 0) {
				return fmt.Errorf("%v: %+v", set, g)
			}
			return nil
		})
	}
}

// SPEC S4.3: a step that departs from its plan is exact; the next ones are learned
// and captured anew.
func TestDepartures(t *testing.T) {
	t.Parallel()
	for _, set := range []memory.Scopes{0, whole, scopes} {
		for _, c := range []Config{{ByHand: byHand["moe_act"]}, {ByHand: byHand["recompute"]}, {SavedLimit: 30 * memory.KiB}} {
			if c.Scopes = set; set == scopes && c.ByHand == byHand["moe_act"] {
				c.ByHand = byHand["expert_fc1"]
			}
			if c.SavedLimit > 0 {
				c.SavedLimit = extent(t, on(0, Config{Scopes: set})) * 3 / 4
			}
			must(t, on(0, c), func(l *loop, rng *rand.Rand) error {
				if err := l.train(2, rng); err != nil {
					return err
				}
				first := l.rt.Decision(l.key())
				l.extra = 3
				if err := l.train(6, rng); err != nil {
					return err
				}
				s := l.rt.Summary(l.key())
				if set != whole && l.rt.Decision(l.key()) == first || s.Counts.Departed {
					return fmt.Errorf("%v: nothing was learned: %+v", set, s)
				}
				if set != 0 && s.Graphs.Replays == 0 {
					return fmt.Errorf("%v: nothing is replayed: %+v", set, s.Graphs)
				}
				return nil
			})
		}
	}
}

// SPEC S4.1: scopes whose addresses moved are captured again, and the results are
// exact before, meanwhile and after.
func TestMovedScopes(t *testing.T) {
	t.Parallel()
	for _, h := range []*policy.ByHand{hand("core_attn", "mlp_norm", "expert_fc1"), byHand["recompute"]} {
		must(t, on(1, Config{Scopes: scopes, ByHand: h}), func(l *loop, rng *rand.Rand) error {
			for _, n := range []memory.Bytes{0, 4096} {
				l.shift = n
				err := l.train(1, rng)
				for tries := 0; err != nil && n > 0 && len(h.RecomputeModules) > 0 && tries < 3; tries++ {
					if !says(err.Error(), "run the step again") {
						return err
					}
					err = l.train(1, rng)
				}
				if err != nil {
					return err
				}
				if err := l.train(3, rng); err != nil {
					return err
				}
				before := l.rt.Summary(l.key()).Graphs.Replays
				if err := l.train(1, rng); err != nil {
					return err
				}
				if g := l.rt.Summary(l.key()).Graphs; g.Replays == before || n > 0 && g.Moved == 0 {
					return fmt.Errorf("moved by %v: %+v", n, *g)
				}
			}
			return nil
		})
	}
}

// SPEC S4.1: memory grows for a larger step under another key, and graphs captured
// before stay valid.
func TestGrowthLeavesGraphsValid(t *testing.T) {
	for _, set := range []memory.Scopes{whole, scopes} {
		must(t, on(1, Config{Scopes: set, ByHand: hand("core_attn", "expert_fc1")}), func(l *loop, rng *rand.Rand) error {
			long := l.passes
			few, err := schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 1}.Passes(0)
			if err != nil {
				return err
			}
			use := func(passes []schedule.Pass, n int) error {
				l.passes = passes
				return l.one(memory.Key{Microbatches: n}, rng)
			}
			for range 3 {
				if err := use(few, 1); err != nil {
					return err
				}
			}
			dev, _ := l.rt.off.Memory()
			g := *l.rt.Summary(memory.Key{Microbatches: 1}).Graphs
			for range 3 {
				if err := use(long, 4); err != nil {
					return err
				}
			}
			now := *l.rt.Summary(memory.Key{Microbatches: 1}).Graphs
			if grown, _ := l.rt.off.Memory(); grown <= dev || now.Closed != g.Closed {
				return fmt.Errorf("%v: memory %v became %v, graphs %+v and %+v", set, dev, grown, g, now)
			}
			if err := use(few, 1); err != nil {
				return err
			}
			if last := l.rt.Summary(memory.Key{Microbatches: 1}).Graphs; last.Captures != now.Captures || last.Replays == now.Replays || last.Moved > 0 {
				return fmt.Errorf("%v: %+v, before %+v", set, *last, now)
			}
			return nil
		})
	}
}
