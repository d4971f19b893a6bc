// This file owns the flags that ask Megatron-LM for a setup. unsaid.go has what they cannot
// ask for.

package megatron

import (
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// Flags returns the arguments that ask for a setup: flags and values as separate words
// without quotes. FromArgs makes the same setup of them, but for what [Unsaid] lists.
func Flags(s *plan.Setup) []string {
	s = Closest(s)
	e := &emitter{}
	e.model(s)
	e.layout(s)
	e.precision(s)
	e.optimizer(s)
	e.kernels(s)
	e.memory(s)
	return e.out
}

// CommandLine writes flags for a shell, one flag on each line.
func CommandLine(flags []string) string {
	var b strings.Builder
	for i, f := range flags {
		switch {
		case i == 0:
		case strings.HasPrefix(f, "--"):
			b.WriteString(" \\\n")
		default:
			b.WriteString(" ")
		}
		if strings.Trim(f, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.+,") != "" || f == "" {
			f = "'" + strings.ReplaceAll(f, "'", `'\''`) + "'"
		}
		b.WriteString(f)
	}
	return b.String()
}

type emitter struct{ out []string }

// set writes a flag with its values. A hybrid's pattern may begin with a dash like a flag,
// so it is joined to its name.
func (e *emitter) set(name string, values ...string) {
	if name == "hybrid-layer-pattern" {
		e.out = append(e.out, "--"+name+"="+values[0])
		return
	}
	e.out = append(append(e.out, "--"+name), values...)
}

func (e *emitter) setIf(on bool, name string, values ...string) {
	if on {
		e.set(name, values...)
	}
}

func (e *emitter) count(name string, n int) { e.set(name, strconv.Itoa(n)) }

// unless writes a number that differs from Megatron-LM's default.
func (e *emitter) unless(otherwise int, name string, n int) {
	if n != otherwise {
		e.count(name, n)
	}
}

func (e *emitter) number(name string, f float64) {
	e.set(name, strconv.FormatFloat(f, 'g', -1, 64))
}

// parts returns one part of each kind that some layer of the model has.
func parts(m *model.Model) (p model.Layer) {
	layers := m.Layers
	if m.MTP != nil {
		layers = slices.Concat(layers, m.MTP.Layers)
	}
	for _, l := range layers {
		if p.Attention == nil || (l.Attention != nil && l.Attention.Window > p.Attention.Window) {
			p.Attention = l.Attention
		}
		if p.MLA == nil {
			p.MLA = l.MLA
		}
		if p.Mamba == nil {
			p.Mamba = l.Mamba
		}
		if p.DeltaNet == nil {
			p.DeltaNet = l.DeltaNet
		}
		if p.Lightning == nil {
			p.Lightning = l.Lightning
		}
		if p.Dense == nil {
			p.Dense = l.Dense
		}
		if p.MoE == nil {
			p.MoE = l.MoE
		}
	}
	return p
}

// isHybrid reports whether the model needs a pattern. GPT models have attention of some
// kind and a feed-forward part in every layer.
func isHybrid(m *model.Model) bool {
	return slices.ContainsFunc(m.Layers, func(l model.Layer) bool {
		return l.Mamba != nil || (l.Attention == nil && l.MLA == nil && l.DeltaNet == nil) || (l.Dense == nil && l.MoE == nil)
	})
}

func (e *emitter) model(s *plan.Setup) {
	m, p := s.Model, parts(s.Model)
	if isHybrid(m) {
		e.set("hybrid-layer-pattern", hybridText(s))
	} else {
		e.count("num-layers", len(m.Layers))
	}
	e.count("hidden-size", m.Hidden)
	e.count("vocab-size", m.Vocab)
	e.count("max-position-embeddings", max(m.MaxPositions, s.Batch.Seq))
	e.setIf(!m.Tied, "untie-embeddings-and-output-weights")
	e.setIf(m.Norm == model.RMSNorm, "normalization", "RMSNorm")
	e.setIf(!m.Bias, "disable-bias-linear")
	switch rotary := p.MLA != nil || (p.Attention != nil && p.Attention.Rotary); {
	case m.LearnedPositions: // the default
	case rotary:
		e.set("position-embedding-type", "rope")
	default:
		e.set("position-embedding-type", "none")
	}
	e.attention(m, p)
	if d := p.Dense; d != nil {
		e.count("ffn-hidden-size", d.Width)
	}
	e.setIf(gatedModel(m), "swiglu")
	if k := p.Mamba; k != nil {
		e.count("mamba-num-heads", k.Heads)
		e.count("mamba-head-dim", k.Inner/max(k.Heads, 1))
		e.count("mamba-num-groups", k.Groups)
		e.count("mamba-state-dim", k.State)
	}
	e.experts(m, p)
	if m.MTP != nil {
		if !isHybrid(m) {
			e.count("mtp-num-layers", m.MTP.Depth)
		}
		e.setIf(m.MTP.Repeated, "mtp-use-repeated-layer")
	}
}

func (e *emitter) attention(m *model.Model, p model.Layer) {
	if a := p.Attention; a != nil {
		e.count("num-attention-heads", a.Heads)
		e.count("kv-channels", a.HeadDim)
		if a.KVHeads != a.Heads {
			e.set("group-query-attention")
			e.count("num-query-groups", a.KVHeads)
		}
		e.setIf(a.QKNorm && !a.QKNormBare, "qk-layernorm")
		e.setIf(a.QKNormBare, "qk-l2-norm")
		e.setIf(a.QKVBias && !m.Bias, "add-qkv-bias")
		e.setIf(a.Gate, "attention-output-gate")
		e.setIf(a.Sinks, "softmax-type", "learnable")
		if a.Window > 0 {
			e.set("window-size", strconv.Itoa(a.Window-1)+",0")
			e.pattern("window-attn-skip-freq", m, func(l model.Layer) bool { return l.Attention != nil && l.Attention.Window > 0 })
		}
	}
	if a := p.MLA; a != nil {
		e.set("multi-latent-attention")
		e.count("num-attention-heads", a.Heads)
		e.count("kv-channels", a.V)
		e.setIf(a.QRank > 0, "q-lora-rank", strconv.Itoa(a.QRank))
		e.count("kv-lora-rank", a.KVRank)
		e.count("qk-head-dim", a.Nope)
		e.count("qk-pos-emb-head-dim", a.Rope)
		e.count("v-head-dim", a.V)
		e.setIf(a.LatentNorm, "qk-layernorm")
	}
	if d := p.DeltaNet; d != nil {
		e.count("linear-num-key-heads", d.KeyHeads)
		e.count("linear-num-value-heads", d.ValueHeads)
		e.count("linear-key-head-dim", d.KeyDim)
		e.count("linear-value-head-dim", d.ValueDim)
		e.count("linear-conv-kernel-dim", d.Conv)
		if !isHybrid(m) {
			e.set("experimental-attention-variant", "gdn")
			e.pattern("linear-attention-freq", m, func(l model.Layer) bool { return l.DeltaNet != nil })
		}
	}
}

// pattern writes which layers are meant if it is not all of them.
func (e *emitter) pattern(name string, m *model.Model, is func(model.Layer) bool) {
	marks := make([]bool, len(m.Layers))
	for i, l := range m.Layers {
		marks[i] = is(l)
	}
	if slices.Contains(marks, false) {
		e.set(name, formatPattern(marks))
	}
}

func (e *emitter) experts(m *model.Model, p model.Layer) {
	x := p.MoE
	if x == nil {
		return
	}
	e.count("num-experts", x.Experts)
	e.count("moe-router-topk", x.TopK)
	e.count("moe-ffn-hidden-size", x.Width)
	e.unless(0, "moe-shared-expert-intermediate-size", x.SharedWidth)
	e.setIf(x.SharedGate, "moe-shared-expert-gate")
	e.unless(0, "moe-latent-size", x.Latent)
	e.setIf(x.Bias, "moe-router-enable-expert-bias")
	e.setIf(x.Sigmoid, "moe-router-score-function", "sigmoid")
	if !isHybrid(m) {
		e.pattern("moe-layer-freq", m, func(l model.Layer) bool { return l.MoE != nil })
	}
}

// letters returns a layer in a hybrid's pattern: one letter for each of its two parts.
func letters(l model.Layer) (text string) {
	switch {
	case l.Attention != nil:
		text = "*"
	case l.MLA != nil:
		text = "+"
	case l.Mamba != nil:
		text = "M"
	case l.DeltaNet != nil:
		text = "G"
	}
	switch {
	case l.Dense != nil:
		text += "-"
	case l.MoE != nil:
		text += "E"
	}
	return text
}

func hybridText(s *plan.Setup) string {
	p := pattern{}
	for _, st := range s.Layout.Stages {
		stage := ""
		for _, l := range s.Model.Layers[st.First:st.Last] {
			stage += letters(l)
		}
		p.stages = append(p.stages, stage)
	}
	if s.Model.MTP != nil {
		p.depth = s.Model.MTP.Depth
		for _, l := range s.Model.MTP.Layers {
			p.mtp += letters(l)
		}
	}
	return p.String()
}
