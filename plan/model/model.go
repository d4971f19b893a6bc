// Package model describes the architecture of decoder models, and lists the parameters
// that follow from it with their shapes and how ranks divide them. The planner, the
// pools of sharded parameters and the trainer all use it.
//
// [Preset] returns a built-in model, and [ParseHF] reads the config.json of a Hugging
// Face repository.
package model

// This file owns the description. check.go owns its checks, param.go the parameters,
// hf.go, family.go, mixture.go and hybrid.go the reading of a config.json, preset.go the built-in
// models.

// Model is a decoder: an embedding, layers, a final norm and an output layer. It may
// have more layers that predict further tokens (MTP).
type Model struct {
	Name   string `json:"name"`
	Hidden int    `json:"hidden"`
	// Vocab is the size of the vocabulary, before any padding.
	Vocab int `json:"vocab"`
	// MaxPositions is the longest sequence. It adds parameters only if positions are
	// learned.
	MaxPositions     int  `json:"max_positions"`
	LearnedPositions bool `json:"learned_positions,omitempty"`
	// Tied reports whether the output layer uses the embedding's weights.
	Tied bool `json:"tied"`
	Norm Norm `json:"norm"`
	// Bias reports whether linear layers have biases.
	Bias bool `json:"bias,omitempty"`
	// OutputBias adds a bias to the output layer (Phi-3.5-MoE).
	OutputBias bool `json:"output_bias,omitempty"`
	// PostNorms reports whether each part of a layer has a second norm behind it
	// (Gemma).
	PostNorms bool `json:"post_norms,omitempty"`
	// Layers lists the decoder's layers in order. A layer of a hybrid model may have
	// only a mixer or only a feed-forward part.
	Layers []Layer `json:"layers"`
	MTP    *MTP    `json:"mtp,omitempty"`
	// Notes says what a file asks for and the description leaves out, a sentence each.
	Notes []string `json:"-"`
}

// Norm is a kind of normalisation.
type Norm uint8

// The kinds of normalisation.
const (
	RMSNorm   Norm = iota // one vector
	LayerNorm             // two vectors: scale and shift
)

// Layer is one layer: a mixer over the sequence (at most one of Attention, MLA, Mamba,
// DeltaNet and Lightning), then a feed-forward part (at most one of Dense and MoE). Each
// has a norm before it. Attention and Mamba together read the same norm, and their outputs
// are added (Falcon-H1).
type Layer struct {
	Attention *Attention `json:"attention,omitempty"`
	MLA       *MLA       `json:"mla,omitempty"`
	Mamba     *Mamba     `json:"mamba,omitempty"`
	DeltaNet  *DeltaNet  `json:"delta_net,omitempty"`
	Lightning *Lightning `json:"lightning,omitempty"`
	Dense     *Dense     `json:"dense,omitempty"`
	MoE       *MoE       `json:"moe,omitempty"`
}

// Attention is multi-head attention in which groups of queries share keys and values
// (GQA). It is plain attention if KVHeads equals Heads.
type Attention struct {
	Heads   int `json:"heads"`
	KVHeads int `json:"kv_heads"`
	HeadDim int `json:"head_dim"`
	// QKNorm normalises queries and keys head by head.
	QKNorm bool `json:"qk_norm,omitempty"`
	// QKNormWhole makes QKNorm normalise all heads of a token at once (OLMoE).
	QKNormWhole bool `json:"qk_norm_whole,omitempty"`
	// QKNormBare makes QKNorm have no weights (Llama 4).
	QKNormBare bool `json:"qk_norm_bare,omitempty"`
	// QKVBias adds a bias to queries, keys and values even if Model.Bias is not set
	// (Qwen2).
	QKVBias bool `json:"qkv_bias,omitempty"`
	// OutBias adds a bias to the output projection even if Model.Bias is not set.
	OutBias bool `json:"out_bias,omitempty"`
	// Sinks adds one parameter of each head to the denominator of the softmax (gpt-oss).
	Sinks bool `json:"sinks,omitempty"`
	// Gate multiplies the output by a gate of its own width (Qwen3-Next).
	Gate bool `json:"gate,omitempty"`
	// Window is the number of tokens that a query sees. Zero means all before it.
	Window int `json:"window,omitempty"`
	// Chunk is the number of tokens of a chunk. A query sees only its own chunk (Llama 4).
	// Zero means the whole sequence.
	Chunk int `json:"chunk,omitempty"`
	// Rotary reports whether positions are rotated into queries and keys.
	Rotary bool `json:"rotary,omitempty"`
}

// MLA is multi-head latent attention (DeepSeek): queries and keys come from
// narrow projections of the hidden state.
type MLA struct {
	Heads  int `json:"heads"`
	QRank  int `json:"q_rank"` // zero if queries have no narrow projection
	KVRank int `json:"kv_rank"`
	Nope   int `json:"nope"` // width of a head's part without positions
	Rope   int `json:"rope"` // width of the part with them
	V      int `json:"v"`
	// LatentNorm normalises the narrow projections.
	LatentNorm bool `json:"latent_norm"`
	// Indexer chooses the tokens that a query sees (DeepSeek-V3.2). Nil means all.
	Indexer *Indexer `json:"indexer,omitempty"`
}

// Indexer scores all tokens before a query with narrow heads of its own, and passes the
// best on to attention.
type Indexer struct {
	Heads   int `json:"heads"`
	HeadDim int `json:"head_dim"`
	TopK    int `json:"top_k"`
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
	// Norms adds norms of the step, B and C (Jamba's Mamba-1).
	Norms bool `json:"norms,omitempty"`
	// Ungated leaves out the norm behind the scan of Mamba-2 (small Falcon-H1).
	Ungated bool `json:"ungated,omitempty"`
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

// Lightning is linear attention with a decay for each head, and with a norm and a gate
// behind it (MiniMax-01).
type Lightning struct {
	Heads   int `json:"heads"`
	HeadDim int `json:"head_dim"`
}

// Dense is a feed-forward part with one hidden layer.
type Dense struct {
	Width int  `json:"width"`
	Gated bool `json:"gated"` // SwiGLU and the like: two input matrices
	// Bias adds biases to both linear layers even if Model.Bias is not set.
	Bias bool `json:"bias,omitempty"`
}

// MoE is a feed-forward part in which each token uses TopK of the Experts.
type MoE struct {
	Experts int  `json:"experts"`
	TopK    int  `json:"top_k"`
	Width   int  `json:"width"`
	Gated   bool `json:"gated"`
	// SharedWidth is the total width of the experts that all tokens use.
	SharedWidth int  `json:"shared_width,omitempty"`
	SharedGate  bool `json:"shared_gate,omitempty"`
	// Latent is the width of the rows that are sent to the experts, if it differs from
	// the hidden width (Nemotron-3).
	Latent int `json:"latent,omitempty"`
	// Bias adds one number for each expert to the scores (auxiliary-loss-free
	// balancing). It is not a parameter: the optimiser never sees it.
	Bias bool `json:"bias,omitempty"`
	// Sigmoid scores experts by a sigmoid and not by a softmax.
	Sigmoid bool `json:"sigmoid,omitempty"`
}

// MTP describes the heads that predict further tokens. Each depth has norms, a
// projection of two hidden states to one, and layers.
type MTP struct {
	Depth int `json:"depth"`
	// Layers lists the layers of one depth.
	Layers []Layer `json:"layers"`
	// Repeated reports whether all depths share their weights.
	Repeated bool `json:"repeated,omitempty"`
}
