// This file owns the search over layouts: the ways to divide the model over the GPUs,
// each with its best policy.
//
// The time of a layout without a policy is a cheap lower bound of its time with one.
// The search takes layouts in the order of that bound, and stops when the bound exceeds
// the slowest layout of the answer.

package search

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/cost"
)

// LayoutResult is the answer of Layout.
type LayoutResult struct {
	// Best lists the fastest layouts, the fastest first.
	Best []LayoutOption
	// Possible is the number of layouts that divide the model and the batch. Searched
	// of them had their policy searched, and Unfit of those fit with no policy. The rest
	// cannot be faster than those in Best.
	Possible, Searched, Unfit int
}

// LayoutOption is a layout with its best policy.
type LayoutOption struct {
	Layout plan.Layout
	Micro  int
	Policy *Result
	// Slower is how much longer its step is than the fastest, as a fraction.
	Slower float64
	Reason string
}

// Name describes the layout, such as "TP 2 PP 4 DP 8, microbatch 1".
func (p LayoutOption) Name() string { return layoutName(p.Layout, p.Micro) }

func layoutName(l plan.Layout, micro int) string {
	var b strings.Builder
	for _, d := range []struct {
		name string
		n    int
	}{{"TP", l.TP}, {"PP", l.PP}, {"VPP", l.VPP}, {"EP", l.EP}, {"ETP", l.ETP}, {"CP", l.CP}} {
		if d.n > 1 {
			fmt.Fprintf(&b, "%s %d ", d.name, d.n)
		}
	}
	fmt.Fprintf(&b, "DP %d, microbatch %d", l.DP(), micro)
	return b.String()
}

// candidate is a layout during the search.
type candidate struct {
	setup *plan.Setup
	bound cost.Seconds
	name  string

	problem *problem
	list    []*choice // the policies that were compared
	best    *choice
	total   cost.Seconds
	least   memory.Bytes // the lowest peak of any policy, if none fits
	err     error
}

// wave is how many layouts are searched at the same time before the bound is compared
// again. It is a constant, so that the answer does not depend on the number of
// processors.
const wave = 8

// Layout finds the fastest layouts for the setup's GPUs. It returns a *TooSmall if no
// layout fits the budget, and a *memory.SettingError if the number of GPUs or the budget
// is missing.
func Layout(s *plan.Setup, o Options) (*LayoutResult, error) {
	if s.Layout.World < 1 {
		return nil, &memory.SettingError{Setting: "GPUs", Problem: "is missing, and a search over layouts needs it", Remedy: "give the number of GPUs"}
	}
	if _, err := budgetOf(s, o); err != nil {
		return nil, err
	}
	if o.Top == 0 {
		o.Top = 5
	}
	list, err := candidates(s, o)
	if err != nil {
		return nil, err
	}
	res := &LayoutResult{Possible: len(list)}
	var fit, unfit []*candidate
	for at := 0; at < len(list); at += wave {
		if len(fit) >= o.Top && list[at].bound > fit[o.Top-1].total {
			break
		}
		some := list[at:min(at+wave, len(list))]
		var all sync.WaitGroup
		for _, c := range some {
			all.Go(func() { c.search(o) })
		}
		all.Wait()
		for _, c := range some {
			res.Searched++
			switch {
			case c.err != nil:
				return nil, c.err
			case c.best == nil:
				unfit = append(unfit, c)
			default:
				fit = append(fit, c)
			}
		}
		if o.Progress != nil {
			o.Progress(res.Searched, len(list))
		}
		slices.SortStableFunc(fit, func(a, b *candidate) int {
			return cmp.Or(cmp.Compare(a.total, b.total), cmp.Compare(a.name, b.name))
		})
	}
	if res.Unfit = len(unfit); len(fit) == 0 {
		return nil, smallestLayout(unfit, o)
	}
	return res, res.fill(fit[:min(o.Top, len(fit))], o)
}

// candidates returns the layouts that divide the model, the batch and the GPUs, in the
// order of their lower bounds.
func candidates(s *plan.Setup, o Options) ([]*candidate, error) {
	var list []*candidate
	var last error
	for l := range layouts(s) {
		micros := o.Micro
		if len(micros) == 0 {
			micros = []int{max(s.Batch.Micro, 1)}
		}
		for _, micro := range micros {
			n := withoutPolicy(s)
			n.Layout, n.Batch.Micro = l, micro
			n, err := n.Normalise()
			if err != nil {
				last = err
				continue
			}
			if l.VPP > 1 && n.Microbatches()%l.PP != 0 {
				continue // interleaving needs whole groups of microbatches
			}
			m, err := cost.New(n)
			if err != nil {
				return nil, err
			}
			list = append(list, &candidate{setup: n, bound: m.Bound(m.Stages()), name: layoutName(n.Layout, micro)})
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("no layout divides the model and the batch over %d GPUs; the last that was tried says: %w", s.Layout.World, last)
	}
	slices.SortStableFunc(list, func(a, b *candidate) int {
		return cmp.Or(cmp.Compare(a.bound, b.bound), cmp.Compare(a.name, b.name))
	})
	return list, nil
}

// layouts yields the possible degrees. Tensor parallelism stays within a domain of fast
// links, and at most 8. Context parallelism is for sequences that leave 4096 tokens to a
// rank.
func layouts(s *plan.Setup) func(func(plan.Layout) bool) {
	layers := len(s.Model.Layers)
	experts := 1
	for _, l := range s.Model.Layers {
		if l.MoE != nil {
			experts = max(experts, l.MoE.Experts)
		}
	}
	fast := 8
	if s.Hardware != nil && s.Hardware.FastGroup > 0 {
		fast = min(fast, s.Hardware.FastGroup)
	}
	return func(yield func(plan.Layout) bool) {
		for _, tp := range divisors(s.Layout.World, fast) {
			for _, pp := range divisors(s.Layout.World/tp, min(layers, 64)) {
				for _, cp := range divisors(s.Layout.World/tp/pp, max(s.Batch.Seq/4096, 1)) {
					for _, ep := range divisors(experts, s.Layout.World/pp) {
						for _, etp := range slices.Compact([]int{1, tp}) {
							for _, vpp := range chunks(layers, pp) {
								l := s.Layout
								l.TP, l.PP, l.CP, l.EP, l.ETP, l.VPP = tp, pp, cp, ep, etp, vpp
								l.Stages, l.GroupSize, l.SequenceParallel = nil, 0, tp > 1
								if experts == 1 && (ep > 1 || etp != tp) {
									continue
								}
								if !yield(l) {
									return
								}
							}
						}
					}
				}
			}
		}
	}
}

// divisors returns the divisors of n up to most.
func divisors(n, most int) (out []int) {
	for d := 1; d <= min(n, most); d++ {
		if n%d == 0 {
			out = append(out, d)
		}
	}
	return out
}

// chunks returns the numbers of chunks to try on a pipeline. Each stage has at least one
// layer. More than eight chunks cost more in messages than they gain.
func chunks(layers, pp int) []int {
	out := []int{1}
	if pp == 1 {
		return out
	}
	for v := 2; v <= 8 && v*pp <= layers; v++ {
		out = append(out, v)
	}
	return out
}

// search finds the best policy of a layout without reasons.
func (c *candidate) search(o Options) {
	if c.problem, c.err = newProblem(c.setup, o); c.err != nil {
		return
	}
	p := c.problem
	if p.clean.Node.Missing > 0 {
		c.least = math.MaxInt64
	} else if p.fits(p.clean.heights()) {
		c.best = p.nothing()
	} else if c.least, c.err = p.floor(); c.err == nil && c.least <= p.budget {
		if c.err = p.calibrate(); c.err == nil {
			c.list = p.solve()
			c.best, c.err = p.verify(c.list)
		}
	}
	var small *TooSmall
	if errors.As(c.err, &small) {
		c.least, c.err = small.Least, nil
	}
	if c.best != nil {
		c.total = p.walked(c.best)
	} else {
		c.list = nil // thousands of policies; nothing is said about them
	}
}

// result returns the best policy with the reasons. If the stash is a choice, it searches
// once more with it.
func (c *candidate) result(o Options) (*Result, error) {
	if c.setup.Stash.RankCapacity > 0 && len(c.setup.Stash.Modules) == 0 {
		return Policy(c.setup, o)
	}
	return c.problem.result(c.best, c.list)
}

// smallestLayout returns the error for a budget that no layout meets.
func smallestLayout(unfit []*candidate, o Options) error {
	best := slices.MinFunc(unfit, func(a, b *candidate) int { return cmp.Compare(a.least, b.least) })
	_, err := best.problem.lowestPolicy()
	err = best.problem.blameHost(o, err)
	var small *TooSmall
	if !errors.As(err, &small) {
		return err
	}
	small.Policy = best.name + ", " + small.Policy
	return small
}

// fill adds the reported layouts, each with its policy and the reasons.
func (res *LayoutResult) fill(fit []*candidate, o Options) error {
	for _, c := range fit {
		r, err := c.result(o)
		if err != nil {
			return err
		}
		res.Best = append(res.Best, LayoutOption{Layout: c.setup.Layout, Micro: c.setup.Batch.Micro, Policy: r})
	}
	// A stash that was tried only now may have made a layout faster than those before it.
	slices.SortStableFunc(res.Best, func(a, b LayoutOption) int {
		return cmp.Compare(a.Policy.After.Step.Total, b.Policy.After.Step.Total)
	})
	best := res.Best[0].Policy.After
	res.Best[0].Reason = "the fastest that fits"
	for i := range res.Best[1:] {
		p := &res.Best[i+1]
		p.Slower = float64(p.Policy.After.Step.Total/best.Step.Total) - 1
		p.Reason = whySlower(best, p.Policy.After)
	}
	return nil
}

// whySlower says on what a layout spends the time that another one saves.
func whySlower(best, own Outcome) string {
	type part struct {
		name string
		more cost.Seconds
	}
	work := func(o Outcome) cost.Seconds { return o.Step.Busy[o.Step.Slowest] - o.Recompute - o.Late }
	list := []part{
		{"work and communication in layers", work(own) - work(best)},
		{"waiting in the pipeline", own.Step.Bubble - best.Step.Bubble},
		{"communication between replicas", own.Step.Replicas - best.Step.Replicas},
		{"the optimiser", own.Step.Update - best.Step.Update},
		{"recomputation", own.Recompute - best.Recompute},
		{"late copies", own.Late - best.Late},
	}
	slices.SortStableFunc(list, func(a, b part) int { return cmp.Compare(b.more, a.more) })
	total := own.Step.Total - best.Step.Total
	var words []string
	for _, x := range list {
		if x.more > total/10 && x.more > 0 {
			words = append(words, fmt.Sprintf("%s more in %s", duration(x.more), x.name))
		}
	}
	if len(words) == 0 {
		return "as fast"
	}
	return fmt.Sprintf("%s slower: %s", percent(float64(total/best.Step.Total)), strings.Join(words, ", "))
}
