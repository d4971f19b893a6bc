// This file owns the parts of layers, and which of them a layer has if they alternate.

package megatron

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/plan/model"
)

// blocks are the parts of layers.
type blocks struct {
	attention *model.Attention
	windowed  *model.Attention // nil without --window-size
	mla       *model.MLA
	mamba     *model.Mamba
	deltaNet  *model.DeltaNet
	dense     *model.Dense
	moe       *model.MoE // nil without experts

	linearFrequency, windowFrequency string
	variant                          string
}

func readBlocks(r *reader, m *model.Model, positions string) blocks {
	b := blocks{
		attention: readAttention(r, m, positions),
		mamba:     readMamba(r, m),
		deltaNet: &model.DeltaNet{
			KeyHeads: r.positive("linear-num-key-heads", 16), ValueHeads: r.positive("linear-num-value-heads", 32),
			KeyDim: r.positive("linear-key-head-dim", 128), ValueDim: r.positive("linear-value-head-dim", 128),
			Conv: r.positive("linear-conv-kernel-dim", 4),
		},
		variant:         r.word("experimental-attention-variant", "", "gdn", "gdn2", "gated_delta_net", "dsa"),
		linearFrequency: listText(r, "linear-attention-freq"),
		windowFrequency: listText(r, "window-attn-skip-freq"),
	}
	b.mla = &model.MLA{
		Heads: b.attention.Heads, QRank: r.count("q-lora-rank", 0), KVRank: r.positive("kv-lora-rank", 32),
		Nope: r.positive("qk-head-dim", 128), Rope: r.count("qk-pos-emb-head-dim", 64), V: r.positive("v-head-dim", 128),
		LatentNorm: b.attention.QKNorm,
	}
	if b.variant == "dsa" {
		r.warn("experimental-attention-variant", "sparse attention is counted as plain, its indexer not at all")
	}
	if window := readWindow(r); window > 0 {
		w := *b.attention
		w.Window = window
		b.windowed = &w
	}
	b.dense = readDense(r, m)
	b.moe = readExperts(r, b.dense.Width, b.dense.Gated)
	return b
}

func readDense(r *reader, m *model.Model) *model.Dense {
	gated, width := r.flag("swiglu"), 4*m.Hidden
	if gated {
		// There are two input matrices instead of one, so 2/3 of the width has as many
		// weights.
		width = 8 * m.Hidden / 3 / 64 * 64
	}
	if r.flag("squared-relu") && gated {
		r.fail("--squared-relu and --swiglu exclude each other; keep one")
	}
	return &model.Dense{Gated: r.flag("quick-geglu") || gated, Width: r.positive("ffn-hidden-size", width)}
}

func readAttention(r *reader, m *model.Model, positions string) *model.Attention {
	heads, channels := r.positive("num-attention-heads", 0), r.positive("kv-channels", 0)
	if channels == 0 && heads > 0 {
		if channels = m.Hidden / heads; m.Hidden%heads != 0 {
			r.fail("--num-attention-heads %d does not divide --hidden-size %d; give --kv-channels", heads, m.Hidden)
		}
	}
	groups := r.positive("num-query-groups", 1)
	if !r.flag("group-query-attention") {
		if given := r.args["num-query-groups"]; !given.off && len(given.words) > 0 && groups != heads && !strings.EqualFold(given.words[0], "none") {
			r.warn("num-query-groups", fmt.Sprintf("is %d, and Megatron-LM leaves it out without --group-query-attention: each of the %d heads has keys and values of its own", groups, heads))
		}
		groups = heads
	}
	if groups > 0 && heads%groups != 0 {
		r.fail("--num-query-groups %d does not divide --num-attention-heads %d; the nearest that does is %d", groups, heads, divisor(heads, groups))
	}
	bias := r.flag("add-qkv-bias")
	return &model.Attention{
		Heads: heads, KVHeads: groups, HeadDim: channels,
		QKNorm:  r.flag("qk-layernorm"),
		QKVBias: bias && !m.Bias,
		Gate:    r.flag("attention-output-gate"),
		Sinks:   r.word("softmax-type", "vanilla", "vanilla", "off-by-one", "learnable") == "learnable",
		Rotary:  positions == "rope" || positions == "yarn" || positions == "mrope",
	}
}

func readMamba(r *reader, m *model.Model) *model.Mamba {
	headDim := r.positive("mamba-head-dim", 64)
	mamba := &model.Mamba{
		Version: 2,
		Heads:   r.positive("mamba-num-heads", 2*m.Hidden/headDim),
		Groups:  r.positive("mamba-num-groups", 8),
		State:   r.positive("mamba-state-dim", 128),
		Conv:    4,
	}
	mamba.Inner = mamba.Heads * headDim
	return mamba
}

// readWindow returns how many tokens a query sees, including itself. "(127,0)" means 127
// before it.
func readWindow(r *reader) int {
	text := strings.Trim(strings.ReplaceAll(joined(r, "window-size"), " ", ""), "()")
	if text == "" {
		return 0
	}
	before, _, _ := strings.Cut(text, ",")
	n, err := strconv.Atoi(before)
	if err != nil || n < -1 || n > mostCount {
		r.fail("--window-size %q: two numbers such as 127,0 are expected", text)
		return 0
	}
	return n + 1 // -1 is no window
}

// alternation returns which of n layers have linear attention, and which a window.
func (b blocks) alternation(n int) (linear, windowed []bool, err error) {
	linear, windowed = make([]bool, n), make([]bool, n)
	if b.variant != "" && b.variant != "dsa" {
		if b.linearFrequency == "" {
			return nil, nil, fmt.Errorf("--experimental-attention-variant %s needs --linear-attention-freq; for instance 4", b.variant)
		}
		if linear, err = lastOfEach("linear-attention-freq", b.linearFrequency, n); err != nil {
			return nil, nil, err
		}
	}
	switch {
	case b.windowed == nil:
	case b.windowFrequency == "":
		windowed = slices.Repeat([]bool{true}, n)
	default:
		windowed, err = lastOfEach("window-attn-skip-freq", b.windowFrequency, n)
	}
	return linear, windowed, err
}

// lastOfEach reads frequencies the other way round: a number f excludes every f-th layer,
// the last of each f. Lists have their usual meaning.
func lastOfEach(flag, text string, n int) ([]bool, error) {
	f, err := strconv.Atoi(text)
	if err != nil {
		return layerPattern(flag, text, n)
	}
	if f <= 0 {
		return nil, fmt.Errorf("--%s %d: the frequency must be positive", flag, f)
	}
	pattern := make([]bool, n)
	for i := range pattern {
		pattern[i] = (i+1)%f != 0
	}
	return pattern, nil
}

// mixer returns a layer with one of the mixers.
func (b blocks) mixer(mla, linear, windowed bool) model.Layer {
	switch {
	case linear:
		return model.Layer{DeltaNet: b.deltaNet}
	case mla:
		return model.Layer{MLA: b.mla}
	case windowed:
		return model.Layer{Attention: b.windowed}
	}
	return model.Layer{Attention: b.attention}
}
