// This file owns what one layer saves for one microbatch.

package plan

import "github.com/stowage-dev/stowage/plan/model"

// Activations returns the saved tensors of one layer and microbatch on one rank, in the
// order in which the forward pass saves them, before recompute and offload. The setup
// must be normalised.
func Activations(s *Setup, l model.Layer) []SavedTensor {
	t := newDims(s).layer(l)
	groups := make([]SavedTensor, len(t.saved))
	for i, x := range t.saved {
		groups[i] = x.SavedTensor
	}
	return groups
}

// layer returns the tape of one layer.
func (d *dims) layer(l model.Layer) *tape {
	t := &tape{attends: l.Attention != nil || l.MLA != nil}
	switch {
	case l.Parallel():
		d.parallel(t, l.Attention, l.Mamba)
	case l.Attention != nil:
		d.attention(t, l.Attention)
	case l.MLA != nil:
		d.mla(t, l.MLA)
	case l.Mamba != nil:
		d.mamba(t, l.Mamba)
	case l.DeltaNet != nil:
		d.deltaNet(t, l.DeltaNet)
	case l.Lightning != nil:
		d.lightning(t, l.Lightning)
	}
	scope := "attn"
	if l.Mamba != nil {
		scope = "mamba"
	}
	mixer := len(t.ops)
	t.mark(0, mixer, scope)
	switch {
	case l.Dense != nil:
		d.dense(t, l.Dense)
		t.mark(mixer, len(t.ops), "mlp")
	case l.MoE != nil:
		d.moe(t, l.MoE)
		t.mark(mixer, t.next(mixer, "shared fc2", "router")+1, "moe_router")
		t.mark(t.next(mixer, "shared fc2", "router")+1, len(t.ops), "moe")
	}
	return t
}
