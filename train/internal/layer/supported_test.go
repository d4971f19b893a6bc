// This file owns the table of what the trainer supports.

package layer

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/plan/model"
)

// Each number and flag of a model and of the settings, at values round its limits, is taken or
// refused in words. Write the table anew with -update if a change is meant.
func TestTableOfSupported(t *testing.T) {
	fresh := func() *model.Model {
		attn := func() *model.Attention { return &model.Attention{Heads: 4, KVHeads: 2, HeadDim: 16, Rotary: true} }
		moe := func() *model.MoE {
			return &model.MoE{Experts: 8, TopK: 2, Width: 48, Gated: true, SharedWidth: 32, Bias: true}
		}
		dense := func() *model.Dense { return &model.Dense{Width: 96, Gated: true} }
		return &model.Model{Name: "kinds", Hidden: 64, Vocab: 256, Layers: []model.Layer{
			{MLA: &model.MLA{Heads: 4, QRank: 24, KVRank: 16, Nope: 8, Rope: 8, V: 16}, MoE: moe()},
			{Mamba: &model.Mamba{Version: 2, Inner: 64, State: 8, Heads: 4, Groups: 2, Conv: 4}, Dense: dense()},
			{Attention: attn(), MoE: moe()},
		}, MTP: &model.MTP{Depth: 1, Layers: []model.Layer{{Attention: attn(), Dense: dense()}}}}
	}
	limits := map[string][]int{
		"Experts": {nn.MaxExperts}, "TopK": {nn.MaxTopK}, "Conv": {maxTaps}, "HeadDim": {1 << 18, 1 << 19, maxHead}, "KVHeads": {1 << 15, 1 << 16}, "Heads": {1 << 15, 1 << 17},
		"V": {1 << 18, 1<<19 - 32}, "Nope": {1<<18 - 16}, "Rope": {1<<18 - 16},
	}
	var b strings.Builder
	b.WriteString(golden.Vary(fresh, func(string) bool { return true }, limits, func(m *model.Model) string {
		if err := Supported(m); err != nil {
			return err.Error()
		}
		return "fine"
	}))
	b.WriteString(golden.Vary(func() *Settings { s := DefaultSettings(); return &s }, func(string) bool { return true }, nil, func(s *Settings) string {
		return fmt.Sprint(s.Check())
	}))
	golden.Check(t, "supported.txt", b.String())
}
