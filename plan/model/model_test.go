// This file owns the tests of parameters and of Check.

package model_test

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/plan/model"
)

// sums returns the elements of a list by how they are divided.
func sums(list []model.Param) (n [3]int64) {
	for _, p := range list {
		n[p.Split] += p.Elements()
	}
	return n
}

// The three sums of layers equal those worked out by hand.
func TestSplits(t *testing.T) {
	const h = 8
	gqa := &model.Attention{Heads: 6, KVHeads: 2, HeadDim: 4}
	every := &model.Attention{
		Heads: 6, KVHeads: 2, HeadDim: 4, QKNorm: true, QKVBias: true, OutBias: true, Gate: true, Sinks: true,
	}
	mla := &model.MLA{Heads: 4, QRank: 6, KVRank: 5, Nope: 3, Rope: 2, V: 7, LatentNorm: true}
	noRank := &model.MLA{Heads: 4, KVRank: 5, Nope: 3, Rope: 2, V: 7}
	mamba2 := &model.Mamba{Version: 2, Inner: 12, Heads: 6, Groups: 2, State: 5, Conv: 4}
	mamba1 := &model.Mamba{Version: 1, Inner: 12, State: 5, Conv: 4, DTRank: 3, Norms: true}
	delta := &model.DeltaNet{KeyHeads: 2, ValueHeads: 4, KeyDim: 3, ValueDim: 5, Conv: 4}
	moe := &model.MoE{Experts: 10, TopK: 3, Width: 7, Gated: true, SharedWidth: 9, SharedGate: true}
	latent := &model.MoE{Experts: 10, TopK: 3, Width: 7, SharedWidth: 9, Latent: 2, Bias: true}
	for _, c := range []struct {
		name  string
		m     model.Model
		layer model.Layer
		want  [3]int64 // whole, tensor, expert
	}{
		{"gqa", model.Model{}, model.Layer{Attention: gqa}, [3]int64{h, 10*4*h + 24*h, 0}},
		{"gqa with biases and two-vector norms", model.Model{Bias: true, Norm: model.LayerNorm}, model.Layer{Attention: gqa},
			[3]int64{2*h + h, 40*h + 40 + 24*h, 0}},
		{"gqa with all", model.Model{}, model.Layer{Attention: every}, [3]int64{h + 2*4 + h, 64*h + 64 + 6 + 24*h, 0}},
		{"mla", model.Model{}, model.Layer{MLA: mla},
			[3]int64{h + 6*h + 6 + 7*h + 5, 4*5*6 + 4*10*5 + 4*7*h, 0}},
		{"mla without a query rank or norms", model.Model{}, model.Layer{MLA: noRank},
			[3]int64{h + 7*h, 4*5*h + 4*10*5 + 4*7*h, 0}},
		{"mla with a bias", model.Model{Bias: true}, model.Layer{MLA: noRank},
			[3]int64{h + 7*h + h, 4*5*h + 4*10*5 + 4*7*h, 0}},
		{"mamba-2", model.Model{}, model.Layer{Mamba: mamba2},
			[3]int64{h, (2*12+2*2*5+6)*h + 32*5 + 3*6 + 12 + 12*h, 0}},
		{"mamba-1", model.Model{}, model.Layer{Mamba: mamba1},
			[3]int64{h + 3 + 5 + 5, 24*h + 12*5 + 13*12 + 12*3 + 12 + 12*5 + 12 + 12*h, 0}},
		{"delta net", model.Model{}, model.Layer{DeltaNet: delta},
			[3]int64{h + 5, (2*6+2*20+2*4)*h + 32*4 + 2*4 + 20*h, 0}},
		{"dense", model.Model{}, model.Layer{Dense: &model.Dense{Width: 7}}, [3]int64{h, 2 * 7 * h, 0}},
		{"gated dense with biases", model.Model{}, model.Layer{Dense: &model.Dense{Width: 7, Gated: true, Bias: true}},
			[3]int64{h + h, 3*7*h + 14, 0}},
		{"moe", model.Model{}, model.Layer{MoE: moe}, [3]int64{h + 10*h + h, 3 * 9 * h, 10 * 3 * 7 * h}},
		{"moe with biases", model.Model{Bias: true}, model.Layer{MoE: moe},
			[3]int64{h + 10*h + 10 + h + h, 3*9*h + 18, 10 * (3*7*h + 14 + h)}},
		{"latent moe", model.Model{}, model.Layer{MoE: latent}, [3]int64{h + 10*h + 2*2*h, 2 * 9 * h, 10 * 2 * 7 * 2}},
		{"norms behind", model.Model{PostNorms: true}, model.Layer{Attention: gqa, Dense: &model.Dense{Width: 7}},
			[3]int64{4 * h, 64*h + 14*h, 0}},
	} {
		c.m.Hidden = h
		if got := sums(c.m.LayerParams(c.layer)); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

// Every name of a layer occurs once, and a layer of a hybrid with one part has one norm.
func TestNames(t *testing.T) {
	for _, name := range model.Presets() {
		m := preset(t, name)
		for i, l := range m.Layers {
			seen := map[string]bool{}
			for _, p := range m.LayerParams(l) {
				if seen[p.Name] {
					t.Errorf("%s, layer %d: %s twice", name, i, p.Name)
				}
				seen[p.Name] = true
				if (p.Split == model.Expert) != strings.HasPrefix(p.Name, "mlp.experts.") {
					t.Errorf("%s: %s has split %d", name, p.Name, p.Split)
				}
			}
			mixer := l.Attention != nil || l.MLA != nil || l.Mamba != nil || l.DeltaNet != nil
			if got := seen["norm.weight"] || seen["input_layernorm.weight"]; got != mixer {
				t.Errorf("%s, layer %d: a norm before the mixer: %t", name, i, got)
			}
			if got := seen["pre_mlp_layernorm.weight"]; got != (l.Dense != nil || l.MoE != nil) {
				t.Errorf("%s, layer %d: a norm before the feed-forward part: %t", name, i, got)
			}
		}
	}
}

func TestMTP(t *testing.T) {
	layer := model.Layer{Dense: &model.Dense{Width: 3}}
	m := &model.Model{Hidden: 4, Vocab: 10, Layers: []model.Layer{layer}, MTP: &model.MTP{Depth: 3, Layers: []model.Layer{layer}}}
	const one = 2*4 + 4*8 + (4 + 2*3*4) + 4 // norms, projection, layer, last norm
	without := *m
	without.MTP = nil
	base := without.Parameters()
	if got := m.Parameters() - base; got != 3*one {
		t.Errorf("three depths have %d parameters, want %d", got, 3*one)
	}
	m.MTP.Repeated = true
	if got := m.Parameters() - base; got != one {
		t.Errorf("three depths that share weights have %d parameters, want %d", got, one)
	}
	if got := elements(m.MTPParams(2)); got != one {
		t.Errorf("the last depth has %d parameters, want %d", got, one)
	}
	if m.ActiveParameters() != without.ActiveParameters() {
		t.Error("MTP counts among the parameters of a token")
	}
	m.MTP.Layers = []model.Layer{layer, layer}
	var names []string
	for _, p := range m.MTPParams(0) {
		names = append(names, p.Name)
	}
	if !slices.Contains(names, "mtp_model_layer.layers.1.mlp.linear_fc2.weight") {
		t.Errorf("two layers of a depth are not told apart: %q", names)
	}
	defer func() {
		if recover() == nil {
			t.Error("a depth that is not there is no panic")
		}
	}()
	m.MTPParams(3)
}

func TestTiedOutput(t *testing.T) {
	m := preset(t, "llama-3-8b")
	apart, active := m.Parameters(), m.ActiveParameters()
	m.Tied = true
	if got := apart - m.Parameters(); got != int64(m.Vocab)*int64(m.Hidden) {
		t.Errorf("tying saves %d parameters", got)
	}
	if m.ActiveParameters() != active {
		t.Error("tying changes what a token is multiplied with")
	}
	if elements(m.OutputParams()) == 0 {
		t.Error("a tied output layer has no parameters")
	}
}

// draw returns any sound model that is small enough to add up by hand.
func draw(t *rapid.T) *model.Model {
	size := func(name string) int { return rapid.IntRange(1, 40).Draw(t, name) }
	yes := func(name string) bool { return rapid.Bool().Draw(t, name) }
	layer := func() (l model.Layer) {
		switch rapid.IntRange(0, 4).Draw(t, "mixer") {
		case 0:
			kv := size("kv")
			l.Attention = &model.Attention{Heads: kv * size("group"), KVHeads: kv, HeadDim: size("dim"), QKNorm: yes("qk")}
		case 1:
			l.MLA = &model.MLA{
				Heads: size("heads"), QRank: size("lq") - 1, KVRank: size("lk"), Nope: size("dn"), Rope: size("dr"), V: size("dv"),
				LatentNorm: true,
			}
		}
		mixed := l.Attention != nil || l.MLA != nil
		switch n := rapid.IntRange(0, 2).Draw(t, "feed"); {
		case n == 0 || n == 2 && !mixed:
			l.Dense = &model.Dense{Width: size("f"), Gated: yes("gated")}
		case n == 1:
			e := size("E")
			l.MoE = &model.MoE{
				Experts: e, TopK: rapid.IntRange(1, e).Draw(t, "k"), Width: size("fe"), Gated: yes("gated"),
				SharedWidth: size("fs") - 1, Latent: size("latent") - 1,
			}
		}
		return l
	}
	m := &model.Model{Hidden: size("h"), Vocab: size("V"), Tied: yes("tied")}
	for range size("layers") {
		m.Layers = append(m.Layers, layer())
	}
	if yes("mtp") {
		m.MTP = &model.MTP{Depth: size("depth"), Layers: []model.Layer{layer()}, Repeated: yes("repeated")}
	}
	return m
}

// byHand returns the number of parameters by the planner's documentation, without biases
// and with one vector for each norm: of all, and of one token.
func byHand(m *model.Model, l model.Layer) (all, active int) {
	h, both := m.Hidden, 0
	if a := l.Attention; a != nil {
		both += h + h*(a.Heads+2*a.KVHeads)*a.HeadDim + a.Heads*a.HeadDim*h
		if a.QKNorm {
			both += 2 * a.HeadDim
		}
	}
	if a := l.MLA; a != nil {
		both += h + h*(a.KVRank+a.Rope) + a.KVRank*a.Heads*(a.Nope+a.V) + a.Heads*a.V*h + a.KVRank
		if a.QRank > 0 {
			both += h*a.QRank + a.QRank + a.QRank*a.Heads*(a.Nope+a.Rope)
		} else {
			both += h * a.Heads * (a.Nope + a.Rope)
		}
	}
	matrices := func(gated bool) int {
		if gated {
			return 3
		}
		return 2
	}
	if d := l.Dense; d != nil {
		both += h + matrices(d.Gated)*h*d.Width
	}
	expert := 0
	if d := l.MoE; d != nil {
		both += h + h*d.Experts + matrices(d.Gated)*h*d.SharedWidth + 2*h*d.Latent
		width := h
		if d.Latent > 0 {
			width = d.Latent
		}
		expert = matrices(d.Gated) * width * d.Width
		return both + d.Experts*expert, both + d.TopK*expert
	}
	return both, both
}

func TestTotalsByHand(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := draw(t)
		if err := m.Check(); err != nil {
			t.Fatal(err)
		}
		h := m.Hidden
		all, active := h+m.Vocab*h, h+m.Vocab*h
		if !m.Tied {
			all += m.Vocab * h
		}
		for _, l := range m.Layers {
			a, b := byHand(m, l)
			all, active = all+a, active+b
		}
		if m.MTP != nil {
			a, _ := byHand(m, m.MTP.Layers[0])
			depths := m.MTP.Depth
			if m.MTP.Repeated {
				depths = 1
			}
			all += depths * (3*h + 2*h*h + a)
		}
		if m.Parameters() != int64(all) || m.ActiveParameters() != int64(active) {
			t.Fatalf("%d and %d a token, by hand %d and %d", m.Parameters(), m.ActiveParameters(), all, active)
		}
		text, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		var back model.Model
		if err := json.Unmarshal(text, &back); err != nil || !reflect.DeepEqual(&back, m) {
			t.Fatalf("%v; %s is read back as %+v", err, text, back)
		}
	})
}
