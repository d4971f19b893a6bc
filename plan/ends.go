// This file owns the two ends of a model: the embedding, and the output layer
// with its loss; and the heads that predict further tokens, which have both.

package plan

import "fmt"

// embedding keeps only the token numbers; its backward pass makes the gradient of
// the whole table.
func (d *dims) embedding() *tape {
	t := &tape{name: "embedding"}
	o := op{name: "embedding", out: d.gathered(), gout: d.residual(), work: d.elem * d.vocab * d.h}
	if d.sp() {
		o.temp = d.gathered()
		o.work += d.gathered()
	}
	i := t.op(o)
	t.save(i, i, SavedTensor{Group: "embedding", Tensor: "token numbers", Bytes: 8 * d.tokens})
	if d.s.Kernels.Dropout > 0 {
		t.save(i, i, SavedTensor{Group: "embedding", Tensor: "dropout mask", Bytes: d.local * d.h})
	}
	return t
}

// head is the last norm.
func (d *dims) finalNorm(t *tape) {
	i := t.op(op{name: "final norm", gin: d.residual()})
	t.save(i, i, SavedTensor{Group: "loss", Tensor: "input of the final norm", Bytes: d.residual()})
	t.save(i, i+1, SavedTensor{Group: "loss", Tensor: "output of the final norm", Bytes: d.residual()})
	t.save(i, i, d.stats("loss"))
}

// output is the output layer and the loss of one head.
//
//   - TransformerEngine's loss works in place: the logits become their own
//     gradient, two bytes each.
//   - Megatron's keeps the softmax in fp32, four bytes, and needs the logits of
//     two bytes beside it in both passes; the fused one is compiled, so that the
//     softmax does not overwrite the logits in fp32: four bytes more while the
//     forward pass runs.
func (d *dims) output(t *tape) {
	n := d.tokens * d.vocab
	layer := op{name: "output layer", out: d.elem * n, gin: d.residual(), work: d.wgrad(d.vocab, d.h)}
	if d.sp() {
		// The input's gradient before it is scattered; the gathered input lies in
		// the shared buffer, see fixed.go.
		layer.work += d.gathered()
	}
	t.op(layer)
	loss := op{name: "loss", gin: d.elem * n}
	saved := SavedTensor{Group: "loss", Tensor: "softmax", Bytes: 4 * n}
	switch d.s.Kernels.Loss {
	case "te":
		loss.gin, loss.work = 0, 0
		saved = SavedTensor{Group: "loss", Tensor: "logits, then their gradient", Bytes: d.elem * n}
		t.ops[len(t.ops)-1].out = 0
		i := t.op(loss)
		t.save(i-1, i-1, saved)
		return
	case "native-fused":
		loss.temp = 4 * n
	}
	if d.elem == 4 {
		// Logits in fp32 are worked on in place.
		t.ops[len(t.ops)-1].out, loss.gin = 0, 0
	}
	i := t.op(loss)
	t.save(i, i, saved)
	t.save(i, i, SavedTensor{Group: "loss", Tensor: "targets", Bytes: 9 * d.tokens})
}

// loss is the end of the model.
func (d *dims) loss() *tape {
	t := &tape{name: "loss"}
	d.finalNorm(t)
	d.output(t)
	return t
}

// mtp is one depth: the norms of the embedding of the next tokens and of the
// hidden state, the projection of both to one, and the layers.
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
