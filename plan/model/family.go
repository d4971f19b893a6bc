// This file owns what each family of attention models means by its keys.
// Defaults are those of the family's own configuration class.

package model

import "slices"

// families maps model_type to the function that fills in the layers.
var families = map[string]func(c *config, m *Model){
	"llama": llama, "mistral": llama,
	"qwen2": qwen2, "qwen3": qwen3,
	"gemma": gemma, "gemma2": gemma2, "gemma3_text": gemma3,
	"gpt2": gpt2, "gpt_neox": gptNeoX,
	"mixtral": mixtral, "gpt_oss": gptOSS,
	"qwen2_moe": qwen2MoE, "qwen3_moe": qwen3MoE,
	"deepseek_v2": deepseekV2, "deepseek_v3": deepseekV3, "kimi_k2": deepseekV3,
	"deepseek_v32": deepseekV32,
	"glm4_moe":     glm4MoE,
	"olmoe":        olmoe, "phimoe": phiMoE, "llama4_text": llama4, "ernie4_5_moe": ernieMoE,
	"minimax": minimax, "minimax_text_01": minimax, "minimax_m1": minimax, "minimax_m2": minimax,
	"qwen3_next": qwen3Next, "qwen3_5_text": qwen3Next, "qwen3_5_moe_text": qwen3Next,
	"jamba": jamba, "nemotron_h": nemotronH, "granitemoehybrid": graniteHybrid, "falcon_h1": falconH1,
}

// attention reads heads and their width.
func (c *config) attention(m *Model) Attention {
	a := Attention{Heads: c.size("num_attention_heads"), Rotary: true}
	a.KVHeads = c.optional(1, a.Heads, "num_key_value_heads")
	c.divide("num_key_value_heads", a.KVHeads, "num_attention_heads", a.Heads)
	a.HeadDim = c.optional(1, 0, "head_dim", "attention_head_dim")
	if a.HeadDim == 0 {
		c.divide("num_attention_heads", a.Heads, "hidden_size", m.Hidden)
		a.HeadDim = max(1, m.Hidden/a.Heads)
	}
	return a
}

// window returns how far a layer looks back, by the list of layer types if there is one, or
// else by the family's rule.
func (c *config) window(types []string, i int, rule func(i int) bool) int {
	sliding := rule(i)
	if i < len(types) {
		sliding = types[i] == "sliding_attention"
	}
	if !sliding {
		return 0
	}
	return c.size("sliding_window")
}

func (c *config) attentionTypes() []string {
	return c.layerTypes("layer_types", "full_attention", "sliding_attention")
}

// slides is the rule of Llama and its relatives: every layer has the window if there is
// one, unless a switch turns it off.
func (c *config) slides(int) bool {
	_, ok := c.get("sliding_window")
	return ok && c.flag(true, "use_sliding_window")
}

// qwenSlides is Qwen's rule: a switch turns the window on, in the layers from
// max_window_layers on.
func (c *config) qwenSlides(i int) bool {
	return c.flag(false, "use_sliding_window") && i >= c.optional(0, 0, "max_window_layers")
}

func never(int) bool { return false }

// decoder adds layers with the attention a and the feed-forward part that feed adds.
func (c *config) decoder(m *Model, a Attention, rule func(i int) bool, feed func(i int, l *Layer)) {
	types := c.attentionTypes()
	c.layers(m, func(i int) Layer {
		own := a
		own.Window = c.window(types, i, rule)
		l := Layer{Attention: &own}
		feed(i, &l)
		return l
	})
}

// dense adds a gated feed-forward part of intermediate_size.
func (c *config) dense(_ int, l *Layer) {
	l.Dense = &Dense{Width: c.size("intermediate_size"), Gated: true, Bias: c.flag(false, "mlp_bias")}
}

func llama(c *config, m *Model) {
	a := c.attention(m)
	a.QKVBias = c.flag(false, "attention_bias")
	a.OutBias = a.QKVBias
	c.decoder(m, a, c.slides, c.dense)
}

func qwen2(c *config, m *Model) {
	a := c.attention(m)
	a.QKVBias = true
	c.decoder(m, a, c.qwenSlides, c.dense)
}

func qwen3(c *config, m *Model) {
	c.decoder(m, c.qwen3Attention(m), c.qwenSlides, c.dense)
}

func (c *config) qwen3Attention(m *Model) Attention {
	a := c.attention(m)
	a.QKNorm = true
	a.QKVBias = c.flag(false, "attention_bias")
	a.OutBias = a.QKVBias
	return a
}

func (c *config) gemma(m *Model, norms bool, rule func(i int) bool) {
	m.Tied = c.flag(true, "tie_word_embeddings")
	a := c.attention(m)
	a.QKNorm = norms
	a.QKVBias = c.flag(false, "attention_bias")
	a.OutBias = a.QKVBias
	c.decoder(m, a, rule, c.dense)
}

func gemma(c *config, m *Model) { c.gemma(m, false, never) }

func gemma2(c *config, m *Model) {
	m.PostNorms = true
	c.gemma(m, false, func(i int) bool { return i%2 == 0 })
}

func gemma3(c *config, m *Model) {
	m.PostNorms = true
	every := c.optional(1, 6, "sliding_window_pattern")
	c.gemma(m, true, func(i int) bool { return (i+1)%every != 0 })
}

func gpt2(c *config, m *Model) {
	c.same("n_embd", "hidden_size")
	c.same("n_layer", "num_hidden_layers")
	c.same("n_head", "num_attention_heads")
	m.Hidden = c.size("n_embd")
	m.MaxPositions = c.size("n_positions", "n_ctx")
	m.LearnedPositions, m.Norm, m.Bias = true, LayerNorm, true
	heads := c.size("n_head")
	c.divide("n_head", heads, "n_embd", m.Hidden)
	a := Attention{Heads: heads, KVHeads: heads, HeadDim: max(1, m.Hidden/heads)}
	d := Dense{Width: c.optional(1, 4*m.Hidden, "n_inner")}
	c.atMost("n_inner", d.Width, "the largest width", maxSize)
	for range c.sizeTo(maxLayers, "n_layer") {
		a, d := a, d
		m.Layers = append(m.Layers, Layer{Attention: &a, Dense: &d})
	}
}

func gptNeoX(c *config, m *Model) {
	m.Norm = LayerNorm
	m.Bias = c.flag(true, "attention_bias")
	c.decoder(m, c.attention(m), never, func(_ int, l *Layer) {
		l.Dense = &Dense{Width: c.size("intermediate_size"), Bias: true}
	})
}

// moe reads the experts. width is the key of their width.
func (c *config) moe(experts []string, width string) *MoE {
	c.same(append(experts[:len(experts):len(experts)], "num_experts", "num_local_experts", "n_routed_experts")...)
	e := &MoE{
		Experts: c.size(experts...),
		TopK:    c.size("num_experts_per_tok", "experts_per_token"),
		Width:   c.size(width),
		Gated:   true,
	}
	c.atMost("num_experts_per_tok", e.TopK, experts[0], e.Experts)
	return e
}

func mixtral(c *config, m *Model) {
	c.decoder(m, c.attention(m), c.slides, func(_ int, l *Layer) {
		l.MoE = c.moe([]string{"num_local_experts", "num_experts"}, "intermediate_size")
	})
}

func gptOSS(c *config, m *Model) {
	c.must(true, "attention_bias")
	m.Bias = true
	a := c.attention(m)
	a.Sinks = true
	c.decoder(m, a, func(i int) bool { return i%2 == 0 }, func(_ int, l *Layer) {
		l.MoE = c.moe([]string{"num_local_experts", "num_experts"}, "intermediate_size")
	})
}

// qwenFeed adds experts to one of decoder_sparse_step layers, except those in
// mlp_only_layers. A missing shared width means none.
func (c *config) qwenFeed() func(i int, l *Layer) {
	step := c.optional(1, 1, "decoder_sparse_step")
	dense := map[int]bool{}
	for _, i := range list[int](c, "mlp_only_layers") {
		dense[i] = true
	}
	return func(i int, l *Layer) {
		if (i+1)%step != 0 || dense[i] {
			c.dense(i, l)
			return
		}
		l.MoE = c.moe([]string{"num_experts", "num_local_experts"}, "moe_intermediate_size")
		l.MoE.SharedWidth = c.optional(0, 0, "shared_expert_intermediate_size")
		l.MoE.SharedGate = l.MoE.SharedWidth > 0
	}
}

func qwen2MoE(c *config, m *Model) {
	a := c.attention(m)
	a.QKVBias = c.flag(true, "qkv_bias")
	c.size("shared_expert_intermediate_size")
	c.decoder(m, a, c.qwenSlides, c.qwenFeed())
}

func qwen3MoE(c *config, m *Model) {
	c.decoder(m, c.qwen3Attention(m), c.qwenSlides, c.qwenFeed())
}

// deepseekFeed adds experts to one of moe_layer_freq layers from first_k_dense_replace on.
func (c *config) deepseekFeed(i int, l *Layer, balanced bool) {
	_, routed := c.get("n_routed_experts")
	freq := c.optional(1, 1, "moe_layer_freq")
	if !routed || i < c.optional(0, 0, "first_k_dense_replace") || i%freq != 0 {
		c.dense(i, l)
		return
	}
	e := c.moe([]string{"n_routed_experts"}, "moe_intermediate_size")
	c.expertGroups(e)
	e.SharedWidth = c.optional(0, 0, "n_shared_experts") * e.Width
	c.atMost("n_shared_experts times moe_intermediate_size", e.SharedWidth, "the largest width", maxSize)
	e.Bias, e.Sigmoid = balanced, balanced
	if method := c.word("topk_method"); method != "" {
		if !slices.Contains([]string{"greedy", "group_limited_greedy", "noaux_tc"}, method) {
			c.fail("topk_method is %.40q; it must be greedy, group_limited_greedy or noaux_tc", method)
		}
		e.Bias = method == "noaux_tc"
	}
	if score := c.word("scoring_func"); score != "" {
		if score != "softmax" && score != "sigmoid" {
			c.fail("scoring_func is %.40q; it must be softmax or sigmoid", score)
		}
		e.Sigmoid = score == "sigmoid"
	}
	l.MoE = e
}

// expertGroups reports groups of experts that cannot be: a router that chooses among the
// experts of topk_group of n_group groups needs groups of one size. The greedy method has none.
func (c *config) expertGroups(e *MoE) {
	if _, given := c.get("n_group"); !given || c.word("topk_method") == "greedy" {
		return
	}
	groups := c.optional(1, 1, "n_group")
	c.divide("n_group", groups, "n_routed_experts", e.Experts)
	chosen := c.optional(1, 1, "topk_group")
	c.atMost("topk_group", chosen, "n_group", groups)
	c.atMost("num_experts_per_tok", e.TopK, "the experts of topk_group groups", e.Experts/groups*chosen)
}

func (c *config) depth() int {
	depth := c.optional(0, 0, "num_nextn_predict_layers", "num_mtp_layers")
	c.atMost("num_nextn_predict_layers", depth, "the largest depth", maxDepth)
	return depth
}

// nextN adds MTP heads whose layers are like one behind the last layer.
func (c *config) nextN(m *Model, layer func(i int) Layer) {
	if depth := c.depth(); depth > 0 {
		m.MTP = &MTP{Depth: depth, Layers: []Layer{layer(len(m.Layers))}}
	}
}

// deepseek fills in a DeepSeek model. If balanced is set, a bias on sigmoid scores balances
// experts unless the file says otherwise.
func (c *config) deepseek(m *Model, balanced bool, indexer func() *Indexer) {
	c.must(false, "attention_bias")
	a := MLA{
		Heads:      c.size("num_attention_heads"),
		QRank:      c.optional(1, 0, "q_lora_rank"),
		KVRank:     c.size("kv_lora_rank"),
		Nope:       c.size("qk_nope_head_dim"),
		Rope:       c.size("qk_rope_head_dim"),
		V:          c.size("v_head_dim"),
		LatentNorm: true,
	}
	layer := func(i int) Layer {
		own := a
		own.Indexer = indexer()
		l := Layer{MLA: &own}
		c.deepseekFeed(i, &l, balanced)
		return l
	}
	c.layers(m, layer)
	c.nextN(m, layer)
}

func noIndexer() *Indexer { return nil }

func deepseekV2(c *config, m *Model) { c.deepseek(m, false, noIndexer) }
func deepseekV3(c *config, m *Model) { c.deepseek(m, true, noIndexer) }

// deepseekV32 reads DeepSeek-V3.2: V3 with an indexer in every layer.
func deepseekV32(c *config, m *Model) {
	c.size("q_lora_rank") // the indexer's queries come from it
	c.deepseek(m, true, func() *Indexer {
		return &Indexer{Heads: c.size("index_n_heads"), HeadDim: c.size("index_head_dim"), TopK: c.size("index_topk")}
	})
}

func glm4MoE(c *config, m *Model) {
	a := c.attention(m)
	a.QKVBias = c.flag(false, "attention_bias")
	a.QKNorm = c.flag(false, "use_qk_norm")
	layer := func(i int) Layer {
		own := a
		l := Layer{Attention: &own}
		c.deepseekFeed(i, &l, true)
		return l
	}
	c.layers(m, layer)
	c.nextN(m, layer)
}
