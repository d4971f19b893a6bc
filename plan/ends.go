// This file owns the two ends of a model: the embedding, and the output layer with its
// loss. It also owns the heads that predict further tokens, which have both.

package plan

import (
	"fmt"

	"github.com/stowage-dev/stowage/memory"
)

// embedding returns the tape of the embedding. It saves only the token numbers, and its
// backward pass makes the gradient of the whole table.
func (d *dims) embedding() *tape {
	t := &tape{name: "embedding"}
	o := op{name: "embedding", out: d.gathered(), gout: d.residual(), work: d.size(d.vocab * d.h)}
	if d.dividesSequence() {
		o.temp = d.gathered()
		o.work += d.gathered()
	}
	i := t.op(o)
	t.save(i, i, SavedTensor{Group: "embedding", Tensor: "token numbers", Bytes: 8 * memory.Bytes(d.tokens)})
	if d.s.Kernels.Dropout > 0 {
		t.save(i, i, SavedTensor{Group: "embedding", Tensor: "dropout mask", Bytes: memory.Bytes(d.local * d.h)})
	}
	return t
}

// narrowOutput reports whether the output layer has inputs of eight bits or less.
func (d *dims) narrowOutput() bool { return d.s.Precision.OutputLayer && d.lowPrecision() }

// finalNorm appends the last norm.
func (d *dims) finalNorm(t *tape) {
	i := t.op(op{name: "final norm", gin: d.residual()})
	t.save(i, i, SavedTensor{Group: "loss", Tensor: "input of the final norm", Bytes: d.residual()})
	out := d.residual()
	if d.narrowOutput() {
		out = d.quantised(d.local * d.h)
	}
	t.save(i, i+1, SavedTensor{Group: "loss", Tensor: "output of the final norm", Bytes: out})
	t.save(i, i, d.stats("loss"))
}

// output appends the output layer and the loss of one head.
//
//   - TransformerEngine's loss works in place: the logits become their own gradient, two
//     bytes each.
//   - Megatron-LM's loss keeps the softmax in fp32, four bytes, and needs the logits of two
//     bytes beside it in both passes. Its fused loss is compiled, so the softmax does not
//     overwrite the logits in fp32, which takes four bytes more in the forward pass.
//   - An output layer in eight bits is TransformerEngine's. Its backward pass makes two copies
//     of the logits' gradient in eight bits, one for each product, and gathers the input itself.
func (d *dims) output(t *tape) {
	n := d.tokens * d.vocab
	layer := op{name: "output layer", out: d.size(n), gin: d.residual(), work: d.wgrad(d.vocab, d.h)}
	if d.dividesSequence() {
		// This is the input's gradient before it is scattered. The gathered input lies in
		// the shared buffer; see fixed.go.
		layer.work += d.gathered()
	}
	if d.narrowOutput() {
		layer.work += 2 * d.quantised(n)
		if d.dividesSequence() {
			layer.work += d.quantised(d.tokens * d.h)
		}
	}
	t.op(layer)
	loss := op{name: "loss", gin: d.size(n)}
	saved := SavedTensor{Group: "loss", Tensor: "softmax", Bytes: 4 * memory.Bytes(n)}
	switch d.s.Kernels.Loss {
	case "te":
		loss.gin, loss.work = 0, 0
		saved = SavedTensor{Group: "loss", Tensor: "logits, then their gradient", Bytes: d.size(n)}
		t.ops[len(t.ops)-1].out = 0
		i := t.op(loss)
		t.save(i-1, i-1, saved)
		return
	case "native-fused":
		loss.temp = 4 * memory.Bytes(n)
	}
	if d.elem == 4 {
		// The loss works on fp32 logits in place.
		t.ops[len(t.ops)-1].out, loss.gin = 0, 0
	}
	i := t.op(loss)
	t.save(i, i, saved)
	t.save(i, i, SavedTensor{Group: "loss", Tensor: "targets", Bytes: 9 * memory.Bytes(d.tokens)})
}

// loss returns the tape of the last norm, the output layer and the loss.
func (d *dims) loss() *tape {
	t := &tape{name: "loss"}
	d.finalNorm(t)
	d.output(t)
	return t
}

// mtp returns the tapes of one depth of multi-token prediction: the norms of the next
// tokens' embedding and of the hidden state, the projection of both, and the layers.
func (d *dims) mtp(depth int) []*tape {
	t := &tape{name: fmt.Sprintf("mtp %d", depth)}
	r := d.residual()
	i := t.op(op{name: "mtp norms", gin: 2 * r})
	t.save(i, i, SavedTensor{Group: "mtp", Tensor: "inputs of the norms", Bytes: 2 * r})
	proj := d.column("mtp projection", 2*d.h, d.h/d.tp)
	proj.out = r
	j := t.op(proj)
	t.save(i, j, SavedTensor{Group: "mtp", Tensor: "input of the projection", Bytes: 2 * d.quantised(d.local*d.h)})
	tapes := []*tape{t}
	for k, l := range d.m.MTP.Layers {
		u := d.layer(l)
		u.name = fmt.Sprintf("mtp %d layer %d", depth, k)
		tapes = append(tapes, u)
	}
	return tapes
}
