// This file owns the tests of models that cannot be trained. Each error is one sentence.

package layer

import (
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/plan/model"
)

func TestUnsupportedModels(t *testing.T) {
	for what, change := range map[string]func(m *model.Model){
		"layer norms":       func(m *model.Model) { m.Norm = model.LayerNorm },
		"biases on linear":  func(m *model.Model) { m.Bias = true },
		"learned positions": func(m *model.Model) { m.LearnedPositions = true },
		"norms behind":      func(m *model.Model) { m.PostNorms = true },
		"share their":       func(m *model.Model) { m.MTP = &model.MTP{Depth: 2, Layers: m.Layers, Repeated: true} },
		"odd width":         func(m *model.Model) { m.Layers[0].Attention.HeadDim = 7 },
		"sinks":             func(m *model.Model) { m.Layers[0].Attention.Sinks = true },
		"gated attention":   func(m *model.Model) { m.Layers[0].Attention.Gate = true },
		"biases in":         func(m *model.Model) { m.Layers[0].Attention.OutBias = true },
		"2^21 columns":      func(m *model.Model) { m.Layers[0].Attention.Heads = 1 << 18 },
		"positions take no": func(m *model.Model) { m.Layers[0] = model.Layer{MLA: &model.MLA{Heads: 1, KVRank: 4, Nope: 4, V: 4}} },
		"Mamba-1":           func(m *model.Model) { m.Layers[0] = model.Layer{Mamba: &model.Mamba{Version: 1}} },
		"taps":              func(m *model.Model) { m.Layers[0] = model.Layer{Mamba: &model.Mamba{Version: 2, Conv: 9}} },
		"side by side":      func(m *model.Model) { m.Layers[0].Mamba = &model.Mamba{Version: 2, Conv: 4} },
		"behind the scan": func(m *model.Model) {
			m.Layers[0] = model.Layer{Mamba: &model.Mamba{Version: 2, Conv: 4, Ungated: true}}
		},
		"lightning":      func(m *model.Model) { m.Layers[0] = model.Layer{Lightning: &model.Lightning{}} },
		"indexer":        func(m *model.Model) { m.Layers[0] = model.Layer{MLA: &model.MLA{Indexer: &model.Indexer{}}} },
		"not by head":    func(m *model.Model) { m.Layers[0].Attention.QKNormWhole = true },
		"in chunks":      func(m *model.Model) { m.Layers[0].Attention.Chunk = 4 },
		"output layer":   func(m *model.Model) { m.OutputBias = true },
		"delta nets":     func(m *model.Model) { m.Layers[0] = model.Layer{DeltaNet: &model.DeltaNet{}} },
		"SwiGLU without": func(m *model.Model) { m.Layers[0].Dense.Gated = false },
		"are not SwiGLU": func(m *model.Model) {
			m.MTP = &model.MTP{Depth: 1, Layers: []model.Layer{{MoE: &model.MoE{Experts: 4, TopK: 2, Width: 4}}}}
		},
		"latent width": func(m *model.Model) {
			m.Layers[0] = model.Layer{MoE: &model.MoE{Experts: 4, TopK: 2, Width: 4, Gated: true, Latent: 4}}
		},
		"more than 1024": func(m *model.Model) {
			m.Layers[0] = model.Layer{MoE: &model.MoE{Experts: 2048, TopK: 2, Width: 4, Gated: true}}
		},
	} {
		m := tiny("model", model.Layer{Attention: attentionLayer(), Dense: &model.Dense{Width: 8, Gated: true}})
		if err := Supported(m); err != nil {
			t.Fatal(err)
		}
		change(m)
		if err := Supported(m); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// The attention kernels for GPUs support heads up to a certain width.
func TestHeadsOfGPUs(t *testing.T) {
	wide, narrow := attentionLayer(), attentionLayer()
	wide.HeadDim, narrow.HeadDim = maxHead+2, maxHead
	for _, x := range []struct {
		layer   model.Layer
		backend string
		ok      bool
	}{
		{model.Layer{Attention: wide}, "cpu", true}, {model.Layer{Attention: wide}, "cuda", false}, {model.Layer{Attention: narrow}, "cuda", true},
		{model.Layer{MLA: &model.MLA{Nope: 192, Rope: 64, V: 128}}, "cuda", true}, {model.Layer{MLA: &model.MLA{Nope: 200, Rope: 64, V: 128}}, "cuda", false},
	} {
		if err := Runs(tiny("model", x.layer), device.Info{Backend: x.backend}); (err == nil) != x.ok {
			t.Errorf("%+v on %s: %v", x.layer, x.backend, err)
		}
	}
}
