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
	proj  linear
	table device.Range // of rotary positions
}

func newAttention(u *Unit, a model.Attention, s Settings, table device.Range) *attention {
	t := &attention{
		Attention: a,
		norm:      norm{u.weight("input_layernorm.weight"), s.Epsilon},
		qkv:       linear{u.weight("linear_qkv.weight")},
		proj:      linear{u.weight("linear_proj.weight")},
		table:     table,
	}
	if a.QKNorm {
		t.qn, t.kn = &norm{u.weight("q_layernorm.weight"), s.Epsilon}, &norm{u.weight("k_layernorm.weight"), s.Epsilon}
	}
	return t
}

func (a *attention) widths() (q, kv, all int) {
	q, kv = a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	return q, kv, q + 2*kv
}

// Forward returns the residual stream after attention.
func (a *attention) Forward(p *Pass, x Mat) Mat {
	return p.within(memory.Attn, x.Cols, func() Mat { return a.forward(p, x) })
}

func (a *attention) forward(p *Pass, x Mat) Mat {
	t, h := x.Rows, x.Cols
	qw, _, width := a.widths()
	xn := a.norm.saved(p, "attn_norm", "qkv_linear", x)
	var qkv, raw, o Mat
	var lse *engine.Tensor
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
	p.run("attn_proj", func(again bool) []*engine.Tensor {
		in := qkv.Matrix
		if again {
			g := p.load("core_attn")
			defer g.Done()
			in = g.mat(0, p.Number, t, width)
		}
		o, lse = p.New(t, qw), p.words(t*a.Heads)
		nn.Attend(p.S, a.attend(p, in, o.Matrix, lse.Range()))
		return []*engine.Tensor{o.t, lse}
	})
	lse.Free()
	qkv.Free()
	y := p.New(t, h)
	a.proj.forward(p, y.Matrix, o.Matrix, x.Matrix)
	o.Free()
	return y
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
	qw, kvw, width := a.widths()
	in := raw.Matrix
	if again {
		g := p.load("qk_norm")
		defer g.Done()
		in = g.mat(0, p.Number, p.Tokens(), width)
	}
	y := p.New(in.Rows, width)
	nn.RMSNorm(p.S, nn.Norm{Y: y.Columns(0, qw), X: in.Columns(0, qw), W: row(a.qn.w()), Epsilon: a.qn.epsilon})
	nn.RMSNorm(p.S, nn.Norm{Y: y.Columns(qw, kvw), X: in.Columns(qw, kvw), W: row(a.kn.w()), Epsilon: a.kn.epsilon})
	copyMatrix(p, y.Columns(qw+kvw, kvw), in.Columns(qw+kvw, kvw))
	return y
}

// rotate rotates queries and keys by their positions, or back if inverse is set.
func (a *attention) rotate(p *Pass, qkv nn.Matrix, inverse bool) {
	if !a.Rotary {
		return
	}
	qw, kvw, _ := a.widths()
	// Queries and keys lie side by side as heads of one width.
	nn.Rope(p.S, nn.Rotation{
		X: qkv.Columns(0, qw+kvw), Heads: a.Heads + a.KVHeads, Head: a.HeadDim, Width: a.HeadDim,
		Seq: p.Seq, Table: a.table, Inverse: inverse,
	})
}

func (a *attention) attend(p *Pass, qkv, o nn.Matrix, lse device.Range) nn.Attention {
	qw, kvw, _ := a.widths()
	return nn.Attention{
		Q: qkv.Columns(0, qw), K: qkv.Columns(qw, kvw), V: qkv.Columns(qw+kvw, kvw), O: o, LSE: lse,
		Batch: p.Batch, Seq: p.Seq, Heads: a.Heads, KVHeads: a.KVHeads, KeyDim: a.HeadDim, ValueDim: a.HeadDim,
		Scale: float32(1 / math.Sqrt(float64(a.HeadDim))), Window: a.Window,
	}
}

// Backward returns the gradient of the layer's input.
func (a *attention) Backward(p *Pass, dy Mat) Mat {
	return p.within(memory.Attn, dy.Cols, func() Mat { return a.backward(p, dy) })
}

func (a *attention) backward(p *Pass, dy Mat) Mat {
	t, h := dy.Rows, dy.Cols
	qw, kvw, width := a.widths()
	proj := p.load("attn_proj")
	o := proj.mat(0, p.Number, t, qw)
	a.proj.addGrad(p, dy.Matrix, o)
	do := p.New(t, qw)
	a.proj.backward(p, do.Matrix, dy.Matrix, nn.Matrix{})
	core := p.load("core_attn")
	dqkv, delta := p.New(t, width), p.words(t*a.Heads)
	nn.AttendGrad(p.S, nn.AttentionGrad{
		Attention: a.attend(p, core.mat(0, p.Number, t, width), o, proj.Range(1)), DO: do.Matrix,
		DQ: dqkv.Columns(0, qw), DK: dqkv.Columns(qw, kvw), DV: dqkv.Columns(qw+kvw, kvw), Delta: delta.Range(),
	})
	delta.Free()
	do.Free()
	core.Done()
	proj.Done()
	a.rotate(p, dqkv.Matrix, true)
	if a.QKNorm {
		g := p.load("qk_norm")
		raw := g.mat(0, p.Number, t, width)
		a.qn.backward(p, dqkv.Columns(0, qw), raw.Columns(0, qw), dqkv.Columns(0, qw), nn.Matrix{})
		a.kn.backward(p, dqkv.Columns(qw, kvw), raw.Columns(qw, kvw), dqkv.Columns(qw, kvw), nn.Matrix{})
		g.Done()
	}
	in := p.load("qkv_linear")
	a.qkv.addGrad(p, dqkv.Matrix, in.mat(0, p.Number, t, h))
	in.Done()
	dxn := p.New(t, h)
	a.qkv.backward(p, dxn.Matrix, dqkv.Matrix, nn.Matrix{})
	dqkv.Free()
	x := p.load("attn_norm")
	dx := p.New(t, h)
	a.norm.backward(p, dx.Matrix, x.mat(0, p.Number, t, h), dxn.Matrix, dy.Matrix)
	x.Done()
	dxn.Free()
	return dx
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
