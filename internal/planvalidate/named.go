// This file owns models of published figures: given by their dimensions, or by a
// name with reductions.

package planvalidate

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/stowage-dev/stowage/plan/model"
)

// model returns the model by its dimensions, or by the name of a preset with reductions
// such as "14 layers" or "cut to 4 layers, 2 experts".
func (f *modelFacts) model() (*model.Model, error) {
	if f.Hidden > 0 && f.Layers > 0 && f.Heads > 0 && f.Vocab > 0 {
		return f.build(), nil
	}
	m, err := preset(f.Name)
	if err != nil {
		return nil, err
	}
	n, ok := before(f.Name, "layer")
	if ok && (n < 1 || n > len(m.Layers)) {
		return nil, fmt.Errorf("its name says %d layers, and the model has %d", n, len(m.Layers))
	}
	if ok {
		// A shortened model keeps the layers that it mostly consists of, and not the dense
		// layers that MoE models begin with.
		m.Layers = m.Layers[len(m.Layers)-n:]
	}
	if n, ok := before(f.Name, "experts"); ok {
		for i, l := range m.Layers {
			if l.MoE != nil {
				e := *l.MoE
				e.Experts, e.TopK = n, min(e.TopK, n)
				m.Layers[i].MoE = &e
			}
		}
	}
	// Published runs leave out the heads that predict further tokens unless they
	// say so, or state a size that only fits with them.
	depth, _ := before(f.Name, "mtp")
	switch {
	case depth == 0 && f.sizedWithHeads(m):
	case depth == 0:
		m.MTP = nil
	case m.MTP != nil:
		m.MTP.Depth = depth
	default:
		m.MTP = &model.MTP{Depth: depth, Layers: lastBlock(m), Repeated: depth > 1}
	}
	return m, nil
}

// before returns the number before a word.
func before(text, word string) (int, bool) {
	m := regexp.MustCompile(`(\d+)[ -]` + word).FindStringSubmatch(strings.ToLower(text))
	if m == nil {
		return 0, false
	}
	n, err := strconv.Atoi(m[1])
	return n, err == nil
}

// sizedWithHeads reports whether the size in the name ("685B") is nearer to that of
// the model with its further heads than without.
func (f *modelFacts) sizedWithHeads(m *model.Model) bool {
	size := regexp.MustCompile(`(\d+(?:\.\d+)?)[Bb]\b`).FindStringSubmatch(f.Name)
	if size == nil || m.MTP == nil {
		return false
	}
	stated, err := strconv.ParseFloat(size[1], 64)
	if err != nil {
		return false
	}
	bare := *m
	bare.MTP = nil
	with, without := float64(m.Parameters())/1e9, float64(bare.Parameters())/1e9
	return math.Abs(stated-with) < math.Abs(stated-without)
}

// lastBlock returns the layers of one head that predicts a further token: like the model's
// last layer, or in a hybrid like its last attention and feed-forward layers.
func lastBlock(m *model.Model) []model.Layer {
	last := m.Layers[len(m.Layers)-1]
	if last.Attention != nil || last.MLA != nil {
		return []model.Layer{last}
	}
	for _, l := range slices.Backward(m.Layers) {
		if l.Attention != nil {
			return []model.Layer{l, last}
		}
	}
	return []model.Layer{last}
}

func (f *modelFacts) build() *model.Model {
	m := &model.Model{Name: f.Name, Hidden: f.Hidden, Vocab: f.Vocab, Tied: !f.Untied, Norm: model.RMSNorm}
	for i := range f.Layers {
		var l model.Layer
		if f.MLA != nil {
			l.MLA = &model.MLA{Heads: f.Heads, QRank: f.MLA.Q, KVRank: f.MLA.KV, Nope: f.MLA.Nope, Rope: f.MLA.Rope, V: f.MLA.V, LatentNorm: true}
		} else {
			dim := f.HeadDim
			if dim == 0 {
				dim = f.Hidden / f.Heads
			}
			kv := f.KVHeads
			if kv == 0 {
				kv = f.Heads
			}
			l.Attention = &model.Attention{Heads: f.Heads, KVHeads: kv, HeadDim: dim, Rotary: true}
		}
		if f.Experts > 0 && i >= f.DenseLayers {
			l.MoE = &model.MoE{Experts: f.Experts, TopK: f.TopK, Width: f.MoEFFN, Gated: f.SwiGLU, SharedWidth: f.SharedFFN}
		} else {
			l.Dense = &model.Dense{Width: f.FFN, Gated: f.SwiGLU}
		}
		m.Layers = append(m.Layers, l)
	}
	return m
}

// sameAs are models with the dimensions of another one: Nemotron 3.5 Lightning is
// Nemotron 3 Nano with heads for further tokens.
var sameAs = map[string]string{"nemotron35lightning": "nemotron-3-nano-30b-a3b"}

// preset finds the preset whose name a text begins with, regardless of case and
// punctuation: "Llama-3-70B SFT" is llama-3-70b. It takes the longest.
func preset(name string) (*model.Model, error) {
	text := letters(name)
	for other, known := range sameAs {
		if strings.HasPrefix(text, other) {
			text = letters(known)
		}
	}
	best := ""
	for _, p := range model.Presets() {
		if strings.HasPrefix(text, letters(p)) && len(p) > len(best) {
			best = p
		}
	}
	if best == "" {
		// A family may be named without its size: "Nemotron-3-Nano".
		for _, p := range model.Presets() {
			if n := letters(p); len(text) >= 6 && strings.HasPrefix(n, text) {
				best = p
				break
			}
		}
	}
	if best == "" {
		return nil, fmt.Errorf("no preset is known for %q, and its dimensions are not stated", name)
	}
	m, err := model.Preset(best)
	if err != nil {
		return nil, err
	}
	c := *m
	c.Layers = slices.Clone(m.Layers)
	return &c, nil
}

func letters(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsLetter(r) || unicode.IsDigit(r) {
			return unicode.ToLower(r)
		}
		return -1
	}, s)
}
