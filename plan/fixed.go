// This file owns what a rank holds regardless of its parameters: workspaces, caches, and
// what the last step left behind.

package plan

import (
	"slices"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// fixedItems returns what is held throughout a step.
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

// anyLayer reports whether a rank holds a layer of a kind.
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

// teWorkspace returns the size of TransformerEngine's workspaces: one for products (32 MiB
// from Hopper on, 4 MiB before), four for the streams of grouped products, and three for
// the streams of products that overlap with TP communication.
func (d *dims) teWorkspace(rank int) memory.Bytes {
	experts := d.anyLayer(rank, isMoE)
	if d.s.Kernels.Local && !experts {
		return 0 // routers use torchWorkspace
	}
	size, n := 32*memory.MiB, memory.Bytes(1)
	if d.generation() < 9 {
		size = 4 * memory.MiB
	}
	if d.s.Kernels.GroupedGEMM && experts {
		n += 4
	}
	if d.s.Kernels.TPCommOverlap {
		n += 3
	}
	return n * size
}

// torchWorkspace returns the size of PyTorch's workspaces. PyTorch has a cuBLAS handle with
// a workspace for the forward thread and one for the backward thread. A workspace has 32
// MiB on Hopper, or if determinism requires it (CUBLAS_WORKSPACE_CONFIG=:4096:8), and else
// 8 MiB and 128 KiB. The output layer, the router and unfused attention use it, because
// TransformerEngine does not compute them.
func (d *dims) torchWorkspace(rank int) memory.Bytes {
	if !d.s.Kernels.Local && !(d.hasLoss(rank) && !d.narrowOutput()) && !d.unfused() && !d.anyLayer(rank, isMoE) {
		return 0
	}
	size := 8*memory.MiB + 128*memory.KiB
	if d.generation() == 9 || d.s.Kernels.Deterministic {
		size = 32 * memory.MiB
	}
	return 2 * size
}

// dummies returns the size of tensors that nobody reads. A product that accumulates the
// weight's gradient itself returns a tensor of the weight's shape. TransformerEngine keeps
// one for each shape, including the output layer's.
func (d *dims) dummies(s share) memory.Bytes {
	if !d.s.Kernels.GradFusion || d.s.Kernels.Local {
		return 0
	}
	var n memory.Bytes
	for m := range s.shapes {
		n += d.size(m.rows * m.cols)
	}
	return n
}

// sharedBuffer returns the size of Megatron-LM's buffer for gathered inputs. It grows to
// the largest use: the output layer's input if the sequence is divided, all tokens of an
// expert group if tokens are gathered, or the scores of Megatron-LM's own attention.
func (d *dims) sharedBuffer(rank int) memory.Bytes {
	var n memory.Bytes
	if d.hasLoss(rank) && d.dividesSequence() && !d.narrowOutput() {
		n = d.gathered()
	}
	k := d.s.Kernels
	if (k.Dispatcher == "" || k.Dispatcher == "allgather") && d.anyLayer(rank, isMoE) {
		if ranks := memory.Bytes(d.s.Layout.EP * d.s.Layout.ETP); ranks > 1 {
			n = max(n, d.residual()*ranks)
		}
	}
	if k.Local {
		for _, l := range d.m.Layers {
			if l.Attention != nil {
				n = max(n, d.size(d.tokens*int64(d.s.Batch.Seq/d.s.Layout.CP)*int64(l.Attention.Heads))/memory.Bytes(d.tp))
			}
		}
	}
	return n
}

// boundary returns what pipeline communication holds in addition to the inputs of chunks. A
// forward pass holds the input of the last microbatch, its gradient, and a tensor that is
// being sent. A backward pass holds only the tensor that is being sent.
func (d *dims) boundary() (forward, backward memory.Bytes) {
	if d.s.Layout.PP == 1 {
		return 0, 0
	}
	return 3 * d.residual(), d.residual()
}

// deferred returns what is kept to compute the output layer's weight gradient later: the
// gradients of the logits and the inputs of the layer.
func (d *dims) deferred(rank int) memory.Bytes {
	k := d.s.Kernels
	if !k.DeferEmbeddingWgrad || !d.hasLoss(rank) || d.s.Layout.PP == 1 {
		return 0
	}
	n := memory.Bytes(d.s.Microbatches())
	if k.WgradDeferral > 0 {
		n = min(n, memory.Bytes(k.WgradDeferral))
	}
	return n * (d.size(d.tokens*d.vocab) + d.gathered())
}

// mask returns the size of the attention mask of a batch on the first and the last stage: a
// byte for each pair of positions.
func (d *dims) mask(rank int) memory.Bytes {
	if d.s.Kernels.NoAttentionMask || rank != 0 && !d.hasLoss(rank) {
		return 0
	}
	seq := int64(d.s.Batch.Seq)
	return memory.Bytes(int64(d.s.Batch.Micro) * seq * seq / int64(d.s.Layout.CP))
}

// leftBehind returns what the last step leaves until the next one replaces it: the input and
// gradient of each chunk, which the module refers to, and the optimiser's copy of
// gradients.
func (d *dims) leftBehind(rank int, s share) []Item {
	var inputs memory.Bytes
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
