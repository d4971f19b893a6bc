// This file owns mixtures of experts: the norm, the router, the experts that all tokens
// use, and the sum of those and the routed ones.

package layer

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// RoutingSettings says how tokens choose experts, beyond what the model says.
type RoutingSettings struct {
	Normalise bool    // weights of a token are divided by their sum
	Factor    float32 // and multiplied by this
	Balance   float32 // the factor of the auxiliary loss; zero means none
	BiasRate  float32 // how far the bias of each expert moves in a step
	// Capacity is the most rows of an expert over its balanced share. Zero means no limit,
	// so no token is dropped.
	Capacity float64
}

// Balance is what a layer's router keeps over a step, in memory of the caller: how often
// each expert was chosen (uint32), the bias if there is one, and the sum of auxiliary
// losses (fp32).
type Balance struct{ Load, Bias, Loss device.Range }

// mixture is x + shared(norm(x)) + the routed experts' part. It saves
//
//	mlp_norm        x
//	router          norm(x), scores, choices and weights
//	shared_experts  the input of their activation
//
// and what its dispatcher and its experts save. The router and the shared experts can be
// recomputed.
type mixture struct {
	model.MoE
	settings RoutingSettings
	norm     norm
	router   linear
	shared   *gated
	gate     *linear // of the shared experts
	experts  *experts
	balance  Balance
}

func newMixture(u *Unit, m model.MoE, s Settings, e *experts, b Balance) *mixture {
	x := &mixture{
		MoE: m, settings: s.Routing, norm: norm{u.weight("pre_mlp_layernorm.weight"), s.Epsilon},
		router: linear{u.weight("mlp.router.weight")}, experts: e, balance: b,
	}
	if m.SharedWidth > 0 {
		x.shared = &gated{
			linear{u.weight("shared_experts.linear_fc1.weight")}, linear{u.weight("shared_experts.linear_fc2.weight")}, m.SharedWidth,
		}
		if m.SharedGate {
			x.gate = &linear{u.weight("shared_experts.gate_weight")}
		}
	}
	return x
}

// chosen is the result of the router.
type chosen struct{ xn, scores, index, weight *engine.Tensor }

func (m *mixture) routing(scores nn.Matrix, index, weight device.Range) nn.Routing {
	return nn.Routing{
		Logits: scores, Bias: m.balance.Bias, TopK: m.TopK, Sigmoid: m.Sigmoid, Normalise: m.settings.Normalise,
		Factor: m.settings.Factor, Scores: scores, Index: index, Weight: weight,
	}
}

// route computes the choices of all tokens.
func (m *mixture) route(p *Pass, x nn.Matrix, again bool) chosen {
	t := x.Rows
	xn := m.norm.forward(p, x)
	scores := p.newOf(kernels.F32, t, m.Experts)
	m.router.forward(p, scores.Matrix, xn.Matrix, nn.Matrix{})
	c := chosen{xn.t, scores.t, p.words(t * m.TopK), p.words(t * m.TopK)}
	r := m.routing(scores.Matrix, c.index.Range(), c.weight.Range())
	if !again && !p.Evaluate { // a recomputed choice does not count twice
		r.Load = m.balance.Load
	}
	nn.Route(p.S, r)
	return c
}

// Forward returns the residual stream after the part.
func (m *mixture) Forward(p *Pass, x Mat) Mat {
	return p.within(memory.MoE, x.Cols, func() Mat { return m.forward(p, x) })
}

func (m *mixture) forward(p *Pass, x Mat) Mat {
	aside := m.aside(p)
	out := p.scope(memory.MoERouter, func() []*engine.Tensor { return m.front(p, x, aside) })
	xn, index, weight := p.Wrap(out[0], x.Cols), out[1], out[2]
	var a Mat // the output of the shared experts' activation
	y, plus := p.New(x.Rows, x.Cols), x
	m.experts.forward(p, y.Matrix, xn.Matrix, index.Range(), weight.Range(), func() {
		if aside {
			a = m.sharedHidden(p, xn.Matrix)
		}
	}, func() nn.Matrix {
		switch {
		case aside:
			plus = m.sharedOutput(p, x, xn.Matrix, a)
			out = append(out, plus.t)
		case m.shared != nil:
			plus = p.Wrap(out[3], x.Cols)
		}
		return plus.Matrix
	})
	for _, t := range out {
		t.Free()
	}
	return y
}

// aside reports whether the shared experts are computed while rows travel between ranks,
// and not with the router. They are a part of the router's graph if it has one.
func (m *mixture) aside(p *Pass) bool {
	return m.shared != nil && m.experts.ranks > 1 && !p.Step.Captures(memory.MoERouter)
}

// front computes what the dispatch needs: norm(x), choices, weights and, with shared
// experts that are not computed aside, x plus their output.
func (m *mixture) front(p *Pass, x Mat, aside bool) []*engine.Tensor {
	p.save("mlp_norm", x.t)
	var c chosen
	p.run("router", func(again bool) []*engine.Tensor {
		in := x.Matrix
		if again {
			g := p.load("mlp_norm")
			defer g.Done()
			in = g.mat(0, p.Number, x.Rows, x.Cols)
		}
		c = m.route(p, in, again)
		return []*engine.Tensor{c.xn, c.scores, c.index, c.weight}
	})
	c.scores.Free()
	out := []*engine.Tensor{c.xn, c.index, c.weight}
	if m.shared == nil || aside {
		return out
	}
	xn := p.Wrap(c.xn, x.Cols).Matrix
	return append(out, m.sharedOutput(p, x, xn, m.sharedHidden(p, xn)).t)
}

// sharedHidden computes the input of the shared experts' activation and returns its output.
func (m *mixture) sharedHidden(p *Pass, xn nn.Matrix) (a Mat) {
	var h Mat
	p.run("shared_experts", func(again bool) []*engine.Tensor {
		in := xn
		if again {
			g := p.load("router")
			defer g.Done()
			in = g.mat(0, p.Number, xn.Rows, xn.Cols)
		}
		h, a = m.shared.hidden(p, in, again)
		return []*engine.Tensor{h.t}
	})
	h.Free()
	return a
}

// sharedOutput returns x plus the shared experts' output. It frees a.
func (m *mixture) sharedOutput(p *Pass, x Mat, xn nn.Matrix, a Mat) Mat {
	y := p.New(x.Rows, x.Cols)
	if m.gate == nil {
		m.shared.output(p, y.Matrix, a, x.Matrix)
	} else {
		m.gatedOutput(p, y.Matrix, xn, a, x.Matrix)
	}
	return y
}

// gatedOutput computes the shared experts' output times their gate, plus x.
func (m *mixture) gatedOutput(p *Pass, y, xn nn.Matrix, a Mat, x nn.Matrix) {
	o, logit := p.New(y.Rows, y.Cols), p.newOf(kernels.F32, y.Rows, 1)
	m.shared.output(p, o.Matrix, a, nn.Matrix{})
	m.gate.forward(p, logit.Matrix, xn, nn.Matrix{})
	nn.GateRows(p.S, nn.RowGate{Y: o.Matrix, X: o.Matrix, Logit: logit.Matrix})
	nn.Add(p.S, nn.Sum{Y: y, A: o.Matrix, B: x})
	logit.Free()
	o.Free()
}

// Backward returns the gradient of the part's input.
func (m *mixture) Backward(p *Pass, dy Mat) Mat {
	return p.within(memory.MoE, dy.Cols, func() Mat { return m.backward(p, dy) })
}

func (m *mixture) backward(p *Pass, dy Mat) Mat {
	aside := m.aside(p)
	dxn := p.New(dy.Rows, dy.Cols)
	dweight := p.words(dy.Rows * m.TopK)
	var r group
	var finish func(dx, plus nn.Matrix)
	m.experts.backward(p, dxn.Matrix, dweight.Range(), dy.Matrix, func() {
		if aside {
			r = p.load("router")
			finish = m.sharedBackward(p, r.mat(0, p.Number, dy.Rows, dy.Cols), dy.Matrix)
		}
	})
	var sum Mat
	if aside {
		sum = p.New(dy.Rows, dy.Cols)
		finish(sum.Matrix, dxn.Matrix)
	}
	dx := p.within(memory.MoERouter, dy.Cols, func() Mat {
		if !aside {
			r = p.load("router")
		}
		return m.frontBackward(p, r, dy, dxn.Matrix, dweight.Range(), sum)
	})
	if aside {
		r.Done()
	}
	dweight.Free()
	dxn.Free()
	return dx
}

// frontBackward is the backward pass of front. If shared experts were computed aside, sum is
// dxn and their part, and it is freed. The products are the same in both cases, memory
// included: a library may choose another algorithm, with other bits, for a sum in place.
func (m *mixture) frontBackward(p *Pass, r group, dy Mat, dxn nn.Matrix, dweight device.Range, sum Mat) Mat {
	t, c := dy.Rows, dy.Cols
	xn := r.mat(0, p.Number, t, c)
	aside, plus := sum.t != nil, dxn
	if !aside {
		sum = p.New(t, c)
	}
	if m.shared != nil {
		if !aside {
			m.sharedBackward(p, xn, dy.Matrix)(sum.Matrix, dxn)
		}
		plus = sum.Matrix
	}
	scores := r.mat(1, kernels.F32, t, m.Experts)
	dlogits, scratch := p.newOf(kernels.F32, t, m.Experts), p.bytes(nn.RouteScratch(t, m.Experts))
	nn.RouteGrad(p.S, nn.RoutingGrad{
		Routing: m.routing(scores, r.Range(2), r.Range(3)), DWeight: dweight, DLogits: dlogits.Matrix,
		Balance: m.settings.Balance * p.Scale * float32(t), Scale: p.Scale * float32(t), Loss: m.balance.Loss, Scratch: scratch.Range(),
	})
	scratch.Free()
	m.router.addGrad(p, dlogits.Matrix, xn)
	m.router.backward(p, sum.Matrix, dlogits.Matrix, plus)
	dlogits.Free()
	if !aside {
		r.Done()
	}
	return m.norm.savedBackward(p, "mlp_norm", sum, dy)
}

// sharedBackward is the backward pass of the shared experts but for its last products, which
// finish makes. Finish adds another gradient of xn and writes the sum to dx.
func (m *mixture) sharedBackward(p *Pass, xn, dy nn.Matrix) (finish func(dx, plus nn.Matrix)) {
	t, c := dy.Rows, dy.Cols
	g := p.load("shared_experts")
	h := g.mat(0, p.Number, t, 2*m.shared.width)
	if m.gate == nil {
		m.shared.backwardHidden(p, xn, h, dy)
		return func(dx, plus nn.Matrix) {
			m.shared.fc1.backward(p, dx, h, plus)
			g.Done()
		}
	}
	o, logit, dlogit := p.New(t, c), p.newOf(kernels.F32, t, 1), p.newOf(kernels.F32, t, 1)
	m.shared.output(p, o.Matrix, m.shared.activate(p, h), nn.Matrix{})
	m.gate.forward(p, logit.Matrix, xn, nn.Matrix{})
	do := p.New(t, c)
	nn.GateRowsGrad(p.S, nn.RowGateGrad{DX: do.Matrix, DLogit: dlogit.Matrix, DY: dy, X: o.Matrix, Logit: logit.Matrix})
	m.gate.addGrad(p, dlogit.Matrix, xn)
	m.shared.backwardHidden(p, xn, h, do.Matrix)
	do.Free()
	logit.Free()
	return func(dx, plus nn.Matrix) {
		m.gate.backward(p, o.Matrix, dlogit.Matrix, plus)
		m.shared.fc1.backward(p, dx, h, o.Matrix)
		dlogit.Free()
		o.Free()
		g.Done()
	}
}
