// This file owns the tests of the built-in models: their totals are compared with the
// published ones.

package model_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/plan/model"
)

// counted says what a published figure leaves out.
type counted int64

const (
	all         counted = iota
	noEmbedding         // the table that tokens look up
	noVocab             // that and the output layer
)

// published has totals without MTP and, if known, the parameters of one token. The
// tolerance follows from the published digits.
var published = []struct {
	name     string
	total    float64 // in 10^9
	within   float64 // per cent
	of       counted
	active   float64
	aWithin  float64
	activeOf counted
}{
	{name: "llama-3-8b", total: 8.030261248},
	{name: "llama-3-70b", total: 70.553706496},
	{name: "llama-3.1-405b", total: 405.853388800},
	{name: "mixtral-8x7b", total: 46.7, within: 0.5, active: 12.9, aWithin: 0.5},
	{name: "mixtral-8x22b", total: 140.620634112, active: 39.1, aWithin: 0.5},
	{name: "deepseek-v2", total: 235.741434880, active: 21, aWithin: 1, activeOf: noEmbedding},
	{name: "deepseek-v2-lite", total: 15.7, within: 0.5, active: 2.4, aWithin: 2.5, activeOf: noEmbedding},
	{name: "deepseek-v3", total: 671.026419200, within: 0.001, active: 37, aWithin: 1.5, activeOf: noEmbedding},
	{name: "moonlight-16b-a3b", total: 15.29, within: 0.1, of: noVocab, active: 2.24, aWithin: 0.5, activeOf: noVocab},
	{name: "kimi-k2", total: 1040, within: 1.5, active: 32, aWithin: 1.5, activeOf: noEmbedding},
	{name: "glm-4.5", total: 355, within: 1, active: 32, aWithin: 3, activeOf: noEmbedding},
	{name: "glm-4.5-air", total: 106, within: 1},
	{name: "qwen2.5-72b", total: 72.7, within: 0.1},
	{name: "qwen3-32b", total: 31.2, within: 0.1, of: noVocab},
	{name: "qwen3-30b-a3b", total: 29.9, within: 0.1, of: noVocab, active: 3.3, aWithin: 2},
	{name: "qwen3-235b-a22b", total: 235.093634560, active: 22, aWithin: 1},
	{name: "qwen3-next-80b-a3b", total: 79, within: 0.5, of: noVocab},
	{name: "gpt-oss-20b", total: 20.91, within: 0.1, active: 3.61, aWithin: 0.1, activeOf: noEmbedding},
	{name: "gpt-oss-120b", total: 116.829156672, active: 5.13, aWithin: 0.1, activeOf: noEmbedding},
	{name: "jamba-1.5-large", total: 398, within: 0.5, active: 94, aWithin: 0.5},
	{name: "nemotron-h-8b", total: 8.1, within: 0.5},
	{name: "nemotron-h-56b", total: 56, within: 1},
	{name: "nemotron-3-nano-30b-a3b", total: 31.577940288, within: 0.001, active: 3.2, aWithin: 1, activeOf: noEmbedding},
	{name: "nemotron-3-super-120b-a12b", total: 120.6, within: 0.1, active: 12, aWithin: 2, activeOf: noEmbedding},
	// Our own models, added up by hand. With 65664 for two tables and the last norm, a
	// layer has 49152 + 128 of attention, 51424 of MLA or 105272 of Mamba-2, and 98304 +
	// 128 of a dense part or 16*24576 + 2048 + 128 of experts, and 24576 of a shared one.
	{name: "tiny-dense", total: 1.214592e-3},    // 8*147712 + 32896: one table
	{name: "tiny-moe", total: 3.623040e-3},      // 8*444672 + 65664
	{name: "tiny-hybrid", total: 4.155600e-3},   // 6*105272 + 2*49280 + 8*419968 + 65664
	{name: "tiny-deepseek", total: 2.131840e-3}, // 8*51424 + 98432 + 7*222336 + 65664: eight experts, without MTP
}

// SPEC S6.1: presets have the parameters of the models that they are named after.
func TestPresetsHaveThePublishedParameters(t *testing.T) {
	var names []string
	for _, p := range published {
		names = append(names, p.name)
		m, err := model.Preset(p.name)
		if err != nil {
			t.Error(err)
			continue
		}
		table := elements(m.OutputParams()) // as large as the embedding
		total := m.Parameters() - int64(p.of)*table
		if m.MTP != nil {
			total -= elements(m.MTPParams(0))
		}
		compare(t, p.name+" in all", total, p.total, p.within)
		if p.active > 0 {
			// ActiveParameters leaves out the embedding.
			compare(t, p.name+" of a token", m.ActiveParameters()+int64(noEmbedding-p.activeOf)*table, p.active, p.aWithin)
		}
	}
	slices.Sort(names)
	if !slices.Equal(names, model.Presets()) {
		t.Errorf("the table has %q, the presets are %q", names, model.Presets())
	}
}

func compare(t *testing.T, what string, got int64, billions, percent float64) {
	t.Helper()
	if off := 100 * math.Abs(float64(got)/(billions*1e9)-1); off > percent+1e-10 {
		t.Errorf("%s: %.4f*10^9 parameters, published %g: %.2f %% off", what, float64(got)/1e9, billions, off)
	}
}

func elements(list []model.Param) (n int64) {
	for _, p := range list {
		n += p.Elements()
	}
	return n
}

// DeepSeek publishes 14*10^9 parameters of MTP: 11.6 of its own, and copies of the
// embedding and the output layer, which we do not count twice.
func TestMTPOfDeepSeekV3(t *testing.T) {
	m := preset(t, "deepseek-v3")
	own := elements(m.MTPParams(0))
	compare(t, "MTP with its copies", own+2*elements(m.OutputParams()), 13.5, 0.5)
	compare(t, "MTP", own, 11.6, 0.5)
	if m.MTP.Layers[0].MoE == nil {
		t.Error("the layer of the MTP head has no experts")
	}
}

func preset(t *testing.T, name string) *model.Model {
	t.Helper()
	m, err := model.Preset(name)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestUnknownPresets(t *testing.T) {
	for _, c := range []struct{ name, nearest string }{
		{"deepseek_v3", "deepseek-v3"},
		{"llama3-70b", "llama-3-70b"},
		{"gpt-oss-120", "gpt-oss-120b"},
		{"qwen3", "qwen3-32b"},
		{"", ""},
		{"zzz", ""},
	} {
		_, err := model.Preset(c.name)
		if err == nil {
			t.Errorf("%q is a preset", c.name)
			continue
		}
		if want := "did you mean " + c.nearest + "?"; strings.Contains(err.Error(), want) != (c.nearest != "") || c.nearest == "" && strings.Contains(err.Error(), "did you mean") {
			t.Errorf("%q: %v; the nearest should be %q", c.name, err, c.nearest)
		}
		for _, known := range model.Presets() {
			if !strings.Contains(err.Error(), known) {
				t.Errorf("%q: %v does not name %s", c.name, err, known)
			}
		}
	}
	if m := preset(t, "DeepSeek-V3"); m.Name != "deepseek-v3" {
		t.Errorf("DeepSeek-V3 is named %q", m.Name)
	}
}
