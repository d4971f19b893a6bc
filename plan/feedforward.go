// This file owns what dense feed-forward parts and experts save.

package plan

import (
	"slices"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

func gates(gated bool) int64 {
	if gated {
		return 2
	}
	return 1
}

func (d *dims) dense(t *tape, f *model.Dense) {
	w := int64(f.Width) / d.tp
	m := gates(f.Gated)
	fc1 := d.column("fc1", d.h, m*w)
	fc1.out = 0 // saved by the activation function
	first := len(t.saved)
	i := d.normed(t, "mlp_norm", "", !d.s.Kernels.Local, fc1)
	if !d.s.Kernels.Local {
		// The recomputed part includes the norm.
		for j := first; j < len(t.saved); j++ {
			if s := &t.saved[j]; s.Tensor == "output of the norm" {
				s.Recompute = []string{"mlp"}
			}
		}
	}
	mlp := []string{"mlp"}
	act := t.op(op{name: "activation", gin: d.size(d.tokens * m * w)})
	t.save(i, act, d.actInput(SavedTensor{Group: "mlp", Tensor: "fc1 output", Recompute: mlp}, d.tokens*m*w))
	fc2 := t.op(d.row("fc2", w, d.h))
	t.save(act, fc2, SavedTensor{Group: "mlp", Tensor: "fc2 input", Bytes: d.quantised(d.tokens * w), Recompute: mlp})
	t.ends(fc2, "mlp")
	d.joined(t, "mlp_add")
}

// actInput sets the size of n elements that the activation function saves.
func (d *dims) actInput(g SavedTensor, n int64) SavedTensor {
	g.Bytes = d.size(n)
	if d.s.Precision.ActivationInputFP8 {
		g.Bytes = memory.Bytes(n)
	}
	return g
}

func (d *dims) moe(t *tape, e *model.MoE) {
	fused := false
	norm := op{name: "router", gin: d.residual(), work: 4 * memory.Bytes(d.local*int64(e.Experts))}
	i := d.normed(t, "mlp_norm", "", fused, norm)
	d.wholeNorm(t)
	d.router(t, i, e)
	if e.SharedWidth > 0 {
		d.shared(t, i-1, e)
	}
	d.experts(t, e)
	t.ends(t.last(), "moe")
	d.joined(t, "mlp_add")
}

// wholeNorm saves the output of the norm unquantised, because the router reads it.
func (d *dims) wholeNorm(t *tape) {
	for j := range t.saved {
		if s := &t.saved[j]; s.Group == "mlp_norm" && s.Tensor == "output of the norm" {
			s.Bytes = d.residual()
			s.Recompute = []string{"layernorm"}
		}
	}
}

// router saves scores and probabilities in fp32 over all experts, the map, and the origin
// of each row.
func (d *dims) router(t *tape, i int, e *model.MoE) {
	n := d.local * int64(e.Experts)
	moe := []string{"moe"}
	t.save(i, i, SavedTensor{Group: "router", Tensor: "scores", Bytes: 4 * memory.Bytes(n), Recompute: moe})
	t.save(i, i, SavedTensor{Group: "router", Tensor: "probabilities", Bytes: 4 * memory.Bytes(n), Recompute: moe})
	t.save(i, i, SavedTensor{Group: "router", Tensor: "map", Bytes: memory.Bytes(n), Recompute: moe})
	rows := 8 * d.rows(e) // indices
	if d.s.Kernels.PermuteFusion {
		rows = 8 * n // two 32-bit row numbers for every token and expert
	}
	t.save(i, i, SavedTensor{Group: "router", Tensor: "row numbers", Bytes: memory.Bytes(rows), Recompute: moe})
}

// shared appends the shared experts: a dense part that reads the norm's output.
func (d *dims) shared(t *tape, norm int, e *model.MoE) {
	w := int64(e.SharedWidth) / d.tp
	m := gates(e.Gated)
	again := []string{"shared_experts", "moe"}
	fc1 := d.column("shared fc1", d.h, m*w)
	fc1.hold = 0
	i := t.op(fc1)
	if d.lowPrecision() {
		t.save(norm, i, SavedTensor{Group: "shared_experts", Tensor: "quantised norm output", Bytes: d.quantised(d.local * d.h), Recompute: again})
	}
	act := t.op(op{name: "shared activation", gin: d.size(d.tokens * m * w)})
	t.save(i, act, d.actInput(SavedTensor{Group: "shared_experts", Tensor: "fc1 output", Recompute: again}, d.tokens*m*w))
	fc2 := t.op(d.row("shared fc2", w, d.h))
	t.save(act, fc2, SavedTensor{Group: "shared_experts", Tensor: "fc2 input", Bytes: d.quantised(d.tokens * w), Recompute: again})
	t.ends(fc2, "shared_experts")
}

// experts appends the experts. Rows are permuted, sent and sorted by expert before them,
// and take the same way back. Probabilities are applied before fc2, so the way back saves
// nothing.
func (d *dims) experts(t *tape, e *model.MoE) {
	width := d.h
	if e.Latent > 0 {
		width = int64(e.Latent)
	}
	etp := int64(d.s.Layout.ETP)
	local := int64(e.Experts) / int64(d.s.Layout.EP)
	f, m := int64(e.Width)/etp, gates(e.Gated)
	r := d.rows(e)
	sent := d.local * int64(e.TopK)
	if e.Latent > 0 {
		d.latent(t, e)
	}
	rows := d.size(r * width)
	moe := []string{"moe"}
	d.dispatch(t, d.size(sent*width), rows, local)
	fc1 := t.op(op{name: "experts' fc1", gin: rows, work: memory.Bytes(local) * d.wgrad(m*f, width)})
	input := d.quantised(r * width)
	if d.s.Precision.Compute == FP8 && slices.Contains(d.s.Offload.Modules, "expert_fc1") {
		input = rows // the input itself moves, not its quantised copy
	}
	t.save(fc1-1, fc1, SavedTensor{Group: "expert_fc1", Tensor: "rows", Bytes: input, Elements: r * width, Offload: "expert_fc1", Recompute: moe, Stash: "expert_fc1"})
	act := t.op(op{name: "experts' activation", gin: d.size(r * m * f)})
	t.save(fc1, act, d.actInput(SavedTensor{Group: "moe_act", Tensor: "fc1 output", Elements: r * m * f, Offload: "moe_act", Recompute: moe, Stash: "moe_act"}, r*m*f))
	t.save(fc1, act, SavedTensor{Group: "moe_act", Tensor: "probabilities of rows", Bytes: 4 * memory.Bytes(r), Recompute: moe})
	fused := e.Gated && !d.s.Kernels.UnfusedActivation || d.s.Kernels.WeightedSquaredReLU
	if !fused {
		// The product with the probabilities saves the output of the activation function.
		w := t.op(op{name: "experts' weighting", gin: d.size(r * f), temp: 4 * memory.Bytes(r*f), work: 8 * memory.Bytes(r*f)})
		t.save(act, w, SavedTensor{Group: "moe_act", Tensor: "unweighted activation", Bytes: d.size(r * f), Recompute: []string{"moe_act", "moe"}})
	}
	fc2 := t.op(op{name: "experts' fc2", out: rows, gin: d.size(r * f), work: memory.Bytes(local) * d.wgrad(width, f)})
	// The stash takes fc2's input together with the activation function's.
	t.save(fc2-1, fc2, SavedTensor{Group: "experts", Tensor: "fc2 input", Bytes: d.quantised(r * f), Recompute: []string{"moe_act", "moe"}, Stash: "moe_act"})
	t.ends(fc2, "moe_act")
	d.combine(t, d.size(sent*width), rows, local)
	if d.s.Kernels.Dispatcher == "alltoall" {
		// The forward pass of the layer refers to the sent rows until it returns, and to
		// the received ones if they were sorted afterwards.
		held := d.size(sent * width)
		if local > 1 {
			held += rows
		}
		for i := fc1; i < len(t.ops); i++ {
			t.ops[i].temp += held
		}
	}
}

// latent appends the products to and from the narrower rows that experts compute.
func (d *dims) latent(t *tape, e *model.MoE) {
	l := int64(e.Latent)
	i := t.op(op{name: "latent projection", out: d.size(d.local * l), gin: d.residual(), work: d.wgrad(l, d.h)})
	t.save(i, i, SavedTensor{Group: "experts", Tensor: "latent output", Bytes: d.size(d.local * l), Recompute: []string{"moe"}})
}

// dispatch appends the operations before the experts.
func (d *dims) dispatch(t *tape, sent, rows memory.Bytes, local int64) {
	switch d.s.Kernels.Dispatcher {
	case "alltoall":
		t.op(op{name: "permutation", out: sent, gin: d.residual(), work: 0})
		t.op(op{name: "all-to-all", out: rows, temp: 0, gin: sent})
		if local > 1 {
			t.op(op{name: "sorting", temp: sent, gin: rows})
		}
	case "deepep", "hybridep":
		t.op(op{name: "dispatch", temp: sent, gin: d.residual()})
	default:
		all := d.residual() * memory.Bytes(d.s.Layout.EP*d.s.Layout.ETP)
		t.op(op{name: "gathering", gin: d.residual()})
		t.op(op{name: "permutation", gin: all})
	}
}

// combine appends the operations behind the experts.
func (d *dims) combine(t *tape, sent, rows memory.Bytes, local int64) {
	switch d.s.Kernels.Dispatcher {
	case "alltoall":
		if local > 1 {
			t.op(op{name: "unsorting", out: rows, gin: rows})
		}
		t.op(op{name: "all-to-all back", out: sent, gin: rows})
		t.op(op{name: "unpermutation", out: d.residual(), gin: sent})
	case "deepep", "hybridep":
		t.op(op{name: "combination", out: d.residual(), gin: rows})
	default:
		all := d.residual() * memory.Bytes(d.s.Layout.EP*d.s.Layout.ETP)
		t.op(op{name: "unpermutation", out: all, gin: rows})
		t.op(op{name: "scattering", out: d.residual(), gin: all})
	}
}
