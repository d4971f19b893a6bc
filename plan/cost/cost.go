// Package cost predicts how long a training step takes, and what recompute and offload
// add to it. It uses no device.
//
// Call [New] with a setup that names hardware. [Model.Step] adds up the passes of all
// stages by walking the pipeline's schedule:
//
//	m, err := cost.New(setup)
//	...
//	step := m.Step(m.Policy().Passes)
//
// A matrix product takes its operations over the arithmetic peak times an efficiency, or
// its traffic over the memory bandwidth if that is longer. Attention takes its products
// and its exponentials. Other operations take their traffic. Communication takes its bytes
// over the bandwidth of a link, and compute hides a part of it. A layer takes at least as
// long as the host needs to launch it. The efficiencies are fitted to published runs. Trust
// differences between policies of one job more than absolute times: the mean error of a
// step is 5 %, and 6 % for models that the fit has not seen.
package cost

// This file owns the time model of one setup.

import (
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
)

// Seconds is a length of time. It is not a time.Duration because figures are fitted and
// averaged, and nanoseconds would round them.
type Seconds float64

// Model is the time model of one setup. It caches results, so only one goroutine at a
// time may use it.
type Model struct {
	setup *plan.Setup
	gpu   *hardware.GPU
	rates efficiencies

	// tokens is the number of tokens of a microbatch on one rank before tensor parallelism
	// (T). local is the number that a rank holds between layers (Ts).
	tokens, local float64
	// products is the rate of matrix products in the compute format, and plain the rate in
	// bf16. Both include their efficiency, in operations a second.
	products, plain float64
	memory          float64 // the bandwidth of memory that kernels reach, in bytes a second
	// width is the size of an element in the compute format, in bytes.
	width float64
	flops float64 // operations of the model for a token

	layers map[model.Kind]*Layer
	holds  map[model.Kind]held // the parameters of a layer
	orders map[schedule.Pipeline][][]schedule.Pass
	end    *[2]Seconds // the cached result of ends
}

// New returns the time model of a setup. It returns a *memory.SettingError if the setup
// names no hardware, or hardware without the necessary figures.
func New(s *plan.Setup) (*Model, error) { return newWith(s, fitted()) }

// newWith returns the time model with other efficiencies than the fitted ones.
func newWith(s *plan.Setup, r efficiencies) (*Model, error) {
	n, err := s.Normalise()
	if err != nil {
		return nil, err
	}
	g := n.Hardware
	if g == nil {
		return nil, &memory.SettingError{Setting: "Hardware", Problem: "is missing, and times cannot be predicted without it", Remedy: "name the hardware"}
	}
	for _, x := range []struct {
		key  string
		rate float64
	}{{"flops of bf16", g.Flops["bf16"]}, {"hbm", g.HBM}, {"host_out", g.HostOut}, {"host_in", g.HostIn}, {"fast_link", g.FastLink}, {"network", g.Network}} {
		if x.rate <= 0 {
			return nil, &memory.SettingError{Setting: "Hardware", Asked: g.Name, Problem: "has no " + x.key + ", which times depend on", Remedy: "add it to its JSON file, in bytes or operations a second"}
		}
	}
	m := &Model{setup: n, gpu: g, flops: TokenFlops(n.Model, n.Batch.Seq), orders: map[schedule.Pipeline][][]schedule.Pass{}}
	m.tokens = float64(n.Batch.Seq) * float64(n.Batch.Micro) / float64(n.Layout.CP)
	m.local = m.tokens
	if n.Layout.SequenceParallel {
		m.local /= float64(n.Layout.TP)
	}
	m.setEfficiencies(r)
	return m, nil
}

// setEfficiencies sets the efficiencies.
func (m *Model) setEfficiencies(r efficiencies) {
	g := m.gpu
	m.rates, m.layers, m.end = r, map[model.Kind]*Layer{}, nil
	m.memory = g.HBM * r.Memory
	m.plain = g.Flops["bf16"] * r.product(g, plan.BF16)
	m.products, m.width = m.plain, 2
	if c := m.setup.Precision.Compute; c == plan.FP8 || c == plan.MXFP8 || c == plan.NVFP4 {
		// A GB300's peak in nvfp4 is six times that in bf16, but its runs are no faster in
		// relation to a GB200's than in fp8.
		m.products = min(peak(g, c), 4*g.Flops["bf16"]) * r.product(g, c)
		m.width = 1
		if c == plan.NVFP4 {
			m.width = 0.5
		}
	}
}

// peak returns the arithmetic peak in a format. A GPU whose data file lacks a format
// runs it as the next wider one.
func peak(g *hardware.GPU, f plan.Format) float64 {
	names := []string{"bf16"}
	switch f {
	case plan.NVFP4:
		names = []string{"nvfp4", "mxfp8", "fp8", "bf16"}
	case plan.MXFP8:
		names = []string{"mxfp8", "fp8", "bf16"}
	case plan.FP8:
		names = []string{"fp8", "mxfp8", "bf16"}
	}
	for _, n := range names {
		if v := g.Flops[n]; v > 0 {
			return v
		}
	}
	return 0
}

// Setup returns the setup with all defaults filled in.
func (m *Model) Setup() *plan.Setup { return m.setup }
