// This file owns the table of settings: each number and flag of a run, at values round its
// limits, and what Check says. Write it anew with -update if a change is meant.

package train

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

func TestTableOfSettings(t *testing.T) {
	var b strings.Builder
	base := testConfig(t, smallMoE())
	text := base.Text
	for i, run := range []struct {
		name  string
		build func(c *Config)
	}{
		{"pipeline", func(c *Config) {}},
		{"a pipeline in chunks", func(c *Config) { c.Layout, c.DryRun = Layout{PP: 2, VPP: 2, EP: 2, DP: 4}, true }},
		{"sharded", func(c *Config) {
			c.Layout, c.Sharding = Layout{PP: 1, VPP: 1, EP: 2, DP: 4}, &Sharding{Pool: bucket.Dynamic, Prefetch: 1}
			c.Memory.Rows = layer.Padded
		}},
		{"stashed", func(c *Config) {
			c.Memory = Memory{Rows: layer.Stashed, Fraction: 0.5, Stash: []string{"expert_fc1"}, Recompute: []string{"layernorm", "moe_act"}, Scopes: memory.ScopesOf(memory.Attn)}
		}},
		{"without experts", func(c *Config) { c.Model, c.Layout.EP = smallDense(), 1 }},
	} {
		said := func(c *Config) string {
			c.Text = text
			if err := c.Check(); err != nil {
				return err.Error()
			}
			return fmt.Sprint("fine, ", c.Tokens(), " tokens")
		}
		fresh := func() *Config {
			c := base
			run.build(&c)
			c.Text = nil
			return &c
		}
		fmt.Fprintf(&b, "%s: %s\n", run.name, said(fresh()))
		b.WriteString(golden.Vary(fresh, func(name string) bool {
			if i > 0 && (strings.HasPrefix(name, "Optim") || strings.HasPrefix(name, "Settings")) {
				return false
			}
			return name != "Text" && name != "HeldOut" && name != "Log" && !strings.HasPrefix(name, "Model") && !strings.HasPrefix(name, "Process")
		}, map[string][]int{"DP": {32, 64, 1 << 15, 1 << 24}, "EP": {1 << 24}, "VPP": {1 << 24}, "PP": {1 << 24}, "Seq": {1024}, "Micro": {1 << 24}}, said))
	}
	golden.Check(t, "settings.txt", b.String())
}
