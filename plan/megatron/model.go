// This file owns how arguments become a model.

package megatron

import (
	"fmt"
	"strings"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

func readModel(r *reader, s *plan.Setup, o Options) error {
	if o.Model != nil {
		return adaptModel(r, s, o)
	}
	m := &model.Model{
		Name:         o.Name,
		Hidden:       r.positive("hidden-size", 0),
		MaxPositions: r.positive("max-position-embeddings", 0),
		Tied:         !r.flag("untie-embeddings-and-output-weights"),
		Bias:         !r.flag("disable-bias-linear"),
		Norm:         model.LayerNorm,
	}
	s.Model = m
	if r.word("normalization", "LayerNorm", "LayerNorm", "RMSNorm") == "RMSNorm" {
		m.Norm = model.RMSNorm
	}
	positions := r.word("position-embedding-type", "learned_absolute", "learned_absolute", "rope", "yarn", "mrope", "relative", "none")
	if r.flag("use-rotary-position-embeddings") {
		positions = "rope"
	}
	without := r.flag("no-position-embedding") // scripts set it together with rope
	m.LearnedPositions = positions == "learned_absolute" && !without
	m.Vocab = readVocab(r, o)
	b := readBlocks(r, m, positions)
	layers, err := readLayers(r, m, b)
	if err != nil {
		return err
	}
	if m.MaxPositions == 0 {
		m.MaxPositions = r.count("seq-length", 0)
	}
	for _, f := range []struct {
		flag  string
		value int
	}{{"hidden-size", m.Hidden}, {"num-layers", layers}} {
		if f.value == 0 {
			return fmt.Errorf("--%s is missing: the model cannot be sized without it", f.flag)
		}
	}
	return nil
}

func readExperts(r *reader, width int, gated bool) *model.MoE {
	moe := &model.MoE{
		Experts:     r.count("num-experts", 0),
		TopK:        r.positive("moe-router-topk", 2),
		Width:       r.positive("moe-ffn-hidden-size", width),
		Gated:       gated,
		SharedWidth: r.count("moe-shared-expert-intermediate-size", 0),
		SharedGate:  r.flag("moe-shared-expert-gate"),
		Latent:      r.count("moe-latent-size", 0),
		Bias:        r.flag("moe-router-enable-expert-bias"),
		Sigmoid:     r.word("moe-router-score-function", "softmax", "softmax", "sigmoid", "sqrtsoftplus") == "sigmoid",
	}
	if moe.Experts == 0 {
		return nil
	}
	if moe.TopK > moe.Experts {
		r.fail("--moe-router-topk %d is more than --num-experts %d", moe.TopK, moe.Experts)
	}
	return moe
}

// readLayers sets the model's layers and returns their number.
func readLayers(r *reader, m *model.Model, b blocks) (int, error) {
	n := max(r.positive("num-layers", 0), r.positive("encoder-num-layers", 0))
	if n > mostLayers {
		return 0, fmt.Errorf("--num-layers %d is more than %d", n, mostLayers)
	}
	depth := r.count("mtp-num-layers", 0)
	if depth > mostLayers {
		return 0, fmt.Errorf("--mtp-num-layers %d is more than %d", depth, mostLayers)
	}
	repeated := r.flag("mtp-use-repeated-layer")
	mla := r.flag("multi-latent-attention")
	if mla && r.flag("group-query-attention") {
		return 0, fmt.Errorf("--group-query-attention and --multi-latent-attention exclude each other; keep one")
	}
	frequency := listText(r, "moe-layer-freq")
	hybrid := hybridPattern(r)
	if hybrid != "" {
		return readHybrid(r, m, b, hybrid, n, depth, repeated)
	}
	if n == 0 {
		return 0, nil
	}
	experts := make([]bool, n)
	if b.moe != nil {
		if frequency == "" {
			frequency = "1"
		}
		var err error
		if experts, err = layerPattern("moe-layer-freq", frequency, n); err != nil {
			return 0, err
		}
	}
	linear, windowed, err := b.alternation(n)
	if err != nil {
		return 0, err
	}
	for i := range n {
		layer := b.mixer(mla, linear[i], windowed[i])
		if experts[i] {
			layer.MoE = b.moe
		} else {
			layer.Dense = b.dense
		}
		m.Layers = append(m.Layers, layer)
	}
	if depth > 0 {
		m.MTP = &model.MTP{Depth: depth, Layers: []model.Layer{m.Layers[n-1]}, Repeated: repeated}
	}
	if (b.attention.Heads == 0 && !mla) || (mla && b.mla.Heads == 0) {
		return 0, fmt.Errorf("--num-attention-heads is missing: the model cannot be sized without it")
	}
	return n, nil
}

// listText returns a list expression as it was written, or nothing. A plain list gets its
// brackets back.
func listText(r *reader, name string) string {
	words, _ := r.get(name)
	text := strings.Join(words, ",")
	if strings.Contains(text, ",") && !strings.Contains(text, "[") {
		text = "[" + text + "]"
	}
	return text
}

// hybridPattern returns the pattern of a hybrid under either of its two names.
func hybridPattern(r *reader) string {
	now, old := r.word("hybrid-layer-pattern", ""), r.word("hybrid-override-pattern", "")
	if now != "" && old != "" {
		r.fail("--hybrid-override-pattern is the old name of --hybrid-layer-pattern; give one of them")
	}
	text := now + old
	// This is the old way to describe a depth of MTP.
	depth := r.count("mtp-num-layers", 0)
	if mtp := r.word("mtp-hybrid-override-pattern", ""); mtp != "" && text != "" && depth <= mostLayers && !strings.Contains(text, "/") {
		text += strings.Repeat("/"+mtp, depth)
	}
	return text
}

func readHybrid(r *reader, m *model.Model, b blocks, text string, n, depth int, repeated bool) (int, error) {
	p, err := parsePattern(text)
	if err != nil {
		return 0, err
	}
	if m.Layers, err = hybridLayers(p.layers(), b); err != nil {
		return 0, err
	}
	if n != 0 && n != len(m.Layers) {
		r.warn("num-layers", fmt.Sprintf("the pattern has %d layers, which replaces %d", len(m.Layers), n))
	}
	if depth != 0 && p.depth != 0 && depth != p.depth {
		r.warn("mtp-num-layers", fmt.Sprintf("the pattern has %d depths, which replaces %d", p.depth, depth))
	}
	if depth != 0 && p.depth == 0 {
		return 0, fmt.Errorf("--mtp-num-layers %d: a hybrid says in --hybrid-layer-pattern what a depth holds; append %q", depth, strings.Repeat("/*E", depth))
	}
	if p.depth > 0 {
		layers, err := hybridLayers(p.mtp, b)
		if err != nil {
			return 0, err
		}
		m.MTP = &model.MTP{Depth: p.depth, Layers: layers, Repeated: repeated}
	}
	return len(m.Layers), nil
}

func hybridLayers(letters string, b blocks) ([]model.Layer, error) {
	layers := []model.Layer{}
	for _, c := range letters {
		switch c {
		case 'M':
			layers = append(layers, model.Layer{Mamba: b.mamba})
		case 'G':
			layers = append(layers, model.Layer{DeltaNet: b.deltaNet})
		case '*', '+':
			if b.attention.Heads == 0 {
				return nil, fmt.Errorf("--num-attention-heads is missing: --hybrid-layer-pattern has attention layers")
			}
			if c == '*' {
				layers = append(layers, model.Layer{Attention: b.attention})
			} else {
				layers = append(layers, model.Layer{MLA: b.mla})
			}
		case '-':
			layers = append(layers, model.Layer{Dense: b.dense})
		case 'E':
			if b.moe == nil {
				return nil, fmt.Errorf("--num-experts is missing: --hybrid-layer-pattern has expert layers")
			}
			layers = append(layers, model.Layer{MoE: b.moe})
		}
	}
	return layers, nil
}
