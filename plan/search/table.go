// This file owns the linear model of peaks: what each rank holds at the moments that
// can become its peak, as a sum over layers of what a policy leaves of them.
//
// The full forecast of a setup without a policy gives the highest point of every
// pass. Whole microbatches of the rank's chunks are live there. Without the bytes of
// their layers a constant remains, and a policy changes the point by as much as it
// changes the layers. The model leaves out tensors that must stay and memory that
// recompute needs; predicting each module's policy alone measures those.

package search

import (
	"cmp"
	"slices"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/cost"
	"github.com/stowage-dev/stowage/plan/model"
)

// problem is one search for a policy.
type problem struct {
	setup  *plan.Setup // without a policy, normalised
	budget memory.Bytes
	// The budget bounds what the allocator reserves at worst, and the linear model counts
	// allocated bytes. over is the factor between the two on each rank without a policy,
	// and rooms is the budget in allocated bytes.
	over  []float64
	rooms []memory.Bytes
	time  *cost.Model
	clean *forecast
	// ahead predicts a rank of the setup with as few microbatches as fill the pipeline.
	ahead func(rank int, r plan.Recompute, o plan.Offload) (*plan.Rank, error)
	moves []move

	rec, off []string // the modules that can be chosen; their indices are bits of a set
	kinds    []kind
	stages   []stage
	tables   []table  // by rank
	remains  [][]left // by set of recomputed modules, filled as needed
	answers  map[asked]measured

	crowded bool // whether a policy was dropped because host memory is too small for it
	// crowdedOff and crowdedRec are the modules of such policies.
	crowdedOff, crowdedRec uint32
	pinned                 []memory.Bytes // by rank; room for what a choice pins
}

// forecast adds what the search asks of a forecast.
type forecast struct{ *plan.Forecast }

// peaks returns the most memory that each rank allocates.
func (f *forecast) peaks() []memory.Bytes {
	h := make([]memory.Bytes, len(f.Ranks))
	for i := range f.Ranks {
		h[i] = f.Ranks[i].Peak.Expected
	}
	return h
}

// heights returns the memory of each rank that is compared with the budget: the upper
// end of what the allocator reserves.
func (f *forecast) heights() []memory.Bytes {
	h := make([]memory.Bytes, len(f.Ranks))
	for i := range f.Ranks {
		h[i] = f.Ranks[i].Reserved.High
	}
	return h
}

// kind is a kind of layer.
type kind struct {
	layer   model.Layer
	time    *cost.Layer
	tensors []tensor
	again   []cost.Seconds // by set of recomputed modules
}

type tensor struct {
	plan.SavedTensor
	freed uint32 // the set of recomputed modules that free it
	moved int    // the offloaded module that moves it, or -1
}

// stage is one chunk of one rank.
type stage struct {
	rank, chunk int
	layers      int
	count       []int // by kind
	pass        cost.Pass
}

// table is the model of a rank's peak.
type table struct {
	points []point
	// again is what recomputing a module needs beyond the linear model. stays is what
	// offloading a module leaves on the device beyond it: groups that are being copied, and
	// those that are needed next. Both are by module.
	again, stays []memory.Bytes
}

// point is a moment that can be the peak.
type point struct {
	fixed memory.Bytes
	live  []int // microbatches by chunk
}

func newProblem(s *plan.Setup, o Options) (*problem, error) {
	n, err := withoutPolicy(s).Normalise()
	if err != nil {
		return nil, err
	}
	budget, err := budgetOf(n, o)
	if err != nil {
		return nil, err
	}
	n.Budget = o.Budget
	if o.Budget == 0 {
		n.Budget = s.Budget
	}
	p := &problem{setup: n, answers: map[asked]measured{}, budget: budget}
	if p.time, err = cost.New(n); err != nil {
		return nil, err
	}
	if p.clean, err = predict(n); err != nil {
		return nil, err
	}
	p.pinned = make([]memory.Bytes, len(p.clean.Ranks))
	p.ahead = plan.PredictRanks(filled(n))
	p.layers()
	p.choose()
	peaks := p.clean.peaks()
	for r, h := range p.clean.heights() {
		p.tables = append(p.tables, p.table(r))
		p.over = append(p.over, float64(h)/float64(max(peaks[r], 1)))
		p.rooms = append(p.rooms, memory.Bytes(float64(budget)/p.over[r]))
	}
	return p, nil
}

func (p *problem) ranks() int { return p.setup.Layout.PP }

// filled returns a setup with only as many microbatches as fill the pipeline, and the
// rest of the last group. More microbatches do not raise a peak, unless each leaves
// something behind.
func filled(s *plan.Setup) *plan.Setup {
	n := *s
	group := cmp.Or(n.Layout.GroupSize, n.Layout.PP)
	few := 3 * max(group, n.Layout.PP)
	if mbs := n.Microbatches(); mbs > few+group && !n.Kernels.DeferEmbeddingWgrad {
		n.Batch.Global = (few + (mbs-few)%group) * n.Batch.Micro * n.Layout.DP()
	}
	return &n
}

// predict predicts the memory of a setup.
func predict(s *plan.Setup) (*forecast, error) {
	f, err := plan.Predict(filled(s))
	if err != nil {
		return nil, err
	}
	return &forecast{f}, nil
}

// layers collects the kinds of layers, and how many of each kind every stage holds.
func (p *problem) layers() {
	s := p.setup
	index := map[model.Kind]int{}
	passes := p.time.Stages()
	for i, st := range s.Layout.Stages {
		layers := slices.Clone(s.Model.Layers[st.First:st.Last])
		if st.MTP && s.Model.MTP != nil {
			for range s.Model.MTP.Depth {
				layers = append(layers, s.Model.MTP.Layers...)
			}
		}
		g := stage{rank: i % s.Layout.PP, chunk: i / s.Layout.PP, layers: len(layers), pass: passes[i]}
		for _, l := range layers {
			k, ok := index[model.KindOf(l)]
			if !ok {
				k = len(p.kinds)
				index[model.KindOf(l)] = k
				p.kinds = append(p.kinds, kind{layer: l, time: p.time.Layer(l)})
			}
			for len(g.count) <= k {
				g.count = append(g.count, 0)
			}
			g.count[k]++
		}
		p.stages = append(p.stages, g)
	}
	for i := range p.stages {
		for len(p.stages[i].count) < len(p.kinds) {
			p.stages[i].count = append(p.stages[i].count, 0)
		}
	}
}

// choose finds the modules that can be chosen: those that free something of some layer
// and that nothing forbids.
func (p *problem) choose() {
	saved := make([][]plan.SavedTensor, len(p.kinds))
	frees, moves := map[string]bool{}, map[string]bool{}
	for k := range p.kinds {
		saved[k] = plan.Activations(p.setup, p.kinds[k].layer)
		for _, g := range saved[k] {
			for _, m := range g.Recompute {
				frees[m] = true
			}
			if g.Elements < p.setup.Offload.MinElements {
				continue
			}
			moves[g.Offload] = true
			// A module that covers others exists if they are one fused operation.
			if fused, ok := coveredBy(g.Offload); ok && p.setup.Kernels.OpFuser {
				moves[fused] = true
			}
		}
	}
	pick := func(names []string, a memory.Choice, useful map[string]bool, why func(*plan.Setup, string) string) (usable []string) {
		for _, m := range names {
			if !useful[m] {
				continue // the model has no such module, or nothing of it is large enough
			}
			never := why(p.setup, m)
			p.moves = append(p.moves, move{m, a, never})
			if never == "" {
				usable = append(usable, m)
			}
		}
		return usable
	}
	p.rec = pick(memory.MegatronModules(memory.Recompute), memory.Recompute, frees, noRecompute)
	p.off = pick(memory.MegatronModules(memory.Offload), memory.Offload, moves, noOffload)
	for k := range p.kinds {
		for _, g := range saved[k] {
			t := tensor{SavedTensor: g, moved: -1}
			for _, m := range g.Recompute {
				if i := slices.Index(p.rec, m); i >= 0 {
					t.freed |= 1 << i
				}
			}
			if g.Elements >= p.setup.Offload.MinElements {
				t.moved = slices.Index(p.off, memory.Including(p.off, g.Offload))
			}
			p.kinds[k].tensors = append(p.kinds[k].tensors, t)
		}
		p.kinds[k].again = make([]cost.Seconds, 1<<len(p.rec))
		for set := range p.kinds[k].again {
			p.kinds[k].again[set] = p.kinds[k].time.Recompute(plan.Recompute{Modules: names(p.rec, uint32(set))})
		}
	}
}

// names returns the modules of a set.
func names(list []string, set uint32) (out []string) {
	for i, m := range list {
		if set&(1<<i) != 0 {
			out = append(out, m)
		}
	}
	return out
}

// table finds the moments that can be a rank's peak: the highest of those with the same
// live microbatches, unless another moment exceeds it in everything.
func (p *problem) table(r int) table {
	chunks := p.setup.Layout.VPP
	layers := make([]memory.Bytes, chunks) // bytes of a microbatch by chunk
	for _, g := range p.stages {
		if g.rank != r {
			continue
		}
		for k, n := range g.count {
			for _, t := range p.kinds[k].tensors {
				layers[g.chunk] += memory.Bytes(n) * t.Bytes
			}
		}
	}
	var points []point
	live := make([]int, chunks)
	rank := &p.clean.Ranks[r]
	beyond := rank.Peak.Expected
	for _, at := range rank.Timeline() {
		beyond = min(beyond, rank.Peak.Expected-at.Bytes())
	}
	// A peak above all passes belongs to the optimiser, and no policy changes it. If the
	// whole iteration is captured, it belongs to the capture, which holds the same as the
	// passes.
	if beyond > 0 && !has(p.setup.Graph.Scopes, "full_iteration") {
		points = append(points, point{fixed: rank.Peak.Expected, live: slices.Clone(live)})
		beyond = 0
	}
	for _, at := range rank.Timeline() {
		c := at.Pass.Chunk
		if !at.Pass.Backward {
			live[c]++
		}
		q := point{fixed: at.Bytes() + beyond, live: slices.Clone(live)}
		for i, n := range live {
			q.fixed -= memory.Bytes(n) * layers[i]
		}
		points = addPoint(points, q)
		if at.Pass.Backward {
			live[c]--
		}
	}
	return table{points: points, again: make([]memory.Bytes, len(p.rec)), stays: make([]memory.Bytes, len(p.off))}
}

// addPoint adds a point unless another exceeds it, and removes those that it exceeds.
func addPoint(points []point, q point) []point {
	tops := func(a, b point) bool {
		if a.fixed < b.fixed {
			return false
		}
		for i := range a.live {
			if a.live[i] < b.live[i] {
				return false
			}
		}
		return true
	}
	for _, x := range points {
		if tops(x, q) {
			return points
		}
	}
	points = slices.DeleteFunc(points, func(x point) bool { return tops(q, x) })
	return append(points, q)
}
