// This file owns what attention saves: plain and grouped heads, latent
// attention, and the kernels between queries and outputs.

package plan

import (
	"github.com/stowage-dev/stowage/plan/model"

	"github.com/stowage-dev/stowage/memory"
)

// wgrad returns the size of a weight's gradient until the backward pass has added it to the
// main gradient. Fused accumulation writes to the main gradient at once. The tensor that it
// returns instead is one of the fixed items.
func (d *dims) wgrad(out, in int64) memory.Bytes {
	if d.s.Kernels.GradFusion {
		return 0
	}
	return d.size(out * in)
}

// column returns a product whose outputs are divided over TP ranks. If the sequence is
// divided, the backward pass gathers the input once more and scatters the sum of the
// input's gradients.
func (d *dims) column(name string, in, out int64) op {
	o := op{name: name, gin: d.size(d.local * in), work: d.wgrad(out, in)}
	if d.dividesSequence() {
		o.temp = d.size(d.tokens * in)
		o.work += 2 * d.size(d.tokens*in)
	}
	return o
}

// row returns a product whose inputs are divided over TP ranks.
func (d *dims) row(name string, in, out int64) op {
	o := op{name: name, out: d.size(d.local * out), gin: d.size(d.tokens * in), work: d.wgrad(out, in)}
	if d.dividesSequence() {
		o.temp = d.size(d.tokens * out) // before the sum is scattered
		o.work += d.size(d.tokens * out)
	}
	return o
}

// normed appends the norm before a part and saves its input and output. The norm is fused
// with the product behind it, or alone. Its backward pass makes what is added to the
// gradient of the residual stream.
func (d *dims) normed(t *tape, part, offload string, fused bool, product op) int {
	in := SavedTensor{Group: part, Tensor: "input of the norm", Bytes: d.residual(), Elements: d.local * d.h, Offload: part}
	out := SavedTensor{Group: part, Tensor: "output of the norm", Bytes: d.quantised(d.local * d.h), Elements: d.local * d.h, Offload: offload}
	if offload != "" {
		out.Group = offload
	}
	norm := op{name: part, gin: d.residual(), release: d.residual()}
	if fused {
		product.gin, product.release = norm.gin, norm.release
		product.work += d.residual() // the product's own, before the norm's
		i := t.op(product)
		t.save(i, i, in)
		t.save(i, i, out)
		t.save(i, i, d.stats(part))
		return i
	}
	out.Recompute = []string{"layernorm"}
	i := t.op(norm)
	j := t.op(product)
	t.save(i, i, in)
	t.save(i, j, out)
	t.save(i, i, d.stats(part))
	return j
}

// stats returns the statistics of a norm: one fp32 number a token, or two for LayerNorm.
func (d *dims) stats(part string) SavedTensor {
	n := 4 * d.local
	if d.m.Norm == model.LayerNorm {
		n *= 2
	}
	return SavedTensor{Group: part, Tensor: "statistics of the norm", Bytes: memory.Bytes(n)}
}

// joined appends the addition to the residual stream.
func (d *dims) joined(t *tape, part string) {
	t.ends(t.last(), "layernorm")
	o := op{name: part, out: d.residual(), gout: d.residual(), hold: d.residual()}
	if d.s.Kernels.Dropout > 0 {
		o.gin = d.residual()
		i := t.op(o)
		t.save(i, i, SavedTensor{Group: part, Tensor: "dropout mask", Bytes: memory.Bytes(d.local * d.h)})
		return
	}
	t.op(o)
}

// heads is the shape of attention on one rank.
type heads struct {
	q, kv  int64 // heads
	qk, v  int64 // widths of a head
	latent bool
}

func (d *dims) attention(t *tape, a *model.Attention) {
	d.project(t, d.attend(t, a, !d.s.Kernels.Local))
	d.joined(t, "attn_add")
}

// attend appends attention up to its output projection. fused tells whether the norm before
// it is fused with the product to queries, keys and values.
func (d *dims) attend(t *tape, a *model.Attention, fused bool) heads {
	n := heads{q: int64(a.Heads) / d.tp, kv: max(int64(a.KVHeads)/d.tp, 1), qk: int64(a.HeadDim), v: int64(a.HeadDim)}
	width := n.q*n.qk + n.kv*(n.qk+n.v)
	gate := int64(0)
	if a.Gate {
		gate = n.q * n.v
	}
	qkv := d.column("qkv product", d.h, width+gate)
	qkv.out = d.size(d.tokens * (width + gate))
	d.normed(t, "attn_norm", "qkv_linear", fused, qkv)
	if a.QKNorm {
		// Norms of heads save their inputs in addition to the inputs of attention.
		i := t.op(op{name: "q, k norms", gin: d.size(d.tokens * width)})
		t.save(i, i, SavedTensor{Group: "qkv_linear", Tensor: "inputs of the q, k norms", Bytes: d.size(d.tokens * (n.q + n.kv) * n.qk)})
		t.save(i, i, SavedTensor{Group: "qkv_linear", Tensor: "statistics of the q, k norms", Bytes: 4 * memory.Bytes(d.tokens*(n.q+n.kv))})
	}
	d.core(t, n)
	if gate > 0 {
		i := t.op(op{name: "output gate", gin: 2 * d.size(d.tokens*gate)})
		t.save(i, i, SavedTensor{Group: "attn_proj", Tensor: "gate", Bytes: d.size(d.tokens * gate)})
		t.save(i, i, SavedTensor{Group: "attn_proj", Tensor: "gated output", Bytes: d.size(d.tokens * gate)})
	}
	return n
}

// project appends the output projection. The input of the
// projection is the output of attention. The product saves a copy of its own if it computes
// in eight bits.
func (d *dims) project(t *tape, n heads) {
	t.ends(t.last(), "core_attn", "mla_up_proj")
	i := t.op(d.row("output projection", n.q*n.v, d.h))
	if d.lowPrecision() {
		t.save(i, i, SavedTensor{Group: "attn_proj", Tensor: "quantised attention output", Bytes: d.quantised(d.tokens * n.q * n.v), Elements: d.tokens * n.q * n.v, Offload: "attn_proj"})
	}
}

func (d *dims) mla(t *tape, a *model.MLA) {
	n := heads{q: int64(a.Heads) / d.tp, kv: int64(a.Heads) / d.tp, qk: int64(a.Nope + a.Rope), v: int64(a.V), latent: true}
	lq, lk, dr := int64(a.QRank), int64(a.KVRank), int64(a.Rope)
	// The narrow products are not divided over TP. Every rank computes those of its own
	// tokens.
	down := op{name: "down projections", out: d.size(d.local * (lq + lk + dr)), gin: d.residual(), work: d.residual() + d.wgrad(lq+lk+dr, d.h)}
	i := d.normed(t, "attn_norm", "qkv_linear", false, down)
	t.save(i, i+1, SavedTensor{Group: "qkv_linear", Tensor: "latents", Bytes: d.size(d.local * (lq + lk)), Elements: d.local * max(lq, lk), Offload: "qkv_linear"})
	t.op(op{name: "latent norms", gin: d.size(d.local * (lq + lk + dr))})
	up := t.op(op{
		name: "up projections", temp: d.size(d.tokens * n.q * (n.qk + int64(a.Nope) + n.v)),
		gin: d.size(d.local * (lq + lk)), work: d.size(d.tokens*n.q*(n.qk+int64(a.Nope)+n.v)) + d.wgrad(n.q*n.qk, lq) + d.wgrad(n.q*(int64(a.Nope)+n.v), lk),
	})
	t.save(up-1, up, SavedTensor{Group: "qkv_linear", Tensor: "normed latents", Bytes: d.quantised(d.local * (lq + lk)), Elements: d.local * max(lq, lk), Offload: "qkv_linear"})
	t.save(up-1, up, SavedTensor{Group: "qkv_linear", Tensor: "rope key", Bytes: d.size(d.tokens * dr)})
	d.core(t, n)
	d.project(t, n)
	d.joined(t, "attn_add")
}

// core appends attention itself, from queries, keys and values to the output.
func (d *dims) core(t *tape, n heads) {
	if d.unfused() {
		d.unfusedCore(t, n)
		return
	}
	q, k, v := d.size(d.tokens*n.q*n.qk), d.size(d.tokens*n.kv*n.qk), d.size(d.tokens*n.kv*n.v)
	out := d.size(d.tokens * n.q * n.v)
	i := t.op(op{name: "core attention", gin: q + k + v, work: 4 * memory.Bytes(d.tokens*n.q*n.qk)})
	up := []string(nil)
	if n.latent {
		up = []string{"mla_up_proj"}
	}
	for _, x := range []struct {
		name  string
		bytes memory.Bytes
	}{{"queries", q}, {"keys", k}, {"values", v}} {
		t.save(i, i, SavedTensor{Group: "core_attn", Tensor: x.name, Bytes: x.bytes, Elements: d.elements(x.bytes), Offload: "core_attn", Recompute: up})
	}
	t.save(i, i, SavedTensor{Group: "attn_proj", Tensor: "attention output", Bytes: out, Elements: d.elements(out), Offload: "attn_proj"})
	if d.flash(n) && d.s.Batch.Micro > 1 {
		// FlashAttention needs the batch before the sequence, so it saves the output in
		// another order than the projection does.
		t.save(i, i, SavedTensor{Group: "core_attn", Tensor: "output with the batch in front", Bytes: out, Elements: d.elements(out)})
	}
	if d.s.Layout.CP > 1 && d.s.Kernels.CPComm == "a2a" {
		t.save(i, i, SavedTensor{Group: "core_attn", Tensor: "output before the all-to-all", Bytes: out, Elements: d.elements(out)})
	}
	t.save(i, i, SavedTensor{Group: "core_attn", Tensor: "log-sum-exp", Bytes: 4 * memory.Bytes(d.tokens*n.q), Recompute: []string{"core_attn"}})
}

// unfused reports whether probabilities are materialised.
func (d *dims) unfused() bool {
	return d.s.Kernels.Attention == "unfused" || d.s.Kernels.Local && d.s.Kernels.Attention == ""
}

// flash reports whether TransformerEngine uses FlashAttention and not cuDNN's kernels. It
// does so before Hopper, and on Blackwell if dropout must be deterministic. It cannot if
// queries and values differ in width.
func (d *dims) flash(n heads) bool {
	k := d.s.Kernels
	switch {
	case n.qk != n.v || k.Attention == "fused":
		return false
	case k.Attention == "flash":
		return true
	}
	return d.generation() < 9 || d.generation() >= 10 && k.Deterministic && k.AttentionDropout > 0
}

// unfusedCore saves the probabilities. With dropout it also saves a mask and the dropped
// probabilities. Keys and values are repeated to as many heads as queries have.
func (d *dims) unfusedCore(t *tape, n heads) {
	e := d.elem
	seq := int64(d.s.Batch.Seq) / int64(d.s.Layout.CP)
	probs := d.size(d.tokens * seq * n.q)
	q, k, v := d.size(d.tokens*n.q*n.qk), d.size(d.tokens*n.q*n.qk), d.size(d.tokens*n.q*n.v)
	core := []string{"core_attn"}
	up := []string(nil)
	if n.latent {
		up = []string{"mla_up_proj"}
	}
	a := t.op(op{name: "attention scores", out: probs, temp: probs, gin: q + k})
	// The scores and their softmax exist at the same time.
	b := t.op(op{name: "attention softmax", gin: probs, work: -probs})
	c := b
	// Offloading a module moves everything that its operations save.
	last := SavedTensor{Group: "core_attn", Tensor: "attention probabilities", Bytes: probs, Elements: d.elements(probs), Offload: "core_attn", Recompute: core}
	if d.s.Kernels.AttentionDropout > 0 {
		c = t.op(op{name: "attention dropout", temp: probs, gin: probs})
		t.save(b, b, last)
		t.save(c, c, SavedTensor{Group: "core_attn", Tensor: "attention dropout mask", Bytes: probs / e, Elements: d.elements(probs), Offload: "core_attn", Recompute: core})
		last.Tensor = "dropped attention probabilities"
	}
	out := d.size(d.tokens * n.q * n.v)
	// The scores are there until the operation returns, and the product before it is put
	// into another order.
	m := t.op(op{name: "attention times values", temp: probs + out, gin: probs, work: v})
	if c == b {
		// The softmax needs them after the product does. Both save them.
		t.save(b, b, last)
		t.saved[len(t.saved)-1].copies = 2
	} else {
		t.save(c, m, last)
	}
	t.save(a, a, SavedTensor{Group: "core_attn", Tensor: "queries", Bytes: q, Elements: d.elements(q), Offload: "core_attn", Recompute: up})
	t.save(a, a, SavedTensor{Group: "core_attn", Tensor: "keys", Bytes: k, Elements: d.elements(k), Offload: "core_attn", Recompute: up})
	t.save(a, m, SavedTensor{Group: "core_attn", Tensor: "values", Bytes: v, Elements: d.elements(v), Offload: "core_attn", Recompute: up})
	t.save(m, m+1, SavedTensor{Group: "attn_proj", Tensor: "attention output", Bytes: out, Elements: d.elements(out), Offload: "attn_proj"})
}
