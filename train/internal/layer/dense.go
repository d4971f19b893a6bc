// This file owns dense feed-forward parts.

package layer

import (
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
)

// gated is y = fc2(swiglu(fc1(x))) without a norm: a dense part, or the experts that all
// tokens use.
type gated struct {
	fc1, fc2 linear
	width    int
}

// hidden returns the input of the activation, and its output unless the input is computed
// again.
func (g gated) hidden(p *Pass, x nn.Matrix, again bool) (h, a Mat) {
	h = p.New(x.Rows, 2*g.width)
	if !again {
		a = p.New(x.Rows, g.width)
	}
	nn.GatedGemm(p.S, nn.GatedProduct{A: x, B: g.fc1.w(), C: h.Matrix, Y: a.Matrix})
	return h, a
}

// activate returns the output of the activation for an input that was saved.
func (g gated) activate(p *Pass, h nn.Matrix) Mat {
	a := p.New(h.Rows, g.width)
	nn.SwiGLU(p.S, nn.Gate{Y: a.Matrix, X: h})
	return a
}

// output computes y from the output of the activation, which it frees.
func (g gated) output(p *Pass, y nn.Matrix, a Mat, plus nn.Matrix) {
	g.fc2.forward(p, y, a.Matrix, plus)
	a.Free()
}

// backward computes dx. It replaces h by its gradient.
func (g gated) backward(p *Pass, dx, x, h, dy nn.Matrix) {
	g.backwardHidden(p, x, h, dy)
	g.fc1.backward(p, dx, h, nn.Matrix{})
}

// backwardHidden is backward without its last product.
func (g gated) backwardHidden(p *Pass, x, h, dy nn.Matrix) {
	a := p.New(h.Rows, g.width)
	nn.GatedGemmGrad(p.S, nn.GatedProductGrad{A: dy, B: g.fc2.w(), DX: h, X: h, Y: a.Matrix})
	g.fc2.addGrad(p, dy, a.Matrix)
	a.Free()
	g.fc1.addGrad(p, h, x)
}

// dense is x + gated(norm(x)). It saves
//
//	mlp_norm  x
//	mlp       norm(x), and the input of the activation
//
// The second can be recomputed. The output of the activation is never saved, because its
// backward pass computes it on the way.
type dense struct {
	norm norm
	gated
}

func newDense(u *Unit, width int, s Settings) *dense {
	return &dense{
		norm:  norm{u.weight("pre_mlp_layernorm.weight"), s.Epsilon},
		gated: gated{linear{u.weight("mlp.linear_fc1.weight")}, linear{u.weight("mlp.linear_fc2.weight")}, width},
	}
}

// Forward returns the residual stream after the part.
func (d *dense) Forward(p *Pass, x Mat) Mat {
	return p.within(memory.MLP, x.Cols, func() Mat {
		p.save("mlp_norm", x.t)
		var xn, h, a Mat
		p.run("mlp", func(again bool) []*engine.Tensor {
			in := x.Matrix
			if again {
				g := p.load("mlp_norm")
				defer g.Done()
				in = g.mat(0, p.Number, x.Rows, x.Cols)
			}
			xn = d.norm.forward(p, in)
			h, a = d.hidden(p, xn.Matrix, again)
			return []*engine.Tensor{xn.t, h.t}
		})
		xn.Free()
		h.Free()
		y := p.New(x.Rows, x.Cols)
		d.output(p, y.Matrix, a, x.Matrix)
		return y
	})
}

// Backward returns the gradient of the part's input.
func (d *dense) Backward(p *Pass, dy Mat) Mat {
	t, c := dy.Rows, dy.Cols
	return p.within(memory.MLP, c, func() Mat {
		g := p.load("mlp")
		dxn := p.New(t, c)
		d.gated.backward(p, dxn.Matrix, g.mat(0, p.Number, t, c), g.mat(1, p.Number, t, 2*d.width), dy.Matrix)
		g.Done()
		return d.norm.savedBackward(p, "mlp_norm", dxn, dy)
	})
}
