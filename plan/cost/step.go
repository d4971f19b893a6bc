// This file owns the time of a step: the passes of each stage, and their order.

package cost

import (
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/plan/model"
)

// Pass is the time of one stage for one microbatch.
type Pass struct {
	Forward, Backward Seconds
}

// Step is the time of one training step.
type Step struct {
	Total Seconds
	// Busy is how long each pipeline rank works on passes. Slowest is the rank that
	// works longest, and Bubble is how long that rank waits for others.
	Busy    []Seconds
	Slowest int
	Bubble  Seconds
	// Replicas is the communication between data-parallel ranks that compute does not
	// hide. Update is the time of the optimiser.
	Replicas, Update Seconds
	// Tokens is how many tokens all GPUs process in a second. TFLOPS is how many
	// operations of the model a GPU does in a second, in units of 1e12.
	Tokens, TFLOPS float64
}

// Stages returns the time of every stage's passes without recompute and offload.
func (m *Model) Stages() []Pass {
	s := m.setup
	passes := make([]Pass, len(s.Layout.Stages))
	for i, st := range s.Layout.Stages {
		p := &passes[i]
		for _, l := range s.Model.Layers[st.First:st.Last] {
			p.add(m.Layer(l))
		}
		if st.MTP && s.Model.MTP != nil {
			for range s.Model.MTP.Depth {
				m.mtp(p)
			}
		}
		if st.Loss {
			m.heads(p)
		}
	}
	return passes
}

func (p *Pass) add(l *Layer) {
	p.Forward += l.Forward
	p.Backward += l.Backward
}

// mtp adds one depth of multi-token prediction: the projection of two hidden states to one,
// and its layers.
func (m *Model) mtp(p *Pass) {
	h := float64(m.setup.Model.Hidden)
	t := Seconds(2 * m.tokens * 2 * h * h / float64(m.setup.Layout.TP) / m.products)
	p.Forward += t
	p.Backward += 2 * t
	for _, l := range m.setup.Model.MTP.Layers {
		p.add(m.Layer(l))
	}
}

// heads adds the output layer and the loss of every head. The loss reads and writes logits.
// A fused loss does so in bf16 and in place, another one in fp32 with several temporaries.
func (m *Model) heads(p *Pass) {
	s := m.setup
	n := 1
	if s.Model.MTP != nil {
		n += s.Model.MTP.Depth
	}
	logits := m.tokens * float64(s.Model.Vocab) / float64(s.Layout.TP)
	rate := m.plain
	if s.Precision.OutputLayer {
		rate = m.products
	}
	product := Seconds(2 * logits * float64(s.Model.Hidden) / rate)
	bytes := 24.0
	if s.Kernels.Loss == "te" || s.Kernels.Loss == "native-fused" {
		bytes = 8
	}
	memory := Seconds(logits * bytes / m.memory)
	p.Forward += Seconds(n) * (product + memory)
	p.Backward += Seconds(n) * (2*product + memory/2)
}

// Microbatches returns how many microbatches a rank works through in a step.
func (m *Model) Microbatches() int {
	b := m.setup.Batch
	return max(b.Global/(b.Micro*m.setup.Layout.DP()), 1)
}

// Step returns the time of a step whose stages take the given times.
func (m *Model) Step(passes []Pass) Step {
	s := m.setup
	lay := s.Layout
	mbs := m.Microbatches()
	step := Step{Busy: make([]Seconds, lay.PP)}
	for r := range step.Busy {
		var own Seconds
		for i := r; i < len(passes); i += lay.PP {
			own += passes[i].Forward + passes[i].Backward
		}
		step.Busy[r] = Seconds(mbs) * own
		if step.Busy[r] > step.Busy[step.Slowest] {
			step.Slowest = r
		}
	}
	walked := m.walk(passes, mbs)
	step.Bubble = walked - step.Busy[step.Slowest]
	step.Replicas, step.Update = m.aroundPasses()
	step.Total = walked + step.Replicas + step.Update
	tokens := float64(s.Batch.Global) * float64(s.Batch.Seq)
	step.Tokens = tokens / float64(step.Total)
	step.TFLOPS = step.Tokens / float64(lay.World) * m.flops / 1e12
	return step
}

// Bound returns a lower bound of Step that is quick to compute: each rank waits for the
// first microbatch to come through the ranks before it, works, and waits for the last
// microbatch to go back.
func (m *Model) Bound(passes []Pass) Seconds {
	ranks := m.setup.Layout.PP
	mbs := m.Microbatches()
	walked := min(mbs, m.walked())
	var before, most, bound Seconds
	for r := range ranks {
		var own Seconds
		for i := r; i < len(passes); i += ranks {
			own += passes[i].Forward + passes[i].Backward
		}
		most = max(most, own)
		bound = max(bound, before+Seconds(walked)*own)
		before += passes[r].Forward + passes[r].Backward
	}
	shown, update := m.aroundPasses()
	return bound + Seconds(mbs-walked)*most + shown + update
}

// walked returns how many microbatches of the schedule are walked: at least four groups,
// and all if that is not too many. The rest counts at the rate of the slowest rank. If
// stages differ much, ranks that wait for each other in turn can be a little slower.
func (m *Model) walked() int {
	const passes = 1 << 14
	l := m.setup.Layout
	group := max(l.GroupSize, l.PP)
	return group * max(4, passes/(group*l.PP*l.VPP))
}

// walk returns the time of the passes of all ranks in the pipeline's order.
func (m *Model) walk(passes []Pass, mbs int) Seconds {
	lay := m.setup.Layout
	if lay.PP == 1 {
		var t Seconds
		for _, p := range passes {
			t += p.Forward + p.Backward
		}
		return Seconds(mbs) * t
	}
	some := min(mbs, m.walked())
	return m.walkAll(passes, some) + Seconds(mbs-some)*slowest(passes, lay.PP)
}

// walkAll walks the schedule of the given number of microbatches.
func (m *Model) walkAll(passes []Pass, mbs int) Seconds {
	lay := m.setup.Layout
	// The hidden state of one microbatch passes from stage to stage.
	hop := Seconds(2 * m.local * float64(m.setup.Model.Hidden) / m.link(lay.World, 1))
	pipe := schedule.Pipeline{Ranks: lay.PP, Chunks: lay.VPP, Microbatches: mbs, GroupSize: lay.GroupSize}
	return walk(m.order(pipe), pipe, passes, hop)
}

// order returns the order of passes of every rank.
func (m *Model) order(pipe schedule.Pipeline) [][]schedule.Pass {
	orders, ok := m.orders[pipe]
	if !ok {
		for r := range pipe.Ranks {
			order, err := pipe.Passes(r)
			if err != nil {
				panic("cost: " + err.Error()) // a normalised setup has a sound pipeline
			}
			orders = append(orders, order)
		}
		m.orders[pipe] = orders
	}
	return orders
}

// slowest returns the time of one microbatch on the slowest rank.
func slowest(passes []Pass, ranks int) (t Seconds) {
	for r := range ranks {
		var own Seconds
		for i := r; i < len(passes); i += ranks {
			own += passes[i].Forward + passes[i].Backward
		}
		t = max(t, own)
	}
	return t
}

// walk runs the passes of every rank in their order, each as soon as its input has arrived,
// and returns when the last one ends.
func walk(orders [][]schedule.Pass, pipe schedule.Pipeline, passes []Pass, hop Seconds) Seconds {
	type line struct {
		order []schedule.Pass
		next  int
		now   Seconds
	}
	lines := make([]line, pipe.Ranks)
	left := 0
	for r := range lines {
		lines[r].order = orders[r]
		left += len(orders[r])
	}
	stages, mbs := len(passes), pipe.Microbatches
	// These are the times when each stage's pass over each microbatch ended. They are
	// negative before.
	forward, backward := make([]Seconds, stages*mbs), make([]Seconds, stages*mbs)
	for i := range forward {
		forward[i], backward[i] = -1, -1
	}
	var end Seconds
	for left > 0 {
		before := left
		for r := range lines {
			l := &lines[r]
			for l.next < len(l.order) {
				p := l.order[l.next]
				stage := p.Chunk*pipe.Ranks + r
				at, ready := arrival(p, stage, stages, mbs, forward, backward, hop)
				if !ready {
					break
				}
				at = max(at, l.now)
				if p.Backward {
					l.now = at + passes[stage].Backward
					backward[stage*mbs+p.Microbatch] = l.now
				} else {
					l.now = at + passes[stage].Forward
					forward[stage*mbs+p.Microbatch] = l.now
				}
				l.next++
				left--
			}
			end = max(end, l.now)
		}
		if left == before {
			panic("cost: the pipeline's order waits for itself")
		}
	}
	return end
}

// arrival returns when the input of a pass arrives.
func arrival(p schedule.Pass, stage, stages, mbs int, forward, backward []Seconds, hop Seconds) (Seconds, bool) {
	var from []Seconds
	switch {
	case !p.Backward && stage == 0:
		return 0, true
	case !p.Backward:
		from, stage = forward, stage-1
	case stage == stages-1:
		from, hop = forward, 0
	default:
		from, stage = backward, stage+1
	}
	t := from[stage*mbs+p.Microbatch]
	return t + hop, t >= 0
}

// TokenFlops returns the model's operations for one token of a sequence, forward and
// backward: two for each parameter of a matrix that the token meets and each score under
// the causal mask, and twice that in the backward pass. Megatron-LM reports TFLOP/s by
// this count, which ignores attention windows.
func TokenFlops(d *model.Model, seq int) float64 {
	f := 0.0
	known := map[model.Kind]float64{}
	for _, l := range d.Layers {
		k := model.KindOf(l)
		if known[k] == 0 {
			known[k] = layerFlops(d, l, seq)
		}
		f += known[k]
	}
	heads := 1
	if d.MTP != nil {
		heads += d.MTP.Depth
		for range d.MTP.Depth {
			f += 4 * float64(d.Hidden) * float64(d.Hidden)
			for _, l := range d.MTP.Layers {
				f += layerFlops(d, l, seq)
			}
		}
	}
	return 3 * (f + 2*float64(heads)*float64(d.Vocab)*float64(d.Hidden))
}

func layerFlops(d *model.Model, l model.Layer, seq int) float64 {
	f := 0.0
	for _, p := range d.LayerParams(l) {
		if p.Cols == 1 {
			continue
		}
		n := float64(p.Elements())
		if p.Split == model.Expert {
			n *= float64(l.MoE.TopK) / float64(l.MoE.Experts)
		}
		f += 2 * n
	}
	half := float64(seq) / 2
	if l.Parallel() {
		f += scanFlops(l.Mamba)
	}
	switch {
	case l.Attention != nil:
		f += 4 * half * float64(l.Attention.Heads*l.Attention.HeadDim)
	case l.MLA != nil:
		f += 2 * half * float64(l.MLA.Heads*(l.MLA.Nope+l.MLA.Rope+l.MLA.V))
	case l.Mamba != nil:
		f += scanFlops(l.Mamba)
	case l.DeltaNet != nil:
		f += deltaFlops(l.DeltaNet)
	case l.Lightning != nil:
		f += lightningFlops(l.Lightning)
	}
	return f
}
