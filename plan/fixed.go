// This file owns what a rank holds whatever its parameters are: workspaces,
// caches, and what is left lying from the step before.

package plan

import (
	"slices"

	"github.com/stowage-dev/stowage/plan/model"
)

const mib = 1 << 20

// fixedItems are there throughout a step.
func (d *dims) fixedItems(rank int, s share) []Item {
	items := []Item{
		{CauseFixed, "TransformerEngine workspaces", d.teWorkspace(rank), true},
		{CauseFixed, "PyTorch workspaces", d.torchWorkspace(rank), true},
		{CauseFixed, "gradients returned by fused products", d.dummies(s), true},
		{CauseFixed, "shared buffer", d.sharedBuffer(rank), true},
		{CauseTransient, "attention mask", d.mask(rank), false},
		{CauseTransient, "deferred gradients of the output layer", d.deferred(rank), false},
	}
	return slices.DeleteFunc(items, func(it Item) bool { return it.Bytes == 0 })
}

func (d *dims) generation() int {
	if d.s.Hardware == nil {
		return 9
	}
	return d.s.Hardware.Generation
}

// anyLayer reports whether a rank holds such a layer.
func (d *dims) anyLayer(rank int, is func(model.Layer) bool) bool {
	for _, c := range d.s.chunks(rank) {
		if slices.ContainsFunc(d.m.Layers[c.First:c.Last], is) {
			return true
		}
		if c.MTP && d.m.MTP != nil && slices.ContainsFunc(d.m.MTP.Layers, is) {
			return true
		}
	}
	return false
}

func isMoE(l model.Layer) bool { return l.MoE != nil }

func (d *dims) hasLoss(rank int) bool {
	return slices.ContainsFunc(d.s.chunks(rank), func(c Stage) bool { return c.Loss })
}

// teWorkspace: one for products, 32 MiB from Hopper on and 4 MiB before; four
// more for the streams of grouped products, three for those of products that
// overlap with TP communication.
func (d *dims) teWorkspace(rank int) int64 {
	experts := d.anyLayer(rank, isMoE)
	if d.s.Kernels.Local && !experts {
		return 0 // but routers use them always
	}
	size, n := int64(32*mib), int64(1)
	if d.generation() < 9 {
		size = 4 * mib
	}
	if d.s.Kernels.GroupedGEMM && experts {
		n += 4
	}
	if d.s.Kernels.TPCommOverlap {
		n += 3
	}
	return n * size
}

// torchWorkspace: PyTorch has a cuBLAS handle with a workspace for each thread,
// the forward and the backward one. It is 32 MiB on Hopper and where determinism
// asks for it (CUBLAS_WORKSPACE_CONFIG=:4096:8), else 8 MiB and 128 KiB. Only
// what TransformerEngine does not compute needs it: output layer, router,
// unfused attention.
func (d *dims) torchWorkspace(rank int) int64 {
	if !d.s.Kernels.Local && !d.hasLoss(rank) && !d.unfused() && !d.anyLayer(rank, isMoE) {
		return 0
	}
	size := int64(8*mib + 128<<10)
	if d.generation() == 9 || d.s.Kernels.Deterministic {
		size = 32 * mib
	}
	return 2 * size
}

// dummies: a product that accumulates the weight's gradient itself returns a
// tensor of the weight's shape that nobody reads. TransformerEngine keeps one for
// each shape for ever, also the output layer's.
func (d *dims) dummies(s share) int64 {
	if !d.s.Kernels.GradFusion || d.s.Kernels.Local {
		return 0
	}
	var n int64
	for m := range s.shapes {
		n += d.elem * m.rows * m.cols
	}
	return n
}

// sharedBuffer is Megatron's one buffer for gathered inputs, which grows to the
// largest use: the output layer's input where the sequence is divided, all
// tokens of an expert group where tokens are gathered, the scores of Megatron's
// own attention.
func (d *dims) sharedBuffer(rank int) int64 {
	var n int64
	if d.hasLoss(rank) && d.sp() {
		n = d.gathered()
	}
	k := d.s.Kernels
	if (k.Dispatcher == "" || k.Dispatcher == "allgather") && d.anyLayer(rank, isMoE) {
		if ranks := int64(d.s.Layout.EP * d.s.Layout.ETP); ranks > 1 {
			n = max(n, d.residual()*ranks)
		}
	}
	if k.Local {
		for _, l := range d.m.Layers {
			if l.Attention != nil {
				n = max(n, d.elem*d.tokens*int64(d.s.Batch.Seq/d.s.Layout.CP)*int64(l.Attention.Heads)/d.tp)
			}
		}
	}
	return n
}

// boundary is what pipeline communication holds beside the inputs of chunks: in a
// forward pass the input of the microbatch before, its gradient, and a tensor on
// its way; in a backward pass the latter.
func (d *dims) boundary() (forward, backward int64) {
	if d.s.Layout.PP == 1 {
		return 0, 0
	}
	return 3 * d.residual(), d.residual()
}

// deferred is what is kept to compute the output layer's weight gradient later:
// the gradients of the logits and the layer's inputs.
func (d *dims) deferred(rank int) int64 {
	k := d.s.Kernels
	if !k.DeferEmbeddingWgrad || !d.hasLoss(rank) || d.s.Layout.PP == 1 {
		return 0
	}
	n := int64(d.s.Microbatches())
	if k.WgradDeferral > 0 {
		n = min(n, int64(k.WgradDeferral))
	}
	return n * (d.elem*d.tokens*d.vocab + d.gathered())
}

// mask is the attention mask that comes with a batch, a byte for each pair of
// positions, on the first and the last stage.
func (d *dims) mask(rank int) int64 {
	if d.s.Kernels.NoAttentionMask || rank != 0 && !d.hasLoss(rank) {
		return 0
	}
	seq := int64(d.s.Batch.Seq)
	return int64(d.s.Batch.Micro) * seq * seq / int64(d.s.Layout.CP)
}

// left is what the last step left behind until the next one replaces it: the
// input of each chunk and its gradient, which the module keeps a reference to,
// and the optimiser's copy of gradients.
func (d *dims) left(rank int, s share) []Item {
	var inputs int64
	for i, c := range d.s.chunks(rank) {
		if !(c.Embedding && i == 0) {
			inputs += 2 * d.residual()
		}
	}
	if d.s.Layout.PP == 1 {
		inputs = 0
	}
	items := []Item{
		{CauseFixed, "chunk inputs of the last step", inputs, true},
		{CauseGradients, "main gradients of the last step", d.leftGradients(s), true},
		{CausePools, "parameters gathered for the next step", d.gatheredEarly(s), true},
	}
	return slices.DeleteFunc(items, func(it Item) bool { return it.Bytes == 0 })
}
