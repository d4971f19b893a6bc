// This file owns the sizes that follow from a setup: tokens of a rank, bytes of an element,
// rows that experts receive.

package plan

import (
	"math"
	"slices"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// dims are the sizes of one setup.
type dims struct {
	s *Setup
	m *model.Model
	// tokens is the number of tokens of a microbatch on a rank. local is a TP rank's part
	// of them if the sequence is divided.
	tokens, local int64
	tp            int64
	h             int64
	elem          memory.Bytes // of an activation's element
	vocab         int64        // padded, on one rank
	memo          *memo
}

// memo has what was computed before for one setup under any policy. The sizes of ranks and
// layers share it.
type memo struct {
	tapes  map[tapeKey]*tape // before a policy
	shares map[shareKey]share
	ranks  map[int]*basis
}

type tapeKey struct {
	kind           model.Kind
	low, offloaded bool
}

type shareKey struct {
	kind model.Kind
	low  bool
}

// layerTape returns a tape of a layer that a policy can be applied to.
func (d *dims) layerTape(l model.Layer) *tape {
	key := tapeKey{model.KindOf(l), d.lowPrecision(), slices.Contains(d.s.Offload.Modules, "expert_fc1")}
	t := d.memo.tapes[key]
	if t == nil {
		t = d.layer(l)
		d.memo.tapes[key] = t
	}
	own := *t
	own.saved = slices.Clone(t.saved)
	return &own
}

// layerShare returns the parameters of a layer. Nobody may change them.
func (d *dims) layerShare(l model.Layer) share {
	key := shareKey{model.KindOf(l), d.lowPrecision()}
	s, ok := d.memo.shares[key]
	if !ok {
		s = d.shareOf(d.m.LayerParams(l), "layer")
		d.memo.shares[key] = s
	}
	return s
}

func newDims(s *Setup) *dims {
	l := s.Layout
	d := &dims{s: s, m: s.Model, tp: int64(l.TP), h: int64(s.Model.Hidden), memo: &memo{map[tapeKey]*tape{}, map[shareKey]share{}, map[int]*basis{}}}
	d.tokens = int64(s.Batch.Micro) * int64(s.Batch.Seq) / int64(l.CP)
	d.local = d.tokens / int64(l.seqSplit())
	d.elem = bytesOf(s.Precision.Params)
	d.vocab = int64(paddedVocab(s.Model.Vocab, l.VocabMultiple, l.TP)) / d.tp
	return d
}

// bytesOf returns the size of an element. Formats of a byte or less have scales too; see
// quantised.
func bytesOf(f Format) memory.Bytes {
	switch f {
	case FP32:
		return 4
	case FP8, MXFP8, NVFP4:
		return 1
	}
	return 2
}

// paddedVocab returns the vocabulary padded so that every TP rank holds a multiple.
func paddedVocab(vocab, multiple, tp int) int {
	m := multiple * tp
	return (vocab + m - 1) / m * m
}

// size returns the size of n elements of activations.
func (d *dims) size(n int64) memory.Bytes { return d.elem * memory.Bytes(n) }

// elements returns how many elements of activations have a size.
func (d *dims) elements(size memory.Bytes) int64 { return int64(size / d.elem) }

// residual returns the size of one tensor of the residual stream.
func (d *dims) residual() memory.Bytes { return d.size(d.local * d.h) }

// gathered returns the size of the residual stream before it is divided along the sequence.
func (d *dims) gathered() memory.Bytes { return d.size(d.tokens * d.h) }

// dividesSequence reports whether the sequence is divided over the TP ranks.
func (d *dims) dividesSequence() bool { return d.local < d.tokens }

// lowPrecision reports whether the products of a layer have inputs of eight bits or less.
func (d *dims) lowPrecision() bool {
	switch d.s.Precision.Compute {
	case FP8, MXFP8, NVFP4:
		return true
	}
	return false
}

// quantised returns the size of n elements that are saved as the input of a matrix product.
// MXFP8 has a scale byte for 32 elements, blockwise FP8 four bytes for 128, and NVFP4 half
// a byte an element and a scale byte for 16.
func (d *dims) quantised(n int64) memory.Bytes {
	switch d.s.Precision.Compute {
	case MXFP8:
		return memory.Bytes(n + n/32)
	case NVFP4:
		return memory.Bytes(n/2 + n/16)
	case FP8:
		if d.s.Precision.Blockwise {
			return memory.Bytes(n + n/32)
		}
		return memory.Bytes(n)
	}
	return d.size(n)
}

// ofLayer returns the sizes for decoder layer i. Layers ofLayer both ends may compute in the format
// of the parameters.
func (d *dims) ofLayer(i int) *dims {
	p := d.s.Precision
	if !d.lowPrecision() || i >= p.PlainFirst && i < len(d.m.Layers)-p.PlainLast {
		return d
	}
	n, s := *d, *d.s
	s.Precision.Compute, s.Precision.ParamGather = p.Params, false
	n.s = &s
	return &n
}

// rows returns how many rows the experts of a rank receive from one microbatch. With
// balanced routing all ranks of an expert group send and receive the same number, so EP
// does not divide them. ETP ranks hold all rows of each other.
func (d *dims) rows(e *model.MoE) int64 {
	received, _ := d.load()
	return int64(math.Ceil(float64(d.local) * float64(e.TopK) * float64(d.s.Layout.ETP) * received))
}

// load returns how many rows a rank receives, and how many it would receive with balanced
// routing, as multiples of what tokens choose. Padding fills up to the capacity under any
// routing, and dropping cuts off what exceeds it.
func (d *dims) load() (received, balanced float64) {
	k := d.s.Kernels
	received, balanced = max(d.s.Routing.Imbalance, d.capacity()), 1
	switch {
	case k.CapacityFactor > 0 && k.PadToCapacity:
		return k.CapacityFactor, k.CapacityFactor
	case k.CapacityFactor > 0:
		return min(received, k.CapacityFactor), min(balanced, k.CapacityFactor)
	}
	return received, balanced
}

// natural is how much more than its share an expert rank receives if it holds one expert
// and nothing forces routing to be balanced. It is fitted on the first steps of Mixtral and
// of small models (1.05 to 1.15). The loads of several experts even out like independent
// ones.
const natural = 0.10

// MostImbalance returns the largest imbalance that is possible: all tokens choose the
// experts of one rank, as far as it has as many as a token chooses.
func MostImbalance(m *model.Model, l Layout) float64 {
	most := 1.0
	for _, x := range m.Layers {
		if x.MoE != nil && x.MoE.TopK > 0 && l.EP > 1 {
			local := max(x.MoE.Experts/l.EP, 1)
			most = max(most, float64(l.EP)*float64(min(local, x.MoE.TopK))/float64(x.MoE.TopK))
		}
	}
	return most
}

// NaturalImbalance returns the imbalance to expect if nothing forces routing to be
// balanced and no token is dropped.
func NaturalImbalance(m *model.Model, l Layout) float64 {
	for _, x := range m.Layers {
		if x.MoE != nil && l.EP > 1 {
			local := max(x.MoE.Experts/l.EP, 1)
			return 1 + natural/math.Sqrt(float64(local))
		}
	}
	return 1
}
