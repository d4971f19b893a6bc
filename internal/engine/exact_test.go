// This file owns exactness: whatever the policy, the backward passes are given what
// the forward passes saved.

package engine

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/memory"
)

func hand(modules ...string) *policy.ByHand {
	h := policy.Defaults()
	h.OffloadModules = modules
	return &h
}

// change is settings by hand with changes.
func change(h *policy.ByHand, f func(*policy.ByHand)) *policy.ByHand { f(h); return h }

var everyModule = []string{"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"}

// byHand are the settings that tests go through.
var byHand = map[string]*policy.ByHand{
	"attn_norm":  hand("attn_norm"),
	"qkv_linear": hand("qkv_linear", "core_attn"), // which share storages
	"core_attn":  hand("core_attn"),
	"attn_proj":  hand("core_attn", "attn_proj"),
	"mlp_norm":   hand("mlp_norm"),
	"expert_fc1": hand("expert_fc1"),
	"moe_act":    hand("moe_act", "attn_norm"),
	"all":        change(hand(everyModule...), func(h *policy.ByHand) { h.Margin = 0 }),
	"fraction":   change(hand(everyModule...), func(h *policy.ByHand) { h.OffloadFraction = 0.5 }),
	"groups":     change(hand(everyModule...), func(h *policy.ByHand) { h.OffloadFraction, h.FractionOfGroups = 0.3, true }),
	"margin":     change(hand(everyModule...), func(h *policy.ByHand) { h.Margin = 2 }),
	"min size":   change(hand(everyModule...), func(h *policy.ByHand) { h.MinBytes = 1200 }),
	"cap":        change(hand(everyModule...), func(h *policy.ByHand) { h.MaxInflight = 1 }),
	"delta":      change(hand(everyModule...), func(h *policy.ByHand) { h.DeltaBytes = 3000 }),
	"recompute":  change(hand(), func(h *policy.ByHand) { h.RecomputeModules = []string{"core_attn", "moe_act", "mlp"} }),
	"mixed":      change(hand("attn_norm", "qkv_linear", "expert_fc1"), func(h *policy.ByHand) { h.RecomputeModules = []string{"core_attn", "moe_act", "mlp"} }),
}

// SPEC S5.1, S5.2, S5.3, S4.5: every setting by hand, on every pipeline, gives the
// exact results, and moves what it names and nothing else.
func TestByHandIsExact(t *testing.T) {
	onDevices(t, func(t *testing.T, dev device.Device) {
		for i, p := range pipelines {
			for name, h := range byHand {
				t.Run(p.name+", "+name, func(t *testing.T) {
					err := run(dev, on(i, Config{ByHand: h}), func(l *loop, rng *rand.Rand) error {
						if err := l.eachSure(4, rng, func(int) error { return nil }); err != nil {
							return err
						}
						return l.names(h)
					})
					if err != nil {
						t.Fatal(err)
					}
				})
			}
		}
	})
}

// names tells whether the groups that moved are those that were named.
func (l *loop) names(h *policy.ByHand) error {
	d, s := l.rt.Decision(l.key()), l.rt.Summary(l.key())
	if s.Counts.Departed || s.Counts.Evicted > 0 {
		return fmt.Errorf("the last step departed or evicted: %+v", s.Counts)
	}
	if s.Extent != d.Forecast.Extent || s.Counts.OutBytes != d.Forecast.Counts.OutBytes {
		return fmt.Errorf("extent %d and %d bytes moved, forecast %d and %d", s.Extent, s.Counts.OutBytes, d.Forecast.Extent, d.Forecast.Counts.OutBytes)
	}
	if len(h.RecomputeModules) > 0 && l.again == 0 {
		return fmt.Errorf("nothing was recomputed")
	}
	moved := memory.Bytes(0)
	for _, g := range s.Groups {
		if moved += g.Moved; g.Moved > 0 && g.Units[memory.Offload] == 0 {
			return fmt.Errorf("%s moved %v", g.Name, g.Moved)
		}
	}
	if len(h.OffloadModules) > 0 && len(d.Policy.Units()) > 0 && moved == 0 {
		return fmt.Errorf("nothing moved")
	}
	if moved != s.Counts.OutBytes {
		return fmt.Errorf("the groups moved %v, the step %v", moved, s.Counts.OutBytes)
	}
	return nil
}

// SPEC S8.2, S5.5, S6.1: budgets from all that is needed down to the floor: the results
// are exact, the extent is the forecast's and never above the budget, in the first
// step neither.
func TestBudgetsAreExact(t *testing.T) {
	onDevices(t, func(t *testing.T, dev device.Device) {
		for i, p := range pipelines {
			all := extent(t, on(i, Config{}))
			for k, share := range shares(100, 60, 80, 40) {
				c := []Config{{}, {NoRecompute: true}, {NoOffload: true}}[(k+i)%3]
				c.SavedLimit = all * share / 100 / 256 * 256
				t.Run(fmt.Sprintf("%s, %d%%, no recompute %v, no offload %v", p.name, share, c.NoRecompute, c.NoOffload), func(t *testing.T) {
					err := run(dev, on(i, c), func(l *loop, rng *rand.Rand) error { return l.within(rng, c.SavedLimit, all) })
					if below := (*memory.BudgetError)(nil); err != nil && !(c.NoOffload && errors.As(err, &below)) {
						t.Fatal(err)
					}
				})
			}
		}
	})
}

// shares are those of all memory that budgets are; the first two if time is short,
// since the solver takes its time.
func shares(all ...memory.Bytes) []memory.Bytes {
	if testing.Short() {
		return all[:2]
	}
	return all
}

// eachSure trains so many steps at least, and one under the plan that is made when times are final:
// steps of a busy machine differ, and are recorded and timed again until two are alike. It calls
// then after each of them.
func (l *loop) eachSure(least int, rng *rand.Rand, then func(step int) error) error {
	for i, sure := 0, false; i < least || i < 30 && !sure; i++ {
		k := l.rt.keys[l.key()]
		sure = k != nil && k.known && (k.plan == nil || l.rt.sure(k))
		if err := l.one(l.key(), rng); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		if err := then(i); err != nil {
			return err
		}
	}
	return nil
}

// within trains under a budget.
func (l *loop) within(rng *rand.Rand, budget, all memory.Bytes) error {
	err := l.eachSure(6, rng, func(i int) error {
		s := l.rt.Summary(l.key())
		if s.Extent > budget {
			return fmt.Errorf("step %d takes %v of %v", i, s.Extent, budget)
		}
		if n, _ := l.rt.off.Memory(); n > budget {
			return fmt.Errorf("step %d: %v were taken of %v", i, n, budget)
		}
		return nil
	})
	if err != nil {
		return err
	}
	d, s := l.rt.Decision(l.key()), l.rt.Summary(l.key())
	switch {
	case d == nil:
		return fmt.Errorf("nothing was decided")
	case s.Counts.Departed || s.Extent != d.Forecast.Extent || s.Host > d.Forecast.Host:
		return fmt.Errorf("extent %d, host %d, forecast %d and %d, departed %v", s.Extent, s.Host, d.Forecast.Extent, d.Forecast.Host, s.Counts.Departed)
	case d.Nothing != (budget >= all):
		return fmt.Errorf("nothing to do is %v with %v of %v", d.Nothing, budget, all)
	case d.Nothing && s.Counts.Out > 0:
		return fmt.Errorf("%d copies out with nothing to do", s.Counts.Out)
	}
	return nil
}

// SPEC S4.5: a pipeline rank keeps as many times the delta as its number says, of
// what is on the device at once.
func TestDeltaAcrossRanks(t *testing.T) {
	t.Parallel()
	const delta = 6 * memory.KiB
	for rank := range 3 {
		var out [2]int64
		for i, d := range []memory.Bytes{0, delta} {
			c := on(1, Config{ByHand: change(hand("core_attn", "qkv_linear", "attn_proj"), func(h *policy.ByHand) { h.DeltaBytes, h.Margin = d, 0 })})
			c.rank, c.layers = rank, 6
			must(t, c, func(l *loop, rng *rand.Rand) error {
				err := l.eachSure(3, rng, func(int) error { return nil })
				out[i] = int64(l.rt.Summary(l.key()).Counts.OutBytes)
				return err
			})
		}
		if kept := out[0] - out[1]; rank == 0 && kept != 0 || rank > 0 && kept < int64(delta)*int64(rank)/2 {
			t.Errorf("rank %d moves %d bytes, and %d with a delta", rank, out[0], out[1])
		}
	}
}

// SPEC S5.5, S6.1, S8.2, S1.1: a budget holds for all that the device's ledger counts:
// buffers of the caller, workspaces, page tables, pages and saved tensors.
func TestBudgetIsTheDevices(t *testing.T) {
	t.Parallel()
	for _, set := range []memory.Scopes{0, whole} {
		c := on(0, Config{Stash: store(60, 60), Scopes: set})
		c.most, c.layers = 20, 6
		var all memory.Bytes
		must(t, c, func(l *loop, rng *rand.Rand) error {
			err := l.train(3, rng)
			all = l.dev.Memory().Kind[memory.Device].Peak
			return err
		})
		for _, less := range []memory.Bytes{8, 24, 40} {
			c.Stash = store(60, 60)
			c.Stash.HostPages, c.Stash.HostMax = 60, 60
			c.Budget = all - less*memory.KiB
			must(t, c, func(l *loop, rng *rand.Rand) error {
				for range 5 {
					if err := l.one(l.key(), rng); err != nil {
						return err
					}
					if u := l.dev.Memory(); u.Kind[memory.Device].Peak > c.Budget {
						return fmt.Errorf("%v of a budget of %v: %+v", u.Kind[memory.Device].Peak, c.Budget, u.Owners)
					}
				}
				d := l.rt.Decision(l.key())
				if d.Forecast.Extent > c.Budget {
					return fmt.Errorf("forecast %v of a budget of %v", d.Forecast.Extent, c.Budget)
				}
				t.Logf("%v of %v:\n%s", c.Budget, all, d.Text())
				return nil
			})
		}
	}
}
