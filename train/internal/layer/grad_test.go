// This file owns the tests of the gradients of every layer against differences of losses.

package layer

import (
	"testing"

	"github.com/stowage-dev/stowage/plan/model"
)

// tiny returns a model with one layer.
func tiny(name string, l model.Layer) *model.Model {
	return &model.Model{Name: name, Hidden: 24, Vocab: 32, MaxPositions: 64, Layers: []model.Layer{l}}
}

func attentionLayer() *model.Attention {
	return &model.Attention{Heads: 4, KVHeads: 2, HeadDim: 8, Rotary: true}
}

func TestGradients(t *testing.T) {
	dense := &model.Dense{Width: 20, Gated: true}
	qk := *attentionLayer()
	qk.QKNorm = true
	window := *attentionLayer()
	window.Window = 3
	moe := model.MoE{Experts: 4, TopK: 2, Width: 16, Gated: true}
	sharedMoE := moe
	sharedMoE.SharedWidth = 12
	gated := sharedMoE
	gated.SharedGate = true
	sigmoid := moe
	sigmoid.Sigmoid, sigmoid.Bias = true, true
	tied := tiny("tied", model.Layer{Attention: attentionLayer(), Dense: dense})
	tied.Tied = true
	odd := tiny("odd vocabulary", model.Layer{Attention: attentionLayer()})
	odd.Vocab = 37
	mtp := tiny("mtp", model.Layer{Attention: attentionLayer(), Dense: dense})
	mtp.MTP = &model.MTP{Depth: 2, Layers: []model.Layer{{Attention: attentionLayer(), Dense: dense}}}
	for _, m := range []*model.Model{
		tiny("attention", model.Layer{Attention: attentionLayer()}),
		tiny("dense", model.Layer{Dense: dense}),
		tiny("both", model.Layer{Attention: attentionLayer(), Dense: dense}),
		tiny("qk norm", model.Layer{Attention: &qk}),
		tiny("window", model.Layer{Attention: &window}),
		tiny("moe", model.Layer{Attention: attentionLayer(), MoE: &moe}),
		tiny("shared experts", model.Layer{MoE: &sharedMoE}),
		tiny("gated shared experts", model.Layer{MoE: &gated}),
		tiny("sigmoid routing", model.Layer{MoE: &sigmoid}),
		tied, mtp, odd,
	} {
		t.Run(m.Name, func(t *testing.T) { checkGradients(t, m, rigOptions{}) })
	}
}

// Gradients are right if the rows of experts lie in pages or in buffers with gaps.
func TestGradientsOfStashedRows(t *testing.T) { // SPEC S1.1
	for _, rows := range []Rows{Padded, Stashed} {
		checkGradients(t, tiny("moe", model.Layer{MoE: &model.MoE{Experts: 4, TopK: 2, Width: 16, Gated: true}}), rigOptions{rows: rows})
	}
}
