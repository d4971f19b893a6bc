// This file owns multi-head latent attention.

package layer

import (
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// latent is x + proj(attend(up(norm(down(norm(x)))))). Queries, and keys with values, come
// from narrow projections of the hidden state. A part of each key comes from the narrow
// projection itself. All heads share it, and only it is rotated by its position. It saves
//
//	attn_norm    x
//	qkv_linear   norm(x)
//	mla_up_proj  the narrow projections before their norms, with the shared key rotated
//	core_attn    queries, keys and values
//	attn_proj    the output of attention, and its sums
//
// All but the first can be recomputed.
type latent struct {
	model.MLA
	norm   norm
	q      linear  // from the narrow projection if there is one, else from norm(x)
	qDown  *linear // nil if queries have no narrow projection
	qNorm  *norm   // nil without LatentNorm and without qDown
	kvDown linear
	kvNorm *norm
	kvUp   linear
	core   core
	table  device.Range // of rotary positions
}

func newMLA(u *Unit, a model.MLA, s Settings, table device.Range) part {
	l := &latent{
		MLA:    a,
		norm:   norm{u.weight("input_layernorm.weight"), s.Epsilon},
		kvDown: linear{u.weight("linear_kv_down_proj.weight")},
		kvUp:   linear{u.weight("linear_kv_up_proj.weight")},
		core: core{linear{u.weight("linear_proj.weight")}, nn.Attention{
			Heads: a.Heads, KVHeads: a.Heads, KeyDim: a.Nope + a.Rope, ValueDim: a.V,
			Scale: float32(1 / math.Sqrt(float64(a.Nope+a.Rope))),
		}},
		table: table,
	}
	if a.QRank == 0 {
		l.q = linear{u.weight("linear_q_proj.weight")}
	} else {
		l.q, l.qDown = linear{u.weight("linear_q_up_proj.weight")}, &linear{u.weight("linear_q_down_proj.weight")}
	}
	if a.LatentNorm {
		l.kvNorm = &norm{u.weight("kv_layernorm.weight"), s.Epsilon}
		if a.QRank > 0 {
			l.qNorm = &norm{u.weight("q_layernorm.weight"), s.Epsilon}
		}
	}
	return l
}

// Forward returns the residual stream after attention.
func (a *latent) Forward(p *Pass, x Mat) Mat {
	return p.within(memory.Attn, x.Cols, func() Mat { return a.forward(p, x) })
}

func (a *latent) forward(p *Pass, x Mat) Mat {
	t, h := x.Rows, x.Cols
	xn := a.norm.saved(p, "attn_norm", "qkv_linear", x)
	var down, qkv Mat
	p.run("mla_up_proj", func(again bool) []*engine.Tensor {
		in := xn.Matrix
		if again {
			g := p.load("qkv_linear")
			defer g.Done()
			in = g.mat(0, p.Number, t, h)
		}
		down = a.narrow(p, in)
		return []*engine.Tensor{down.t}
	})
	p.run("core_attn", func(again bool) []*engine.Tensor {
		in, from := xn.Matrix, down.Matrix
		if again {
			if a.qDown == nil {
				g := p.load("qkv_linear")
				defer g.Done()
				in = g.mat(0, p.Number, t, h)
			}
			g := p.load("mla_up_proj")
			defer g.Done()
			from = g.mat(0, p.Number, t, a.narrowWidth())
		}
		qkv = a.wide(p, in, from)
		return []*engine.Tensor{qkv.t}
	})
	down.Free()
	xn.Free()
	return a.core.forward(p, x, qkv)
}

// narrowWidth returns the columns of the narrow projections: keys and values, the shared
// key, and queries if they have a narrow projection.
func (a *latent) narrowWidth() int { return a.KVRank + a.Rope + a.QRank }

func (a *latent) narrowKV(m nn.Matrix) nn.Matrix { return m.Columns(0, a.KVRank) }
func (a *latent) shared(m nn.Matrix) nn.Matrix   { return m.Columns(a.KVRank, a.Rope) }
func (a *latent) narrowQ(m nn.Matrix) nn.Matrix  { return m.Columns(a.KVRank+a.Rope, a.QRank) }

// narrow computes the narrow projections from norm(x).
func (a *latent) narrow(p *Pass, xn nn.Matrix) Mat {
	y := p.New(xn.Rows, a.narrowWidth())
	a.kvDown.forward(p, y.Columns(0, a.KVRank+a.Rope), xn, nn.Matrix{})
	if a.qDown != nil {
		a.qDown.forward(p, a.narrowQ(y.Matrix), xn, nn.Matrix{})
	}
	a.turnShared(p, y.Matrix, false)
	return y
}

// wide computes queries, keys and values from the narrow projections. It computes queries
// from norm(x) if they have no narrow projection.
func (a *latent) wide(p *Pass, xn, down nn.Matrix) Mat {
	y := p.New(down.Rows, a.core.width())
	q, _, _ := a.core.split(y.Matrix)
	if a.qDown == nil {
		a.q.forward(p, q, xn, nn.Matrix{})
	} else {
		a.through(p, a.qNorm, a.narrowQ(down), func(in nn.Matrix) { a.q.forward(p, q, in, nn.Matrix{}) })
	}
	a.turnQueries(p, y.Matrix, false)
	kv := p.New(down.Rows, a.Heads*(a.Nope+a.V))
	a.through(p, a.kvNorm, a.narrowKV(down), func(in nn.Matrix) {
		a.kvUp.forward(p, kv.Matrix, in, nn.Matrix{})
	})
	nn.SpreadLatent(p.S, a.columns(y.Matrix, kv.Matrix, a.shared(down)))
	kv.Free()
	return y
}

// through calls use with a narrow projection, normalised if it has a norm.
func (a *latent) through(p *Pass, n *norm, x nn.Matrix, use func(nn.Matrix)) {
	if n == nil {
		use(x)
		return
	}
	y := n.forward(p, x)
	use(y.Matrix)
	y.Free()
}

func (a *latent) columns(qkv, kv, shared nn.Matrix) nn.Latent {
	_, k, v := a.core.split(qkv)
	return nn.Latent{K: k, V: v, KV: kv, Shared: shared, Heads: a.Heads, Nope: a.Nope}
}

// turnQueries rotates the last part of each query by its position, or back if inverse is
// set.
func (a *latent) turnQueries(p *Pass, qkv nn.Matrix, inverse bool) {
	q, _, _ := a.core.split(qkv)
	nn.Rope(p.S, nn.Rotation{
		X: q, Heads: a.Heads, Head: a.Nope + a.Rope, At: a.Nope, Width: a.Rope,
		Seq: p.Seq, Table: a.table, Inverse: inverse,
	})
}

// turnShared rotates the shared key.
func (a *latent) turnShared(p *Pass, down nn.Matrix, inverse bool) {
	nn.Rope(p.S, nn.Rotation{
		X: a.shared(down), Heads: 1, Head: a.Rope, Width: a.Rope,
		Seq: p.Seq, Table: a.table, Inverse: inverse,
	})
}

// Backward returns the gradient of the layer's input.
func (a *latent) Backward(p *Pass, dy Mat) Mat {
	return p.within(memory.Attn, dy.Cols, func() Mat { return a.backward(p, dy) })
}

func (a *latent) backward(p *Pass, dy Mat) Mat {
	t, h := dy.Rows, dy.Cols
	dqkv := a.core.backward(p, dy)
	dq, _, _ := a.core.split(dqkv.Matrix)
	a.turnQueries(p, dqkv.Matrix, true)
	ddown := a.wideBackward(p, dqkv)
	in := p.load("qkv_linear")
	xn := in.mat(0, p.Number, t, h)
	dkv := ddown.Columns(0, a.KVRank+a.Rope)
	q := &a.q
	if a.qDown != nil {
		q, dq = a.qDown, a.narrowQ(ddown.Matrix)
	}
	a.kvDown.addGrad(p, dkv, xn)
	q.addGrad(p, dq, xn)
	in.Done()
	dxn := p.New(t, h)
	a.kvDown.backward(p, dxn.Matrix, dkv, nn.Matrix{})
	q.backward(p, dxn.Matrix, dq, dxn.Matrix)
	ddown.Free()
	dqkv.Free()
	return a.norm.savedBackward(p, "attn_norm", dxn, dy)
}

// wideBackward returns the gradient of the narrow projections.
func (a *latent) wideBackward(p *Pass, dqkv Mat) Mat {
	t := dqkv.Rows
	g := p.load("mla_up_proj")
	defer g.Done()
	down, ddown := g.mat(0, p.Number, t, a.narrowWidth()), p.New(t, a.narrowWidth())
	dkv := p.New(t, a.Heads*(a.Nope+a.V))
	nn.GatherLatent(p.S, a.columns(dqkv.Matrix, dkv.Matrix, a.shared(ddown.Matrix)))
	a.turnShared(p, ddown.Matrix, true)
	a.upBackward(p, a.kvUp, a.kvNorm, a.narrowKV(ddown.Matrix), a.narrowKV(down), dkv.Matrix)
	dkv.Free()
	if a.qDown != nil {
		dq, _, _ := a.core.split(dqkv.Matrix)
		a.upBackward(p, a.q, a.qNorm, a.narrowQ(ddown.Matrix), a.narrowQ(down), dq)
	}
	return ddown
}

// upBackward computes the gradient dx of a narrow projection x from the gradient of its up
// projection's output.
func (a *latent) upBackward(p *Pass, up linear, n *norm, dx, x, dy nn.Matrix) {
	a.through(p, n, x, func(in nn.Matrix) { up.addGrad(p, dy, in) })
	up.backward(p, dx, dy, nn.Matrix{})
	if n != nil {
		n.backward(p, dx, x, dx, nn.Matrix{})
	}
}
