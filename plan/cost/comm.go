// This file owns communication inside a layer and between replicas: its bytes, its links,
// and the part that compute does not hide.

package cost

import (
	"math"

	"github.com/stowage-dev/stowage/plan/model"
)

// communicate adds the collectives of a layer.
func (t *tally) communicate(l model.Layer) {
	t.tensor(l)
	t.context(l)
	if l.MoE != nil {
		t.experts(l.MoE)
	}
}

// tensor adds the collectives of tensor parallelism. The sequence is gathered before the
// first product of a block and scattered after its last. The backward pass does the
// reverse, and gathers the input once more for the weights' gradient. Without sequence
// parallelism two all-reduces move the same bytes, except for that last gather.
func (t *tally) tensor(l model.Layer) {
	m := t.m
	lay := m.setup.Layout
	if lay.TP == 1 {
		return
	}
	// Gathers send what the product multiplies, in its format. Sums are scattered in bf16.
	width := (m.width + 2) / 2
	bytes := width * m.tokens * float64(m.setup.Model.Hidden) * float64(lay.TP-1) / float64(lay.TP)
	once := Seconds(bytes/m.link(lay.TP, 1)) + collectiveStart
	// Unless user buffers overlap all of them with products, each pass waits for two. The
	// backward pass hides the gather of the input behind the product of its gradient. User
	// buffers divide each into as many pieces as there are ranks. A rank begins with its own
	// piece while a gather brings the others, but only the sum of the last piece can be
	// scattered after the last product.
	forward, backward := 2.0, 2.0
	if m.setup.Kernels.TPCommOverlap {
		forward, backward = 1/float64(lay.TP), 1/float64(lay.TP)
	}
	add := func(x part) {
		w := t.workOf(x)
		w.sentForward += Seconds(forward) * once
		w.sentBackward += Seconds(backward) * once
	}
	switch {
	case l.Attention != nil || l.MLA != nil || l.DeltaNet != nil || l.Lightning != nil:
		add(attnProj)
	case l.Mamba != nil:
		add(mambaOut)
	}
	if l.Parallel() {
		add(mambaOut)
	}
	switch {
	case l.Dense != nil:
		add(denseMLP)
	case l.MoE != nil && l.MoE.SharedWidth > 0:
		add(sharedExperts)
	}
}

// context adds the exchange of keys and values between context-parallel ranks. Attention
// hides all but the first piece.
func (t *tally) context(l model.Layer) {
	m := t.m
	lay := m.setup.Layout
	if lay.CP == 1 || l.Attention == nil && l.MLA == nil {
		return
	}
	var kv float64
	if a := l.Attention; a != nil {
		kv = 2 * float64(a.KVHeads*a.HeadDim)
	} else {
		kv = float64(l.MLA.Heads * (l.MLA.Nope + l.MLA.Rope + l.MLA.V))
	}
	piece := 2 * m.tokens * kv / float64(lay.TP)
	once := Seconds(piece / m.link(lay.CP, lay.TP))
	w := t.workOf(coreAttn)
	// The rest is hidden unless it takes longer than the attention.
	rest := Seconds(lay.CP-1) * once
	w.sentForward += max(once, rest-w.forward)
	w.sentBackward += max(2*once, 2*rest-w.backward)
}

// experts adds the exchange of rows with the ranks that hold the experts.
func (t *tally) experts(e *model.MoE) {
	m := t.m
	lay := m.setup.Layout
	group := lay.EP * lay.ETP
	if group == 1 {
		return
	}
	width := float64(m.setup.Model.Hidden)
	if e.Latent > 0 {
		width = float64(e.Latent)
	}
	shown := Seconds(m.exchangeRows(e, 2*width))
	for _, x := range []part{dispatch, combine} {
		w := t.workOf(x)
		w.sentForward += shown
		w.sentBackward += shown
	}
}

// plainDispatch reports whether the framework's own collectives exchange rows.
func (m *Model) plainDispatch() bool {
	d := m.setup.Kernels.Dispatcher
	return d != "deepep" && d != "hybridep"
}

// exchangeRows returns the time of one exchange of rows of the given size.
func (m *Model) exchangeRows(e *model.MoE, row float64) float64 {
	lay := m.setup.Layout
	group := lay.EP * lay.ETP
	nodes := math.Ceil(float64(group) / float64(max(m.gpu.FastGroup, 1)))
	if d := m.setup.Kernels.Dispatcher; d == "" || d == "allgather" {
		// Every rank receives every token.
		return m.local * float64(group-1) * row / m.link(group, 1)
	}
	inside := m.rows(e) * row * (1 - nodes/float64(group)) / (m.gpu.FastLink * fastShare)
	if nodes <= 1 {
		return inside
	}
	// A token crosses to a node once for each of its experts there, or once for all of them
	// if the dispatcher copies it on arrival. Of n nodes, k choices reach n(1-(1-1/n)^k),
	// and one of the n is the token's own.
	crossings := float64(e.TopK)
	if !m.plainDispatch() {
		crossings = nodes * (1 - math.Pow(1-1/nodes, crossings))
	}
	outside := m.local * float64(lay.ETP) * crossings * (1 - 1/nodes) * row / (m.gpu.Network * networkShare)
	return max(inside, outside)
}

// link returns the bandwidth of one GPU in a group of ranks that lie the given distance
// apart. The network limits a group that is larger than a domain of fast links. Each GPU of
// the group in a node has its own share of the network.
func (m *Model) link(ranks, apart int) float64 {
	g := m.gpu
	if ranks*apart <= max(g.FastGroup, 1) {
		return g.FastLink * fastShare
	}
	near := min(max(g.FastGroup/apart, 1), ranks)
	return min(g.FastLink*fastShare, g.Network*float64(near)*networkShare)
}
