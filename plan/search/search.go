// Package search finds the fastest memory policy that fits a budget, and the fastest
// layout with its policy. It says for every module why it was chosen or not. The same
// input gives the same answer.
//
// [Policy] chooses keep, stash, offload or recompute for each module. A module is
// recomputed or offloaded on all ranks, because frameworks have flags for that. How much
// of the offloaded groups each pipeline rank really offloads is chosen for each rank:
// the least that brings its peak within the budget.
//
// [Layout] tries the ways to divide the model over the GPUs, each with its best policy.
//
// A budget is the device memory that a rank may hold at its peak. The search compares it
// with the upper end of the memory that the allocator reserves, as [plan.Forecast]
// does.
package search

// This file owns the input and the answer. table.go owns the linear model of peaks,
// solve.go the search, verify.go the check of the winner against the full forecast.

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/cost"
)

// Options bounds a search.
type Options struct {
	// Budget is the device memory that a rank may hold at its peak, in bytes. Zero
	// stands for the setup's budget, or else for what the hardware leaves.
	Budget memory.Bytes
	// Micro lists the microbatch sizes that Layout tries. Nil stands for the setup's.
	Micro []int
	// Top is how many layouts Layout reports. Zero stands for five.
	Top int
	// Progress, if it is not nil, is told by Layout how many of all layouts have been
	// searched. Layout returns before the last one if no other can be faster.
	Progress func(done, all int)
}

// Result is the answer of Policy.
type Result struct {
	// Setup is the setup with the policy and the budget. A forecast of it fits.
	Setup  *plan.Setup
	Budget memory.Bytes
	// Nothing reports whether the setup fits without a policy.
	Nothing bool
	// Before is the outcome without a policy, After the outcome with the chosen one.
	Before, After Outcome
	Ranks         []Share
	Modules       []ModuleDecision
	Pools         []Pool
	// Tried is the number of policies that were compared.
	Tried int
	// Others has the next fastest policies that fit, the fastest first: only their setup,
	// their outcome, and as their Reason why they are slower. Policies that do more than a faster one and save nothing are left out.
	Others []*Result
	Reason string
	// HostCost says which faster policy nodes with more host memory would allow. It is
	// empty if there is none.
	HostCost string
}

// Outcome is the memory and the time of a setup with a policy.
type Outcome struct {
	// Peaks is the memory that is expected to be allocated. Needs is the upper end of
	// the memory that the allocator reserves, which the budget bounds. Both are by
	// pipeline rank.
	Peaks, Needs []memory.Bytes
	Step         cost.Step
	// Recompute and Late are what recompute and late copies add to a step, on the rank
	// where they add most.
	Recompute, Late cost.Seconds
}

// Share is what a pipeline rank offloads.
type Share struct {
	// Fraction is the part of the offloadable bytes that the rank offloads, and Host
	// is what of them is in host memory at the rank's peak.
	Fraction float64
	Host     memory.Bytes
	// Step is how many bytes cross the link in a step, one way. Link is the part of
	// the step in which the busier direction of the link works.
	Step memory.Bytes
	Link float64
}

// ModuleDecision is what was decided about one choice for one module, and why.
type ModuleDecision struct {
	Module   string
	Choice   memory.Choice
	Chosen   bool
	Possible bool
	// Bytes is the most that the choice frees of a layer and microbatch. Window and
	// Copy are the times of an offload, and Recompute that of a recompute.
	Bytes                   memory.Bytes
	Window, Copy, Recompute cost.Seconds
	Reason                  string
}

// Pool is memory that the policy allocates before the first step.
type Pool struct {
	Name  string
	Rank  int
	Page  memory.Bytes // zero for a slab of exact sizes
	Bytes memory.Bytes
}

// TooSmall reports that no policy fits a budget.
type TooSmall struct {
	Budget memory.Bytes
	// Least is the smallest budget that a policy fits, Rank is the rank that needs it,
	// and Policy describes the policy.
	Least  memory.Bytes
	Rank   int
	Policy string
	// Node is set if host memory alone is too small: it is the node of a policy that
	// fits the budget and pins more than the node has.
	Node *plan.Node
}

// Error names the smallest budget that a policy fits.
func (e *TooSmall) Error() string {
	if e.Node != nil {
		return fmt.Sprintf("no policy fits a budget of %s and a node's host memory of %s; %s would pin %s a node; raise one of them or search layouts",
			gibibytes(e.Budget), gibibytes(e.Node.Room), e.Policy, enough(e.Node.Pinned))
	}
	return fmt.Sprintf("no policy fits a budget of %s; the smallest budget that a policy fits is %s (rank %d), with %s; raise the budget or search layouts",
		gibibytes(e.Budget), enough(e.Least), e.Rank, e.Policy)
}

// Policy finds the fastest policy that fits the budget. It returns a *TooSmall if no
// policy fits, and a *memory.SettingError if the setup has neither a budget nor
// hardware.
func Policy(s *plan.Setup, o Options) (*Result, error) {
	best, err := policy(s, o)
	if s.Stash.RankCapacity == 0 || len(s.Stash.Modules) > 0 || err == nil && best.Nothing {
		return best, err
	}
	// Buffers have a fixed capacity, and the setup does not mention the stash. Try the
	// policies with it as well.
	var small *TooSmall
	if err != nil && !errors.As(err, &small) {
		return nil, err
	}
	n := *s
	n.Stash.Modules = memory.MegatronModules(memory.Stash)
	stashed, err2 := policy(&n, o)
	var small2 *TooSmall
	switch {
	case errors.As(err2, &small2):
		if small != nil && small2.Least < small.Least {
			return nil, err2
		}
		if best != nil {
			best.Modules = append(best.Modules, stashVerdict(n.Stash, best, nil))
		}
		return best, err
	case err2 != nil:
		return nil, err2
	}
	p, err3 := newProblem(s, o)
	if err3 != nil {
		return nil, err3
	}
	stashed.Before, stashed.Nothing = p.before(), false
	v := stashVerdict(n.Stash, best, stashed)
	if v.Chosen {
		best, err = stashed, nil
	}
	best.Modules = append(best.Modules, v)
	return best, err
}

// stashVerdict compares the best policy without the stash and the best one with it. One
// of them may be nil.
func stashVerdict(s plan.Stash, without, with *Result) ModuleDecision {
	v := ModuleDecision{Module: strings.Join(s.Modules, ", "), Choice: memory.Stash, Possible: true}
	figures := fmt.Sprintf("pages for the rows that come, instead of buffers for %.3g times as many in every layer", s.RankCapacity)
	switch {
	case with == nil:
		v.Reason = figures + ": no policy with it fits"
	case without == nil:
		v.Chosen, v.Reason = true, figures+": no policy without it fits"
	default:
		more := float64(with.After.Step.Total/without.After.Step.Total) - 1
		if v.Chosen = more < 0; v.Chosen {
			v.Reason = fmt.Sprintf("%s: the best policy without it takes %s longer", figures, percent(1/(1+more)-1))
		} else {
			v.Reason = fmt.Sprintf("%s: the best policy with it takes %s longer", figures, percent(more))
		}
	}
	return v
}

// policy finds the fastest policy for one way to hold the experts' rows.
func policy(s *plan.Setup, o Options) (*Result, error) {
	p, err := newProblem(s, o)
	if err != nil {
		return nil, err
	}
	if err := p.overfull(); err != nil {
		return nil, err
	}
	if p.fits(p.clean.heights()) {
		return p.result(p.nothing(), nil)
	}
	if err := p.calibrate(); err != nil {
		return nil, err
	}
	list := p.solve()
	best, err := p.verify(list)
	if err != nil {
		return nil, p.blameHost(o, err)
	}
	r, err := p.result(best, list)
	if err == nil {
		r.Others, err = p.others(r.After, best, list)
	}
	if err == nil {
		r.HostCost, err = p.hostCost(o, r)
	}
	return r, err
}

// overfull returns a *TooSmall if nodes have too little host memory without any policy. No
// policy takes something out of it.
func (p *problem) overfull() error {
	node := p.clean.Node
	if node.Missing == 0 {
		return nil
	}
	heights := p.clean.heights()
	least := slices.Max(heights)
	return &TooSmall{Budget: p.budget, Least: least, Rank: slices.Index(heights, least), Policy: "every policy", Node: &node}
}

// blameHost returns an error that names the node if some policy fits and only host memory
// is too small for it. Else it returns the error as it is.
func (p *problem) blameHost(o Options, err error) error {
	var small *TooSmall
	if !p.crowded || !errors.As(err, &small) {
		return err
	}
	r, node, err2 := p.withoutHostLimit(o)
	if err2 != nil {
		return err
	}
	small.Node, small.Policy = &node, describe(r.Setup.Recompute, r.Setup.Offload.Modules)
	return small
}

// withoutHostLimit returns the best policy if nodes had host memory without limit, and the
// node that it needs.
func (p *problem) withoutHostLimit(o Options) (*Result, plan.Node, error) {
	free := *p.setup
	free.HostMemory = math.MaxInt64
	r, err := policy(&free, o)
	if err != nil {
		return nil, plan.Node{}, err
	}
	pinned := make([]memory.Bytes, p.ranks())
	for i, x := range r.Ranks {
		pinned[i] = p.clean.Ranks[i].Host + x.Host
	}
	return r, p.setup.Node(pinned), nil
}

// hostCost says which faster policy nodes with more host memory would allow. It returns
// nothing if there is none.
func (p *problem) hostCost(o Options, got *Result) (string, error) {
	if !p.crowded {
		return "", nil
	}
	r, node, err := p.withoutHostLimit(o)
	if err != nil {
		return "", err
	}
	more := float64(got.After.Step.Total/r.After.Step.Total) - 1
	if more < 0.0005 || node.Missing == 0 {
		return "", nil
	}
	return fmt.Sprintf("host memory makes a step %s longer: %s would pin %s on a node, which has %s", percent(more),
		describe(r.Setup.Recompute, r.Setup.Offload.Modules), gibibytes(node.Pinned), gibibytes(node.Room)), nil
}

// nothing returns the choice that keeps everything.
func (p *problem) nothing() *choice {
	c := p.newChoice(0, 0)
	c.passes, c.heights = p.time.Stages(), p.clean.heights()
	return c
}

// budgetOf returns the budget of a search.
func budgetOf(s *plan.Setup, o Options) (memory.Bytes, error) {
	switch {
	case o.Budget < 0 || s.Budget < 0:
		return 0, &memory.SettingError{Setting: "Budget", Problem: "is negative", Remedy: "give the device memory that a rank may hold at its peak"}
	case o.Budget > 0:
		return o.Budget, nil
	case s.Budget > 0:
		return s.Budget, nil
	case s.Hardware != nil && s.Hardware.Usable > 0:
		return s.Hardware.Usable, nil
	}
	return 0, &memory.SettingError{Setting: "Budget", Problem: "is missing, and there is no hardware to take it from", Remedy: "give a budget or name the hardware"}
}

// withoutPolicy returns a setup without a policy.
func withoutPolicy(s *plan.Setup) *plan.Setup {
	n := *s
	n.Recompute = plan.Recompute{}
	n.Offload = plan.Offload{MinElements: s.Offload.MinElements}
	return &n
}

func has(list []string, name string) bool { return slices.Contains(list, name) }
