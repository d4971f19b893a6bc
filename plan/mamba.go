// This file owns what the recurrent mixers save: Mamba and gated delta nets.

package plan

import (
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// scanChunk is how many tokens the scan's kernels process at once. They keep states between
// chunks.
const scanChunk = 128

// mamba appends a Mamba mixer. The fused kernel of mamba_ssm saves its input (gate, x, B, C
// and steps in one tensor) and the scan's output before the gate. The norm and the output
// projection save their inputs. The backward pass recomputes the states and the convolved
// input.
func (d *dims) mamba(t *tape, a *model.Mamba) {
	i := d.normed(t, "attn_norm", "", true, d.mambaInput(a))
	for j := range t.saved {
		if s := &t.saved[j]; s.Group == "attn_norm" && s.until == i && s.Tensor == "output of the norm" {
			s.Group = "mamba_in"
		}
	}
	d.scan(t, i, a)
	d.joined(t, "mamba_add")
}

// parallel appends attention and a Mamba mixer that read the same norm, and the sum of
// their outputs. The norm's output lives until the first product of attention is done with
// it, which the backward pass reaches last.
func (d *dims) parallel(t *tape, a *model.Attention, m *model.Mamba) {
	d.project(t, d.attend(t, a, false))
	i := t.op(d.mambaInput(m))
	d.scan(t, i, m)
	// Attention's output waits for that of the scan.
	for j := i; j < len(t.ops); j++ {
		t.ops[j].temp += d.residual()
	}
	d.joined(t, "mamba_add")
}

// mambaSizes returns the widths on a rank: of the scan, of one of B and C, and of the input
// projection's output.
func (d *dims) mambaSizes(a *model.Mamba) (inner, bc, in int64) {
	inner, bc = int64(a.Inner)/d.tp, max(int64(a.Groups)/d.tp, 1)*int64(a.State)
	if a.Version == 1 {
		return inner, bc, 2 * inner
	}
	return inner, bc, 2*inner + 2*bc + max(int64(a.Heads)/d.tp, 1)
}

func (d *dims) mambaInput(a *model.Mamba) op {
	_, _, in := d.mambaSizes(a)
	proj := d.column("mamba input projection", d.h, in)
	proj.temp += d.size(d.tokens * in) // the transposed copy
	return proj
}

// scan appends a Mamba mixer behind its input projection, which is operation i.
func (d *dims) scan(t *tape, i int, a *model.Mamba) {
	inner, bc, in := d.mambaSizes(a)
	groups, state := max(int64(a.Groups)/d.tp, 1), int64(a.State)
	conv := d.size(d.tokens * (inner + 2*bc))
	states := memory.Bytes(4 * d.tokens * inner * state / scanChunk)
	inChunk := 4 * memory.Bytes(d.tokens*scanChunk*groups)
	scan := t.op(op{
		name: "mamba scan", temp: conv + 2*states + inChunk,
		gin: d.size(d.tokens * in), work: 2*conv + d.size(d.tokens*inner) + 3*states + 2*inChunk,
	})
	t.save(i, scan, SavedTensor{Group: "mamba_in", Tensor: "gate, x, B, C and steps", Bytes: d.size(d.tokens * in)})
	out := d.size(d.tokens * inner)
	t.save(scan, scan, SavedTensor{Group: "mamba_scan", Tensor: "scan output", Bytes: out})
	last := scan
	if !a.Ungated {
		last = t.op(op{name: "mamba norm", gin: out})
		t.save(scan, last, SavedTensor{Group: "mamba_scan", Tensor: "input of the gated norm", Bytes: out})
	}
	row := t.op(d.row("mamba output projection", inner, d.h))
	t.save(last, row, SavedTensor{Group: "mamba_scan", Tensor: "output projection input", Bytes: d.quantised(d.tokens * inner)})
}

// lightning appends linear attention: queries, keys and values behind an activation
// function, the recurrence, a norm over all heads, and a gate. The kernel saves queries,
// keys and values, and recomputes its states.
func (d *dims) lightning(t *tape, a *model.Lightning) {
	width := int64(a.Heads*a.HeadDim) / d.tp
	one := d.size(d.tokens * width)
	i := d.normed(t, "attn_norm", "qkv_linear", false, d.column("qkv product", d.h, 3*width))
	gate := t.op(d.column("gate product", d.h, width))
	act := t.op(op{name: "qkv activation", gin: 3 * one})
	t.save(i, act, SavedTensor{Group: "qkv_linear", Tensor: "qkv product output", Bytes: 3 * one})
	rule := t.op(op{name: "linear attention", out: 0, gin: 3 * one, work: 2 * one})
	t.save(act, rule, SavedTensor{Group: "core_attn", Tensor: "queries, keys, values", Bytes: 3 * one, Elements: d.tokens * width, Offload: "core_attn"})
	norm := t.op(op{name: "linear attention norm", gin: one})
	t.save(rule, norm, SavedTensor{Group: "attn_proj", Tensor: "recurrence output", Bytes: one, Elements: d.tokens * width, Offload: "attn_proj"})
	gated := t.op(op{name: "output gate", gin: 2 * one})
	t.save(norm, gated, SavedTensor{Group: "attn_proj", Tensor: "normed output", Bytes: one})
	t.save(gate, gated, SavedTensor{Group: "attn_proj", Tensor: "gate", Bytes: one})
	row := t.op(d.row("output projection", width, d.h))
	t.save(gated, row, SavedTensor{Group: "attn_proj", Tensor: "gated output", Bytes: d.quantised(d.tokens * width), Elements: d.tokens * width, Offload: "attn_proj"})
	d.joined(t, "attn_add")
}

// deltaNet appends a gated delta net. It saves the output of the input projection, the
// convolved queries, keys and values, and the recurrence's output before and after its
// norm.
func (d *dims) deltaNet(t *tape, a *model.DeltaNet) {
	keys, values := int64(a.KeyHeads*a.KeyDim)/d.tp, int64(a.ValueHeads*a.ValueDim)/d.tp
	heads := int64(a.ValueHeads) / d.tp
	in := 2*keys + 2*values + 2*heads
	i := d.normed(t, "attn_norm", "qkv_linear", true, d.column("delta net input projection", d.h, in))
	qkv := d.size(d.tokens * (2*keys + values))
	conv := t.op(op{name: "delta net convolution", gin: d.size(d.tokens * in), work: qkv})
	t.save(i, conv, SavedTensor{Group: "qkv_linear", Tensor: "input projection output", Bytes: d.size(d.tokens * in), Recompute: []string{"gdp_in_proj"}})
	// Keys are repeated to as many heads as values have.
	rule := t.op(op{name: "delta rule", gin: qkv, work: 2 * qkv})
	t.save(conv, rule, SavedTensor{Group: "core_attn", Tensor: "queries, keys, values", Bytes: d.size(d.tokens * 3 * values), Offload: "gdp_qkv", Elements: d.tokens * values, Recompute: []string{"gdp_qkv"}})
	t.save(rule, rule, SavedTensor{Group: "core_attn", Tensor: "gates and steps", Bytes: 8 * memory.Bytes(d.tokens*heads)})
	out := d.size(d.tokens * values)
	norm := t.op(op{name: "delta net norm", gin: 2 * out})
	t.save(rule, norm, SavedTensor{Group: "attn_proj", Tensor: "recurrence output", Bytes: out, Elements: d.elements(out), Offload: "attn_proj"})
	row := t.op(d.row("output projection", values, d.h))
	t.save(norm, row, SavedTensor{Group: "attn_proj", Tensor: "normed output", Bytes: d.quantised(d.tokens * values), Recompute: []string{"gdn_norm_out"}})
	d.joined(t, "attn_add")
}
