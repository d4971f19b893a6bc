// This file owns the parts that are not matrix products: attention, scans, norms,
// activations and permutations.

package cost

import (
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// mixer adds what a layer computes over the sequence.
func (t *tally) mixer(l model.Layer) {
	m := t.m
	tp := float64(m.setup.Layout.TP)
	h := float64(m.setup.Model.Hidden)
	if l.Parallel() {
		t.mamba(l.Mamba)
	}
	switch {
	case l.Attention != nil:
		a := l.Attention
		q, kv := float64(a.Heads*a.HeadDim)/tp, float64(a.KVHeads*a.HeadDim)/tp
		t.attention(float64(a.Heads)/tp, q, q, q+2*kv, a.Window)
		if a.Rotary {
			t.stream(qkvLinear, m.tokens*(q+kv), 4, 4)
		}
	case l.MLA != nil:
		a := l.MLA
		q, v := float64(a.Heads*(a.Nope+a.Rope))/tp, float64(a.Heads*a.V)/tp
		t.attention(float64(a.Heads)/tp, q, v, 2*q+v, 0)
		// The rotation and the joining of each head's two parts read and write q and k.
		t.stream(mlaUp, m.tokens*2*q, 4, 4)
	case l.Mamba != nil:
		t.mamba(l.Mamba)
	case l.DeltaNet != nil:
		a := l.DeltaNet
		values := float64(a.ValueHeads*a.ValueDim) / tp
		t.scan(deltaFlops(a) * m.tokens / tp)
		t.stream(mambaScan, m.tokens*(2*float64(a.KeyHeads*a.KeyDim)/tp+2*values), 12, 24)
	case l.Lightning != nil:
		a := l.Lightning
		width := float64(a.Heads*a.HeadDim) / tp
		t.scan(lightningFlops(a) * m.tokens / tp)
		t.stream(mambaScan, m.tokens*4*width, 12, 24)
	default:
		return
	}
	// The norm reads and writes an element, and the residual sum reads two and writes one:
	// ten bytes an element. The backward pass also reads the gradient.
	t.stream(attnNorm, m.local*h, 10, 12)
}

func (t *tally) mamba(a *model.Mamba) {
	tp := float64(t.m.setup.Layout.TP)
	t.scan(scanFlops(a) * t.m.tokens / tp)
	// Convolution, chunked scan, gate and norm each read and write the widths once.
	// States between chunks add about as much.
	t.stream(mambaScan, t.m.tokens*(2*float64(a.Inner)/tp+2*float64(a.Groups*a.State)/tp), 12, 24)
}

// attention adds fused attention over the given channels of scores and values. held is the
// size of queries, keys and values together.
func (t *tally) attention(heads, scores, values, held float64, window int) {
	m := t.m
	s := m.setup
	w := t.workOf(coreAttn)
	visible := visibleTokens(s.Batch.Seq, window)
	flops := 2 * m.tokens * visible * (scores + values)
	w.flops += flops
	rate, memory := m.gpu.Flops["bf16"], m.memory
	if s.Precision.Attention {
		rate = peak(m.gpu, plan.MXFP8)
	}
	// Kernels work in tiles of 128 tokens. They compute the tiles that the mask cuts as
	// a whole.
	seen := visible + 64
	if window > 0 && window < s.Batch.Seq {
		seen = min(visible+128, float64(s.Batch.Seq)/2+64)
	}
	products := flops * seen / visible / rate
	weights := m.tokens * seen * heads / exponentials(m.gpu)
	moved := 2 * m.tokens * (held + values)
	// The backward pass recomputes the scores, so it has five products and the forward pass
	// two.
	w.forward += Seconds(max((products+weights)/m.rates.Attention, moved/memory))
	w.backward += Seconds(max((2.5*products+2*weights)/m.rates.Attention, 2*moved/memory))
}

// scan adds the operations of a scan. Its small products run in bf16.
func (t *tally) scan(flops float64) {
	w := t.workOf(mambaScan)
	w.flops += flops
	rate := t.m.gpu.Flops["bf16"] * t.m.rates.Scan
	w.forward += Seconds(flops / rate)
	w.backward += Seconds(2.5 * flops / rate)
}

// visibleTokens returns how many tokens a query sees on average under a causal mask: half of the
// sequence, or a whole window except in its first tokens.
func visibleTokens(seq, window int) float64 {
	s, w := float64(seq), float64(window)
	if window == 0 || window >= seq {
		return s / 2
	}
	return w - w*w/(2*s)
}

// scanFlops returns the operations of a Mamba scan for one token, as Megatron-LM counts
// them.
func scanFlops(a *model.Mamba) float64 { return 7 * float64(a.Inner) * float64(a.State) }

// deltaFlops returns the operations of a delta net for one token. Each head reads, corrects
// and writes a state of key width times value width.
func deltaFlops(a *model.DeltaNet) float64 {
	return 8 * float64(a.ValueHeads*a.ValueDim) * float64(a.KeyDim)
}

// lightningFlops returns the operations of linear attention for one token. Each head reads
// and updates a state of head width squared, and computes products within a block of 256.
func lightningFlops(a *model.Lightning) float64 {
	return 4 * float64(a.Heads*a.HeadDim) * (float64(a.HeadDim) + 128)
}

// feedForward adds what the feedForward-forward part of a layer computes besides products.
func (t *tally) feedForward(l model.Layer) {
	m := t.m
	lay := m.setup.Layout
	h := float64(m.setup.Model.Hidden)
	switch {
	case l.Dense != nil:
		t.activation(denseMLP, m.tokens*float64(l.Dense.Width)/float64(lay.TP), l.Dense.Gated)
	case l.MoE != nil:
		e := l.MoE
		rows := m.rows(e)
		width := h
		if e.Latent > 0 {
			width = float64(e.Latent)
		}
		if m.setup.Kernels.OpFuser {
			t.workOf(moeAct) // inside of the products
		} else {
			t.activation(moeAct, rows*float64(e.Width)/float64(lay.ETP), e.Gated)
		}
		if m.setup.Model.Bias {
			// The bias of the second product is scaled by the routing weight and added in
			// fp32, an operation at a time: 28 bytes an element forward, 36 backward. The
			// gradient of the first product's bias reads that of the output once more.
			t.stream(expertFC2, rows*width, 28, 36)
			outputs := float64(e.Width)
			if e.Gated {
				outputs *= 2
			}
			t.stream(expertFC1, rows*outputs/float64(lay.ETP), 0, 2)
		}
		if e.SharedWidth > 0 {
			t.activation(sharedExperts, m.tokens*float64(e.SharedWidth)/float64(lay.TP), e.Gated)
		}
		// This is the traffic of fp32 scores, the choice of experts, and the maps.
		t.stream(router, m.local*float64(e.Experts), 24, 16)
		// Rows are permuted to the order of experts. The framework's own collectives do so
		// on both sides of an exchange.
		permuted := 4.0
		if m.plainDispatch() {
			permuted = 8
		}
		t.stream(dispatch, rows*width, permuted, permuted)
		t.stash(l)
		t.stream(combine, rows*width, permuted, permuted)
	default:
		return
	}
	t.stream(mlpNorm, m.local*h, 10, 12)
}

// stash adds the copies to and from pages. Each reads and writes all rows once.
func (t *tally) stash(l model.Layer) {
	s := t.m.setup
	if len(s.Stash.Modules) == 0 {
		return
	}
	var bytes float64
	for _, g := range plan.Activations(s, l) {
		if memory.Including(s.Stash.Modules, g.Stash) != "" {
			bytes += float64(g.Bytes)
		}
	}
	t.stream(dispatch, bytes, 2, 2)
}

// activation adds an activation function of n outputs. Gated ones read two inputs. The
// backward pass reads the inputs and the gradient, and writes the gradients of the inputs.
func (t *tally) activation(x part, n float64, gated bool) {
	in := 1.0
	if gated {
		in = 2
	}
	t.stream(x, n, 2*(in+1), 2*(2*in+1))
}

// stream adds traffic of the given bytes for each of n elements.
func (t *tally) stream(x part, n, forward, backward float64) {
	w := t.workOf(x)
	memory := t.m.memory
	w.forward += Seconds(n * forward / memory)
	w.backward += Seconds(n * backward / memory)
}
