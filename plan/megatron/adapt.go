// This file owns models that are given in addition to the arguments: which arguments may
// still change them, and how.

package megatron

import (
	"fmt"
	"maps"
	"slices"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// shared are flags that the model and other parts read. They do not describe a model.
var shared = []string{"seq-length", "padded-vocab-size", "tokenizer-type"}

// modelFlags returns the names of all flags that describe a model.
func modelFlags() map[string]bool {
	r := &reader{known: map[string]bool{}}
	_ = readModel(r, &plan.Setup{}, Options{}) // fails because sizes are missing, but has read every flag
	for _, name := range shared {
		delete(r.known, name)
	}
	return r.known
}

// adaptModel changes the caller's model as the arguments say: another number of layers or
// experts, or another depth of MTP, as in proxies of large models.
func adaptModel(r *reader, s *plan.Setup, o Options) error {
	m := *o.Model
	if o.Name != "" {
		m.Name = o.Name
	}
	s.Model = &m
	cut := []string{"num-layers", "num-experts", "mtp-num-layers", "vocab-size", "max-position-embeddings"}
	for _, name := range slices.Sorted(maps.Keys(modelFlags())) {
		if r.given(name) && !slices.Contains(cut, name) {
			return fmt.Errorf("--%s describes a model, but %s is given already; drop one of them", name, m.Name)
		}
	}
	switch n := r.positive("num-layers", len(m.Layers)); {
	case n > mostLayers:
		return fmt.Errorf("--num-layers %d is more than %d", n, mostLayers)
	case n > len(m.Layers):
		r.warn("num-layers", fmt.Sprintf("%s has %d layers; %d more repeat the last ones in their pattern", m.Name, len(m.Layers), n-len(m.Layers)))
		m.Layers = extended(m.Layers, n)
	default:
		m.Layers = m.Layers[:n:n]
	}
	if r.given("num-experts") {
		n := r.positive("num-experts", 1)
		if !slices.ContainsFunc(m.Layers, func(l model.Layer) bool { return l.MoE != nil }) {
			return fmt.Errorf("--num-experts %d changes nothing, because %s has no experts; leave it out", n, m.Name)
		}
		m.Layers = withExperts(m.Layers, n)
		if m.MTP != nil {
			mtp := *m.MTP
			mtp.Layers = withExperts(mtp.Layers, n)
			m.MTP = &mtp
		}
	}
	if r.given("mtp-num-layers") {
		depth := r.count("mtp-num-layers", 0)
		switch {
		case depth == 0:
			m.MTP = nil
		case depth > mostLayers:
			return fmt.Errorf("--mtp-num-layers %d is more than %d", depth, mostLayers)
		case m.MTP == nil:
			m.MTP = &model.MTP{Depth: depth, Layers: m.Layers[len(m.Layers)-1:]}
		default:
			mtp := *m.MTP
			mtp.Depth = depth
			m.MTP = &mtp
		}
	}
	r.get("tokenizer-type") // the model knows its vocabulary
	m.Vocab = r.positive("vocab-size", m.Vocab)
	m.MaxPositions = r.positive("max-position-embeddings", m.MaxPositions)
	if !m.LearnedPositions {
		// Rotary positions need no table, so none can be too short.
		m.MaxPositions = max(m.MaxPositions, r.count("seq-length", 0))
	}
	return nil
}

// extended returns layers with more that go on in their pattern: layers that repeat with
// some period, perhaps behind a few others. Without such a pattern it repeats all of them.
func extended(layers []model.Layer, n int) []model.Layer {
	kinds := make([]model.Kind, len(layers))
	for i, l := range layers {
		kinds[i] = model.KindOf(l)
	}
	period := len(layers)
	for p := len(layers) / 2; p > 0; p-- {
		same := 0 // layers at the end that are like those one period before
		for same < len(layers)-p && kinds[len(kinds)-1-same] == kinds[len(kinds)-1-same-p] {
			same++
		}
		if same >= len(layers)/2 { // most of the model has the pattern
			period = p
		}
	}
	layers = slices.Clone(layers)
	for len(layers) < n {
		layers = append(layers, layers[len(layers)-period])
	}
	return layers
}

// withExperts returns a copy of layers with another number of experts.
func withExperts(layers []model.Layer, n int) []model.Layer {
	layers = slices.Clone(layers)
	for i, l := range layers {
		if l.MoE != nil {
			moe := *l.MoE
			moe.Experts = n
			moe.TopK = min(moe.TopK, n)
			layers[i].MoE = &moe
		}
	}
	return layers
}
