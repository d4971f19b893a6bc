// This file owns the reasons: what the search decided about every module, and why.

package search

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/cost"
)

// result returns the answer of a search.
func (p *problem) result(c *choice, list []*choice) (*Result, error) {
	r := &Result{Budget: p.budget, Tried: len(list), Nothing: c.size() == 0 && !c.recompute.Full}
	r.Before = p.before()
	r.Setup = p.chosen(c)
	f, err := predict(r.Setup)
	if err != nil {
		return nil, err
	}
	r.After = Outcome{Peaks: f.peaks(), Needs: f.heights(), Step: p.step(c)}
	r.After.Recompute, r.After.Late = p.added(c)
	r.Ranks = p.shares(c, f, r.After.Step)
	r.Modules = p.verdicts(c, list, r)
	for rank, s := range r.Ranks {
		if s.Host > 0 {
			r.Pools = append(r.Pools, Pool{Name: "host slab of offloaded groups", Rank: rank, Bytes: s.Host})
		}
		for _, it := range p.clean.Ranks[rank].Items {
			if it.Cause == plan.CausePools {
				r.Pools = append(r.Pools, Pool{Name: it.Name, Rank: rank, Page: p.setup.Stash.PageBytes, Bytes: it.Bytes})
			}
		}
	}
	return r, nil
}

// before returns the outcome without a policy.
func (p *problem) before() Outcome {
	return Outcome{Peaks: p.clean.peaks(), Needs: p.clean.heights(), Step: p.step(p.nothing())}
}

// added returns what recompute and late copies add to a step, each on the rank where it
// adds most.
func (p *problem) added(c *choice) (again, late cost.Seconds) {
	mbs := cost.Seconds(p.time.Microbatches())
	if c.recompute.Full {
		pol := p.time.PolicyOf(c.recompute, plan.Offload{})
		for r := range p.ranks() {
			var own cost.Seconds
			for i := r; i < len(p.stages); i += p.ranks() {
				own += mbs * pol.Recompute[i]
			}
			again = max(again, own)
		}
		return again, 0
	}
	of := p.left(c.rec)
	for r := range p.ranks() {
		var own, behind cost.Seconds
		for i := r; i < len(p.stages); i += p.ranks() {
			g := &p.stages[i]
			for k, n := range g.count {
				x := p.time.Copies(p.kinds[k].time, c.bytes(r, of[k]), g.layers, p.kinds[k].again[c.rec])
				own += mbs * cost.Seconds(n) * p.kinds[k].again[c.rec]
				behind += mbs * cost.Seconds(n) * (x.LateOut + x.LateBack)
			}
		}
		again, late = max(again, own), max(late, behind)
	}
	return again, late
}

// shares returns what every rank offloads.
func (p *problem) shares(c *choice, f *forecast, step cost.Step) []Share {
	of := p.left(c.rec)
	mbs := memory.Bytes(p.time.Microbatches())
	shares := make([]Share, p.ranks())
	for r := range shares {
		s := &shares[r]
		if s.Fraction = float64(c.fractions[r]) / parts; s.Fraction == 0 {
			continue
		}
		s.Host = f.Ranks[r].Host - p.clean.Ranks[r].Host
		var busy cost.Seconds
		for i := r; i < len(p.stages); i += p.ranks() {
			g := &p.stages[i]
			for k, n := range g.count {
				x := p.time.Copies(p.kinds[k].time, c.bytes(r, of[k]), g.layers, 0)
				s.Step += mbs * memory.Bytes(n) * x.Bytes
				busy += cost.Seconds(mbs) * cost.Seconds(n) * max(x.Out, x.Back)
			}
		}
		s.Link = min(float64(busy/step.Total), 1)
	}
	return shares
}

// verdicts returns the decision on every module with its reason.
func (p *problem) verdicts(c *choice, list []*choice, res *Result) []ModuleDecision {
	var out []ModuleDecision
	for _, m := range p.moves {
		v := ModuleDecision{Module: m.module, Choice: m.action, Possible: m.never == ""}
		if m.action == memory.Recompute {
			p.recomputeVerdict(&v, m, c, list, res)
		} else {
			p.offloadVerdict(&v, m, c, list, res)
		}
		out = append(out, v)
	}
	return append(out, p.wholeVerdict(c, res))
}

func (p *problem) offloadVerdict(v *ModuleDecision, m move, c *choice, list []*choice, res *Result) {
	bit := bitOf(p.off, m.module)
	v.Chosen = c.off&bit != 0
	var x cost.Copies
	for i := range p.stages {
		for k, n := range p.stages[i].count {
			var bytes memory.Bytes
			for _, t := range p.kinds[k].tensors {
				if memory.Including([]string{m.module}, t.Offload) != "" && t.Elements >= p.setup.Offload.MinElements && !(v.Chosen && t.freed&c.rec != 0) {
					bytes += t.Bytes
				}
			}
			if n > 0 && bytes > x.Bytes {
				x = p.time.Copies(p.kinds[k].time, bytes, p.stages[i].layers, 0)
			}
		}
	}
	// Report the direction that fits worse.
	v.Bytes, v.Window, v.Copy = x.Bytes, x.Forward, x.Out
	if x.Back-x.Backward > x.Out-x.Forward {
		v.Window, v.Copy = x.Backward, x.Back
	}
	figures := fmt.Sprintf("%s a layer, window %s, copy %s", mebibytes(v.Bytes), duration(v.Window), duration(v.Copy))
	hides := v.Copy <= v.Window
	switch {
	case v.Chosen && v.Bytes == 0:
		v.Reason = "its own tensors are recomputed, but another module can only be offloaded together with it"
	case m.never != "":
		v.Reason = fmt.Sprintf("%s: impossible, because %s", figures, m.never)
	case res.Nothing:
		v.Reason = figures + ": not needed, because the job fits without a policy"
	case v.Chosen && res.After.Late == 0 && hides:
		v.Reason = fmt.Sprintf("%s: hides; %s", figures, fractions(c.fractions))
	case v.Chosen && res.After.Late == 0:
		v.Reason = fmt.Sprintf("%s: the whole does not hide, the share that moves does; %s", figures, fractions(c.fractions))
	case v.Chosen:
		v.Reason = fmt.Sprintf("%s: %s late in a step, and yet the fastest; %s", figures, duration(res.After.Late), fractions(c.fractions))
	case !hides:
		v.Reason = figures + ": does not hide"
		if with := p.instead(list, res, p.crowdedOff&bit != 0, func(x *choice) bool { return x.off&bit != 0 }); with != unneeded {
			v.Reason += with
		}
	default:
		v.Reason = figures + ": would hide" + p.instead(list, res, p.crowdedOff&bit != 0, func(x *choice) bool { return x.off&bit != 0 })
	}
}

// bitOf returns the set of one module. It is empty if the module cannot be chosen.
func bitOf(list []string, module string) uint32 {
	if i := slices.Index(list, module); i >= 0 {
		return 1 << i
	}
	return 0
}

func (p *problem) recomputeVerdict(v *ModuleDecision, m move, c *choice, list []*choice, res *Result) {
	for k := range p.kinds {
		var bytes memory.Bytes
		for _, t := range p.kinds[k].tensors {
			if has(t.Recompute, m.module) {
				bytes += t.Bytes
			}
		}
		again := p.kinds[k].time.Recompute(plan.Recompute{Modules: []string{m.module}})
		if bytes > v.Bytes {
			v.Bytes, v.Recompute = bytes, again
		}
	}
	figures := fmt.Sprintf("frees %s a layer for %s", mebibytes(v.Bytes), duration(v.Recompute))
	bit := bitOf(p.rec, m.module)
	v.Chosen = c.rec&bit != 0
	switch {
	case m.never != "":
		v.Reason = fmt.Sprintf("%s: impossible, because %s", figures, m.never)
	case res.Nothing:
		v.Reason = figures + ": not needed, because the job fits without a policy"
	case v.Chosen:
		v.Reason = figures + ": the cheapest way to what is missing"
	default:
		v.Reason = figures + p.instead(list, res, p.crowdedRec&bit != 0, func(x *choice) bool { return x.rec&bit != 0 })
	}
}

const unneeded = ", but is not needed"

// instead compares the answer with the best policy that satisfies a condition. Crowded says
// that host memory was too small for one of these.
func (p *problem) instead(list []*choice, res *Result, crowded bool, in func(*choice) bool) string {
	best := p.fastest(list, func(c *choice) bool { return !c.failed && in(c) })
	if best == nil && crowded {
		return "; what fits with it needs more host memory than a node has"
	}
	if best == nil {
		// Policies that offload more than necessary are not in the list.
		if p.fastest(list, func(c *choice) bool { return !c.failed && c.off == 0 }) != nil {
			return ", but is too little alone, and not needed beside what is enough"
		}
		return ": no policy with it fits"
	}
	more := float64(p.walked(best)/res.After.Step.Total) - 1
	if more < 0.0005 {
		return unneeded
	}
	return fmt.Sprintf(": the best policy with it takes %s longer", percent(more))
}

func (p *problem) wholeVerdict(c *choice, res *Result) ModuleDecision {
	v := ModuleDecision{Module: "full", Choice: memory.Recompute, Chosen: c.recompute.Full}
	never := noWhole(p.setup)
	v.Possible = never == ""
	var all, input memory.Bytes
	for k := range p.kinds {
		var n memory.Bytes
		for _, t := range p.kinds[k].tensors {
			n += t.Bytes
		}
		if n > all && len(p.kinds[k].tensors) > 0 {
			all, input, v.Recompute = n, p.kinds[k].tensors[0].Bytes, p.kinds[k].time.Forward
		}
	}
	v.Bytes = all - input
	figures := fmt.Sprintf("frees %s a layer for %s", mebibytes(v.Bytes), duration(v.Recompute))
	switch {
	case never != "":
		v.Reason = fmt.Sprintf("%s: impossible, because %s", figures, never)
	case res.Nothing:
		v.Reason = figures + ": not needed, because the job fits without a policy"
	case v.Chosen && c.recompute.Method == "block":
		v.Reason = fmt.Sprintf("%s: nothing faster fits; the first %d layers of each stage are enough", figures, c.recompute.Layers)
	case v.Chosen:
		v.Reason = figures + ": nothing faster fits"
	default:
		passes := p.time.PolicyOf(plan.Recompute{Full: true, Method: "uniform", Layers: 1}, plan.Offload{}).Passes
		more := float64(p.time.Step(passes).Total/res.After.Step.Total) - 1
		if v.Reason = fmt.Sprintf("%s: of all layers it takes %s longer", figures, percent(more)); more < 0 {
			v.Reason = figures + ": does not fit" // or it would have been chosen
		}
	}
	return v
}

// describe returns a choice in words.
func describe(r plan.Recompute, offload []string) string {
	var parts []string
	switch {
	case r.Full && r.Method == "block":
		parts = append(parts, fmt.Sprintf("recomputation of the first %d layers of each stage", r.Layers))
	case r.Full:
		parts = append(parts, "recomputation of whole layers")
	case len(r.Modules) > 0:
		parts = append(parts, "recomputation of "+strings.Join(r.Modules, ", "))
	}
	if len(offload) > 0 {
		parts = append(parts, "offloading of "+strings.Join(offload, ", "))
	}
	if len(parts) == 0 {
		return "everything kept"
	}
	return strings.Join(parts, " and ")
}
