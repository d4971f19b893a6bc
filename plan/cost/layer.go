// This file owns the modules of a layer: what each computes, moves and sends, and
// how long that takes forward and backward for one microbatch on one rank.

package cost

import (
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/model"
)

// Module is a part of a layer that takes time of its own.
type Module uint8

const (
	AttnNorm Module = iota
	QKV             // projections to queries, keys and values; for MLA the narrow ones
	MLAUp           // MLA: from the narrow projections to heads
	CoreAttn
	AttnProj
	MambaIn
	MambaScan // convolution and scan, also of a delta net
	MambaOut
	MLPNorm
	MLP
	Router
	Dispatch // permutation and all-to-all to the experts
	ExpertFC1
	MoEAct
	ExpertFC2
	Combine
	Shared
	modules
)

func (m Module) String() string {
	return [...]string{
		"attn_norm", "qkv_linear", "mla_up_proj", "core_attn", "attn_proj", "mamba_in", "mamba_scan", "mamba_out",
		"mlp_norm", "mlp", "router", "dispatch", "expert_fc1", "moe_act", "expert_fc2", "combine", "shared_experts",
	}[m]
}

// Part is the time of one module of one layer for one microbatch.
type Part struct {
	Module Module
	// Forward and Backward are what the step sees: compute and traffic, and of
	// communication what shows.
	Forward, Backward Seconds
	// Flops are the operations of the forward pass.
	Flops float64
	// Launch is the host's time to launch the forward pass.
	Launch Seconds
}

// Layer is the time of one layer for one microbatch on one rank.
type Layer struct {
	Parts             []Part // in forward order
	Forward, Backward Seconds
	// Waiting says that the device waits for the host to launch the layer.
	Waiting bool
}

// part finds a module; a layer that lacks it has one that takes no time.
func (l *Layer) part(m Module) Part {
	for _, p := range l.Parts {
		if p.Module == m {
			return p
		}
	}
	return Part{Module: m}
}

// Layer is the time of a layer.
func (m *Model) Layer(l model.Layer) *Layer {
	k := KindOf(l)
	if t, ok := m.layers[k]; ok {
		return t
	}
	t := m.time(l)
	m.layers[k] = t
	return t
}

// tally collects work by module before it becomes time.
type tally struct {
	m     *Model
	parts [modules]work
}

// work is what a module takes in both directions, and of it what is communication
// that no compute of the layer hides.
type work struct {
	used                      bool
	flops                     float64 // forward
	forward, backward         Seconds
	sentForward, sentBackward Seconds
}

func (t *tally) at(m Module) *work {
	t.parts[m].used = true
	return &t.parts[m]
}

// time adds up a layer.
func (m *Model) time(l model.Layer) *Layer {
	t := &tally{m: m}
	for _, p := range m.setup.Model.LayerParams(l) {
		if p.Cols > 1 && !strings.Contains(p.Name, "conv1d") && !strings.HasSuffix(p.Name, "A_log") {
			t.product(moduleOf(p.Name), p, l)
		}
	}
	t.mixer(l)
	t.feed(l)
	t.communicate(l)
	out := &Layer{}
	for i := range t.parts {
		if !t.parts[i].used {
			continue
		}
		w := t.parts[i]
		p := Part{
			Module: Module(i), Flops: w.flops,
			Forward:  w.forward + w.sentForward,
			Backward: w.backward + w.sentBackward,
		}
		out.Parts = append(out.Parts, p)
		out.Forward += p.Forward
		out.Backward += p.Backward
	}
	if m.setup.Layout.OverlapEP && l.MoE != nil {
		out.hide(t)
	}
	var experts float64
	if l.MoE != nil {
		experts = float64(l.MoE.Experts) / float64(m.setup.Layout.EP)
	}
	m.launch(out, experts)
	return out
}

// launch stretches a layer to the time that the host needs to launch it: the host
// runs ahead of the device, so that launching shows only where it is slower.
// Backward launches twice as much. Products of experts launch work for each expert
// of the rank, and the narrower the format, the more: scales are found and
// applied besides.
func (m *Model) launch(l *Layer, experts float64) {
	var host Seconds
	for i := range l.Parts {
		p := &l.Parts[i]
		if m.captured(p.Module) {
			continue
		}
		p.Launch = m.rates.Launch
		if p.Module == ExpertFC1 || p.Module == ExpertFC2 {
			p.Launch += m.rates.LaunchExpert * Seconds(experts) / Seconds(m.width)
		}
		host += p.Launch
	}
	l.Waiting = host > l.Forward
	forward, backward := max(host/l.Forward, 1), max(2*host/l.Backward, 1)
	for i := range l.Parts {
		l.Parts[i].Forward *= forward
		l.Parts[i].Backward *= backward
	}
	l.Forward *= forward
	l.Backward *= backward
}

// captured tells whether a module lies in a captured scope.
func (m *Model) captured(mod Module) bool {
	scope := "moe"
	switch mod {
	case AttnNorm, QKV, MLAUp, CoreAttn, AttnProj:
		scope = "attn"
	case MambaIn, MambaScan, MambaOut:
		scope = "mamba"
	case MLPNorm, MLP:
		scope = "mlp"
	case Router:
		scope = "moe_router"
	case Dispatch:
		scope = "moe_preprocess"
	}
	s := m.setup.Graph.Scopes
	return slices.Contains(s, scope) || slices.Contains(s, "full_iteration") || scope[:3] == "moe" && slices.Contains(s, "moe")
}

// hide takes from a layer the expert communication that another microbatch's
// compute covers.
func (l *Layer) hide(t *tally) {
	for i := range l.Parts {
		p := &l.Parts[i]
		w := t.parts[p.Module]
		if p.Module != Dispatch && p.Module != Combine {
			continue
		}
		// Forward communication runs behind backward compute, and the other way
		// round; what shows is what is longer than a share of that.
		f, b := max(w.sentForward-l.Backward/2, 0), max(w.sentBackward-l.Forward/2, 0)
		l.Forward -= w.sentForward - f
		l.Backward -= w.sentBackward - b
		p.Forward -= w.sentForward - f
		p.Backward -= w.sentBackward - b
	}
}

// moduleOf says which module a parameter belongs to.
func moduleOf(name string) Module {
	for _, c := range []struct {
		part string
		m    Module
	}{
		{"_up_proj", MLAUp}, {"linear_proj", AttnProj}, {"self_attention.out_proj", AttnProj}, {"self_attention.", QKV},
		{"mixer.in_proj", MambaIn}, {"mixer.out_proj", MambaOut}, {"mixer.", MambaScan},
		{"shared_experts", Shared}, {"experts.linear_fc1", ExpertFC1}, {"experts.linear_fc2", ExpertFC2},
		{"fc1_latent", ExpertFC1}, {"fc2_latent", ExpertFC2}, {"router", Router},
	} {
		if strings.Contains(name, c.part) {
			return c.m
		}
	}
	return MLP
}

// rows is the number of rows that the experts of a rank compute: padding fills
// up to the capacity, dropping cuts off what is beyond it.
func (m *Model) rows(e *model.MoE) float64 {
	k, load := m.setup.Kernels, m.setup.Routing.Imbalance
	switch {
	case k.CapacityFactor > 0 && k.PadToCapacity:
		load = k.CapacityFactor
	case k.CapacityFactor > 0:
		load = min(load, k.CapacityFactor)
	}
	return m.local * float64(e.TopK) * float64(m.setup.Layout.ETP) * load
}

// product adds a matrix product. A matrix that every TP rank holds works on the
// rank's share of the sequence, a divided one on all of it.
func (t *tally) product(mod Module, p model.Param, l model.Layer) {
	m := t.m
	rows, in, out, weights := m.local, float64(p.Cols), float64(p.Rows), float64(p.Elements())
	lay := m.setup.Layout
	switch p.Split {
	case model.Tensor:
		rows, weights = m.tokens, weights/float64(lay.TP)
	case model.Expert:
		rows, weights = m.rows(l.MoE), weights/float64(lay.EP*lay.ETP)
	}
	share := 1 / float64(lay.TP)
	switch p.Split {
	case model.Whole:
		share = 1
	case model.Expert:
		share = 1 / float64(lay.ETP)
	}
	flops := 2 * rows * in * out * share
	rate, width := m.products, m.width
	if mod == Router {
		rate, width = m.plain, 2
	}
	memory := m.gpu.HBM * m.rates.Memory
	// Of a divided matrix one side is narrower on a rank; the mean of the two
	// ways is near enough for traffic.
	side := (1 + share) / 2
	moved := rows*side*(in*width+2*out) + weights*width
	w := t.at(mod)
	w.flops += flops
	w.forward += Seconds(max(flops/rate, moved/memory))
	// Gradients of weights are added to an fp32 buffer.
	w.backward += Seconds(2*max(flops/rate, moved/memory) + 8*weights/memory)
	if width < 2 {
		// The input, and in backward the output's gradient, is read in bf16 and
		// written twice, once for each direction of products.
		w.forward += Seconds(rows * side * in * (2 + 2*width) / memory)
		w.backward += Seconds(rows * side * out * (2 + 2*width) / memory)
	}
}
