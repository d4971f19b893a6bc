// This file owns Mamba-2.

package layer

import (
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels/nn"
	"github.com/stowage-dev/stowage/plan/model"
)

// mamba is x + out(gated norm(scan(conv(in(norm(x)))))). It saves
//
//	attn_norm   x
//	mamba_in    norm(x), and its projection: the gate, x, B, C and steps
//	mamba_scan  the output of the scan
//
// All but the first can be recomputed. The outputs of the convolution and the gated norm
// and the scan's states between chunks are always recomputed: states in bf16 have State/128
// times the size of the scan's output, and cost a tenth of the products of the scan's
// backward pass. No scope captures layers of this kind.
type mamba struct {
	model.Mamba
	epsilon          float32
	norm             norm
	in, out          linear
	taps, bias       weight
	aLog, d, dtBias  weight
	gate             weight // of the gated norm
	mixed, width, at int    // columns of x, B and C; of all; where steps begin
}

func newMamba(u *Unit, m model.Mamba, s Settings) *mamba {
	mixed := m.Inner + 2*m.Groups*m.State
	return &mamba{
		Mamba:   m,
		epsilon: s.Epsilon,
		norm:    norm{u.weight(".norm.weight"), s.Epsilon},
		in:      linear{u.weight("mixer.in_proj.weight")},
		out:     linear{u.weight("mixer.out_proj.weight")},
		taps:    u.weight("mixer.conv1d.weight"), bias: u.weight("mixer.conv1d.bias"),
		aLog: u.weight("mixer.A_log"), d: u.weight("mixer.D"), dtBias: u.weight("mixer.dt_bias"),
		gate:  u.weight("mixer.norm.weight"),
		mixed: mixed, at: m.Inner + mixed, width: m.Inner + mixed + m.Heads,
	}
}

// Forward returns the residual stream after the layer.
func (m *mamba) Forward(p *Pass, x Mat) Mat {
	t, h := x.Rows, x.Cols
	p.save("attn_norm", x.t)
	var xn, in, y Mat
	p.run("mamba_in", func(again bool) []*engine.Tensor {
		from := x.Matrix
		if again {
			g := p.load("attn_norm")
			defer g.Done()
			from = g.mat(0, p.Number, t, h)
		}
		xn, in = m.norm.forward(p, from), p.New(t, m.width)
		m.in.forward(p, in.Matrix, xn.Matrix, nn.Matrix{})
		return []*engine.Tensor{xn.t, in.t}
	})
	xn.Free()
	p.run("mamba_scan", func(again bool) []*engine.Tensor {
		from := in.Matrix
		if again {
			g := p.load("mamba_in")
			defer g.Done()
			from = g.mat(1, p.Number, t, m.width)
		}
		y = m.mix(p, from)
		return []*engine.Tensor{y.t}
	})
	normed := p.New(t, m.Inner)
	nn.GatedRMSNorm(p.S, m.gated(normed.Matrix, y.Matrix, in.Matrix))
	y.Free()
	in.Free()
	out := p.New(t, h)
	m.out.forward(p, out.Matrix, normed.Matrix, x.Matrix)
	normed.Free()
	return out
}

// mix returns the output of the scan.
func (m *mamba) mix(p *Pass, in nn.Matrix) Mat {
	xbc := p.New(in.Rows, m.mixed)
	nn.Convolve(p.S, m.conv(p, xbc.Matrix, in))
	y := p.New(in.Rows, m.Inner)
	s, free := m.scan(p, xbc.Matrix, in)
	s.Y = y.Matrix
	nn.Recur(p.S, s)
	free()
	xbc.Free()
	return y
}

func (m *mamba) conv(p *Pass, y, in nn.Matrix) nn.Conv {
	return nn.Conv{Y: y, X: in.Columns(m.Inner, m.mixed), W: m.taps.w(), Bias: row(m.bias.w()), Seq: p.Seq}
}

// scan returns the scan without a result. free frees the memory for its states.
func (m *mamba) scan(p *Pass, xbc, in nn.Matrix) (s nn.Scan, free func()) {
	s = nn.Scan{
		XBC: xbc, DT: in.Columns(m.at, m.Heads),
		ALog: row(m.aLog.w()), D: row(m.d.w()), DTBias: row(m.dtBias.w()),
		Seq: p.Seq, Heads: m.Heads, HeadDim: m.Inner / m.Heads, Groups: m.Groups, State: m.State,
	}
	n := s.StateBytes(in.Rows)
	if n == 0 {
		return s, func() {}
	}
	states := p.bytes(n)
	s.States = states.Range()
	return s, states.Free
}

func (m *mamba) gated(y, x, in nn.Matrix) nn.GatedNorm {
	return nn.GatedNorm{Y: y, X: x, Z: in.Columns(0, m.Inner), W: row(m.gate.w()), Groups: m.Groups, Epsilon: m.epsilon}
}

// Backward returns the gradient of the layer's input.
func (m *mamba) Backward(p *Pass, dy Mat) Mat {
	t, h := dy.Rows, dy.Cols
	saved := p.load("mamba_in")
	xn, in := saved.mat(0, p.Number, t, h), saved.mat(1, p.Number, t, m.width)
	din := p.New(t, m.width)
	d := m.backwardGate(p, din.Matrix, in, dy.Matrix)
	m.backwardMix(p, din.Matrix, in, d.Matrix)
	d.Free()
	m.in.addGrad(p, din.Matrix, xn)
	saved.Done()
	dxn := p.New(t, h)
	m.in.backward(p, dxn.Matrix, din.Matrix, nn.Matrix{})
	din.Free()
	return m.norm.savedBackward(p, "attn_norm", dxn, dy)
}

// backwardGate returns the gradient of the scan's output, and computes the gate's part of
// din.
func (m *mamba) backwardGate(p *Pass, din, in, dy nn.Matrix) Mat {
	saved := p.load("mamba_scan")
	y := saved.mat(0, p.Number, dy.Rows, m.Inner)
	d := p.New(dy.Rows, m.Inner) // the norm's output, then its gradient, then that of y
	op := m.gated(d.Matrix, y, in)
	nn.GatedRMSNorm(p.S, op)
	m.out.addGrad(p, dy, d.Matrix)
	m.out.backward(p, d.Matrix, dy, nn.Matrix{})
	scratch := p.bytes(nn.GatedNormScratch(dy.Rows, m.Inner))
	nn.GatedRMSNormGrad(p.S, nn.GatedNormGrad{
		GatedNorm: op, DY: d.Matrix, DX: d.Matrix, DZ: din.Columns(0, m.Inner), DW: row(m.gate.dw()), Scratch: scratch.Range(),
	})
	scratch.Free()
	saved.Done()
	return d
}

// backwardMix computes the rest of din.
func (m *mamba) backwardMix(p *Pass, din, in, dy nn.Matrix) {
	xbc := p.New(in.Rows, m.mixed)
	conv := m.conv(p, xbc.Matrix, in)
	nn.Convolve(p.S, conv)
	s, free := m.scan(p, xbc.Matrix, in)
	nn.ScanStates(p.S, s)
	scratch := p.bytes(s.ScratchBytes(in.Rows))
	nn.RecurGrad(p.S, nn.ScanGrad{
		Scan: s, DY: dy, DXBC: xbc.Matrix, DDT: din.Columns(m.at, m.Heads),
		DALog: row(m.aLog.dw()), DD: row(m.d.dw()), DDTBias: row(m.dtBias.dw()), Scratch: scratch.Range(),
	})
	scratch.Free()
	free()
	scratch = p.bytes(conv.ScratchBytes())
	nn.ConvolveGrad(p.S, nn.ConvGrad{
		Conv: conv, DY: xbc.Matrix, DX: din.Columns(m.Inner, m.mixed), DW: m.taps.dw(), DBias: row(m.bias.dw()), Scratch: scratch.Range(),
	})
	scratch.Free()
	xbc.Free()
}
