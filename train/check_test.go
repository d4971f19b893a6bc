// This file owns whole runs under the race checker: no schedule of the streams changes
// a result, and nothing is used after it was freed.

package train

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// under opens the devices of a run under a checker.
func under(ck *check.Checker) func(int) (device.Device, error) {
	return func(rank int) (device.Device, error) {
		d, err := cpu.Open(cpu.Options{Ordinal: rank, CopyThreads: 1})
		if err != nil {
			return nil, err
		}
		return ck.Wrap(d), nil
	}
}

// watched are runs for the checker: each policy on one rank, on two expert ranks and
// on two stages, and sharded parameters.
func watched(t *testing.T, yield func(name string, c Config)) {
	for _, l := range []struct {
		name string
		Layout
	}{{"one rank", Layout{1, 1, 1, 1}}, {"ep 2", Layout{1, 1, 2, 2}}, {"pp 2", Layout{2, 1, 1, 1}}} {
		at := func(name string, m *model.Model, set func(c *Config)) {
			c := quick(t, m)
			c.Layout, c.Batch.Seq = l.Layout, 8
			set(&c)
			c.Memory.Links = links
			yield(l.name+", "+name, c)
		}
		for _, name := range []string{"none", "static", "stash", "offload", "offload+recompute", "graphs"} {
			at(name, mixed(), func(c *Config) { c.Memory = namedMemory(t, name) })
		}
		at("reruns", mixed(), func(c *Config) { c.Memory = Memory{Rows: layer.Stashed, Fraction: 1, Room: 0.01, Sets: 1} })
		at("recompute", assorted(), func(c *Config) {
			c.Memory = Memory{Fraction: 1, Recompute: []string{"layernorm", "core_attn", "mla_up_proj", "mlp", "moe", "shared_experts"}}
		})
		at("graphs and offload", assorted(), func(c *Config) {
			c.Memory = Memory{Rows: layer.Stashed, Fraction: 1, Offload: []string{"core_attn", "mlp_norm"}, Scopes: memory.ScopesOf(memory.Attn, memory.MoERouter)}
		})
		at("one graph", mixed(), func(c *Config) {
			c.Memory = Memory{Rows: layer.Stashed, Fraction: 1, Offload: []string{"core_attn", "mlp_norm"}, Scopes: fullIteration}
		})
		at("one graph, sharded", mixed(), func(c *Config) {
			c.Memory = Memory{Rows: layer.Stashed, Fraction: 1, Room: 0.01, Offload: []string{layer.RowsGroup}, Scopes: fullIteration}
			c.Sharding = &Sharding{Pool: bucket.Arena, Prefetch: 1, GradComm: kernels.F32}
		})
		at("experts in graphs", mixed(), func(c *Config) {
			c.Memory = Memory{Rows: layer.Padded, Fraction: 1, Offload: []string{"core_attn", "moe_act"}, Scopes: memory.ScopesOf(memory.Attn, memory.MoE)}
		})
		at("ring, sharded", assorted(), func(c *Config) {
			c.Memory, c.Dispatch = namedMemory(t, "offload"), layer.Ring
			c.Sharding = &Sharding{Pool: bucket.Recorded, Prefetch: 1, GradComm: kernels.F32}
		})
	}
}

func TestUnderAnySchedule(t *testing.T) { // SPEC S6.2
	at, few := 0, few()
	watched(t, func(name string, c Config) {
		seeds := 2
		if at++; few {
			if seeds = 1; at%3 > 0 {
				return
			}
		}
		t.Run(name, func(t *testing.T) {
			want := mustRun(t, c, 4)
			err := check.Explore(check.Options{}, seeds, func(ck *check.Checker) error {
				c := c
				c.Device = under(ck)
				got, err := runs(c, 4)
				if err != nil {
					return err
				}
				return got.differs(want)
			})
			if err != nil {
				t.Error(err)
			}
		})
	})
}
