// This file tests up to which sizes launches take the kernels for vectors. Threads of these kernels keep a fixed number
// of vectors; their twins compute any size, and only a GPU would fail.

package nn

import (
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

func TestLimitsOfVectorKernels(t *testing.T) {
	_, b := trialMemory(t)
	m := func(rows, cols int) Matrix { return NewMatrix(b.All(), kernels.BF16, rows, cols) }
	first := func(issue func(s device.Stream)) *device.Kernel {
		var s tape
		issue(&s)
		return s.ops[0].Kernel
	}
	norm := func(cols int) *device.Kernel {
		return first(func(s device.Stream) { RMSNorm(s, Norm{Y: m(2, cols), X: m(2, cols), W: m(1, cols)}) })
	}
	normGrad := func(cols int) *device.Kernel {
		return first(func(s device.Stream) {
			RMSNormGrad(s, NormGrad{DX: m(2, cols), DW: m(1, cols), X: m(2, cols), W: m(1, cols), DY: m(2, cols), Scratch: b.Slice(0, NormScratch(2, cols))})
		})
	}
	gated := func(cols, groups int) GatedNorm {
		return GatedNorm{Y: m(2, cols), X: m(2, cols), Z: m(2, cols), W: m(1, cols), Groups: groups}
	}
	gatedNorm := func(cols, groups int) *device.Kernel {
		return first(func(s device.Stream) { GatedRMSNorm(s, gated(cols, groups)) })
	}
	gatedGrad := func(cols, groups int) *device.Kernel {
		return first(func(s device.Stream) {
			GatedRMSNormGrad(s, GatedNormGrad{GatedNorm: gated(cols, groups), DY: m(2, cols), DX: m(2, cols), DZ: m(2, cols), DW: m(1, cols), Scratch: b.Slice(0, GatedNormScratch(2, cols))})
		})
	}
	combine := func(every int) *device.Kernel {
		return first(func(s device.Stream) {
			CombineRows(s, Combining{Dst: m(2, 16), Src: m(2, 16), Place: b.Slice(0, memory.Bytes(8*every)), Every: every})
		})
	}
	convGrad := func(taps int) *device.Kernel {
		c := ConvGrad{Conv: Conv{X: m(4, 16), W: m(16, taps), Bias: m(1, 16), Seq: 4}, DY: m(4, 16), DX: m(4, 16), DW: m(16, taps), DBias: m(1, 16)}
		c.Scratch = b.Slice(0, c.ScratchBytes())
		return first(func(s device.Stream) { ConvolveGrad(s, c) })
	}
	loss := func(grad Matrix) *device.Kernel {
		l := lossLaunch(Loss{Logits: NewMatrix(b.All(), kernels.F32, 2, 16), Targets: b.Slice(0, 8), Losses: b.Slice(0, 8), Grad: grad})
		return l.Kernel
	}
	for _, x := range []struct {
		what string
		took *device.Kernel
		of   *ways
		wide bool
	}{
		{"a norm of 8192 columns", norm(rowThreads * normKeep * 8), normKernels, true},
		{"a norm of 8200", norm(rowThreads*normKeep*8 + 8), normKernels, false},
		{"its gradient of 8192", normGrad(normGradThreads * normGradKeep * 8), normGradKernels, true},
		{"its gradient of 8200", normGrad(normGradThreads*normGradKeep*8 + 8), normGradKernels, false},
		{"a gated norm of two groups of 8192", gatedNorm(2*gatedThreads*gatedKeep*8, 2), gatedNormKernels, true},
		{"a gated norm of 8200", gatedNorm(gatedThreads*gatedKeep*8+8, 1), gatedNormKernels, false},
		{"a gated norm of two groups of 4 columns", gatedNorm(8, 2), gatedNormKernels, false},
		{"its gradient of two groups of 8192", gatedGrad(2*normGradThreads*gatedGradKeep*8, 2), gatedNormGradKernels, true},
		{"its gradient of 8200", gatedGrad(normGradThreads*gatedGradKeep*8+8, 1), gatedNormGradKernels, false},
		{"32 rows that are combined", combine(32), combineKernels, true},
		{"33 rows", combine(33), combineKernels, false},
		{"4 taps", convGrad(4), convGradKernels, true},
		{"3 taps", convGrad(3), convGradKernels, false},
		{"a loss without a gradient", loss(Matrix{}), lossKernels, true},
		{"a loss whose gradient has its columns", loss(NewMatrix(b.All(), kernels.F32, 2, 16)), lossKernels, true},
		{"a loss whose gradient begins inside of a vector", loss(NewMatrix(b.Slice(4, 128), kernels.F32, 2, 16)), lossKernels, false},
	} {
		if wide := strings.HasPrefix(x.took.Name, x.of.wide.Name); wide != x.wide || !wide && x.took != &x.of.any {
			t.Errorf("%s: %s", x.what, x.took.Name)
		}
	}
}
