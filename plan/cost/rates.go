// This file owns the figures of the time model: 13 that are fitted, and a few that are not.
//
// The fitted figures minimise the mean error of the logarithm of tokens a second on the 143
// runs of internal/planruns: Megatron-Bridge's published throughput for nine models on H100,
// B200, B300, GB200 and GB300 in bf16, fp8, mxfp8 and nvfp4, and step times of SimuMax and
// Megatron-LM where those lack a format. `go test ./plan/cost -run TestFit -fit` fits again.
//
// The mean error is 4.6 %, and the worst 21 %. If the runs of one model are left out of the
// fit, they are predicted with a mean error of 6.0 % and a worst of 21 % (TestLeftOut). The
// figures that are not fitted, and which effects the model has, were chosen with all runs in
// view. What the runs do not say (versions of kernels, clocks, the network) is in that
// spread: the same settings differ by up to 12 % between releases.
//
// Hardware counts by its figures alone: its generation, and what its data file states. No
// figure here follows a name.

package cost

import (
	"math"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
)

// efficiencies are the shares of the hardware's peak figures that training reaches.
type efficiencies struct {
	// Hopper and Blackwell are the shares of the arithmetic peak that matrix products
	// reach, by format: bf16, fp8 and mxfp8, nvfp4.
	Hopper    [2]float64
	Blackwell [3]float64
	// Power is the exponent by which the share grows with the power that hardware may take
	// for its peak. Products lower the clock until they keep to that power, and the clock
	// grows with the cube root of power at least, because the voltage grows with it. A GB300
	// has the bf16 peak of a GB200 and 1.17 times its power.
	Power float64
	// Attention is the share that fused attention reaches of the time that its products
	// and its exponentials take one after the other. Scan is the share of the bf16 peak
	// that the products of a scan reach.
	Attention, Scan float64
	// Memory is the share of the bandwidth of memory.
	Memory float64
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
		Hopper: [2]float64{0.603, 0.729}, Blackwell: [3]float64{0.449, 0.662, 0.85}, Power: 0.506,
		Attention: 0.764, Scan: 0.0245, Memory: 0.469,
		Launch: 222.5e-6, LaunchExpert: 25e-6, Overlapped: 1.6375, Gap: 37.5e-6,
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
	// The shares are those of an H100 and of a GB200, in joules for an operation in bf16.
	share, joules := r.Hopper[min(i, 1)], 700/989.4e12
	if g.Generation >= 10 {
		share, joules = r.Blackwell[i], 1200/2500e12
	}
	if g.Watts > 0 {
		share *= math.Pow(g.Watts/g.Flops["bf16"]/joules, r.Power)
	}
	return min(share, 0.95)
}

// Reached returns what training reaches of a GPU on average, as the fit found it: operations
// of matrix products a second in bf16, and bytes of its memory a second.
func Reached(g *hardware.GPU) (products, memory float64) {
	r := fitted()
	return g.Flops["bf16"] * r.product(g, plan.BF16), g.HBM * r.Memory
}

// exponentials returns how many exponentials hardware computes in a second. Unless its data
// file says it, a multiprocessor computes 16 in a cycle, and beside them 4096 operations of
// bf16 products on Hopper and 8192 on Blackwell. Other hardware counts as Hopper.
func exponentials(g *hardware.GPU) float64 {
	switch {
	case g.Exponentials > 0:
		return g.Exponentials
	case g.Generation >= 10:
		return g.Flops["bf16"] / 512
	}
	return g.Flops["bf16"] / 256
}
