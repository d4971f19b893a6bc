// This file owns the parts of a layer: what each computes, moves and sends, and how long it
// takes in both passes for one microbatch on one rank.

package cost

import (
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// part is a part of a layer that takes time of its own.
type part uint8

const (
	attnNorm  part = iota
	qkvLinear      // projections to queries, keys and values; for MLA the narrow ones
	mlaUp          // MLA: from the narrow projections to heads
	coreAttn
	attnProj
	mambaIn
	mambaScan // convolution and scan, also of a delta net
	mambaOut
	mlpNorm
	denseMLP
	router
	dispatch // permutation and all-to-all to the experts
	expertFC1
	moeAct
	expertFC2
	combine
	sharedExperts
	parts // the number of parts
)

func (p part) String() string {
	return [...]string{
		"attn_norm", "qkv_linear", "mla_up_proj", "core_attn", "attn_proj", "mamba_in", "mamba_scan", "mamba_out",
		"mlp_norm", "mlp", "router", "dispatch", "expert_fc1", "moe_act", "expert_fc2", "combine", "shared_experts",
	}[p]
}

// Part is the time of one part of one layer for one microbatch on one rank.
type Part struct {
	part part
	// Forward and Backward are compute, traffic, and the communication that compute
	// does not hide.
	Forward, Backward Seconds
	// Flops is the number of operations of the forward pass.
	Flops float64
	// Launch is the host's time to launch the forward pass.
	Launch Seconds
}

// Module returns the name of the part: a module's, or "mamba_out" or "combine" for
// parts that save nothing.
func (p Part) Module() string { return p.part.String() }

// Layer is the time of one layer for one microbatch on one rank.
type Layer struct {
	Parts             []Part // in forward order
	Forward, Backward Seconds
	// Waiting reports whether the device waits for the host to launch the layer.
	Waiting bool
}

// timeOf returns the time of a part. It is zero if the layer lacks the part.
func (l *Layer) timeOf(x part) Part {
	for _, p := range l.Parts {
		if p.part == x {
			return p
		}
	}
	return Part{part: x}
}

// Layer returns the time of a layer.
func (m *Model) Layer(l model.Layer) *Layer {
	k := model.KindOf(l)
	if t, ok := m.layers[k]; ok {
		return t
	}
	t := m.layerTime(l)
	m.layers[k] = t
	return t
}

// tally collects work by part before it becomes time.
type tally struct {
	m     *Model
	parts [parts]work
}

// work is what a part takes in both passes. sentForward and sentBackward are communication
// that no compute of the layer hides.
type work struct {
	used                      bool
	flops                     float64 // forward
	forward, backward         Seconds
	sentForward, sentBackward Seconds
}

func (t *tally) workOf(x part) *work {
	t.parts[x].used = true
	return &t.parts[x]
}

// layerTime returns the layerTime of a layer.
func (m *Model) layerTime(l model.Layer) *Layer {
	t := &tally{m: m}
	for _, p := range m.setup.Model.LayerParams(l) {
		if p.Cols > 1 && !strings.Contains(p.Name, "conv1d") && !strings.HasSuffix(p.Name, "A_log") {
			t.product(partOf(p.Name), p, l)
		}
	}
	t.mixer(l)
	t.feedForward(l)
	t.communicate(l)
	out := &Layer{}
	for i := range t.parts {
		if !t.parts[i].used {
			continue
		}
		w := t.parts[i]
		p := Part{
			part: part(i), Flops: w.flops,
			Forward:  w.forward + w.sentForward + m.rates.Gap,
			Backward: w.backward + w.sentBackward + 2*m.rates.Gap,
		}
		out.Parts = append(out.Parts, p)
		out.Forward += p.Forward
		out.Backward += p.Backward
	}
	if m.setup.Layout.OverlapEP && l.MoE != nil {
		out.hideExchange(t)
	}
	m.launch(out, l.MoE)
	return out
}

// launch stretches a layer to the time that the host needs to launch it. The host runs
// ahead of the device, so launching shows only if it is slower. The backward pass
// launches twice as much. Products of experts launch work for each expert of the rank.
// Formats of one byte launch twice as much as bf16, because scales are computed and applied.
// The captured parts of a layer are one graph, which is launched like a module, unless the
// graph is that of the whole step.
func (m *Model) launch(l *Layer, moe *model.MoE) {
	whole := slices.Contains(m.setup.Graph.Scopes, memory.FullIteration.String())
	if whole {
		return
	}
	factor := 1 / Seconds(max(m.width, 1))
	var experts Seconds
	if moe != nil {
		experts = Seconds(moe.Experts) / Seconds(m.setup.Layout.EP)
		if m.setup.Layout.OverlapEP {
			factor *= Seconds(m.rates.Overlapped)
		}
	}
	var host Seconds
	replays := false
	for i := range l.Parts {
		p := &l.Parts[i]
		if m.captured(p.part, moe != nil) {
			if replays {
				continue
			}
			replays = true
		}
		p.Launch = factor * m.rates.Launch
		if p.part == expertFC1 || p.part == expertFC2 {
			p.Launch += factor * m.rates.LaunchExpert * experts
		}
		host += p.Launch
	}
	l.Waiting = host > l.Forward
	forward, backward := max(host, l.Forward), max(2*host, l.Backward)
	if moe != nil && !m.setup.Layout.OverlapEP {
		forward = l.afterCounts()
	}
	for i := range l.Parts {
		l.Parts[i].Forward *= forward / l.Forward
		l.Parts[i].Backward *= backward / l.Backward
	}
	l.Forward, l.Backward = forward, backward
}

// afterCounts returns the time of the forward pass from one wait of the host to the next.
// The host waits in every layer for the number of rows that its experts receive. It then
// launches the experts, the rest of the layer and the beginning of the next one, and the
// device has nothing to do until the first of them arrives.
func (l *Layer) afterCounts() Seconds {
	first := max(slices.IndexFunc(l.Parts, func(p Part) bool { return p.part == expertFC1 }), 0)
	var host, device Seconds
	for i := range l.Parts {
		p := l.Parts[(first+i)%len(l.Parts)]
		host += p.Launch
		device = max(device, host) + p.Forward
	}
	return device
}

// captured reports whether a part of a layer, with experts or without, lies in a captured
// scope.
func (m *Model) captured(x part, moe bool) bool {
	captured := m.setup.Graph.Scopes
	if slices.Contains(captured, memory.FullIteration.String()) {
		return true
	}
	var scope string
	switch {
	case x == mambaIn, x == mambaScan, x == mambaOut:
		scope = "mamba"
	case x == dispatch:
		scope = "moe_preprocess"
	case x == combine, x == sharedExperts && m.setup.Kernels.SharedExpertOverlap:
		scope = memory.MoE.String()
	default:
		entry, _ := memory.LookupModule(x.String())
		scope = entry.In(moe)[0].String()
	}
	// Megatron-LM's scope moe includes its other scopes of experts.
	inMoE := strings.HasPrefix(scope, "moe") && slices.Contains(captured, memory.MoE.String())
	return inMoE || slices.Contains(captured, scope)
}

// hideExchange removes the expert communication that the compute of another microbatch hides.
func (l *Layer) hideExchange(t *tally) {
	for i := range l.Parts {
		p := &l.Parts[i]
		w := t.parts[p.part]
		if p.part != dispatch && p.part != combine {
			continue
		}
		// Forward communication runs behind backward compute and the reverse. Only what
		// exceeds a share of that compute remains.
		// The multiprocessors that exchange rows do not compute meanwhile.
		f, b := max(w.sentForward-l.Backward/2, 0), max(w.sentBackward-l.Forward/2, 0)
		hiddenF, hiddenB := (1-exchangeSMs)*(w.sentForward-f), (1-exchangeSMs)*(w.sentBackward-b)
		l.Forward -= hiddenF
		l.Backward -= hiddenB
		p.Forward -= hiddenF
		p.Backward -= hiddenB
	}
}

// partOf returns the part that a parameter belongs to.
func partOf(name string) part {
	for _, c := range []struct {
		text string
		part part
	}{
		{"_up_proj", mlaUp}, {"linear_proj", attnProj}, {"self_attention.out_proj", attnProj}, {"self_attention.", qkvLinear},
		{"mixer.in_proj", mambaIn}, {"mixer.out_proj", mambaOut}, {"mixer.", mambaScan},
		{"shared_experts", sharedExperts}, {"experts.linear_fc1", expertFC1}, {"experts.linear_fc2", expertFC2},
		{"fc1_latent", expertFC1}, {"fc2_latent", expertFC2}, {"router", router},
	} {
		if strings.Contains(name, c.text) {
			return c.part
		}
	}
	return denseMLP
}

// rows returns the number of rows that the experts of a rank compute. Padding fills up to
// the capacity, and dropping cuts off what exceeds it.
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

// product adds a matrix product. A matrix that every TP rank holds is applied to the rank's
// share of the sequence, and a divided matrix to all of it.
func (t *tally) product(x part, p model.Param, l model.Layer) {
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
	if x == router {
		rate, width = m.plain, 2
	}
	memory := m.memory
	// A divided matrix is narrower on one side. The mean of both ways is near enough for
	// traffic.
	side := (1 + share) / 2
	moved := rows*side*(in*width+2*out) + weights*width
	w := t.workOf(x)
	w.flops += flops
	w.forward += Seconds(max(flops/rate, moved/memory))
	// Gradients of weights are added to an fp32 buffer by the product itself.
	w.backward += Seconds(max(flops/rate, moved/memory) + max(flops/rate, (moved+8*weights)/memory))
	if width == 2 {
		return
	}
	// The input is read in bf16 and written twice, once for each direction of products.
	// The backward pass does the same with the output's gradient. The fused experts write what lies between their two
	// products in the narrow format.
	quantise := 2 + 2*width
	fused := m.setup.Kernels.OpFuser && p.Split == model.Expert
	if !fused || x == expertFC1 {
		w.forward += Seconds(rows * side * in * quantise / memory)
	}
	if !fused || x == expertFC2 {
		w.backward += Seconds(rows * side * out * quantise / memory)
	}
}
