// This file owns norms.

package layer

import (
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
)

// Settings says how layers compute, beyond the shapes of the model.
type Settings struct {
	Epsilon float32 // of norms
	Theta   float64 // of rotary positions
	Routing RoutingSettings
}

// DefaultSettings returns the customary settings.
func DefaultSettings() Settings {
	return Settings{Epsilon: 1e-5, Theta: 10000, Routing: RoutingSettings{Normalise: true, Factor: 1, Balance: 0.01}}
}

// Check returns an error that says what is wrong with the settings, or nil.
func (s Settings) Check() error {
	r := s.Routing
	for _, x := range []struct {
		name  string
		value float64
	}{{"Epsilon", float64(s.Epsilon)}, {"Theta", s.Theta}, {"Factor", float64(r.Factor)}} {
		if !(x.value > 0 && x.value <= math.MaxFloat32) {
			return &memory.SettingError{Setting: x.name, Asked: fmt.Sprintf("%g", x.value), Problem: "is out of range", Remedy: "give a number above 0 that fits fp32"}
		}
	}
	for _, x := range []struct {
		name  string
		value float64
	}{{"AuxLoss", float64(r.Balance)}, {"BiasRate", float64(r.BiasRate)}, {"Capacity", r.Capacity}} {
		if !(x.value >= 0 && x.value <= math.MaxFloat32) {
			return &memory.SettingError{Setting: x.name, Asked: fmt.Sprintf("%g", x.value), Problem: "is out of range", Remedy: "give a number from 0 that fits fp32"}
		}
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

// saved saves x as one group and norm(x) as another, which can be recomputed.
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

// savedBackward returns dy plus the gradient of x, which was saved as a group, from the
// gradient of norm(x), which it frees.
func (n norm) savedBackward(p *Pass, group string, dxn, dy Mat) Mat {
	t, cols := dy.Rows, dy.Cols
	x := p.load(group)
	dx := p.New(t, cols)
	n.backward(p, dx.Matrix, x.mat(0, p.Number, t, cols), dxn.Matrix, dy.Matrix)
	x.Done()
	dxn.Free()
	return dx
}

// linear is y = x Wᵀ.
type linear struct{ weight }

// forward computes y, plus a matrix if one is given.
func (l linear) forward(p *Pass, y, x, plus nn.Matrix) {
	nn.Gemm(p.S, nn.Product{A: x, B: l.w(), C: y, TransB: true, Plus: plus})
}

// addGrad adds to the gradient of the weight.
func (l linear) addGrad(p *Pass, dy, x nn.Matrix) {
	g := nn.Product{A: dy, B: x, C: l.dw(), TransA: true}
	if !l.first() {
		g.Plus = g.C
	}
	nn.Gemm(p.S, g)
}

// backward computes dx, plus a matrix if one is given.
func (l linear) backward(p *Pass, dx, dy, plus nn.Matrix) {
	nn.Gemm(p.S, nn.Product{A: dy, B: l.w(), C: dx, Plus: plus})
}
