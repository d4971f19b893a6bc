// This file owns what both kinds of attention share: attention over queries, keys and
// values, the output projection and the residual connection.

package layer

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
)

// core is y = x + proj(attend(qkv)). Queries, keys and values lie side by side in one
// matrix, which the layer has saved as core_attn.
type core struct {
	proj  linear
	shape nn.Attention // without matrices and the sizes of the batch
}

// widths returns the columns of queries, of keys, of values and of the output.
func (c core) widths() (q, k, v, out int) {
	s := c.shape
	return s.Heads * s.KeyDim, s.KVHeads * s.KeyDim, s.KVHeads * s.ValueDim, s.Heads * s.ValueDim
}

// width returns the columns of queries, keys and values together.
func (c core) width() int {
	q, k, v, _ := c.widths()
	return q + k + v
}

// split returns queries, keys and values.
func (c core) split(qkv nn.Matrix) (q, k, v nn.Matrix) {
	qw, kw, vw, _ := c.widths()
	return qkv.Columns(0, qw), qkv.Columns(qw, kw), qkv.Columns(qw+kw, vw)
}

func (c core) attention(p *Pass, qkv, o nn.Matrix, lse device.Range) nn.Attention {
	a := c.shape
	a.Q, a.K, a.V = c.split(qkv)
	a.O, a.LSE, a.Batch, a.Seq = o, lse, p.Batch, p.Seq
	return a
}

// forward returns y. It saves the output of attention and its sums as attn_proj, which can
// be recomputed, and frees qkv.
func (c core) forward(p *Pass, x, qkv Mat) Mat {
	t := x.Rows
	_, _, _, out := c.widths()
	var o Mat
	var lse *engine.Tensor
	p.run("attn_proj", func(again bool) []*engine.Tensor {
		in := qkv.Matrix
		if again {
			g := p.load("core_attn")
			defer g.Done()
			in = g.mat(0, p.Number, t, c.width())
		}
		o, lse = p.New(t, out), p.words(t*c.shape.Heads)
		nn.Attend(p.S, c.attention(p, in, o.Matrix, lse.Range()))
		return []*engine.Tensor{o.t, lse}
	})
	lse.Free()
	qkv.Free()
	y := p.New(t, x.Cols)
	c.proj.forward(p, y.Matrix, o.Matrix, x.Matrix)
	o.Free()
	return y
}

// backward returns the gradients of queries, keys and values from that of y.
func (c core) backward(p *Pass, dy Mat) (dqkv Mat) {
	t := dy.Rows
	_, _, _, out := c.widths()
	proj := p.load("attn_proj")
	o := proj.mat(0, p.Number, t, out)
	c.proj.addGrad(p, dy.Matrix, o)
	do := p.New(t, out)
	c.proj.backward(p, do.Matrix, dy.Matrix, nn.Matrix{})
	saved := p.load("core_attn")
	dqkv = p.New(t, c.width())
	a := c.attention(p, saved.mat(0, p.Number, t, c.width()), o, proj.Range(1))
	delta := p.words(int(nn.AttendScratch(a) / 4))
	dq, dk, dv := c.split(dqkv.Matrix)
	nn.AttendGrad(p.S, nn.AttentionGrad{Attention: a, DO: do.Matrix, DQ: dq, DK: dk, DV: dv, Delta: delta.Range()})
	delta.Free()
	do.Free()
	saved.Done()
	proj.Done()
	return dqkv
}
