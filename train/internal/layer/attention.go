// This file owns attention with grouped queries.

package layer

import (
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// attention is x + proj(attend(qkv(norm(x)))). It saves
//
//	attn_norm   x
//	qkv_linear  norm(x)
//	qk_norm     queries and keys before their norms, if they have any
//	core_attn   queries, keys and values
//	attn_proj   the output of attention, and its sums
//
// All but the first can be recomputed.
type attention struct {
	model.Attention
	norm  norm
	qkv   linear
	qn    *norm
	kn    *norm
	core  core
	table device.Range // of rotary positions
}

func newAttention(u *Unit, a model.Attention, s Settings, table device.Range) *attention {
	t := &attention{
		Attention: a,
		norm:      norm{u.weight("input_layernorm.weight"), s.Epsilon},
		qkv:       linear{u.weight("linear_qkv.weight")},
		core: core{linear{u.weight("linear_proj.weight")}, nn.Attention{
			Heads: a.Heads, KVHeads: a.KVHeads, KeyDim: a.HeadDim, ValueDim: a.HeadDim,
			Scale: float32(1 / math.Sqrt(float64(a.HeadDim))), Window: a.Window,
		}},
		table: table,
	}
	if a.QKNorm {
		t.qn, t.kn = &norm{u.weight("q_layernorm.weight"), s.Epsilon}, &norm{u.weight("k_layernorm.weight"), s.Epsilon}
	}
	return t
}

// Forward returns the residual stream after attention.
func (a *attention) Forward(p *Pass, x Mat) Mat {
	return p.within(memory.Attn, x.Cols, func() Mat { return a.forward(p, x) })
}

func (a *attention) forward(p *Pass, x Mat) Mat {
	width := a.core.width()
	xn := a.norm.saved(p, "attn_norm", "qkv_linear", x)
	var qkv, raw Mat
	if a.QKNorm {
		p.run("qk_norm", func(again bool) []*engine.Tensor {
			raw = a.project(p, xn, again, "qkv_linear", width)
			return []*engine.Tensor{raw.t}
		})
	}
	p.run("core_attn", func(again bool) []*engine.Tensor {
		if a.QKNorm {
			qkv = a.normalised(p, raw, again)
		} else {
			qkv = a.project(p, xn, again, "qkv_linear", width)
		}
		a.rotate(p, qkv.Matrix, false)
		return []*engine.Tensor{qkv.t}
	})
	if a.QKNorm {
		raw.Free()
	}
	xn.Free()
	return a.core.forward(p, x, qkv)
}

// project returns queries, keys and values.
func (a *attention) project(p *Pass, xn Mat, again bool, from string, width int) Mat {
	in := xn.Matrix
	if again {
		g := p.load(from)
		defer g.Done()
		in = g.mat(0, p.Number, p.Tokens(), a.qkv.u.Params[a.qkv.i].Cols)
	}
	y := p.New(in.Rows, width)
	a.qkv.forward(p, y.Matrix, in, nn.Matrix{})
	return y
}

// normalised returns them with queries and keys normalised head by head.
func (a *attention) normalised(p *Pass, raw Mat, again bool) Mat {
	width := a.core.width()
	in := raw.Matrix
	if again {
		g := p.load("qk_norm")
		defer g.Done()
		in = g.mat(0, p.Number, p.Tokens(), width)
	}
	y := p.New(in.Rows, width)
	q, k, v := a.core.split(y.Matrix)
	fromQ, fromK, fromV := a.core.split(in)
	nn.RMSNorm(p.S, nn.Norm{Y: q, X: fromQ, W: row(a.qn.w()), Epsilon: a.qn.epsilon})
	nn.RMSNorm(p.S, nn.Norm{Y: k, X: fromK, W: row(a.kn.w()), Epsilon: a.kn.epsilon})
	copyMatrix(p, v, fromV)
	return y
}

// rotate rotates queries and keys by their positions, or back if inverse is set.
func (a *attention) rotate(p *Pass, qkv nn.Matrix, inverse bool) {
	if !a.Rotary {
		return
	}
	q, k, _, _ := a.core.widths()
	// Queries and keys lie side by side as heads of one width.
	nn.Rope(p.S, nn.Rotation{
		X: qkv.Columns(0, q+k), Heads: a.Heads + a.KVHeads, Head: a.HeadDim, Width: a.HeadDim,
		Seq: p.Seq, Table: a.table, Inverse: inverse,
	})
}

// Backward returns the gradient of the layer's input.
func (a *attention) Backward(p *Pass, dy Mat) Mat {
	return p.within(memory.Attn, dy.Cols, func() Mat { return a.backward(p, dy) })
}

func (a *attention) backward(p *Pass, dy Mat) Mat {
	t, h := dy.Rows, dy.Cols
	dqkv := a.core.backward(p, dy)
	a.rotate(p, dqkv.Matrix, true)
	if a.QKNorm {
		g := p.load("qk_norm")
		q, k, _ := a.core.split(g.mat(0, p.Number, t, a.core.width()))
		dq, dk, _ := a.core.split(dqkv.Matrix)
		a.qn.backward(p, dq, q, dq, nn.Matrix{})
		a.kn.backward(p, dk, k, dk, nn.Matrix{})
		g.Done()
	}
	in := p.load("qkv_linear")
	a.qkv.addGrad(p, dqkv.Matrix, in.mat(0, p.Number, t, h))
	in.Done()
	dxn := p.New(t, h)
	a.qkv.backward(p, dxn.Matrix, dqkv.Matrix, nn.Matrix{})
	dqkv.Free()
	return a.norm.savedBackward(p, "attn_norm", dxn, dy)
}

// copyMatrix copies a matrix of the same type.
func copyMatrix(p *Pass, dst, src nn.Matrix) {
	p.S.Copy2D(rect(dst), rect(src))
}

func rect(m nn.Matrix) device.Rect {
	size := m.Type.Size()
	pitch := m.Pitch
	if pitch == 0 {
		pitch = m.Cols
	}
	return device.Rect{Range: m.Range.Slice(0, size*memory.Bytes(m.Cols)), Rows: m.Rows, Pitch: size * memory.Bytes(pitch)}
}
