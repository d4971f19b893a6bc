package nn

import (
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

func gatedOf(y *yard, typ, params, grads kernels.Number, p *plainGated) GatedNormGrad {
	p.run(true)
	rows := len(p.y) / p.cols
	return GatedNormGrad{
		GatedNorm: GatedNorm{
			Y: y.matrix(typ, rows, p.cols), X: placeMatrix(y, typ, p.cols, p.x.x), Z: placeMatrix(y, typ, p.cols, p.z.x),
			W: solid(y, params, p.cols, p.w.x), Groups: p.groups, Epsilon: float32(p.epsilon),
		},
		DY: placeMatrix(y, typ, p.cols, p.dy), DX: y.matrix(typ, rows, p.cols), DZ: y.matrix(typ, rows, p.cols),
		DW: begun(y, grads, p.cols, p.w), Scratch: place[float32](y, int(GatedNormScratch(rows, p.cols)/4)),
	}
}

// The gated norm and its gradients follow the definition, in place or not.
func TestGatedNorm(t *testing.T) {
	y := newYard(t, 2<<20)
	rapid.Check(t, func(t *rapid.T) {
		y.reset(t)
		y.strict = rapid.IntRange(0, 9).Draw(t, "strict") == 0
		typ, params, grads := rapid.SampledFrom(numbers).Draw(t, "type"), rapid.SampledFrom(numbers).Draw(t, "parameters"), rapid.SampledFrom(numbers).Draw(t, "gradients")
		groups := rapid.IntRange(1, 4).Draw(t, "groups")
		p := newPlainGated(rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1)), typ, params,
			rapid.IntRange(1, 70).Draw(t, "rows"), groups*rapid.OneOf(rapid.IntRange(1, 40), rapid.IntRange(100, 300)).Draw(t, "columns"), groups)
		c := gatedOf(y, typ, params, grads, p)
		GatedRMSNorm(y, c.GatedNorm)
		near(t, "y", c.Y, p.y, 1e-6)
		switch rapid.IntRange(0, 2).Draw(t, "in place") {
		case 1:
			c.DX, c.DZ = c.DY, c.Z
		case 2:
			c.DX = c.X
		}
		GatedRMSNormGrad(y, c)
		near(t, "dx", c.DX, p.x.dx, 1e-6, p.mostX)
		near(t, "dz", c.DZ, p.z.dx, 1e-6, p.mostZ)
		near(t, "dw", c.DW, p.w.dx, 1e-6, math.Sqrt(float64(c.X.Rows))) // the terms of the sum may cancel
	})
}

// Pieces have all rows, none is empty, and of many rows none is much shorter or longer than others.
func TestGatedGradRows(t *testing.T) {
	for rows := 1; rows <= 100000; rows++ {
		each := gatedGradRows(rows)
		pieces := runsOf(rows, each)
		if each*pieces < rows || each*(pieces-1) >= rows || each < 32 || each > 96 {
			t.Fatalf("%d rows are %d pieces of %d", rows, pieces, each)
		}
		if GatedNormScratch(rows, 3) != 12*memory.Bytes(pieces) {
			t.Fatalf("%d rows of 3 columns and %d pieces have %d bytes of scratch", rows, pieces, GatedNormScratch(rows, 3))
		}
	}
}
