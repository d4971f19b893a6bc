// This file owns what the families that mix attention with layers of a fixed
// state mean by their keys.

package model

import "strings"

// qwen3Next reads Qwen3-Next. One of full_attention_interval layers has gated attention,
// and the others a gated delta net. Later Qwen models state how many layers their MTP head
// has, which always have attention.
func qwen3Next(c *config, m *Model) {
	a := c.qwen3Attention(m)
	a.Gate = true
	d := DeltaNet{
		KeyHeads:   c.size("linear_num_key_heads"),
		ValueHeads: c.size("linear_num_value_heads"),
		KeyDim:     c.size("linear_key_head_dim"),
		ValueDim:   c.size("linear_value_head_dim"),
		Conv:       c.size("linear_conv_kernel_dim"),
	}
	c.divide("linear_num_key_heads", d.KeyHeads, "linear_num_value_heads", d.ValueHeads)
	types := c.layerTypes("layer_types", "full_attention", "linear_attention")
	every := c.optional(1, 4, "full_attention_interval")
	feed := c.qwenFeed()
	if _, routed := c.get("num_experts"); !routed {
		feed = c.dense
	}
	c.layers(m, func(i int) Layer {
		full := (i+1)%every == 0
		if i < len(types) {
			full = types[i] == "full_attention"
		}
		var l Layer
		if full {
			own := a
			l.Attention = &own
		} else {
			own := d
			l.DeltaNet = &own
		}
		feed(i, &l)
		return l
	})
	if n := c.optional(0, 0, "mtp_num_hidden_layers"); n > 0 {
		c.atMost("mtp_num_hidden_layers", n, "the largest depth", maxDepth)
		m.MTP = &MTP{Depth: 1}
		for i := range min(n, maxDepth) {
			own := a
			l := Layer{Attention: &own}
			feed(len(m.Layers)+i, &l)
			m.MTP.Layers = append(m.MTP.Layers, l)
		}
	}
}

// jamba reads Jamba. One of attn_layer_period layers has attention, and the others Mamba,
// which provides positions. One of expert_layer_period layers has experts.
func jamba(c *config, m *Model) {
	c.must(true, "mamba_conv_bias")
	c.must(false, "mamba_proj_bias")
	a := c.attention(m)
	a.Rotary = false
	s := Mamba{
		Version: 1,
		Inner:   m.Hidden * c.optional(1, 2, "mamba_expand"),
		State:   c.size("mamba_d_state"),
		Conv:    c.size("mamba_d_conv"),
		Norms:   true,
	}
	c.atMost("mamba_expand times hidden_size", s.Inner, "the largest width", maxSize)
	if raw, ok := c.get("mamba_dt_rank"); !ok || string(raw) == `"auto"` {
		s.DTRank = (m.Hidden + 15) / 16
	} else {
		s.DTRank = c.number("mamba_dt_rank", raw, 1, maxSize)
	}
	attention := c.periodic("attn_layer", 8, 4)
	experts := c.periodic("expert_layer", 2, 1)
	routed := c.optional(0, 16, "num_experts", "num_local_experts") > 1
	c.layers(m, func(i int) Layer {
		var l Layer
		if attention(i) {
			own := a
			l.Attention = &own
		} else {
			own := s
			l.Mamba = &own
		}
		if routed && experts(i) {
			l.MoE = c.moe([]string{"num_experts", "num_local_experts"}, "intermediate_size")
		} else {
			c.dense(i, &l)
		}
		return l
	})
}

// periodic returns the rule of two keys: one layer of a period, at an offset.
func (c *config) periodic(key string, period, offset int) func(i int) bool {
	period = c.optional(1, period, key+"_period")
	offset = c.optional(0, offset, key+"_offset")
	c.atMost(key+"_offset", offset, key+"_period less one", period-1)
	return func(i int) bool { return i%period == offset }
}

// nemotronH reads Nemotron-H. Every layer is a mixer or a feed-forward part alone, by a
// pattern of letters or, in later files, a list of words.
func nemotronH(c *config, m *Model) {
	c.must(true, "use_conv_bias")
	c.must(false, "use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias")
	pattern := c.nemotronPattern("hybrid_override_pattern", "layers_block_type")
	if pattern == "" {
		c.fail("hybrid_override_pattern is missing")
		return
	}
	if n := c.optional(1, len(pattern), "num_hidden_layers"); n != len(pattern) {
		c.fail("hybrid_override_pattern has %d layers; it must have num_hidden_layers, which is %d", len(pattern), n)
	}
	if len(pattern) > maxLayers {
		c.fail("hybrid_override_pattern has %d layers; it must have at most %d", len(pattern), maxLayers)
		return
	}
	m.Layers = c.nemotronLayers(m, pattern)
	depth := c.depth()
	if depth == 0 {
		return
	}
	pattern = c.nemotronPattern("mtp_hybrid_override_pattern", "mtp_layers_block_type")
	if pattern == "" {
		pattern = "*E"
	}
	if len(pattern) > maxDepth {
		c.fail("mtp_hybrid_override_pattern has %d layers; it must have at most %d", len(pattern), maxDepth)
		return
	}
	m.MTP = &MTP{
		Depth:    depth,
		Layers:   c.nemotronLayers(m, pattern),
		Repeated: c.flag(true, "mtp_use_repeated_layer"),
	}
}

// nemotronPattern returns the pattern, from the list of words if there is one.
func (c *config) nemotronPattern(letters, words string) string {
	pattern := c.word(letters)
	if types := list[string](c, words); types != nil {
		var b strings.Builder
		for i, t := range types {
			letter := map[string]byte{
				"mamba": 'M', "linear_attention": 'M', "attention": '*', "full_attention": '*', "mlp": '-', "moe": 'E',
			}[t]
			if letter == 0 {
				c.fail("%s[%d] is %.40q; it must be mamba, attention, mlp or moe", words, i, t)
				return ""
			}
			b.WriteByte(letter)
		}
		return b.String()
	}
	for i, r := range pattern {
		if !strings.ContainsRune("M*-E", r) {
			c.fail("%s has %q at %d; it must be made of M, *, - and E", letters, r, i)
			return ""
		}
	}
	return pattern
}

func (c *config) nemotronLayers(m *Model, pattern string) []Layer {
	layers := make([]Layer, len(pattern))
	for i, r := range pattern {
		switch r {
		case 'M':
			layers[i].Mamba = c.mamba2()
		case '*':
			a := c.attention(m)
			a.Rotary = false
			layers[i].Attention = &a
		case '-':
			layers[i].Dense = &Dense{Width: c.size("intermediate_size")}
		default:
			layers[i].MoE = c.nemotronMoE()
		}
	}
	return layers
}

func (c *config) mamba2() *Mamba {
	width := c.size("mamba_head_dim")
	s := &Mamba{
		Version: 2,
		Heads:   c.size("mamba_num_heads"),
		Groups:  c.size("n_groups", "mamba_n_groups"),
		State:   c.size("ssm_state_size", "mamba_d_state"),
		Conv:    c.size("conv_kernel", "mamba_d_conv"),
	}
	s.Inner = s.Heads * width
	c.atMost("mamba_num_heads times mamba_head_dim", s.Inner, "the largest width", maxSize)
	c.divide("n_groups", s.Groups, "mamba_num_heads", s.Heads)
	return s
}

// graniteHybrid reads Granite 4. Every layer has attention or Mamba-2, and then experts
// with one that all tokens use, or that one alone if there are no others.
func graniteHybrid(c *config, m *Model) {
	c.must(true, "mamba_conv_bias")
	c.must(false, "mamba_proj_bias")
	m.Tied = c.flag(true, "tie_word_embeddings")
	a := c.attention(m)
	a.QKVBias = c.flag(false, "attention_bias")
	a.OutBias = a.QKVBias
	switch positions := c.word("position_embedding_type"); positions {
	case "", "nope":
		a.Rotary = false
	case "rope":
	default:
		c.fail("position_embedding_type is %.40q; it must be rope or nope", positions)
	}
	routed := c.optional(0, 8, "num_local_experts") > 0
	types := c.layerTypes("layer_types", "attention", "mamba")
	c.layers(m, func(i int) Layer {
		var l Layer
		if i < len(types) && types[i] == "attention" {
			own := a
			l.Attention = &own
		} else {
			l.Mamba = c.graniteMamba(m)
		}
		shared := c.optional(0, 1024, "shared_intermediate_size")
		if routed {
			l.MoE = c.moe([]string{"num_local_experts"}, "intermediate_size")
			l.MoE.SharedWidth = shared
		} else {
			l.Dense = &Dense{Width: shared, Gated: true}
		}
		return l
	})
}

func (c *config) graniteMamba(m *Model) *Mamba {
	s := &Mamba{
		Version: 2,
		Heads:   c.optional(1, 128, "mamba_n_heads"),
		Groups:  c.optional(1, 1, "mamba_n_groups"),
		State:   c.optional(1, 256, "mamba_d_state"),
		Conv:    c.optional(1, 4, "mamba_d_conv"),
	}
	if raw, ok := c.get("mamba_d_head"); !ok || string(raw) == `"auto"` {
		s.Inner = m.Hidden * c.optional(1, 2, "mamba_expand")
		c.divide("mamba_n_heads", s.Heads, "mamba_expand times hidden_size", s.Inner)
	} else {
		s.Inner = s.Heads * c.number("mamba_d_head", raw, 1, maxSize)
	}
	c.atMost("mamba_n_heads times mamba_d_head", s.Inner, "the largest width", maxSize)
	c.divide("mamba_n_groups", s.Groups, "mamba_n_heads", s.Heads)
	return s
}

// falconH1 reads Falcon-H1. Every layer has attention and Mamba-2 side by side.
func falconH1(c *config, m *Model) {
	c.must(true, "mamba_conv_bias")
	c.must(false, "mamba_proj_bias", "projectors_bias", "attention_bias")
	a := c.attention(m)
	s := Mamba{
		Version: 2,
		Heads:   c.optional(1, 128, "mamba_n_heads"),
		Groups:  c.optional(1, 1, "mamba_n_groups"),
		State:   c.optional(1, 256, "mamba_d_state"),
		Conv:    c.optional(1, 4, "mamba_d_conv"),
		Ungated: !c.flag(false, "mamba_rms_norm"),
	}
	if _, ok := c.get("mamba_d_ssm"); ok {
		s.Inner = c.size("mamba_d_ssm")
	} else {
		s.Inner = m.Hidden * c.optional(1, 2, "mamba_expand")
	}
	c.atMost("mamba_expand times hidden_size", s.Inner, "the largest width", maxSize)
	c.divide("mamba_n_heads", s.Heads, "mamba_d_ssm", s.Inner)
	c.divide("mamba_n_groups", s.Groups, "mamba_n_heads", s.Heads)
	if raw, ok := c.get("mamba_d_head"); ok && string(raw) != `"auto"` {
		if width := c.number("mamba_d_head", raw, 1, maxSize); width*s.Heads != s.Inner {
			c.fail("mamba_d_head is %d; times mamba_n_heads it must be mamba_d_ssm, which is %d", width, s.Inner)
		}
	}
	c.layers(m, func(i int) Layer {
		own, scan := a, s
		l := Layer{Attention: &own, Mamba: &scan}
		c.dense(i, &l)
		return l
	})
}

func (c *config) nemotronMoE() *MoE {
	e := c.moe([]string{"n_routed_experts"}, "moe_intermediate_size")
	c.expertGroups(e)
	e.Gated, e.Bias, e.Sigmoid = false, true, true
	e.Latent = c.optional(1, 0, "moe_latent_size")
	if shared := c.optional(0, 1, "n_shared_experts"); shared > 0 {
		e.SharedWidth = c.size("moe_shared_expert_intermediate_size")
	}
	return e
}
