// This file owns how chunks are made from the description of a model, and which models can
// be trained.

package layer

import (
	"fmt"
	"math"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// Supported returns an error that says why a model cannot be trained, or nil.
func Supported(m *model.Model) error {
	refuse := func(what string) error {
		return &memory.SettingError{Setting: "Model", Asked: m.Name, Problem: "has " + what + ", which the trainer does not support", Remedy: "choose another model"}
	}
	switch {
	case m.Norm != model.RMSNorm:
		return refuse("layer norms with a shift")
	case m.Bias:
		return refuse("biases on linear layers")
	case m.LearnedPositions:
		return refuse("learned positions")
	case m.PostNorms:
		return refuse("norms behind its layers")
	case m.OutputBias:
		return refuse("a bias of the output layer")
	}
	if m.MTP != nil && m.MTP.Repeated {
		return refuse("MTP heads that share their weights")
	}
	for _, l := range Layers(m) {
		if what := unsupported(l); what != "" {
			return refuse(what)
		}
	}
	return nil
}

// Layers returns the layers of a model and those of its further heads, each depth's once.
func Layers(m *model.Model) []model.Layer {
	if m.MTP == nil {
		return m.Layers
	}
	return slices.Concat(m.Layers, m.MTP.Layers)
}

// These are the limits of the kernels.
const (
	maxTaps  = 8       // of a convolution
	maxWidth = 1 << 21 // of queries, keys and values together
	maxHead  = 256     // numbers of an attention head, on a GPU
)

func unsupported(l model.Layer) string {
	switch {
	case l.DeltaNet != nil:
		return "gated delta nets"
	case l.Lightning != nil:
		return "lightning attention"
	case l.Parallel():
		return "attention and Mamba side by side"
	case l.MLA != nil && l.MLA.Indexer != nil:
		return "an indexer of sparse attention"
	case l.Mamba != nil && l.Mamba.Version != 2:
		return "Mamba-1 layers"
	case l.Mamba != nil && (l.Mamba.Norms || l.Mamba.Ungated || l.Mamba.Conv > maxTaps):
		return fmt.Sprintf("Mamba layers with norms inside, without one behind the scan, or with more than %d taps", maxTaps)
	case l.MLA != nil && (l.MLA.Rope == 0 || l.MLA.Rope%2 != 0):
		return "latent attention whose positions take no or an odd number of columns"
	case l.MLA != nil && l.MLA.Heads*(2*(l.MLA.Nope+l.MLA.Rope)+l.MLA.V) >= maxWidth:
		return "attention of 2^21 columns or more"
	case l.Dense != nil && (!l.Dense.Gated || l.Dense.Bias):
		return "feed-forward parts that are not SwiGLU without bias"
	case l.MoE != nil && !l.MoE.Gated:
		return "experts that are not SwiGLU"
	case l.MoE != nil && (l.MoE.Experts > nn.MaxExperts || l.MoE.TopK > nn.MaxTopK):
		return fmt.Sprintf("more than %d experts, or tokens that use more than %d", nn.MaxExperts, nn.MaxTopK)
	case l.MoE != nil && l.MoE.Latent > 0:
		return "experts in a latent width"
	}
	if a := l.Attention; a != nil {
		switch {
		case a.Rotary && a.HeadDim%2 != 0:
			return "rotary positions in heads of an odd width"
		case (a.Heads+2*a.KVHeads)*a.HeadDim >= maxWidth:
			return "attention of 2^21 columns or more"
		case a.QKVBias || a.OutBias:
			return "biases in attention"
		case a.Sinks:
			return "attention sinks"
		case a.Gate:
			return "gated attention"
		case a.QKNormWhole || a.QKNormBare:
			return "norms of queries and keys that are not by head and with weights"
		case a.Chunk > 0:
			return "attention in chunks"
		}
	}
	return ""
}

// Runs returns an error that says for which part of a model a device has no kernel, or nil.
func Runs(m *model.Model, on device.Info) error {
	if on.Backend == "cpu" {
		return nil
	}
	head := 0
	for _, l := range Layers(m) {
		if l.Attention != nil {
			head = max(head, l.Attention.HeadDim)
		}
		if l.MLA != nil {
			head = max(head, l.MLA.Nope+l.MLA.Rope, l.MLA.V)
		}
	}
	if head > maxHead {
		return &memory.SettingError{Setting: "Model", Asked: m.Name, Problem: fmt.Sprintf("has attention heads of %d numbers, and a GPU takes at most %d", head, maxHead), Remedy: "use the CPU, or another model"}
	}
	return nil
}

// Env is what the layers of a rank are made from.
type Env struct {
	Model    *model.Model
	Settings Settings
	Shape    Shape
	Grad     kernels.Number // of parameters' gradients
	Expert   Place          // the rank among those that share out the experts
	Comm     comm.Comm      // of those ranks; nil if there is one
	Link     *Link          // for their exchanges; nil means compute
	Dispatch Dispatch
	Rows     Rows
	// Imbalance is the assumed rows of a rank over balanced ones on a null device, which
	// computes nothing and so counts no rows. Zero counts the rows.
	Imbalance float64
	// Space returns the workspace for experts of a width, once passes run. Table returns
	// the rotary positions for a number of columns. Balance returns the router memory of a
	// layer by its name.
	Space   func(width int) *stash.Workspace
	Table   func(columns int) device.Range
	Balance func(name string, experts int, bias bool) Balance
	Sums    Sums
}

// Span says which layers of a model a chunk has, and whether it has the ends.
type Span struct {
	From, To    int
	First, Last bool
}

// Build returns a chunk. Its units are in the order of a forward pass.
func Build(e *Env, s Span) *Chunk {
	m := e.Model
	c := &Chunk{Hidden: m.Hidden, sums: e.Sums}
	var table *Unit
	ends := s.Last && (m.Tied || m.MTP != nil)
	if s.First || ends {
		table = e.unit("embedding", "", m.EmbeddingParams())
		table.Loose = ends
		c.Units = append(c.Units, table)
	}
	if s.First {
		c.embed, c.first = &embedding{table.weight("word_embeddings.weight")}, []*Unit{table}
	}
	for i := s.From; i < s.To; i++ {
		prefix := fmt.Sprintf("layers.%d.", i)
		c.blocks = append(c.blocks, e.block(c, fmt.Sprintf("layer %d", i), prefix, m.Layers[i]))
	}
	if s.Last {
		e.addEnds(c, table)
	}
	return c
}

func (e *Env) unit(name, prefix string, params []model.Param) *Unit {
	return newUnit(name, prefix, params, e.Shape.Number, e.Grad, e.Expert)
}

// block returns a layer with a unit of its own. The names of its parameters begin with
// prefix.
func (e *Env) block(c *Chunk, name, prefix string, l model.Layer) *block {
	u := e.unit(name, prefix, e.Model.LayerParams(l))
	u.Once = true
	c.Units = append(c.Units, u)
	b := e.parts(u, prefix, l)
	b.unit = len(c.Units) - 1
	return b
}

// parts returns the parts of a layer, from a unit that has its parameters.
func (e *Env) parts(u *Unit, name string, l model.Layer) *block {
	b := &block{}
	switch {
	case l.Attention != nil:
		var table device.Range
		if l.Attention.Rotary {
			table = e.Table(l.Attention.HeadDim)
		}
		b.parts = append(b.parts, newAttention(u, *l.Attention, e.Settings, table))
	case l.MLA != nil:
		b.parts = append(b.parts, newMLA(u, *l.MLA, e.Settings, e.Table(l.MLA.Rope)))
	case l.Mamba != nil:
		b.parts = append(b.parts, newMamba(u, *l.Mamba, e.Settings))
	}
	switch {
	case l.Dense != nil:
		b.parts = append(b.parts, newDense(u, l.Dense.Width, e.Settings))
	case l.MoE != nil:
		b.parts = append(b.parts, newMixture(u, *l.MoE, e.Settings, e.experts(u, l.MoE), e.Balance(name, l.MoE.Experts, l.MoE.Bias)))
	}
	return b
}

// dispatcher returns a dispatcher for the rows of a mixture's experts.
func (e *Env) dispatcher(m *model.MoE) *dispatcher {
	return &dispatcher{
		how: e.Dispatch, comm: e.Comm, link: e.Link, ranks: e.Expert.Ranks, rank: e.Expert.Rank, experts: m.Experts, topK: m.TopK,
		tokens: e.Shape.Tokens(), capacity: e.Settings.Routing.Capacity,
	}
}

// RowBounds returns how many rows a rank's experts receive for a microbatch: with balanced
// routing, and at most.
func (e *Env) RowBounds(m *model.MoE) (balanced, worst int) {
	d := e.dispatcher(m)
	return d.tokens * d.topK, d.Worst()
}

// Assumed returns the rows of a rank's experts if none are counted, or zero.
func (e *Env) Assumed(m *model.MoE) int {
	if e.Imbalance == 0 {
		return 0
	}
	balanced, worst := e.RowBounds(m)
	return min(worst, int(math.Ceil(e.Imbalance*float64(balanced))))
}

// Passing returns about the memory that a mixture's passes use and do not save: rows on
// their way between ranks, the results of experts, and a few matrices of tokens.
func (e *Env) Passing(m *model.MoE) memory.Bytes {
	d := e.dispatcher(m)
	n := d.Worst()*(e.Model.Hidden+m.Width) + 6*d.tokens*e.Model.Hidden
	if d.ranks > 1 {
		n += 2 * d.received() * e.Model.Hidden
	}
	return e.Shape.Number.Size() * memory.Bytes(n)
}

func (e *Env) experts(u *Unit, m *model.MoE) *experts {
	return &experts{
		dispatcher: e.dispatcher(m), rows: e.Rows, assumed: e.Assumed(m), hidden: e.Model.Hidden, width: m.Width,
		fc1: u.weight("mlp.experts.linear_fc1.weight"), fc2: u.weight("mlp.experts.linear_fc2.weight"), space: e.Space,
	}
}

// addEnds adds the output layer and the further heads to a chunk.
func (e *Env) addEnds(c *Chunk, table *Unit) {
	m := e.Model
	params := m.FinalNormParams()
	if !m.Tied {
		params = append(params, m.OutputParams()...)
	}
	u := e.unit("output", "", params)
	u.Loose = m.MTP != nil
	c.Units = append(c.Units, u)
	c.final = []*Unit{u}
	logits := linear{}
	if m.Tied {
		logits.weight = table.weight("word_embeddings.weight")
		c.final = append(c.final, table)
	} else {
		logits.weight = u.weight("output_layer.weight")
	}
	last := newOutput(norm{u.weight("final_layernorm.weight"), e.Settings.Epsilon}, logits, m.Vocab, 1)
	c.last = &last
	if m.MTP == nil {
		return
	}
	for k := range m.MTP.Depth {
		prefix := fmt.Sprintf("mtp.%d.", k)
		h := e.unit(fmt.Sprintf("mtp %d", k), prefix, m.MTPParams(k))
		c.Units = append(c.Units, h)
		f := &further{
			embedding: embedding{table.weight("word_embeddings.weight")},
			enorm:     norm{h.weight("enorm.weight"), e.Settings.Epsilon}, hnorm: norm{h.weight("hnorm.weight"), e.Settings.Epsilon},
			proj:   linear{h.weight("eh_proj.weight")},
			output: newOutput(norm{h.weight("final_layernorm.weight"), e.Settings.Epsilon}, logits, m.Vocab, MTPFactor/float32(m.MTP.Depth)),
		}
		for i, l := range m.MTP.Layers {
			name := fmt.Sprintf("layers.%d.", i)
			if len(m.MTP.Layers) > 1 {
				h.only = name // their parameters' names end alike
			}
			f.blocks = append(f.blocks, e.parts(h, prefix+name, l))
			h.only = ""
		}
		c.heads = append(c.heads, f)
		c.further = append(c.further, append([]*Unit{h, table}, c.final[:1]...))
	}
}

// MTPFactor is the factor of the sum of the further heads' losses. Its value is customary.
const MTPFactor = 0.1

// Ahead returns how many tokens ahead a model predicts.
func Ahead(m *model.Model) int {
	if m.MTP == nil {
		return 1
	}
	return 1 + m.MTP.Depth
}

// RotaryTable returns the numbers of a table of rotary positions.
func RotaryTable(seq, columns int, theta float64) []float32 { return nn.RopeTable(seq, columns, theta) }
