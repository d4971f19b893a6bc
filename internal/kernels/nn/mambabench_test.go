// This file owns the benchmark that pytorch/bench/torch_mamba.py runs beside PyTorch: a whole
// Mamba-2 layer, with the launches of the trainer's layer in their order, and its parts. The
// method is that of BenchmarkPeersOnGPU.
//
//	python3 pytorch/bench/torch_mamba.py --nn nn.test

package nn

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// mambaPeers are layers with twice as many inner columns as hidden ones. torch_mamba.py has
// the same.
var mambaPeers = []struct {
	name                           string
	hidden, headDim, groups, state int
	seq                            int
}{
	{"d2048-4k", 2048, 64, 1, 128, 4096},
	{"d2048-16k", 2048, 64, 1, 128, 16384},
	{"d4096-4k", 4096, 64, 1, 128, 4096},
	{"d4096-8k-groups8", 4096, 64, 8, 128, 8192},
	{"d4096-16k", 4096, 64, 1, 128, 16384},
	{"d2048-4k-head128", 2048, 128, 1, 128, 4096},
	{"d2048-4k-state256", 2048, 64, 1, 256, 4096},
}

const mambaTokens = 16384

func BenchmarkMambaLayerOnGPU(b *testing.B) {
	p := newPeers(b)
	for _, c := range mambaPeers {
		p.fresh()
		l := p.mambaLayer(c.hidden, c.headDim, c.groups, c.state, c.seq)
		name := func(what string) string { return c.name + "/" + what }
		x, unit := l.conv.X.Rows*l.conv.X.Cols*2, l.norm.X.Len
		p.measure(name("conv"), 0, memory.Bytes(2*x), func(s device.Stream) { Convolve(s, l.conv.Conv) })
		p.measure(name("conv-grad"), 0, memory.Bytes(3*x), func(s device.Stream) { ConvolveGrad(s, l.conv) })
		p.measure(name("norm"), 0, 3*unit, func(s device.Stream) { GatedRMSNorm(s, l.norm.GatedNorm) })
		p.measure(name("norm-grad"), 0, 5*unit, func(s device.Stream) { GatedRMSNormGrad(s, l.norm) })
		p.measure(name("scan"), 0, 2*unit, func(s device.Stream) { Recur(s, l.scan.Scan) })
		p.measure(name("scan-grad"), 0, 3*unit, func(s device.Stream) {
			ScanStates(s, l.scan.Scan)
			RecurGrad(s, l.scan)
		})
		p.measure(name("forward"), l.flops, 0, l.forward)
		p.measure(name("backward"), 2*l.flops, 0, l.backward)
	}
	p.fresh()
	from, to := p.place(1<<30), p.place(1<<30)
	p.measure("copy", 0, 2<<30, func(s device.Stream) { s.Copy(to, from) })
}

// mambaLayer is a layer without its first norm and its residual.
type mambaLayer struct {
	x, win, in, wout, out Matrix // the product's input and weights, its result; the same of the last product
	dwin, dwout, dout, dx Matrix
	conv                  ConvGrad
	scan                  ScanGrad
	norm                  GatedNormGrad
	flops                 float64 // of the products in the forward pass
}

func (p *peers) mambaLayer(hidden, headDim, groups, state, seq int) *mambaLayer {
	const tokens = mambaTokens
	inner := 2 * hidden
	heads, mixed := inner/headDim, inner+2*groups*state
	width := inner + mixed + heads
	grad := func(rows, cols int) Matrix { return NewMatrix(p.f32(rows*cols), kernels.F32, rows, cols) }
	l := &mambaLayer{
		x: p.matrix(tokens, hidden), win: p.matrix(width, hidden), in: p.matrix(tokens, width),
		wout: p.matrix(hidden, inner), out: p.matrix(tokens, hidden),
		dwin: grad(width, hidden), dwout: grad(hidden, inner), dout: p.matrix(tokens, hidden), dx: p.matrix(tokens, hidden),
	}
	l.flops = 2 * tokens * float64(hidden) * float64(width+inner)
	din, xbc, y, d := p.matrix(tokens, width), p.matrix(tokens, mixed), p.matrix(tokens, inner), p.matrix(tokens, inner)
	conv := Conv{Y: xbc, X: l.in.Columns(inner, mixed), W: p.matrix(mixed, 4), Bias: p.matrix(1, mixed), Seq: seq}
	l.conv = ConvGrad{Conv: conv, DY: xbc, DX: din.Columns(inner, mixed), DW: grad(mixed, 4), DBias: grad(1, mixed), Scratch: p.place(conv.ScratchBytes())}
	scan := Scan{
		Y: y, XBC: xbc, DT: l.in.Columns(inner+mixed, heads), ALog: p.matrix(1, heads), D: p.matrix(1, heads), DTBias: p.matrix(1, heads),
		Seq: seq, Heads: heads, HeadDim: headDim, Groups: groups, State: state,
	}
	scan.States = p.place(scan.StateBytes(tokens))
	l.scan = ScanGrad{
		Scan: scan, DY: d, DXBC: xbc, DDT: din.Columns(inner+mixed, heads),
		DALog: grad(1, heads), DD: grad(1, heads), DDTBias: grad(1, heads), Scratch: p.place(scan.ScratchBytes(tokens)),
	}
	norm := GatedNorm{Y: d, X: y, Z: l.in.Columns(0, inner), W: p.matrix(1, inner), Groups: groups, Epsilon: 1e-5}
	l.norm = GatedNormGrad{GatedNorm: norm, DY: d, DX: d, DZ: din.Columns(0, inner), DW: grad(1, inner), Scratch: p.place(GatedNormScratch(tokens, inner))}
	return l
}

func (l *mambaLayer) forward(s device.Stream) {
	Gemm(s, Product{A: l.x, B: l.win, C: l.in, TransB: true})
	Convolve(s, l.conv.Conv)
	Recur(s, l.scan.Scan)
	GatedRMSNorm(s, l.norm.GatedNorm)
	Gemm(s, Product{A: l.norm.Y, B: l.wout, C: l.out, TransB: true})
}

// backward computes again what the trainer's layer computes again: the outputs of the norm
// and the convolution, and the scan's states. Gradients of weights are added to fp32.
func (l *mambaLayer) backward(s device.Stream) {
	din := l.in
	din.Range = l.norm.DZ.Buf.Slice(l.norm.DZ.Off, l.in.Len)
	GatedRMSNorm(s, l.norm.GatedNorm)
	Gemm(s, Product{A: l.dout, B: l.norm.Y, C: l.dwout, TransA: true, Plus: l.dwout})
	Gemm(s, Product{A: l.dout, B: l.wout, C: l.norm.DY})
	GatedRMSNormGrad(s, l.norm)
	Convolve(s, l.conv.Conv)
	ScanStates(s, l.scan.Scan)
	RecurGrad(s, l.scan)
	ConvolveGrad(s, l.conv)
	Gemm(s, Product{A: din, B: l.x, C: l.dwin, TransA: true, Plus: l.dwin})
	Gemm(s, Product{A: din, B: l.win, C: l.dx})
}
