// Package cost predicts how long a training step takes: each module of each
// layer from its shapes, the step from walking the pipeline's schedule, and what
// recomputation and copies that do not hide add to it. It is pure.
//
// A product of matrices takes its operations over the arithmetic peak times an
// efficiency, or its traffic over the memory's bandwidth if that is longer;
// everything else takes its traffic; communication takes its bytes over a link,
// and a part of it shows. The efficiencies are fitted on published runs: see
// rates.go.
//
// This file owns the model of one setup, layer.go and traffic.go the modules of a
// layer, comm.go communication inside of it, replica.go that between replicas,
// step.go the step, copy.go the windows that copies to the host hide in, rates.go
// the fitted figures.
package cost

import (
	"fmt"

	"github.com/stowage-dev/stowage/model"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/schedule"
)

// Seconds is a length of time. It is a float because figures are fitted,
// averaged and divided, and nanoseconds would round them.
type Seconds float64

// Model is the time model of one setup. It remembers what it worked out, so that
// one goroutine at a time may use it.
type Model struct {
	setup *plan.Setup
	gpu   *hardware.GPU
	rates Rates

	// tokens are those of a microbatch on one rank before tensor parallelism,
	// local what of them a rank holds between layers: T and Ts.
	tokens, local float64
	// products is the arithmetic rate of matrix products in the compute format,
	// plain in bf16; both with their efficiency, in operations a second.
	products, plain float64
	// width is the bytes of an element in the compute format.
	width float64
	flops float64 // of the model for a token

	layers map[Kind]*Layer
	orders map[schedule.Pipeline][][]schedule.Pass
	end    *[2]Seconds // what ends has worked out
}

// New makes the time model of a setup with the published efficiencies.
func New(s *plan.Setup) (*Model, error) { return NewWith(s, Fitted()) }

// NewWith makes it with efficiencies of one's own.
func NewWith(s *plan.Setup, r Rates) (*Model, error) {
	n, err := s.Normalise()
	if err != nil {
		return nil, err
	}
	g := n.Hardware
	if g == nil {
		return nil, fmt.Errorf("plan: the setup names no hardware, so nothing can be said about time; give --hardware")
	}
	if g.Flops["bf16"] <= 0 || g.HBM <= 0 || g.HostOut <= 0 || g.HostIn <= 0 || g.FastLink <= 0 || g.Network <= 0 {
		return nil, fmt.Errorf("plan: hardware %s has no bf16 speed, memory bandwidth or link bandwidth; complete its data file", g.Name)
	}
	m := &Model{setup: n, gpu: g, flops: Flops(n.Model, n.Batch.Seq), orders: map[schedule.Pipeline][][]schedule.Pass{}}
	m.tokens = float64(n.Batch.Seq) * float64(n.Batch.Micro) / float64(n.Layout.CP)
	m.local = m.tokens
	if n.Layout.SequenceParallel {
		m.local /= float64(n.Layout.TP)
	}
	m.use(r)
	return m, nil
}

// use takes efficiencies.
func (m *Model) use(r Rates) {
	g := m.gpu
	m.rates, m.layers, m.end = r, map[Kind]*Layer{}, nil
	m.plain = g.Flops["bf16"] * r.product(g, plan.BF16)
	m.products, m.width = m.plain, 2
	if c := m.setup.Precision.Compute; c == plan.FP8 || c == plan.MXFP8 || c == plan.NVFP4 {
		m.products = peak(g, c) * r.product(g, c)
		m.width = 1
		if c == plan.NVFP4 {
			m.width = 0.5
		}
	}
}

// peak is the arithmetic peak in a format; a GPU whose data file lacks a format
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

// Setup is the setup with everything filled in that it left open.
func (m *Model) Setup() *plan.Setup { return m.setup }

// Kind is what a layer is: layers of one kind take the same time.
type Kind struct {
	attention model.Attention
	mla       model.MLA
	mamba     model.Mamba
	delta     model.DeltaNet
	dense     model.Dense
	moe       model.MoE
}

// KindOf is the kind of a layer.
func KindOf(l model.Layer) (k Kind) {
	if l.Attention != nil {
		k.attention = *l.Attention
	}
	if l.MLA != nil {
		k.mla = *l.MLA
	}
	if l.Mamba != nil {
		k.mamba = *l.Mamba
	}
	if l.DeltaNet != nil {
		k.delta = *l.DeltaNet
	}
	if l.Dense != nil {
		k.dense = *l.Dense
	}
	if l.MoE != nil {
		k.moe = *l.MoE
	}
	return k
}
