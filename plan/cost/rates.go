// This file owns the figures of the time model: 14 that are fitted, and a few that are not.
//
// The fitted figures minimise the mean error of the logarithm of tokens a second on the 143
// runs of internal/planruns: Megatron-Bridge's published throughput for nine models on H100,
// B200, B300, GB200 and GB300 in bf16, fp8, mxfp8 and nvfp4, and step times of SimuMax and
// Megatron-LM where those lack a format. `go test ./plan/cost -run TestFit -fit` fits again.
//
// The mean error is 4.9 %, and the worst 20 %. If the runs of one model are left out of the
// fit, they are predicted with a mean error of 6.7 % and a worst of 26 % (TestLeftOut); the
// figures that are not fitted were chosen with all runs in view. What the runs do not say (versions of kernels, clocks, the network) is in that
// spread: the same settings differ by up to 12 % between releases.

package cost

import (
	"strings"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
)

// efficiencies are the shares of the hardware's peak figures that training reaches.
type efficiencies struct {
	// Hopper and Blackwell are the shares of the arithmetic peak that matrix products
	// reach, by format: bf16, fp8 and mxfp8, nvfp4.
	Hopper    [2]float64
	Blackwell [3]float64
	// Ultra is the factor by which a B300 reaches more of the peak of a B200. Both have the
	// same peak in bf16 and fp8, and power limits what they reach of it.
	Ultra float64
	// Attention is the share that fused attention reaches of the time that its products
	// and its exponentials take one after the other. Scan is the share of the bf16 peak
	// that the products of a scan reach.
	Attention, Scan float64
	// Memory is the share of the bandwidth of memory on Hopper and on Blackwell.
	Memory [2]float64
	// Launch is the host's time to launch a module that no graph captures, in a format of
	// one byte. LaunchExpert is what each expert adds to a product of experts. Both are half
	// of that in bf16. Overlapped is the factor by which both grow if expert communication
	// is overlapped, because each layer is then launched in pieces.
	Launch, LaunchExpert Seconds
	Overlapped           float64
	// Gap is the time in which the kernels of a module start and end, in the forward pass.
	Gap Seconds
}

// fitted returns the fitted efficiencies.
func fitted() efficiencies {
	return efficiencies{
		Hopper: [2]float64{0.589, 0.7575}, Blackwell: [3]float64{0.435, 0.669, 0.85}, Ultra: 1.0975,
		Attention: 0.7525, Scan: 0.0256, Memory: [2]float64{0.475, 0.4625},
		Launch: 219e-6, LaunchExpert: 27.5e-6, Overlapped: 1.6375, Gap: 36.25e-6,
	}
}

// These shares are estimates of what exchanges of large messages reach of NVLink and of
// the network.
const (
	fastShare    = 0.78
	networkShare = 0.8
)

// collectiveStart is the time of a tensor-parallel collective beside that of its bytes. It
// is an estimate: messages of 40 MB reach half of what large ones do.
const collectiveStart Seconds = 60e-6

// exposedTP is the share of tensor-parallel communication that stays visible if user
// buffers overlap it: the first and the last piece of about ten. The runs alone would
// choose zero, and a search over layouts would then take all of it.
const exposedTP = 0.1

// exchangeSMs is the share of a GPU's multiprocessors that exchange rows while others
// compute: HybridEP takes 32 of 148 in the published runs.
const exchangeSMs = 0.22

// product returns the share of the arithmetic peak in a format. Other hardware counts as
// Hopper, because no runs of it are known.
func (r efficiencies) product(g *hardware.GPU, f plan.Format) float64 {
	i := 0
	switch f {
	case plan.FP8, plan.MXFP8:
		i = 1
	case plan.NVFP4:
		i = 2
	}
	switch {
	case ultra(g):
		return r.Blackwell[i] * r.Ultra
	case g.Generation >= 10:
		return r.Blackwell[i]
	}
	return r.Hopper[min(i, 1)]
}

// memory returns the bandwidth of memory that kernels reach.
func (r efficiencies) memory(g *hardware.GPU) float64 {
	if g.Generation >= 10 {
		return g.HBM * r.Memory[1]
	}
	return g.HBM * r.Memory[0]
}

// Reached returns what training reaches of a GPU on average, as the fit found it: operations
// of matrix products a second in bf16, and bytes of its memory a second.
func Reached(g *hardware.GPU) (products, memory float64) {
	r := fitted()
	return g.Flops["bf16"] * r.product(g, plan.BF16), r.memory(g)
}

// ultra reports whether hardware is a B300 or a GB300.
func ultra(g *hardware.GPU) bool { return strings.HasSuffix(g.Name, "b300") }

// exponentials returns how many exponentials hardware computes in a second. A
// multiprocessor computes 16 in a cycle, and 32 on a B300. It computes 4096 operations of
// bf16 products in a cycle on Hopper and 8192 on Blackwell. Other hardware counts as Hopper.
func exponentials(g *hardware.GPU) float64 {
	if g.Generation >= 10 && !ultra(g) {
		return g.Flops["bf16"] / 512
	}
	return g.Flops["bf16"] / 256
}
