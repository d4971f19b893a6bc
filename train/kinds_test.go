// This file owns the tests of forecasts of many ranks: walking one rank of each stage says
// what walking all of them says.

package train

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// The forecast of one rank of each stage is that of all ranks, byte for byte and decision
// for decision, whatever the layout, the policy, the pool and the way of rows.
func TestForecastOfOneRankOfEachStage(t *testing.T) {
	sharding := func(k bucket.PoolKind) *Sharding { return &Sharding{Pool: k, Prefetch: 1, GradComm: kernels.BF16} }
	uneven := smallDeepSeek()
	uneven.Layers = append(uneven.Layers, uneven.Layers[len(uneven.Layers)-1])
	for _, x := range []struct {
		m        *model.Model
		l        Layout
		change   func(c *Config)
		policies []string
	}{
		{smallMoE(), Layout{2, 1, 2, 4}, nil, Policies},
		{smallMoE(), Layout{1, 1, 1, 14}, nil, []string{"stash"}}, // more ranks than a reduction has sources
		{smallMoE(), Layout{2, 1, 2, 4}, func(c *Config) { c.Dispatch = layer.Ring }, []string{"none", "budget"}},
		{smallMoE(), Layout{1, 1, 2, 6}, func(c *Config) { c.Sharding = sharding(bucket.Recorded) }, []string{"stash", "budget"}},
		{smallMoE(), Layout{2, 1, 2, 4}, func(c *Config) { c.Sharding, c.Number = sharding(bucket.Fixed), kernels.BF16 }, []string{"graphs", "offload"}},
		{smallMoE(), Layout{2, 1, 1, 3}, func(c *Config) { c.Sharding = sharding(bucket.Dynamic) }, []string{"offload+recompute"}},
		{smallMoE(), Layout{2, 1, 2, 2}, func(c *Config) { c.Memory.Room, c.Imbalance = 1, 1.5 }, []string{"stash"}}, // a step is walked again
		{uneven, Layout{2, 2, 1, 3}, nil, []string{"none", "stash", "budget"}},
		{smallDense(), Layout{2, 1, 1, 3}, func(c *Config) { c.Sharding = sharding(bucket.Rotary) }, []string{"budget"}},
		{smallHybrid(), Layout{1, 1, 2, 2}, nil, []string{"budget"}},
	} {
		for _, name := range x.policies {
			t.Run(fmt.Sprintf("%s/%+v/%s", x.m.Name, x.l, name), func(t *testing.T) {
				c := testConfig(t, x.m)
				c.Layout, c.Batch.Microbatches = x.l, 2*x.l.PP
				if x.change != nil {
					x.change(&c)
				}
				room := c.Memory.Room
				named := func(name string, budget memory.Bytes) {
					var err error
					if c.Memory, err = NamedMemory(name, budget); err != nil {
						t.Fatal(err)
					}
					c.Memory.Room, c.Memory.Links = room, memory.Links{Out: 4e9, In: 4e9}
				}
				named("stash", 0)
				if name == "budget" {
					f, err := Forecast(c)
					if err != nil {
						t.Fatal(err)
					}
					named(name, f.Fullest().Device*9/10)
				} else {
					named(name, 0)
				}
				some, err := Forecast(c)
				if err != nil {
					t.Fatal(err)
				}
				c.everyRank = true
				all, err := Forecast(c)
				if err != nil {
					t.Fatal(err)
				}
				if some.Steps != all.Steps || len(some.Ranks) != x.l.Ranks() || len(all.Ranks) != x.l.Ranks() {
					t.Fatalf("%d ranks after %d steps; of every rank %d after %d", len(some.Ranks), some.Steps, len(all.Ranks), all.Steps)
				}
				for i, want := range all.Ranks {
					if got := some.Ranks[i]; !reflect.DeepEqual(got, want) {
						t.Errorf("rank %d: %+v\n%+v\nwalked itself: %+v\n%+v", i, got, got.Decision, want, want.Decision)
					}
				}
			})
		}
	}
}
