// This file owns the backward pass of norms on Hopper: for which rows it is, and its shared
// memory. normhopper.cu is compiled for the same.

package nn

import (
	_ "embed"

	"github.com/stowage-dev/stowage/device"
)

//go:embed normhopper_sm90a.ptx
var normHopperPTX string

var (
	normHopperImage    = hopperImage("nn/normhopper.cu", normHopperPTX)
	normLateKernel     = device.Kernel{Name: "stowage_nn_rmsnorm_grad_late", Image: normHopperImage}
	normLatePlusKernel = device.Kernel{Name: "stowage_nn_rmsnorm_grad_late_plus", Image: normHopperImage}
	normEarlyKernel    = device.Kernel{Name: "stowage_nn_rmsnorm_grad_weight_early", Image: normHopperImage}
)

const (
	// A team has normStages rows in shared memory, or normStagesPlus if the gradient of the
	// residual comes along.
	normStages     = 5
	normStagesPlus = 3
	// The least columns of a norm that has these kernels.
	normLateCols = 512
	// normEarlyThreads add up the partial sums of 32 columns.
	normEarlyThreads = 256
)

// late reports whether the kernels for Hopper are for a norm: vectors are aligned, and a row
// is one norm that a block keeps. The second launch may begin early only behind the first.
func (n NormGrad) late() bool {
	return normGradKernels.of(n.DX, n.X, n.W, n.DY, n.Plus) != &normGradKernels.any && n.X.Cols == n.W.Cols &&
		n.Scratch.Addr()%16 == 0 && n.W.Cols >= normLateCols && n.W.Cols <= normGradThreads*normGradKeep*8
}

// tune adds the kernel for Hopper to the launch that sets DX.
func (n NormGrad) tune(l *device.Launch) {
	if !n.late() {
		return
	}
	k, stages, operands := &normLateKernel, normStages, 2
	if n.Plus.Buf != nil {
		k, stages, operands = &normLatePlusKernel, normStagesPlus, 3
	}
	// Behind the rows is room for the sums of all threads.
	shared := normGradThreads * normGradKeep * (stages*operands*16 + 8*4)
	l.Tuned = device.Tuned{Kernel: k, Grid: l.Grid, Block: l.Block, Shared: uint32(shared)}
}

// tuneSum adds the kernel for Hopper to the launch that adds up the parts.
func (n NormGrad) tuneSum(l *device.Launch) {
	if n.late() {
		l.Tuned = device.Tuned{Kernel: &normEarlyKernel, Grid: l.Grid, Block: [3]uint32{normEarlyThreads, 1, 1}, Early: true}
	}
}
