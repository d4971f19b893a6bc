// This file owns norms.

package layer

import (
	"fmt"

	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
)

// Settings are what layers are computed with besides the model's shapes.
type Settings struct {
	Epsilon float32 // of norms
	Theta   float64 // of rotary positions
	Routing RoutingSettings
}

// DefaultSettings are the field's.
func DefaultSettings() Settings {
	return Settings{Epsilon: 1e-5, Theta: 10000, Routing: RoutingSettings{Normalise: true, Factor: 1, Balance: 0.01}}
}

// Check returns an error that says what is wrong with the settings, or nil.
func (s Settings) Check() error {
	r := s.Routing
	if !(s.Epsilon > 0) || !(s.Theta > 0) || !(r.Factor > 0) || !(r.Balance >= 0) || !(r.BiasRate >= 0) || !(r.Capacity >= 0) {
		return fmt.Errorf("layer: expected epsilon, theta and the routing factor above 0, and rates and a capacity of at least 0, got %+v", s)
	}
	return nil
}

// norm is an RMS norm with its weight.
type norm struct {
	weight
	epsilon float32
}

// forward computes y = norm(x).
func (n norm) forward(p *Pass, x nn.Matrix) Mat {
	y := p.New(x.Rows, x.Cols)
	nn.RMSNorm(p.S, nn.Norm{Y: y.Matrix, X: x, W: row(n.w()), Epsilon: n.epsilon})
	return y
}

// saved saves x as one group and norm(x) as another, which can be computed again.
func (n norm) saved(p *Pass, from, to string, x Mat) (y Mat) {
	p.save(from, x.t)
	p.run(to, func(again bool) []*engine.Tensor {
		in := x.Matrix
		if again {
			g := p.load(from)
			defer g.Done()
			in = g.mat(0, p.Number, x.Rows, x.Cols)
		}
		y = n.forward(p, in)
		return []*engine.Tensor{y.t}
	})
	return y
}

// backward computes dx from dy, plus a matrix if one is given.
func (n norm) backward(p *Pass, dx, x, dy, plus nn.Matrix) {
	scratch := p.bytes(nn.NormScratch(x.Rows, x.Cols))
	nn.RMSNormGrad(p.S, nn.NormGrad{
		DX: dx, DW: row(n.dw()), X: x, W: row(n.w()), DY: dy, Plus: plus, Epsilon: n.epsilon, Scratch: scratch.Range(),
	})
	scratch.Free()
}

// linear is y = x Wᵀ.
type linear struct{ weight }

// forward computes y, plus a matrix if one is given.
func (l linear) forward(p *Pass, y, x, plus nn.Matrix) {
	nn.Gemm(p.S, nn.Product{A: x, B: l.w(), C: y, TransB: true, Plus: plus})
}

// grad adds to the weight's gradient.
func (l linear) grad(p *Pass, dy, x nn.Matrix) {
	dw := l.dw()
	nn.Gemm(p.S, nn.Product{A: dy, B: x, C: dw, TransA: true, Plus: dw})
}

// backward computes dx, plus a matrix if one is given.
func (l linear) backward(p *Pass, dx, dy, plus nn.Matrix) {
	nn.Gemm(p.S, nn.Product{A: dy, B: l.w(), C: dx, Plus: plus})
}
