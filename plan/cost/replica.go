// This file owns what happens between data-parallel replicas and at the end of a step:
// gathers of parameters, reductions of gradients, and the optimiser.

package cost

import (
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// held is the number of parameters that a pipeline rank has on one GPU.
type held struct{ dense, expert float64 }

func (h *held) add(params []model.Param, lay plan.Layout) {
	for _, p := range params {
		n := float64(p.Elements())
		switch p.Split {
		case model.Whole:
			h.dense += n
		case model.Tensor:
			h.dense += n / float64(lay.TP)
		case model.Expert:
			h.expert += n / float64(lay.EP*lay.ETP)
		}
	}
}

func (m *Model) held(rank int) (h held) {
	s := m.setup
	if m.holds == nil {
		m.holds = map[model.Kind]held{}
	}
	for i := rank; i < len(s.Layout.Stages); i += s.Layout.PP {
		st := s.Layout.Stages[i]
		for _, l := range s.Model.Layers[st.First:st.Last] {
			k := model.KindOf(l)
			own, known := m.holds[k]
			if !known {
				own.add(s.Model.LayerParams(l), s.Layout)
				m.holds[k] = own
			}
			h.dense += own.dense
			h.expert += own.expert
		}
		if st.Embedding {
			h.add(s.Model.EmbeddingParams(), s.Layout)
		}
		if st.Loss && !(s.Model.Tied && st.Embedding) {
			h.add(s.Model.OutputParams(), s.Layout)
		}
		if st.MTP && s.Model.MTP != nil {
			for d := range s.Model.MTP.Depth {
				h.add(s.Model.MTPParams(d), s.Layout)
			}
		}
	}
	return h
}

// updateBytes is what the optimiser reads and writes for each parameter of its share. It
// reads the gradient, the main parameter and two moments, writes the last three, and writes
// the parameter in bf16.
const updateBytes = 4*4 + 3*4 + 2

// hostUpdate is the optimiser's time for a parameter whose state is in host memory. It was
// measured on Qwen3-30B-A3B on 16 H100 with 1.9e9 parameters a rank. A step took 0.996 s
// with no state in host memory, 1.871 s with a quarter and 4.189 s with all of it: 1.8 and
// 1.7 ns a parameter.
const hostUpdate = 1.7e-9

// aroundPasses returns what all ranks wait for around the passes of a step: the exposed
// communication between replicas, and the optimiser. Gradients are reduced behind the
// backward pass of the last microbatch, and parameters are gathered behind the forward pass
// of the first. Both happen for every microbatch if parameters are sharded. The hidden part
// is computed from passes without a policy, so a slower policy does not seem to hide more.
func (m *Model) aroundPasses() (shown, update Seconds) {
	if m.end == nil {
		passes := m.Stages()
		m.end = &[2]Seconds{}
		for r := range m.setup.Layout.PP {
			s, u := m.replicas(passes, r)
			m.end[0], m.end[1] = max(m.end[0], s), max(m.end[1], u)
		}
	}
	return m.end[0], m.end[1]
}

// replicas returns the same for one rank.
func (m *Model) replicas(passes []Pass, rank int) (shown, update Seconds) {
	s := m.setup
	lay := s.Layout
	h := m.held(rank)
	var own Pass
	for i := rank; i < len(passes); i += lay.PP {
		own.Forward += passes[i].Forward
		own.Backward += passes[i].Backward
	}
	grads := 4.0
	if s.Precision.GradsInBF16 {
		grads = 2
	}
	params := 2.0
	if s.Precision.ParamGather {
		params = m.width
	}
	gather, reduce := m.exchange(h, params), m.exchange(h, grads)
	switch {
	case lay.FSDP.Shard == plan.ShardParameters:
		shown = Seconds(m.Microbatches()) * exposed(2*gather+reduce, own.Forward+own.Backward)
	case s.Optimizer.Distributed:
		shown = exposed(gather, own.Forward) + exposed(reduce, own.Backward)
	default:
		shown = exposed(2*reduce, own.Backward)
	}
	mine := h.dense + h.expert
	if s.Optimizer.Distributed || lay.FSDP.Shard >= plan.ShardOptimizer {
		mine = h.dense/float64(lay.DP()*lay.CP) + h.expert/float64(max(lay.EDP(), 1))
	}
	away := s.Optimizer.OffloadFraction
	update = Seconds(mine * ((1-away)*updateBytes/m.memory + away*hostUpdate))
	return shown, update
}

// exposed returns what communication adds to the compute that hides it: what is longer, and
// the multiprocessors that do not compute meanwhile.
func exposed(sent, compute Seconds) Seconds {
	return max(sent-compute, 0) + exchangeSMs*min(sent, compute)
}

// exchange returns the time of one gather or scatter of the given bytes a parameter.
func (m *Model) exchange(h held, bytes float64) (t Seconds) {
	lay := m.setup.Layout
	for _, g := range []struct {
		n            float64
		ranks, apart int
	}{{h.dense, lay.DP() * lay.CP, lay.TP}, {h.expert, lay.EDP(), lay.ETP * lay.EP}} {
		if g.ranks > 1 {
			t += Seconds(g.n * bytes * float64(g.ranks-1) / float64(g.ranks) / m.link(g.ranks, g.apart))
		}
	}
	return t
}
