// This file owns the checks of a configuration: what each refuses, and what it calls the
// setting that is wrong.

package train

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// Each wrong setting is refused by its name, and the values at both ends of what is allowed
// are accepted. A Check that stops early accepts the settings that it did not look at.
func TestConfigRefuses(t *testing.T) {
	stashed := func(c *Config) { c.Memory.Rows = layer.Stashed }
	for _, x := range []struct {
		setting string // empty if it is fine
		change  func(c *Config)
	}{
		{"", func(c *Config) {}},
		{"Layout.PP", func(c *Config) { c.Layout.PP = 0 }},
		{"Layout.PP", func(c *Config) { c.Layout.PP = 5 }},
		{"Layout.VPP", func(c *Config) { c.Layout.VPP = -1 }},
		{"Layout.VPP", func(c *Config) { c.Layout = Layout{PP: 1, VPP: 2, EP: 1, DP: 1} }},
		{"", func(c *Config) { c.Layout = Layout{PP: 2, VPP: 2, EP: 1, DP: 1} }},
		{"Layout.EP", func(c *Config) { c.Layout.EP = 0 }},
		{"Layout.EP", func(c *Config) { c.Layout.EP, c.Layout.DP = 3, 3 }},
		{"Layout.EP", func(c *Config) { c.Model, c.Layout.EP, c.Layout.DP = smallDense(), 2, 2 }},
		{"Layout.DP", func(c *Config) { c.Layout.EP, c.Layout.DP = 2, 3 }},
		{"Layout.DP", func(c *Config) { c.Layout = Layout{PP: 4, VPP: 1, EP: 1, DP: 17} }},
		{"Layout.DP", func(c *Config) { c.DryRun, c.Layout = true, Layout{PP: 4, VPP: 1, EP: 1, DP: 1<<14 + 1} }},
		{"", func(c *Config) { c.DryRun, c.Layout = true, Layout{PP: 3, VPP: 1, EP: 2, DP: 1 << 14} }},
		{"", func(c *Config) { c.Layout = Layout{PP: 4, VPP: 1, EP: 1, DP: 16} }},
		{"Layout.DP", func(c *Config) { c.Layout.DP = 1<<24 + 1 }},
		{"Batch.Microbatches", func(c *Config) { c.Batch.Microbatches = 0 }},
		{"Batch.Microbatches", func(c *Config) { c.Batch.Microbatches = 1<<20 + 1 }},
		{"Batch.Micro", func(c *Config) { c.Batch.Micro = 0 }},
		{"Batch.Micro", func(c *Config) { c.Batch.Micro = 1<<20 + 1 }},
		{"Batch.Micro", func(c *Config) { c.Batch.Micro, c.Batch.Seq = 1<<20, 1024 }},
		{"Batch.Micro", func(c *Config) { c.Batch.Micro, c.Batch.Seq = 1<<20, 1025 }},
		{"Batch.Seq", func(c *Config) { c.Batch.Seq = -1 }},
		{"", func(c *Config) { c.Batch.Seq = 1024 }},
		{"Batch.Seq", func(c *Config) { c.Batch.Seq = 1025 }},
		{"", func(c *Config) { c.Batch.Micro, c.Batch.Seq = 1<<19-1, 1024 }},
		{"Batch.Micro", func(c *Config) { c.Batch.Micro, c.Batch.Seq = 1<<19, 1024 }},
		{"Model", func(c *Config) { c.Model.Vocab = 255 }},
		{"Theta", func(c *Config) { c.Settings.Theta = 0 }},
		{"Epsilon", func(c *Config) { c.Settings.Epsilon = 0 }},
		{"Factor", func(c *Config) { c.Settings.Routing.Factor = -1 }},
		{"AuxLoss", func(c *Config) { c.Settings.Routing.Balance = -1 }},
		{"BiasRate", func(c *Config) { c.Settings.Routing.BiasRate = float32(math.NaN()) }},
		{"Capacity", func(c *Config) { c.Settings.Routing.Capacity = -1 }},
		{"Optim.LR", func(c *Config) { c.Optim.LR = 0 }},
		{"Optim.LR", func(c *Config) { c.Optim.LR = 1e39 }},
		{"Optim.MinLR", func(c *Config) { c.Optim.MinLR = -1e-9 }},
		{"Optim.WarmUp", func(c *Config) { c.Optim.WarmUp = -1 }},
		{"Optim.Decay", func(c *Config) { c.Optim.Decay = -1 }},
		{"", func(c *Config) { c.Optim.Beta1, c.Optim.Beta2 = 0, 0 }},
		{"Optim.Beta1", func(c *Config) { c.Optim.Beta1 = 1 }},
		{"Optim.Beta2", func(c *Config) { c.Optim.Beta2 = 1 }},
		{"Optim.Epsilon", func(c *Config) { c.Optim.Epsilon = 0 }},
		{"Optim.WeightDecay", func(c *Config) { c.Optim.WeightDecay = -1 }},
		{"Optim.Clip", func(c *Config) { c.Optim.Clip = math.Inf(1) }},
		{"Memory.Budget", func(c *Config) { c.Memory.Budget = -1 }},
		{"Memory.Fraction", func(c *Config) { c.Memory.Fraction = 1.01 }},
		{"StashModules", func(c *Config) { c.Memory.Stash = []string{layer.RowsGroup} }},
		{"", func(c *Config) { stashed(c); c.Memory.Stash = []string{layer.RowsGroup} }},
		{"StashModules", func(c *Config) {
			stashed(c)
			c.Model, c.Layout.EP, c.Memory.Stash = smallDense(), 1, []string{layer.RowsGroup}
		}},
		{"Memory.Scopes", func(c *Config) { c.Memory.Scopes = memory.ScopesOf(memory.Attn) }},
		{"", func(c *Config) { stashed(c); c.Memory.Scopes = memory.ScopesOf(memory.Attn) }},
		{"Memory.Scopes", func(c *Config) { stashed(c); c.Memory.Scopes = memory.ScopesOf(memory.MoE) }},
		{"", func(c *Config) { c.Memory.Rows, c.Memory.Scopes = layer.Padded, memory.ScopesOf(memory.MoE) }},
		{"", func(c *Config) { stashed(c); c.Memory.Scopes = memory.ScopesOf(memory.FullIteration) }},
		{"Memory.Scopes", func(c *Config) {
			stashed(c)
			c.Memory.Scopes, c.Sharding = memory.ScopesOf(memory.Attn), &Sharding{Pool: bucket.Dynamic, Prefetch: 1}
		}},
	} {
		c := testConfig(t, smallMoE())
		c.Memory.Rows = layer.Exact
		x.change(&c)
		err := c.Check()
		var wrong *memory.SettingError
		switch {
		case x.setting == "" && err != nil:
			t.Errorf("%+v was refused: %v", c, err)
		case x.setting != "" && (!errors.As(err, &wrong) || wrong.Setting != x.setting):
			t.Errorf("expected %s to be refused, got %v for %+v", x.setting, err, c)
		}
	}
	for _, change := range []func(c *Config){
		func(c *Config) { c.Text = nil }, func(c *Config) { c.Model = nil }, func(c *Config) { c.Device = nil },
		func(c *Config) { c.Batch.Micro = 0 }, func(c *Config) { c.Batch.Seq = 0 }, func(c *Config) { c.Memory.Sets = -1 },
		func(c *Config) { c.Memory.Room = -1 }, func(c *Config) { c.Memory.Room = 1e7 }, func(c *Config) { c.Model.Hidden = 0 },
		func(c *Config) { c.Memory.Offload = []string{"no_such_module"} },
	} {
		c := testConfig(t, smallMoE())
		if change(&c); c.Check() == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
}

// A budget holds under every policy, and a policy of a name is always the same one.
func TestNamedMemory(t *testing.T) {
	for _, name := range Policies {
		for _, budget := range []memory.Bytes{0, 7} {
			m, err := NamedMemory(name, budget)
			if name == "budget" && budget == 0 {
				if err == nil {
					t.Error("the policy budget needs one")
				}
				continue
			}
			if err != nil || m.Budget != budget || m.Fraction != 1 {
				t.Errorf("%s with %v: %+v, %v", name, budget, m, err)
			}
		}
	}
	got := ""
	for _, name := range Policies {
		m, err := NamedMemory(name, 7)
		if err != nil {
			t.Fatal(err)
		}
		got += fmt.Sprintf("%s: %d %v %v %v %v\n", name, m.Rows, m.Offload, m.Recompute, m.Stash, m.Scopes)
	}
	want := `none: 0 [] [] [] none
static: 1 [] [] [] none
stash: 2 [] [] [] none
offload: 2 [core_attn attn_proj fused_group_mlp] [] [] none
offload+recompute: 2 [core_attn attn_proj fused_group_mlp] [layernorm] [] none
budget: 2 [] [] [] none
graphs: 2 [] [] [] attn,mlp,moe_router
`
	if got != want {
		t.Errorf("policies are\n%s, want\n%s", got, want)
	}
}

// What to do about memory that ran out depends on which it was.
func TestRemediesForMemory(t *testing.T) {
	for _, x := range []struct {
		err  error
		want string
	}{
		{&device.OutOfMemory{Kind: memory.Device}, "; use more ranks, shard the parameters, or choose a policy that keeps less"},
		{&device.OutOfMemory{Kind: memory.Host}, "; give the machine more host memory, or offload less"},
		{&device.OutOfMemory{Kind: memory.Host, Refused: "no"}, ""},
		{errors.New("another"), ""},
	} {
		if got := advised(x.err); got.Error() != x.err.Error()+x.want || !errors.Is(got, x.err) {
			t.Errorf("%v becomes %v", x.err, got)
		}
	}
}
