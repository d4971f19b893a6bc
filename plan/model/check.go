// This file owns the checks of a description, and the totals. Products over a model that
// passes Check fit into an int64.

package model

import (
	"fmt"
	"math"
)

// These are the largest sizes that are accepted. They are far beyond any model, and small
// enough that the rows of one parameter (at most 8 products of two sizes) stay below 2^44.
const (
	maxSize   = 1 << 20
	maxVocab  = 1 << 24
	maxLayers = 1 << 12
	maxDepth  = 64 // of MTP, and the layers of one depth
	// maxTotal leaves room in an int64 for thousands of bytes a parameter.
	maxTotal = 1e15
)

// size is a field that must lie in a range.
type size struct {
	field          string
	value, lo, top int
}

func inRange(sizes ...size) error {
	for _, s := range sizes {
		if s.value < s.lo || s.value > s.top {
			return fmt.Errorf("%s is %d; it must be from %d to %d", s.field, s.value, s.lo, s.top)
		}
	}
	return nil
}

// Check returns an error that says what is wrong with the description, if anything is.
func (m *Model) Check() error {
	positions := 0
	if m.LearnedPositions {
		positions = 1
	}
	if err := inRange(
		size{"hidden", m.Hidden, 1, maxSize},
		size{"vocab", m.Vocab, 1, maxVocab},
		size{"max_positions", m.MaxPositions, positions, math.MaxInt32},
		size{"the number of layers", len(m.Layers), 1, maxLayers},
		size{"norm", int(m.Norm), int(RMSNorm), int(LayerNorm)},
	); err != nil {
		return err
	}
	for _, g := range groupsOf(m.Layers) {
		if err := g.layer.check(fmt.Sprintf("layers[%d]", g.first)); err != nil {
			return err
		}
	}
	if m.MTP != nil {
		if err := inRange(
			size{"mtp.depth", m.MTP.Depth, 1, maxDepth},
			size{"the number of mtp.layers", len(m.MTP.Layers), 1, maxDepth},
		); err != nil {
			return err
		}
		for i, l := range m.MTP.Layers {
			if err := l.check(fmt.Sprintf("mtp.layers[%d]", i)); err != nil {
				return err
			}
		}
	}
	// This is in floating point, because it decides whether int64 is wide enough.
	var total float64
	m.each(func(p Param, times int) {
		total += float64(p.Rows) * float64(p.Cols) * float64(p.Count) * float64(times)
	})
	if total > maxTotal {
		return fmt.Errorf("hidden, vocab and the layers make %.3g parameters; at most %g are accepted", total, maxTotal)
	}
	return nil
}

func (l Layer) check(at string) error {
	mixers, err := l.checkMixer(at)
	if err != nil {
		return err
	}
	parts := 0
	if d := l.Dense; d != nil {
		parts++
		err = inRange(size{at + ".dense.width", d.Width, 1, maxSize})
	}
	if d := l.MoE; d != nil && err == nil {
		parts++
		err = inRange(
			size{at + ".moe.experts", d.Experts, 1, maxSize},
			size{at + ".moe.top_k", d.TopK, 1, d.Experts},
			size{at + ".moe.width", d.Width, 1, maxSize},
			size{at + ".moe.shared_width", d.SharedWidth, 0, maxSize},
			size{at + ".moe.latent", d.Latent, 0, maxSize},
		)
	}
	switch {
	case err != nil:
		return err
	case mixers > 1 && !(mixers == 2 && l.Parallel()):
		return fmt.Errorf("%s has %d mixers; give one of attention, mla, mamba, delta_net and lightning, or attention with mamba", at, mixers)
	case parts > 1:
		return fmt.Errorf("%s has both dense and moe; give one of them", at)
	case mixers+parts == 0:
		return fmt.Errorf("%s is empty; give it a mixer, a feed-forward part or both", at)
	}
	return nil
}

// Parallel reports whether attention and Mamba read the same norm.
func (l Layer) Parallel() bool { return l.Attention != nil && l.Mamba != nil }

// checkMixer also returns how many mixers there are.
func (l Layer) checkMixer(at string) (n int, err error) {
	if a := l.Attention; a != nil {
		n++
		err = checkAttention(at+".attention", a)
	}
	if a := l.MLA; a != nil && err == nil {
		n++
		err = inRange(
			size{at + ".mla.heads", a.Heads, 1, maxSize},
			size{at + ".mla.q_rank", a.QRank, 0, maxSize},
			size{at + ".mla.kv_rank", a.KVRank, 1, maxSize},
			size{at + ".mla.nope", a.Nope, 1, maxSize},
			size{at + ".mla.rope", a.Rope, 0, maxSize},
			size{at + ".mla.v", a.V, 1, maxSize},
		)
		if x := a.Indexer; x != nil && err == nil {
			err = inRange(
				size{at + ".mla.indexer.heads", x.Heads, 1, maxSize},
				size{at + ".mla.indexer.head_dim", x.HeadDim, 1, maxSize},
				size{at + ".mla.indexer.top_k", x.TopK, 1, math.MaxInt32},
				size{at + ".mla.q_rank", a.QRank, 1, maxSize}, // its queries come from the narrow ones
			)
		}
	}
	if a := l.Mamba; a != nil && err == nil {
		n++
		err = checkMamba(at+".mamba", a)
	}
	if a := l.DeltaNet; a != nil && err == nil {
		n++
		err = inRange(
			size{at + ".delta_net.key_heads", a.KeyHeads, 1, maxSize},
			size{at + ".delta_net.value_heads", a.ValueHeads, 1, maxSize},
			size{at + ".delta_net.key_dim", a.KeyDim, 1, maxSize},
			size{at + ".delta_net.value_dim", a.ValueDim, 1, maxSize},
			size{at + ".delta_net.conv", a.Conv, 1, maxSize},
		)
		if err == nil {
			err = divides(at+".delta_net.key_heads", a.KeyHeads, "value_heads", a.ValueHeads)
		}
	}
	if a := l.Lightning; a != nil && err == nil {
		n++
		err = inRange(
			size{at + ".lightning.heads", a.Heads, 1, maxSize},
			size{at + ".lightning.head_dim", a.HeadDim, 1, maxSize},
		)
	}
	return n, err
}

func checkAttention(at string, a *Attention) error {
	if err := inRange(
		size{at + ".heads", a.Heads, 1, maxSize},
		size{at + ".kv_heads", a.KVHeads, 1, maxSize},
		size{at + ".head_dim", a.HeadDim, 1, maxSize},
		size{at + ".window", a.Window, 0, math.MaxInt32},
		size{at + ".chunk", a.Chunk, 0, math.MaxInt32},
	); err != nil {
		return err
	}
	return divides(at+".kv_heads", a.KVHeads, "heads", a.Heads)
}

func checkMamba(at string, a *Mamba) error {
	if err := inRange(
		size{at + ".version", a.Version, 1, 2},
		size{at + ".inner", a.Inner, 1, maxSize},
		size{at + ".state", a.State, 1, maxSize},
		size{at + ".conv", a.Conv, 1, maxSize},
	); err != nil {
		return err
	}
	if a.Version == 1 {
		return inRange(size{at + ".dt_rank", a.DTRank, 1, maxSize})
	}
	if err := inRange(
		size{at + ".heads", a.Heads, 1, maxSize},
		size{at + ".groups", a.Groups, 1, maxSize},
	); err != nil {
		return err
	}
	if err := divides(at+".groups", a.Groups, "heads", a.Heads); err != nil {
		return err
	}
	return divides(at+".heads", a.Heads, "inner", a.Inner)
}

func divides(field string, a int, other string, b int) error {
	if b%a != 0 {
		return fmt.Errorf("%s is %d; it must divide %s, which is %d", field, a, other, b)
	}
	return nil
}

// each calls f for every parameter, with the number of times that the model holds it. All
// depths of MTP are equal.
func (m *Model) each(f func(p Param, times int)) {
	visit := func(list []Param, times int) {
		for _, p := range list {
			f(p, times)
		}
	}
	visit(m.EmbeddingParams(), 1)
	if !m.Tied {
		visit(m.OutputParams(), 1)
	}
	for _, g := range groupsOf(m.Layers) {
		visit(m.LayerParams(g.layer), g.count)
	}
	visit(m.FinalNormParams(), 1)
	if m.MTP != nil {
		times := m.MTP.Depth
		if m.MTP.Repeated {
			times = 1
		}
		visit(m.MTPParams(0), times)
	}
}

// Parameters returns the number of parameters. A tied output layer counts once, and so
// do MTP depths that share their weights.
func (m *Model) Parameters() int64 {
	var n int64
	m.each(func(p Param, times int) { n += p.Elements() * int64(times) })
	return n
}

// ActiveParameters returns the number of parameters that one token is multiplied with in
// the layers and the output layer: TopK experts of each layer, and no embedding, of
// which a token only looks up a row. MTP does not count.
func (m *Model) ActiveParameters() int64 {
	var n int64
	for _, l := range m.Layers {
		for _, p := range m.LayerParams(l) {
			if p.Split == Expert {
				p.Count = l.MoE.TopK
			}
			n += p.Elements()
		}
	}
	for _, p := range append(m.FinalNormParams(), m.OutputParams()...) {
		n += p.Elements()
	}
	return n
}
