// This file owns the synthetic training step of the offload benchmark: the modules of
// one pipeline rank with what they save and how long they take, and the order in
// which they run. It is pure; offloadrun.go issues it.
//
// The benchmark does not use the trainer's step, because it must set how long compute
// lasts: link utilisation and hidden time can be measured only against durations that a
// wait kernel keeps. The trainer also runs one size of layer in memory that it owns,
// while the benchmark has the sizes of any model that the planner knows, without weights.

package bench

import (
	"fmt"
	"slices"
	"time"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/cost"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
)

// StepOptions describe the step that the benchmark imitates.
type StepOptions struct {
	Model        *model.Model
	Layers       int // of the model, from its first; zero means all
	Seq          int // tokens a sequence
	Micro        int // sequences a microbatch
	Microbatches int
	PP, VPP      int
	Rank         int // pipeline rank
	// TFLOPS is the speed of compute in 10^12 operations a second, and MemoryGBps that of
	// memory in 10^9 bytes a second. The forward pass of a module takes its matrix products
	// and attention over the former, plus its saved bytes over the latter. Its backward
	// pass takes twice as long. So norms and activations take time too, more than writing
	// and checking their tensors does.
	TFLOPS, MemoryGBps float64
	// Stash counts the rows of experts on the device and stashes them.
	Stash bool
}

// tensor is one saved tensor.
type tensor struct {
	name  string
	bytes memory.Bytes
}

// half is the part of a layer that captured scopes are made of.
type half uint8

const (
	other  half = iota // in no scope: the mixers of state spaces
	mixer              // attention
	dense              // a dense feed-forward part
	router             // a mixture's norm, router and shared experts
	expert             // the rest of it
)

// module is one part of a layer. Its saved tensors are a group.
type module struct {
	name              string
	half              half
	forward, backward time.Duration
	saved             []tensor
}

func (m *module) bytes() (n memory.Bytes) {
	for _, t := range m.saved {
		n += t.bytes
	}
	return n
}

// step is the step of one rank.
type step struct {
	setup  *plan.Setup
	chunks [][][]module // by chunk, layer of the chunk and order of the forward pass
	passes []schedule.Pass
	// rows is how many rows a layer's experts receive with balanced routing, and row is the
	// size of one. Both are zero unless rows are stashed.
	rows stash.Rows
	row  memory.Bytes
}

// StashedModule is the module that is stashed, if one is.
const StashedModule = "expert_fc1"

// newStep returns the step. Its sizes are the planner's, so the benchmark measures what the
// planner predicts.
func newStep(o StepOptions) (*step, error) {
	m := *o.Model
	if o.Layers > 0 {
		if o.Layers > len(m.Layers) {
			return nil, &memory.SettingError{Setting: "Layers", Asked: fmt.Sprint(o.Layers), Problem: fmt.Sprintf("is more than the %d layers of %s", len(m.Layers), m.Name), Remedy: "give fewer"}
		}
		m.Layers = m.Layers[:o.Layers]
	}
	m.MTP = nil                         // the step is about decoder layers
	gpu, err := hardware.ByName("h200") // times are scaled to TFLOPS; a setup must name some hardware
	if err != nil {
		return nil, err
	}
	setup := &plan.Setup{
		Model: &m, Hardware: gpu,
		Layout: plan.Layout{PP: o.PP, VPP: o.VPP},
		Batch:  plan.Batch{Micro: o.Micro, Seq: o.Seq, Global: o.Micro * o.Microbatches},
	}
	// These are the settings of large jobs. Without grouped products a mixture saves every
	// expert's rows separately.
	setup.Kernels = plan.Kernels{GroupedGEMM: true, PermuteFusion: true, Dispatcher: "alltoall"}
	times, err := cost.New(setup)
	if err != nil {
		return nil, err
	}
	s := &step{setup: times.Setup()}
	lay := s.setup.Layout
	s.passes, err = schedule.Pipeline{Ranks: lay.PP, Chunks: lay.VPP, Microbatches: o.Microbatches}.Passes(o.Rank)
	if err != nil {
		return nil, err
	}
	for i := o.Rank; i < len(lay.Stages); i += lay.PP {
		st := lay.Stages[i]
		var layers [][]module
		for _, l := range m.Layers[st.First:st.Last] {
			layers = append(layers, s.modules(times.Layer(l), l, o))
		}
		s.chunks = append(s.chunks, layers)
	}
	if o.Stash {
		s.stash()
	}
	if s.bytes() == 0 {
		return nil, &memory.SettingError{Setting: "Rank", Asked: fmt.Sprint(o.Rank), Problem: "holds no layer that saves anything", Remedy: "give more layers, or another rank"}
	}
	return s, nil
}

// halves maps the scopes of the table of modules to halves, and outside maps parts of a
// layer that are not in the table.
var (
	halves  = map[memory.Scope]half{memory.Attn: mixer, memory.MLP: dense, memory.MoERouter: router, memory.MoE: expert}
	outside = map[string]half{"attn_add": mixer, "mlp_add": dense, "mamba_out": other, "combine": expert}
)

// scope returns the captured scope that holds a half, and whether there is one.
func (h half) scope(captured memory.Scopes) (memory.Scope, bool) {
	switch {
	case h == mixer:
		return memory.Attn, captured.Has(memory.Attn)
	case h == dense:
		return memory.MLP, captured.Has(memory.MLP)
	case h == router && captured.Has(memory.MoERouter):
		return memory.MoERouter, true
	case h == router || h == expert:
		return memory.MoE, captured.Has(memory.MoE)
	}
	return 0, false
}

// modules returns the modules of a layer in forward order: those that compute, each with
// the group of its name, and groups that no module is named after.
func (s *step) modules(l *cost.Layer, of model.Layer, o StepOptions) (ms []module) {
	groups := map[string][]tensor{}
	var names []string
	for _, g := range plan.Activations(s.setup, of) {
		name := g.Group
		if name == "experts" {
			name = "expert_fc2" // the group is the input of fc2
		}
		if _, ok := groups[name]; !ok {
			names = append(names, name)
		}
		groups[name] = append(groups[name], tensor{g.Tensor, g.Bytes})
	}
	add := func(name string, flops float64) {
		m := module{name: name, half: halfOf(name, of), saved: groups[name]}
		m.forward = time.Duration((flops/(o.TFLOPS*1e12) + float64(m.bytes())/(o.MemoryGBps*1e9)) * float64(time.Second))
		m.backward = 2 * m.forward
		ms = append(ms, m)
		delete(groups, name)
	}
	for _, p := range l.Parts {
		add(p.Module(), p.Flops)
	}
	for _, name := range names {
		if groups[name] != nil {
			add(name, 0)
		}
	}
	// Halves run one after the other. Shared experts run beside the router.
	slices.SortStableFunc(ms, func(a, b module) int { return int(a.half) - int(b.half) })
	return ms
}

// halfOf returns the half of a layer that holds a module or another part.
func halfOf(name string, l model.Layer) half {
	m, _ := memory.LookupModule(name)
	if scopes := m.In(l.MoE != nil); len(scopes) > 0 {
		return halves[scopes[0]]
	}
	return outside[name]
}

// stash sets the size of the stashed module's rows.
func (s *step) stash() {
	for _, l := range s.setup.Model.Layers {
		if l.MoE == nil {
			continue
		}
		s.rows = stash.Rows(s.setup.Batch.Micro * s.setup.Batch.Seq * l.MoE.TopK)
		s.each(func(m *module) {
			if m.name == StashedModule {
				s.row = m.bytes() / memory.Bytes(s.rows)
			}
		})
	}
}

// stashes reports whether a module is stashed.
func (s *step) stashes(m *module) bool { return s.row > 0 && m.name == StashedModule }

// stashedBytes returns the live rows of all groups of the step.
func (s *step) stashedBytes() (n memory.Bytes) {
	for _, p := range s.passes {
		for l, ms := range s.chunks[p.Chunk] {
			for i := range ms {
				if !p.Backward && s.stashes(&ms[i]) {
					n += memory.Bytes(s.liveRows(p.Chunk, l)) * s.row
				}
			}
		}
	}
	return n
}

// layerOf numbers layers over all chunks.
func (s *step) layerOf(chunk, layer int) int {
	for _, c := range s.chunks[:chunk] {
		layer += len(c)
	}
	return layer
}

// liveRows returns how many rows a layer's experts receive: up to a quarter more or fewer
// than balanced routing would give.
func (s *step) liveRows(chunk, layer int) stash.Rows {
	return s.rows * stash.Rows(3+s.layerOf(chunk, layer)%3) / 4
}

// scale multiplies all times.
func (s *step) scale(by float64) {
	s.each(func(m *module) {
		m.forward = time.Duration(float64(m.forward) * by)
		m.backward = time.Duration(float64(m.backward) * by)
	})
}

// each visits every module once, regardless of the number of microbatches.
func (s *step) each(visit func(m *module)) {
	for _, c := range s.chunks {
		for _, l := range c {
			for i := range l {
				visit(&l[i])
			}
		}
	}
}

// bytes returns what one microbatch saves in all chunks.
func (s *step) bytes() (n memory.Bytes) {
	s.each(func(m *module) { n += m.bytes() })
	return n
}

// forward returns the compute of one microbatch's forward passes.
func (s *step) forward() (d time.Duration) {
	s.each(func(m *module) { d += m.forward })
	return d
}

// computeTime returns the compute of the whole step.
func (s *step) computeTime() (d time.Duration) {
	for _, p := range s.passes {
		for _, l := range s.chunks[p.Chunk] {
			for _, m := range l {
				if p.Backward {
					d += m.backward
				} else {
					d += m.forward
				}
			}
		}
	}
	return d
}

// names returns the names of the groups that the step saves, in the order in which they
// first come.
func (s *step) names() (names []string) {
	s.each(func(m *module) {
		if len(m.saved) > 0 && !slices.Contains(names, m.name) {
			names = append(names, m.name)
		}
	})
	return names
}

// group names what a module saves.
func group(p schedule.Pass, layer int, m *module) memory.GroupID {
	return memory.GroupID{Name: m.name, Chunk: p.Chunk, Layer: layer, Microbatch: p.Microbatch}
}
