// This file owns what parameters cost between steps: weights, gradients and optimiser
// state.

package plan

import (
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// matrix is the shape of a weight on one rank.
type matrix struct{ rows, cols int64 }

// share is the part of the model that one pipeline rank holds, in elements.
type share struct {
	dense, expert int64
	// narrow are the elements of dense and expert that matrix products may hold in eight
	// bits or less.
	narrowDense, narrowExpert int64
	// table is the part of dense that belongs to the embedding and the output layer.
	table int64
	// shapes are the shapes of weights whose gradients fused products accumulate.
	shapes map[matrix]bool
	// output is the size of the output layer's weights if it has inputs of eight bits.
	output int64
	// tensors are the single parameters. Some optimisers assign them to ranks whole.
	tensors []heldTensor
	units   []unitShare
}

// heldTensor is a parameter, or count equal ones.
type heldTensor struct {
	elements, count int64
	matrix, expert  bool // matrix: updated by Muon where that is the optimiser
}

// unitShare is one FSDP unit: a layer, or an end of the model.
type unitShare struct {
	name          string
	dense, expert int64
	table         bool
}

// rowParallel reports whether the inputs of a weight are divided over TP ranks, and not its
// outputs.
func rowParallel(name string) bool {
	for _, s := range []string{"linear_proj.weight", "linear_fc2.weight", "out_proj.weight", "x_proj.weight"} {
		if strings.HasSuffix(name, s) {
			return true
		}
	}
	return false
}

// fused reports whether the gradient of a weight is accumulated inside of its product, as
// in TransformerEngine's linear layers and the output layer.
func fused(name string) bool {
	return strings.Contains(name, "linear_") || strings.Contains(name, "_proj.weight") || strings.Contains(name, "output_layer")
}

func (d *dims) shareOf(params []model.Param, unit string) (s share) {
	s.shapes = map[matrix]bool{}
	l := d.s.Layout
	for _, p := range params {
		m := matrix{int64(p.Rows), int64(p.Cols)}
		n := int64(p.Count)
		switch {
		case strings.HasSuffix(p.Name, "word_embeddings.weight") || strings.HasSuffix(p.Name, "output_layer.weight"):
			m.rows = d.vocab
		case p.Split == model.Expert:
			n /= int64(l.EP)
			m = divide(m, p.Name, int64(l.ETP))
		case p.Split == model.Tensor:
			m = divide(m, p.Name, d.tp)
		}
		all := n * m.rows * m.cols
		isMatrix := d.lowPrecision() && p.Cols > 1 && fused(p.Name) && !strings.Contains(p.Name, "output_layer")
		table := strings.Contains(p.Name, "_embeddings.weight") || strings.Contains(p.Name, "output_layer")
		switch {
		case p.Split == model.Expert:
			s.expert += all
			if isMatrix {
				s.narrowExpert += all
			}
		default:
			s.dense += all
			if isMatrix {
				s.narrowDense += all
			}
		}
		if table {
			s.table += all
		}
		s.tensors = append(s.tensors, heldTensor{m.rows * m.cols, n, p.Cols > 1 && !table, p.Split == model.Expert})
		if p.Cols > 1 && fused(p.Name) {
			s.shapes[m] = true
		}
	}
	s.units = []unitShare{{unit, s.dense, s.expert, s.table > 0}}
	return s
}

func divide(m matrix, name string, by int64) matrix {
	if rowParallel(name) {
		m.cols /= by
	} else {
		m.rows /= by
	}
	return m
}

func (s *share) add(o share) {
	s.dense += o.dense
	s.expert += o.expert
	s.narrowDense += o.narrowDense
	s.narrowExpert += o.narrowExpert
	s.table += o.table
	s.tensors = append(s.tensors, o.tensors...)
	s.units = append(s.units, o.units...)
	if s.shapes == nil {
		s.shapes = map[matrix]bool{}
	}
	for m := range o.shapes {
		s.shapes[m] = true
	}
}

// chunks returns the virtual stages of a pipeline rank, in order.
func (s *Setup) chunks(rank int) []Stage {
	var chunks []Stage
	for i := rank; i < len(s.Layout.Stages); i += s.Layout.PP {
		chunks = append(chunks, s.Layout.Stages[i])
	}
	return chunks
}

// holds returns the part of the model that a pipeline rank holds.
func (d *dims) holds(rank int) share {
	var s share
	m := d.m
	chunks := d.s.chunks(rank)
	embeds := slices.ContainsFunc(chunks, func(c Stage) bool { return c.Embedding })
	for _, c := range chunks {
		if c.Embedding {
			s.add(d.shareOf(m.EmbeddingParams(), "embedding"))
		}
		for i := c.First; i < c.Last; i++ {
			s.add(d.ofLayer(i).layerShare(m.Layers[i]))
		}
		if c.MTP && m.MTP != nil {
			depths := m.MTP.Depth
			if m.MTP.Repeated {
				depths = 1
			}
			for k := range depths {
				s.add(d.shareOf(m.MTPParams(k), "mtp"))
			}
			if !embeds {
				// Words and positions have embeddings.
				s.add(d.shareOf(m.EmbeddingParams(), "embedding"))
			}
		}
		if c.Loss {
			s.add(d.shareOf(m.FinalNormParams(), "norm"))
			// A tied output layer has a copy of the embedding if that is on another rank.
			if !m.Tied || !embeds && !(c.MTP && m.MTP != nil) {
				s.add(d.shareOf(m.OutputParams(), "output"))
			} else {
				s.shapes[matrix{d.vocab, d.h}] = true
			}
			if d.narrowOutput() {
				s.output = d.vocab * d.h
			}
		}
	}
	return s
}

// parameterItems returns the weights, gradients and optimiser state of a rank that does not
// shard them. For sharded ones see fsdp.go.
func (d *dims) parameterItems(s share) []Item {
	p, o := d.s.Precision, d.s.Optimizer
	all := s.dense + s.expert
	weights := bytesOf(p.Params) * memory.Bytes(all)
	if d.lowPrecision() && p.ParamGather {
		narrow := s.narrowDense + s.narrowExpert
		weights = bytesOf(p.Params)*memory.Bytes(all-narrow) + d.narrowWeights(narrow)
	}
	grads := all
	if d.s.Layout.FSDP.Shard == ShardGradients {
		dense, expert := d.shards()
		grads = ceilDiv(s.dense, dense) + ceilDiv(s.expert, expert)
	}
	items := []Item{
		{CauseWeights, "weights", weights, true},
		{CauseGradients, "gradients", d.gradBytes() * memory.Bytes(grads), true},
	}
	if d.lowPrecision() && !p.ParamGather {
		items = append(items, Item{CauseWeights, "quantised weights", d.narrowWeights(s.narrowDense + s.narrowExpert), true})
	}
	if s.output > 0 { // Megatron-LM makes it outside of fp8-param-gather
		items = append(items, Item{CauseWeights, "quantised output layer", d.narrowWeights(s.output), true})
	}
	state := d.optimizerBytes(s)
	device := state - memory.Bytes(float64(state)*o.OffloadFraction)
	return append(items, Item{CauseOptimizer, "optimizer state", device, true})
}

// narrowWeights returns the size of n weights as inputs of products in eight bits or less:
// a copy for the forward product, and one for the gradients' products, because GPUs before
// Blackwell cannot read the first one transposed. Scales of small blocks need both copies
// on every GPU.
func (d *dims) narrowWeights(n int64) memory.Bytes {
	p := d.s.Precision
	switch {
	case p.Compute == MXFP8:
		return 2 * memory.Bytes(n+n/32)
	case p.Compute == NVFP4:
		return 2 * memory.Bytes(n/2+n/16)
	case p.Blockwise:
		return 2 * memory.Bytes(n)
	case d.s.Hardware != nil && d.s.Hardware.Generation >= 10:
		return memory.Bytes(n)
	}
	return 2 * memory.Bytes(n)
}

// gradBytes returns the size of a gradient in its buffer.
func (d *dims) gradBytes() memory.Bytes {
	p := d.s.Precision
	switch {
	case p.Params == FP32:
		return 4
	case p.GradsInBF16 || p.MainGrads == FP16:
		return 2
	}
	return 4
}

// shards returns how many ranks divide the optimiser's state of dense and of expert
// parameters.
func (d *dims) shards() (dense, expert int64) {
	l, o := d.s.Layout, d.s.Optimizer
	if !o.Distributed {
		return 1, 1
	}
	n := int64(max(o.Instances, 1))
	if l.FSDP.Shard == ShardParameters {
		if n = 1; !l.FSDP.OuterOptimizer {
			n = int64(max(l.FSDP.Outer, 1))
		}
	}
	return max(int64(l.DP()*l.CP)/n, 1), max(int64(l.EDP())/n, 1)
}

// stateBytes returns the optimiser's state per element: main parameter and moments.
// Precision-aware state keeps only the missing half of a bf16 weight's bits if main
// parameters are fp16.
func (d *dims) stateBytes() (main, moments memory.Bytes) {
	o := d.s.Optimizer
	main, moments = 4, 8
	if d.s.Precision.Params == FP32 {
		main = 0
	}
	if o.Kind == "sgd" {
		moments = 4
	}
	if o.PrecisionAware {
		main, moments = bytesOf(o.MainParams), bytesOf(o.Moment1)+bytesOf(o.Moment2)
	}
	return main, moments
}

func (d *dims) optimizerBytes(s share) memory.Bytes {
	if d.s.Optimizer.Kind == "muon" {
		return d.muonBytes(s)
	}
	main, moments := d.stateBytes()
	dense, expert := d.shards()
	return (main + moments) * memory.Bytes(ceilDiv(s.dense, dense)+ceilDiv(s.expert, expert))
}

// leftGradients returns the size of the fp32 main gradients that the optimiser makes if the
// buffer has another format. They stay until the next step begins.
func (d *dims) leftGradients(s share) memory.Bytes {
	if d.gradBytes() == 4 || d.s.Optimizer.PrecisionAware || d.s.Layout.FSDP.Shard == ShardParameters {
		return 0
	}
	dense, expert := d.shards()
	return 4 * memory.Bytes(ceilDiv(s.dense, dense)+ceilDiv(s.expert, expert))
}

func ceilDiv[T ~int64](a, b T) T { return (a + b - 1) / b }
