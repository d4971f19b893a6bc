// Package model describes the architecture of a decoder model: its layers, and
// from them every parameter with its shape and the way it is divided over
// ranks. The planner sizes memory from it, the pools of sharded parameters take
// their buckets from it, and the trainer builds it. It is pure.
//
// This file owns the description, check.go what makes it sound, param.go the
// parameters that follow from it, hf.go reading a Hugging Face config.json, with
// family.go and hybrid.go what each family of models means by its keys, and
// preset.go the models that are built in.
package model

// Model is a decoder: an embedding, layers, a last norm and an output layer,
// and perhaps further layers that predict more than one token ahead.
type Model struct {
	Name   string `json:"name"`
	Hidden int    `json:"hidden"`
	// Vocab is the size of the vocabulary, before any padding.
	Vocab int `json:"vocab"`
	// MaxPositions is the longest sequence; it has parameters of its own only
	// where positions are learned.
	MaxPositions     int  `json:"max_positions"`
	LearnedPositions bool `json:"learned_positions,omitempty"`
	// Tied says that the output layer uses the embedding's weights.
	Tied bool `json:"tied"`
	Norm Norm `json:"norm"`
	// Bias says that linear layers have biases.
	Bias bool `json:"bias,omitempty"`
	// PostNorms says that each part of a layer also has a norm behind it
	// (Gemma).
	PostNorms bool `json:"post_norms,omitempty"`
	// Layers are the decoder's layers in order. A hybrid's layer may have only
	// a mixer or only a feed-forward part.
	Layers []Layer `json:"layers"`
	MTP    *MTP    `json:"mtp,omitempty"`
}

// Norm is the kind of normalisation.
type Norm uint8

const (
	RMSNorm   Norm = iota // one vector
	LayerNorm             // two vectors: scale and shift
)

// Layer is one layer: a mixer over the sequence (at most one of Attention, MLA,
// Mamba and DeltaNet), then a feed-forward part (at most one of Dense and MoE), each
// behind a norm of its own.
type Layer struct {
	Attention *Attention `json:"attention,omitempty"`
	MLA       *MLA       `json:"mla,omitempty"`
	Mamba     *Mamba     `json:"mamba,omitempty"`
	DeltaNet  *DeltaNet  `json:"delta_net,omitempty"`
	Dense     *Dense     `json:"dense,omitempty"`
	MoE       *MoE       `json:"moe,omitempty"`
}

// Attention is multi-head attention whose queries share keys and values in
// groups (GQA); with as many KVHeads as Heads it is plain attention.
type Attention struct {
	Heads   int `json:"heads"`
	KVHeads int `json:"kv_heads"`
	HeadDim int `json:"head_dim"`
	// QKNorm normalises queries and keys head by head.
	QKNorm bool `json:"qk_norm,omitempty"`
	// QKVBias is a bias on queries, keys and values even where Model.Bias is
	// not set (Qwen2).
	QKVBias bool `json:"qkv_bias,omitempty"`
	// OutBias is the same for the output projection.
	OutBias bool `json:"out_bias,omitempty"`
	// Sinks has one number a head that joins the softmax's denominator
	// (gpt-oss).
	Sinks bool `json:"sinks,omitempty"`
	// Gate multiplies the output by a gate of its own width (Qwen3-Next).
	Gate bool `json:"gate,omitempty"`
	// Window is the number of tokens a query sees; zero is all before it.
	Window int `json:"window,omitempty"`
	// Rotary says that positions are rotated into queries and keys.
	Rotary bool `json:"rotary,omitempty"`
}

// MLA is multi-head latent attention (DeepSeek): queries and keys come from
// narrow projections of the hidden state.
type MLA struct {
	Heads  int `json:"heads"`
	QRank  int `json:"q_rank"` // zero: queries are projected at once
	KVRank int `json:"kv_rank"`
	Nope   int `json:"nope"` // width of a head's part without positions
	Rope   int `json:"rope"` // width of the part with them
	V      int `json:"v"`
	// LatentNorm normalises the narrow projections.
	LatentNorm bool `json:"latent_norm"`
}

// Mamba is a Mamba-1 or Mamba-2 layer.
type Mamba struct {
	Version int `json:"version"` // 1 or 2
	Inner   int `json:"inner"`   // width of the scan: heads x head width
	Heads   int `json:"heads"`   // Mamba-2
	Groups  int `json:"groups"`  // Mamba-2: groups of B and C
	State   int `json:"state"`
	Conv    int `json:"conv"`              // taps of the convolution
	DTRank  int `json:"dt_rank,omitempty"` // Mamba-1
	// Norms normalises what becomes the step, B and C (Jamba's Mamba-1).
	Norms bool `json:"norms,omitempty"`
}

// DeltaNet is a gated delta net: attention whose state has a fixed size
// (Qwen3-Next).
type DeltaNet struct {
	KeyHeads   int `json:"key_heads"` // of queries too
	ValueHeads int `json:"value_heads"`
	KeyDim     int `json:"key_dim"` // of one head
	ValueDim   int `json:"value_dim"`
	Conv       int `json:"conv"` // taps of the convolution
}

// Dense is a feed-forward part with one hidden layer.
type Dense struct {
	Width int  `json:"width"`
	Gated bool `json:"gated"` // SwiGLU and the like: two input matrices
	// Bias is for both linear layers even where Model.Bias is not set.
	Bias bool `json:"bias,omitempty"`
}

// MoE is a feed-forward part of which each token uses TopK of Experts.
type MoE struct {
	Experts int  `json:"experts"`
	TopK    int  `json:"top_k"`
	Width   int  `json:"width"`
	Gated   bool `json:"gated"`
	// SharedWidth is the total width of the experts that all tokens use.
	SharedWidth int  `json:"shared_width,omitempty"`
	SharedGate  bool `json:"shared_gate,omitempty"`
	// Latent is the width of the rows that are sent to the experts, if it is
	// not the hidden width (Nemotron-3).
	Latent int `json:"latent,omitempty"`
	// Bias has one number an expert, updated without gradients
	// (auxiliary-loss-free balancing). It is not among the parameters: the
	// optimiser never sees it.
	Bias bool `json:"bias,omitempty"`
	// Sigmoid scores by a sigmoid instead of a softmax.
	Sigmoid bool `json:"sigmoid,omitempty"`
}

// MTP are the heads that predict further tokens. Each has a projection of two
// hidden states to one, norms, and layers.
type MTP struct {
	Depth int `json:"depth"`
	// Layers are those of one depth.
	Layers []Layer `json:"layers"`
	// Repeated says that all depths share one set of weights.
	Repeated bool `json:"repeated,omitempty"`
}
