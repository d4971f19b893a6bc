// This file owns the backward pass of the short convolution on Hopper, whose second launch begins
// early. convhopper.cu is compiled for the same.

package nn

import (
	_ "embed"

	"github.com/stowage-dev/stowage/device"
)

//go:embed convhopper_sm90a.ptx
var convHopperPTX string

var (
	convHopperImage = hopperImage("nn/convhopper.cu", convHopperPTX)
	convLateKernel  = device.Kernel{Name: "stowage_nn_conv_grad_late", Image: convHopperImage}
	convEarlyKernel = device.Kernel{Name: "stowage_nn_conv_grad_sum_early", Image: convHopperImage}
)

// tune adds the kernels for Hopper to the two launches of the backward pass, if that is for whole
// vectors and taps and bias can be read by vectors.
func (c ConvGrad) tune(first, second *device.Launch) {
	if first.Kernel != &convGradKernels.wide || !c.evenTaps() {
		return
	}
	first.Tuned = device.Tuned{Kernel: &convLateKernel, Grid: first.Grid, Block: first.Block, Shared: first.Shared}
	second.Tuned = device.Tuned{Kernel: &convEarlyKernel, Grid: second.Grid, Block: second.Block, Early: true}
}
