// This file owns the parameters that follow from a model's description: their names, their
// shapes, and how ranks divide them. The names are Megatron-LM's, with norms as separate
// modules.

package model

import "fmt"

// Split is how the ranks of a pipeline stage divide a parameter.
type Split uint8

// The ways to divide a parameter.
const (
	// Whole means that every tensor-parallel rank holds the parameter: norms, routers,
	// the narrow projections of MLA.
	Whole Split = iota
	// Tensor means that the TP ranks divide the parameter.
	Tensor
	// Expert means that the parameter belongs to a routed expert: EP ranks divide the
	// experts, and ETP ranks divide each expert.
	Expert
)

// Param is a parameter, or Count equal ones: those of the experts.
type Param struct {
	// Name is relative to its layer: "self_attention.linear_qkv.weight".
	Name string
	// Rows is the number of outputs of a matrix, Cols that of its inputs. A vector has
	// one column.
	Rows, Cols int
	Count      int
	Split      Split
}

// Elements returns the number of elements in the whole model.
func (p Param) Elements() int64 { return int64(p.Rows) * int64(p.Cols) * int64(p.Count) }

// params is a list that grows in forward order.
type params []Param

func (p *params) add(name string, rows, cols int, split Split) {
	*p = append(*p, Param{Name: name, Rows: rows, Cols: cols, Count: 1, Split: split})
}

func (p *params) norm(kind Norm, name string, width int) {
	p.add(name+".weight", width, 1, Whole)
	if kind == LayerNorm {
		p.add(name+".bias", width, 1, Whole)
	}
}

// column adds a linear layer whose outputs are divided. row adds one whose inputs are
// divided: its bias is added once after the sum over the ranks, so every rank holds it.
func (p *params) column(name string, out, in int, bias bool) {
	p.add(name+".weight", out, in, Tensor)
	if bias {
		p.add(name+".bias", out, 1, Tensor)
	}
}

func (p *params) row(name string, out, in int, bias bool) {
	p.add(name+".weight", out, in, Tensor)
	if bias {
		p.add(name+".bias", out, 1, Whole)
	}
}

// whole adds a linear layer that every rank holds.
func (p *params) whole(name string, out, in int, bias bool) {
	p.add(name+".weight", out, in, Whole)
	if bias {
		p.add(name+".bias", out, 1, Whole)
	}
}

// experts adds one linear layer of each of n experts.
func (p *params) experts(name string, n, out, in int, bias bool) {
	*p = append(*p, Param{Name: name + ".weight", Rows: out, Cols: in, Count: n, Split: Expert})
	if bias {
		*p = append(*p, Param{Name: name + ".bias", Rows: out, Cols: 1, Count: n, Split: Expert})
	}
}

// LayerParams returns the parameters of a layer in forward order.
func (m *Model) LayerParams(l Layer) []Param {
	var p params
	switch {
	case l.Mamba != nil:
		p.norm(m.Norm, "norm", m.Hidden)
	case l.Attention != nil || l.MLA != nil || l.DeltaNet != nil || l.Lightning != nil:
		p.norm(m.Norm, "input_layernorm", m.Hidden)
	}
	switch {
	case l.Attention != nil:
		m.attention(&p, l.Attention)
	case l.MLA != nil:
		m.mla(&p, l.MLA)
	case l.DeltaNet != nil:
		m.deltaNet(&p, l.DeltaNet)
	case l.Lightning != nil:
		m.lightning(&p, l.Lightning)
	}
	if l.Mamba != nil {
		m.mamba(&p, l.Mamba)
	}
	if m.PostNorms && len(p) > 0 {
		p.norm(m.Norm, "post_self_attn_layernorm", m.Hidden)
	}
	if l.Dense == nil && l.MoE == nil {
		return p
	}
	p.norm(m.Norm, "pre_mlp_layernorm", m.Hidden)
	if l.Dense != nil {
		bias := m.Bias || l.Dense.Bias
		p.column("mlp.linear_fc1", inputs(l.Dense.Gated)*l.Dense.Width, m.Hidden, bias)
		p.row("mlp.linear_fc2", m.Hidden, l.Dense.Width, bias)
	} else {
		m.moe(&p, l.MoE)
	}
	if m.PostNorms {
		p.norm(m.Norm, "post_mlp_layernorm", m.Hidden)
	}
	return p
}

// inputs returns the number of input matrices of a feed-forward part. They are held as one.
func inputs(gated bool) int {
	if gated {
		return 2
	}
	return 1
}

func (m *Model) attention(p *params, a *Attention) {
	rows := (a.Heads + 2*a.KVHeads) * a.HeadDim
	if a.Gate {
		rows += a.Heads * a.HeadDim
	}
	p.column("self_attention.linear_qkv", rows, m.Hidden, m.Bias || a.QKVBias)
	switch {
	case !a.QKNorm || a.QKNormBare:
	case a.QKNormWhole:
		p.add("self_attention.q_layernorm.weight", a.Heads*a.HeadDim, 1, Tensor)
		p.add("self_attention.k_layernorm.weight", a.KVHeads*a.HeadDim, 1, Tensor)
	default:
		p.norm(m.Norm, "self_attention.q_layernorm", a.HeadDim)
		p.norm(m.Norm, "self_attention.k_layernorm", a.HeadDim)
	}
	if a.Sinks {
		p.add("self_attention.core_attention.softmax_offset", a.Heads, 1, Tensor)
	}
	p.row("self_attention.linear_proj", m.Hidden, a.Heads*a.HeadDim, m.Bias || a.OutBias)
}

// mla adds latent attention. If linear layers have biases, only its output projection has
// one.
func (m *Model) mla(p *params, a *MLA) {
	queries := a.Heads * (a.Nope + a.Rope)
	if a.QRank == 0 {
		p.column("self_attention.linear_q_proj", queries, m.Hidden, false)
	} else {
		p.whole("self_attention.linear_q_down_proj", a.QRank, m.Hidden, false)
		if a.LatentNorm {
			p.norm(m.Norm, "self_attention.q_layernorm", a.QRank)
		}
		p.column("self_attention.linear_q_up_proj", queries, a.QRank, false)
	}
	p.whole("self_attention.linear_kv_down_proj", a.KVRank+a.Rope, m.Hidden, false)
	if a.LatentNorm {
		p.norm(m.Norm, "self_attention.kv_layernorm", a.KVRank)
	}
	p.column("self_attention.linear_kv_up_proj", a.Heads*(a.Nope+a.V), a.KVRank, false)
	p.row("self_attention.linear_proj", m.Hidden, a.Heads*a.V, m.Bias)
	if x := a.Indexer; x != nil {
		// The indexer is whole on every rank, and its norm is a LayerNorm.
		p.whole("self_attention.indexer.linear_wq_b", x.Heads*x.HeadDim, a.QRank, false)
		p.whole("self_attention.indexer.linear_wk", x.HeadDim, m.Hidden, false)
		p.norm(LayerNorm, "self_attention.indexer.k_norm", x.HeadDim)
		p.whole("self_attention.indexer.linear_weights_proj", x.Heads, m.Hidden, false)
	}
}

// mamba adds a Mamba layer. Its projections never have biases, and its convolution always
// has one. Mamba-2 projects the gate, the input, B, C and the steps at once. Mamba-1
// computes B, C and a narrow step from the convolved input.
func (m *Model) mamba(p *params, a *Mamba) {
	if a.Version == 2 {
		bc := 2 * a.Groups * a.State
		p.column("mixer.in_proj", 2*a.Inner+bc+a.Heads, m.Hidden, false)
		p.add("mixer.conv1d.weight", a.Inner+bc, a.Conv, Tensor)
		p.add("mixer.conv1d.bias", a.Inner+bc, 1, Tensor)
		p.add("mixer.dt_bias", a.Heads, 1, Tensor)
		p.add("mixer.A_log", a.Heads, 1, Tensor)
		p.add("mixer.D", a.Heads, 1, Tensor)
		if !a.Ungated {
			p.add("mixer.norm.weight", a.Inner, 1, Tensor)
		}
	} else {
		p.column("mixer.in_proj", 2*a.Inner, m.Hidden, false)
		p.add("mixer.conv1d.weight", a.Inner, a.Conv, Tensor)
		p.add("mixer.conv1d.bias", a.Inner, 1, Tensor)
		p.row("mixer.x_proj", a.DTRank+2*a.State, a.Inner, false)
		if a.Norms {
			p.norm(m.Norm, "mixer.dt_layernorm", a.DTRank)
			p.norm(m.Norm, "mixer.b_layernorm", a.State)
			p.norm(m.Norm, "mixer.c_layernorm", a.State)
		}
		p.column("mixer.dt_proj", a.Inner, a.DTRank, true)
		p.add("mixer.A_log", a.Inner, a.State, Tensor)
		p.add("mixer.D", a.Inner, 1, Tensor)
	}
	p.row("mixer.out_proj", m.Hidden, a.Inner, false)
}

// deltaNet adds a gated delta net. Its input projection makes queries, keys, values, the
// gate of the output, and two numbers for each value head.
func (m *Model) deltaNet(p *params, a *DeltaNet) {
	keys, values := a.KeyHeads*a.KeyDim, a.ValueHeads*a.ValueDim
	p.column("self_attention.in_proj", 2*keys+2*values+2*a.ValueHeads, m.Hidden, false)
	p.add("self_attention.conv1d.weight", 2*keys+values, a.Conv, Tensor)
	p.add("self_attention.dt_bias", a.ValueHeads, 1, Tensor)
	p.add("self_attention.A_log", a.ValueHeads, 1, Tensor)
	p.add("self_attention.out_norm.weight", a.ValueDim, 1, Whole)
	p.row("self_attention.out_proj", m.Hidden, values, false)
}

// lightning adds linear attention. Its norm and its gate are as wide as all heads.
func (m *Model) lightning(p *params, a *Lightning) {
	width := a.Heads * a.HeadDim
	p.column("self_attention.linear_qkv", 3*width, m.Hidden, false)
	p.column("self_attention.linear_gate", width, m.Hidden, false)
	p.add("self_attention.out_norm.weight", width, 1, Tensor)
	p.row("self_attention.linear_proj", m.Hidden, width, false)
}

func (m *Model) moe(p *params, a *MoE) {
	p.whole("mlp.router", a.Experts, m.Hidden, m.Bias)
	if a.SharedWidth > 0 {
		if a.SharedGate {
			p.add("mlp.shared_experts.gate_weight", 1, m.Hidden, Whole)
		}
		p.column("mlp.shared_experts.linear_fc1", inputs(a.Gated)*a.SharedWidth, m.Hidden, m.Bias)
		p.row("mlp.shared_experts.linear_fc2", m.Hidden, a.SharedWidth, m.Bias)
	}
	width := m.Hidden
	if a.Latent > 0 {
		width = a.Latent
		p.whole("mlp.fc1_latent_proj", a.Latent, m.Hidden, m.Bias)
	}
	p.experts("mlp.experts.linear_fc1", a.Experts, inputs(a.Gated)*a.Width, width, m.Bias)
	p.experts("mlp.experts.linear_fc2", a.Experts, width, a.Width, m.Bias)
	if a.Latent > 0 {
		p.whole("mlp.fc2_latent_proj", m.Hidden, a.Latent, m.Bias)
	}
}

// EmbeddingParams returns the parameters before the first layer.
func (m *Model) EmbeddingParams() []Param {
	var p params
	p.add("embedding.word_embeddings.weight", m.Vocab, m.Hidden, Tensor)
	if m.LearnedPositions {
		p.add("embedding.position_embeddings.weight", m.MaxPositions, m.Hidden, Whole)
	}
	return p
}

// FinalNormParams returns the parameters of the norm behind the last layer.
func (m *Model) FinalNormParams() []Param {
	var p params
	p.norm(m.Norm, "decoder.final_layernorm", m.Hidden)
	return p
}

// OutputParams returns the parameters of the output layer, even if it is tied to the
// embedding: the stages decide whether that needs a copy.
func (m *Model) OutputParams() []Param {
	var p params
	p.add("output_layer.weight", m.Vocab, m.Hidden, Tensor)
	if m.OutputBias {
		p.add("output_layer.bias", m.Vocab, 1, Tensor)
	}
	return p
}

// MTPParams returns the parameters of one depth of MTP, counted from zero: two norms,
// the projection of two hidden states to one, the layers, and a final norm. The
// embedding and the output layer are those of the model.
func (m *Model) MTPParams(depth int) []Param {
	if m.MTP == nil || depth < 0 || depth >= m.MTP.Depth {
		panic(fmt.Sprintf("model: %s has no MTP depth %d", m.Name, depth))
	}
	var p params
	p.norm(m.Norm, "enorm", m.Hidden)
	p.norm(m.Norm, "hnorm", m.Hidden)
	p.column("eh_proj", m.Hidden, 2*m.Hidden, false)
	for i, l := range m.MTP.Layers {
		prefix := "mtp_model_layer."
		if len(m.MTP.Layers) > 1 {
			prefix = fmt.Sprintf("mtp_model_layer.layers.%d.", i)
		}
		for _, q := range m.LayerParams(l) {
			q.Name = prefix + q.Name
			p = append(p, q)
		}
	}
	p.norm(m.Norm, "final_layernorm", m.Hidden)
	return p
}
