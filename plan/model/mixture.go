// This file owns what families of mixtures with rules of their own mean by their keys:
// OLMoE, Phi-MoE, Llama 4, ERNIE 4.5 and MiniMax. Defaults are those of the family's own
// configuration class.

package model

import "slices"

// olmoe reads OLMoE. Queries and keys are normalised over all heads at once.
func olmoe(c *config, m *Model) {
	a := c.attention(m)
	a.QKNorm, a.QKNormWhole = true, true
	a.QKVBias = c.flag(false, "attention_bias")
	a.OutBias = a.QKVBias
	c.decoder(m, a, never, func(_ int, l *Layer) {
		l.MoE = c.moe([]string{"num_experts", "num_local_experts"}, "intermediate_size")
	})
}

// phiMoE reads Phi-3.5-MoE, whose norms are LayerNorms.
func phiMoE(c *config, m *Model) {
	m.Norm = LayerNorm
	m.OutputBias = c.flag(false, "lm_head_bias")
	if m.OutputBias && m.Tied {
		c.fail("lm_head_bias is true with tie_word_embeddings, which is not supported; one of them must be false")
	}
	a := c.attention(m)
	a.QKVBias = c.flag(false, "attention_bias")
	a.OutBias = a.QKVBias
	c.decoder(m, a, c.slides, func(_ int, l *Layer) {
		l.MoE = c.moe([]string{"num_local_experts", "num_experts"}, "intermediate_size")
	})
}

// llama4 reads the language model of Llama 4. One of interleave_moe_layer_step layers has
// experts and one that all tokens use. One of no_rope_layer_interval layers sees the whole
// sequence and has no positions; the others see their chunk.
func llama4(c *config, m *Model) {
	a := c.attention(m)
	a.QKVBias = c.flag(false, "attention_bias")
	a.OutBias = a.QKVBias
	n := c.sizeTo(maxLayers, "num_hidden_layers")
	rotary := list[int](c, "no_rope_layers") // ones mean that there are positions
	if len(rotary) > 0 && len(rotary) < n {
		c.fail("no_rope_layers has %d entries; it must have num_hidden_layers, which is %d", len(rotary), n)
		rotary = nil
	}
	every := c.optional(1, 4, "no_rope_layer_interval")
	types := c.layerTypes("layer_types", "full_attention", "chunked_attention")
	step := c.optional(1, 1, "interleave_moe_layer_step")
	experts := list[int](c, "moe_layers")
	c.layers(m, func(i int) Layer {
		own := a
		own.Rotary = (i+1)%every != 0
		if len(rotary) > 0 {
			own.Rotary = rotary[i] != 0
		}
		own.QKNorm = own.Rotary && c.flag(true, "use_qk_norm")
		own.QKNormBare = own.QKNorm
		chunked := own.Rotary
		if i < len(types) {
			chunked = types[i] == "chunked_attention"
		}
		if chunked {
			own.Chunk = c.optional(1, 0, "attention_chunk_size")
		}
		l := Layer{Attention: &own}
		routed := (i+1)%step == 0
		if experts != nil {
			routed = slices.Contains(experts, i)
		}
		if routed {
			l.MoE = c.moe([]string{"num_local_experts", "num_experts"}, "intermediate_size")
			l.MoE.SharedWidth, l.MoE.Sigmoid = l.MoE.Width, true
		} else {
			l.Dense = &Dense{Width: c.size("intermediate_size_mlp"), Gated: true}
		}
		return l
	})
}

// ernieMoE reads ERNIE 4.5. One of moe_layer_interval layers from moe_layer_start_index to
// moe_layer_end_index has experts. The layer of an MTP head is dense.
func ernieMoE(c *config, m *Model) {
	c.must(false, "use_bias")
	m.Tied = c.flag(true, "tie_word_embeddings")
	a := c.attention(m)
	n := c.sizeTo(maxLayers, "num_hidden_layers")
	start, last := c.optional(0, 1, "moe_layer_start_index"), c.optional(-1, -1, "moe_layer_end_index")
	if last == -1 {
		last = n - 1
	}
	every := c.optional(1, 1, "moe_layer_interval")
	c.decoder(m, a, never, func(i int, l *Layer) {
		if i < start || i > last || (i+1)%every != 0 {
			c.dense(i, l)
			return
		}
		l.MoE = &MoE{
			Experts: c.size("moe_num_experts", "num_experts"),
			TopK:    c.size("moe_k", "num_experts_per_tok"),
			Width:   c.size("moe_intermediate_size"),
			Gated:   true, Bias: true,
		}
		c.atMost("moe_k", l.MoE.TopK, "moe_num_experts", l.MoE.Experts)
		l.MoE.SharedWidth = c.optional(0, 2, "moe_num_shared_experts") * l.MoE.Width
		c.atMost("moe_num_shared_experts times moe_intermediate_size", l.MoE.SharedWidth, "the largest width", maxSize)
	})
	c.nextN(m, func(int) Layer {
		own := a
		l := Layer{Attention: &own}
		c.dense(0, &l)
		return l
	})
}

// minimax reads MiniMax-Text-01 and M1, in which most layers have linear attention, and M2,
// in which none has. Their files list the kinds of attention as words, or as 0 for linear
// and 1 for softmax.
func minimax(c *config, m *Model) {
	a := c.attention(m)
	a.QKNorm = c.flag(c.word("model_type") == "minimax_m2", "use_qk_norm")
	switch kind := c.word("qk_norm_type"); kind {
	case "", "per_layer":
		a.QKNormWhole = a.QKNorm
	case "per_head":
	default:
		c.fail("qk_norm_type is %.40q; it must be per_layer or per_head", kind)
	}
	linear := c.minimaxLinear()
	c.layers(m, func(i int) Layer {
		var l Layer
		if linear(i) {
			l.Lightning = &Lightning{Heads: a.Heads, HeadDim: a.HeadDim}
		} else {
			own := a
			l.Attention = &own
		}
		l.MoE = c.moe([]string{"num_local_experts", "num_experts"}, "intermediate_size")
		l.MoE.SharedWidth = c.optional(0, 0, "shared_intermediate_size")
		l.MoE.Bias = c.flag(false, "use_routing_bias")
		l.MoE.Sigmoid = c.word("scoring_func") == "sigmoid"
		return l
	})
	if n := c.optional(0, 0, "num_mtp_modules"); n > 0 && c.flag(true, "use_mtp") {
		c.note("num_mtp_modules is %d, but no published file has their weights, so they are left out", n)
	}
}

// minimaxLinear returns which layers have linear attention. Without a list, files of
// MiniMax-Text-01 alternate, and those of M2 have none.
func (c *config) minimaxLinear() func(i int) bool {
	n := c.sizeTo(maxLayers, "num_hidden_layers")
	if types := c.layerTypes("layer_types", "full_attention", "linear_attention"); types != nil {
		return func(i int) bool { return i < len(types) && types[i] == "linear_attention" }
	}
	if types := list[int](c, "attn_type_list"); types != nil {
		if len(types) != n {
			c.fail("attn_type_list has %d entries; it must have num_hidden_layers, which is %d", len(types), n)
		}
		for i, t := range types {
			if t != 0 && t != 1 {
				c.fail("attn_type_list[%d] is %d; it must be 0 for linear attention or 1 for softmax", i, t)
			}
		}
		return func(i int) bool { return i < len(types) && types[i] == 0 }
	}
	if c.word("model_type") == "minimax_m2" {
		return never
	}
	return func(i int) bool { return i%2 == 1 }
}
