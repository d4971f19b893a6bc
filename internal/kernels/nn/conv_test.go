package nn

import (
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/kernels"
)

func convOf(y *yard, typ, params, grads kernels.Number, p *plainConv) ConvGrad {
	p.backward()
	c := ConvGrad{
		Conv: Conv{
			Y: y.matrix(typ, len(p.y)/p.cols, p.cols), X: placeMatrix(y, typ, p.cols, p.x.x),
			W: solid(y, params, p.taps, p.w.x), Bias: solid(y, params, p.cols, p.bias.x), Seq: p.seq,
		},
		DY: placeMatrix(y, typ, p.cols, p.dy), DX: y.matrix(typ, len(p.y)/p.cols, p.cols),
		DW: begun(y, grads, p.taps, p.w), DBias: begun(y, grads, p.cols, p.bias),
	}
	c.Scratch = place[float32](y, int(c.ScratchBytes()/4))
	return c
}

// The convolution and its gradients follow the definition, for sequences shorter than the
// taps and longer than a run of rows, and for more columns than a run.
func TestConv(t *testing.T) {
	y := newYard(t, 1<<20)
	rapid.Check(t, func(t *rapid.T) {
		y.reset(t)
		y.strict = rapid.IntRange(0, 9).Draw(t, "strict") == 0
		typ, params, grads := rapid.SampledFrom(numbers).Draw(t, "type"), rapid.SampledFrom(numbers).Draw(t, "parameters"), rapid.SampledFrom(numbers).Draw(t, "gradients")
		p := newPlainConv(rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1)), typ, params,
			rapid.IntRange(1, 3).Draw(t, "batch"), rapid.OneOf(rapid.IntRange(1, 9), rapid.IntRange(100, 140)).Draw(t, "seq"),
			rapid.OneOf(rapid.IntRange(1, 40), rapid.IntRange(120, 140)).Draw(t, "columns"), rapid.IntRange(1, 5).Draw(t, "taps"))
		c := convOf(y, typ, params, grads, p)
		Convolve(y, c.Conv)
		bounds := p.bounds()
		withinBounds(t, "y", c.Y, p.y, bounds.y)
		ConvolveGrad(y, c)
		withinBounds(t, "dx", c.DX, p.x.dx, bounds.x)
		withinBounds(t, "dw", c.DW, p.w.dx, bounds.w)
		withinBounds(t, "dbias", c.DBias, p.bias.dx, bounds.bias)
	})
}
