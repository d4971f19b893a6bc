package nn

import (
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// routerCase returns a gradient of a router that the kernels for Hopper compute: in turn that
// of its weights and that of its input.
func routerCase(t testing.TB, i, most int) *tensorCase {
	d := newGemmDraw(t, i, 64<<20)
	tokens, experts, cols := 1+d.IntN(most), 4*(1+d.IntN(32)), 8*(1+d.IntN(50))
	p := Product{TransA: i%2 == 0, A: d.even(kernels.F32, tokens, experts)}
	if p.TransA {
		p.B, p.C = d.even(kernels.BF16, tokens, cols), d.even(kernels.F32, p.A.Cols, cols)
	} else {
		p.B, p.C = d.even(kernels.BF16, experts, cols), d.even(kernels.BF16, tokens, cols)
	}
	switch i / 2 % 3 {
	case 0:
		p.Plus = p.C
	case 1:
		p.Plus = d.even(p.C.Type, p.C.Rows, cols)
	}
	tolerance := gemmTolerance(p.C)
	if p.TransA {
		tolerance *= 1 + float64(tokens)/1000 // tensor cores cut off what they add
	}
	return &tensorCase{
		name:   fmt.Sprintf("product %d of %d tokens, %d experts and %d columns", i, tokens, p.A.Cols, cols),
		memory: d.tensorMemory, results: []Matrix{p.C}, tolerance: tolerance,
		launches: func(b *device.Buffer) []device.Launch {
			q := p
			q.A, q.B, q.C, q.Plus = p.A.inBuffer(b), p.B.inBuffer(b), p.C.inBuffer(b), p.Plus.inBuffer(b)
			return []device.Launch{GemmLaunch(q)}
		},
	}
}

// The source for Hopper, compiled for the host, computes what the twin computes. SPEC S6.3
func TestRouterSourceOnTheHost(t *testing.T) {
	program := newTensorProgram(t, "gemmrouter.cu", routerPTX)
	for i := range 16 {
		if c := routerCase(t, i, 700); !c.tunedOnHost(t, program) {
			t.Errorf("%s has no kernel for Hopper", c.name)
		}
	}
}

func TestRouterOnGPU(t *testing.T) {
	g := newTensorGPU(t)
	for i := range 24 {
		routerCase(t, i, 3000).onGPU(t, g)
	}
}
