// This file owns the tests of Check.

package model_test

import (
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/plan/model"
)

// Each change makes a sound model unsound, and the error must name the field.
func TestCheckNamesTheField(t *testing.T) {
	for _, c := range []struct {
		preset, field string
		spoil         func(m *model.Model, l *model.Layer) // l is the last layer
	}{
		{"llama-3-8b", "hidden", func(m *model.Model, l *model.Layer) { m.Hidden = 0 }},
		{"llama-3-8b", "vocab", func(m *model.Model, l *model.Layer) { m.Vocab = -1 }},
		{"llama-3-8b", "vocab", func(m *model.Model, l *model.Layer) { m.Vocab = 1 << 40 }},
		{"llama-3-8b", "max_positions", func(m *model.Model, l *model.Layer) { m.MaxPositions = -1 }},
		{"llama-3-8b", "max_positions", func(m *model.Model, l *model.Layer) { m.MaxPositions, m.LearnedPositions = 0, true }},
		{"llama-3-8b", "norm", func(m *model.Model, l *model.Layer) { m.Norm = 7 }},
		{"llama-3-8b", "number of layers", func(m *model.Model, l *model.Layer) { m.Layers = nil }},
		{"llama-3-8b", "number of layers", func(m *model.Model, l *model.Layer) { m.Layers = make([]model.Layer, 1<<20) }},
		{"llama-3-8b", "layers[31] is empty", func(m *model.Model, l *model.Layer) { *l = model.Layer{} }},
		{"llama-3-8b", "layers[31] has 2 mixers", func(m *model.Model, l *model.Layer) {
			l.MLA = &model.MLA{Heads: 1, KVRank: 1, Nope: 1, Rope: 1, V: 1}
		}},
		{"llama-3-8b", "layers[31] has both dense and moe", func(m *model.Model, l *model.Layer) {
			l.MoE = &model.MoE{Experts: 2, TopK: 1, Width: 3}
		}},
		{"llama-3-8b", "layers[31].attention.heads", func(m *model.Model, l *model.Layer) { l.Attention.Heads = -8 }},
		{"llama-3-8b", "layers[31].attention.kv_heads", func(m *model.Model, l *model.Layer) { l.Attention.KVHeads = 3 }},
		{"llama-3-8b", "layers[31].attention.head_dim", func(m *model.Model, l *model.Layer) { l.Attention.HeadDim = 0 }},
		{"llama-3-8b", "layers[31].attention.window", func(m *model.Model, l *model.Layer) { l.Attention.Window = -1 }},
		{"llama-3-8b", "layers[31].dense.width", func(m *model.Model, l *model.Layer) { l.Dense.Width = 0 }},
		{"deepseek-v3", "layers[60].mla.heads", func(m *model.Model, l *model.Layer) { l.MLA.Heads = 0 }},
		{"deepseek-v3", "layers[60].mla.q_rank", func(m *model.Model, l *model.Layer) { l.MLA.QRank = -1 }},
		{"deepseek-v3", "layers[60].mla.kv_rank", func(m *model.Model, l *model.Layer) { l.MLA.KVRank = 0 }},
		{"deepseek-v3", "layers[60].mla.nope", func(m *model.Model, l *model.Layer) { l.MLA.Nope = 0 }},
		{"deepseek-v3", "layers[60].mla.rope", func(m *model.Model, l *model.Layer) { l.MLA.Rope = -1 }},
		{"deepseek-v3", "layers[60].mla.v", func(m *model.Model, l *model.Layer) { l.MLA.V = 0 }},
		{"deepseek-v3", "layers[60].moe.experts", func(m *model.Model, l *model.Layer) { l.MoE.Experts = 0 }},
		{"deepseek-v3", "layers[60].moe.top_k", func(m *model.Model, l *model.Layer) { l.MoE.TopK = 257 }},
		{"deepseek-v3", "layers[60].moe.width", func(m *model.Model, l *model.Layer) { l.MoE.Width = 0 }},
		{"deepseek-v3", "layers[60].moe.shared_width", func(m *model.Model, l *model.Layer) { l.MoE.SharedWidth = -1 }},
		{"deepseek-v3", "layers[60].moe.latent", func(m *model.Model, l *model.Layer) { l.MoE.Latent = -1 }},
		{"deepseek-v3", "mtp.depth", func(m *model.Model, l *model.Layer) { m.MTP.Depth = 0 }},
		{"deepseek-v3", "mtp.layers", func(m *model.Model, l *model.Layer) { m.MTP.Layers = nil }},
		{"deepseek-v3", "mtp.layers[0].mla.v", func(m *model.Model, l *model.Layer) { m.MTP.Layers[0].MLA.V = 0 }},
		{"deepseek-v3", "parameters", func(m *model.Model, l *model.Layer) { l.MoE.Experts = 1 << 20; l.MoE.Width = 1 << 20 }},
		{"jamba-1.5-large", "layers[71].mamba.dt_rank", func(m *model.Model, l *model.Layer) { l.Mamba.DTRank = 0 }},
		{"jamba-1.5-large", "layers[71].mamba.version", func(m *model.Model, l *model.Layer) { l.Mamba.Version = 3 }},
		{"jamba-1.5-large", "layers[71].mamba.groups", func(m *model.Model, l *model.Layer) { l.Mamba.Version, l.Mamba.Heads = 2, 4 }},
		{"jamba-1.5-large", "layers[71].mamba.groups", func(m *model.Model, l *model.Layer) {
			l.Mamba.Version, l.Mamba.Heads, l.Mamba.Groups = 2, 4, 3
		}},
		{"jamba-1.5-large", "layers[71].mamba.heads", func(m *model.Model, l *model.Layer) {
			l.Mamba.Version, l.Mamba.Heads, l.Mamba.Groups = 2, 3, 3
		}},
		{"jamba-1.5-large", "layers[71].mamba.state", func(m *model.Model, l *model.Layer) { l.Mamba.State = 0 }},
		{"qwen3-next-80b-a3b", "layers[47].delta_net.conv", func(m *model.Model, l *model.Layer) {
			*l = model.Layer{DeltaNet: &model.DeltaNet{KeyHeads: 1, ValueHeads: 1, KeyDim: 1, ValueDim: 1}}
		}},
		{"qwen3-next-80b-a3b", "layers[47].delta_net.key_heads", func(m *model.Model, l *model.Layer) {
			*l = model.Layer{DeltaNet: &model.DeltaNet{KeyHeads: 3, ValueHeads: 4, KeyDim: 1, ValueDim: 1, Conv: 1}}
		}},
	} {
		m := preset(t, c.preset)
		c.spoil(m, &m.Layers[len(m.Layers)-1])
		err := m.Check()
		if err == nil || !strings.Contains(err.Error(), c.field) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s with a wrong %s: %v", c.preset, c.field, err)
		}
	}
}
