// This file owns the kinds of trials of the parts of Mamba layers.

package nn

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// scan draws a scan of a few chunks, for tensor cores or not.
func (x *trial) scan(tensor bool) Scan {
	c := Scan{Seq: 1 + x.IntN(300), HeadDim: 1 + x.IntN(30), Groups: 1, State: 1 + x.IntN(30), Heads: 1}
	rows := c.Seq
	switch n := x.IntN(3); {
	case x.large && n == 0:
		c.Seq, c.HeadDim, c.State, c.Heads = 300+x.IntN(700), 64, 128, 8
		rows = 2 * c.Seq
	case n == 0:
		c.Seq = 64 + x.IntN(40)
		c.HeadDim, c.State = 1+x.IntN(80), 1+x.IntN(80)
		rows = c.Seq
	case n == 1:
		c.Seq = 1 + x.IntN(140)
		c.Groups = x.atMost(2, 3)
		c.Heads = c.Groups * x.atMost(10, 12) // more than a block has warps
		rows = c.Seq * x.atMost(2, 4)
	}
	t, params := x.number(), x.number()
	switch {
	case tensor:
		t = kernels.BF16
		c.HeadDim = min(c.HeadDim, tensorStrip)
		switch n := x.IntN(8); n {
		case 0, 1: // more heads than a block computes
			c.Heads, c.HeadDim = c.Groups*(tensorGradRun+1+x.IntN(3)), 1+x.IntN(20)
		case 2, 3: // two strips, and more of them than a block computes
			c.HeadDim = min(c.HeadDim+tensorStrip, tensorHeadDim)
			if n == 3 {
				c.Heads = c.Groups * (tensorGradRun/2 + 1)
			}
		case 4:
			c.State = min(c.State+tensorNarrow, tensorState)
		case 5:
			c.HeadDim, c.State = tensorHeadDim, tensorState
		}
	case t == kernels.BF16 && x.maybe():
		c.State += tensorState
	case t == kernels.BF16:
		c.HeadDim += tensorHeadDim
	}
	c.XBC, c.DT = x.matrix(t, rows, c.inner()+2*c.Groups*c.State), x.matrix(t, rows, c.Heads)
	c.ALog, c.D, c.DTBias = x.matrix(params, 1, c.Heads), x.matrix(params, 1, c.Heads), x.matrix(params, 1, c.Heads)
	if n := c.StateBytes(rows); n > 0 {
		c.States = x.numbers(c.states(), int(n/c.states().Size()), 1)
	}
	return c
}

// Tensor cores multiply numbers that were rounded to one part in 512.
const tensorLoose = 500

func scanTrial(x *trial) func(s device.Stream)       { return x.recur(false) }
func scanTensorTrial(x *trial) func(s device.Stream) { return x.recur(true) }

func (x *trial) recur(tensor bool) func(s device.Stream) {
	c := x.scan(tensor)
	x.loose = 4
	if tensor {
		x.loose = tensorLoose
	}
	c.Y = x.matrix(c.XBC.Type, c.XBC.Rows, c.inner())
	return func(s device.Stream) { Recur(s, c) }
}

func scanGradTrial(x *trial) func(s device.Stream)       { return x.recurGrad(false) }
func scanGradTensorTrial(x *trial) func(s device.Stream) { return x.recurGrad(true) }

func (x *trial) recurGrad(tensor bool) func(s device.Stream) {
	c := ScanGrad{Scan: x.scan(tensor)}
	x.loose = 10
	if tensor {
		x.loose = tensorLoose
	}
	rows, t, grads := c.XBC.Rows, c.XBC.Type, x.number()
	c.DY, c.DXBC, c.DDT = x.matrix(t, rows, c.inner()), x.inPlace(c.XBC, t), x.matrix(t, rows, c.Heads)
	param := func() Matrix {
		if !tensor {
			return x.matrix(grads, 1, c.Heads)
		}
		// The sums may cancel, but the errors of their terms do not.
		return NewMatrix(x.values(grads, c.Heads, func() float64 { return 1000 }), grads, 1, c.Heads)
	}
	c.DALog, c.DD, c.DDTBias = param(), param(), param()
	c.Scratch = x.waste(c.ScratchBytes(rows), scratch)
	return func(s device.Stream) { RecurGrad(s, c) }
}

// conv draws a convolution, in whole vectors or not. Taps and bias may lie anywhere.
func (x *trial) conv(whole bool) Conv {
	c := Conv{Seq: x.atMost(30, 300)}
	taps := 1 + x.IntN(5)
	rows, cols := c.Seq*x.atMost(4, 8), x.atMost(300, 700)
	if whole {
		cols = runsOf(cols, 8) * 8
	}
	if whole || x.maybe() {
		taps = wideTaps
	}
	params := x.number()
	c.W, c.Bias = NewMatrix(x.numbers(params, cols*taps, 1), params, cols, taps), x.matrix(params, 1, cols)
	x.whole = whole
	c.X = x.matrix(x.number(), rows, cols)
	return c
}

func convTrial(x *trial) func(s device.Stream)      { return x.convolve(x.maybe()) }
func wholeConvTrial(x *trial) func(s device.Stream) { return x.convolve(true) }

func (x *trial) convolve(whole bool) func(s device.Stream) {
	c := x.conv(whole)
	c.Y = x.matrix(c.X.Type, c.X.Rows, c.X.Cols)
	return func(s device.Stream) { Convolve(s, c) }
}

func convGradTrial(x *trial) func(s device.Stream)      { return x.convolveGrad(x.maybe()) }
func wholeConvGradTrial(x *trial) func(s device.Stream) { return x.convolveGrad(true) }

func (x *trial) convolveGrad(whole bool) func(s device.Stream) {
	c := ConvGrad{Conv: x.conv(whole)}
	rows, cols, t, grads := c.X.Rows, c.X.Cols, c.X.Type, x.number()
	c.DY, c.DX = x.matrix(t, rows, cols), x.matrix(t, rows, cols)
	c.DW = NewMatrix(x.numbers(grads, cols*c.W.Cols, 1), grads, cols, c.W.Cols)
	c.DBias = x.matrix(grads, 1, cols)
	c.Scratch = x.waste(c.ScratchBytes(), scratch)
	return func(s device.Stream) { ConvolveGrad(s, c) }
}

func (x *trial) gated() GatedNorm {
	g := GatedNorm{Groups: 1 + x.IntN(3), Epsilon: 1e-5}
	x.whole = x.maybe()
	rows, cols, t := x.atMost(150, 300), x.cols()*g.Groups, x.number()
	if x.IntN(4) == 0 { // more columns than threads keep
		rows, cols, g.Groups = x.atMost(4, 70), 3000+x.IntN(7000), 1
	}
	if x.IntN(8) == 0 { // so many rows that they are divided by the blocks that run at once
		rows, cols = gatedMany+x.IntN(600), (1+x.IntN(9))*g.Groups
	}
	if x.whole {
		cols = runsOf(cols, 8*g.Groups) * 8 * g.Groups
	}
	g.X, g.Z, g.W = x.matrix(t, rows, cols), x.matrix(t, rows, cols), x.any(1, cols)
	return g
}

func gatedTrial(x *trial) func(s device.Stream) {
	g := x.gated()
	g.Y = x.inPlace(g.X, g.X.Type)
	if x.IntN(3) == 0 {
		g.Y = g.Z
	}
	return func(s device.Stream) { GatedRMSNorm(s, g) }
}

func gatedGradTrial(x *trial) func(s device.Stream) {
	g := GatedNormGrad{GatedNorm: x.gated()}
	rows, cols, t := g.X.Rows, g.X.Cols, g.X.Type
	g.DY = x.matrix(t, rows, cols)
	g.DX, g.DZ, g.DW = x.inPlace(g.DY, t), x.inPlace(g.Z, t), x.any(1, cols)
	if x.IntN(3) == 0 {
		g.DX = g.X
	}
	g.Scratch = x.waste(GatedNormScratch(rows, cols), scratch)
	return func(s device.Stream) { GatedRMSNormGrad(s, g) }
}
