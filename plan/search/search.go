// Package search finds the fastest memory policy that fits a budget, and the
// fastest layout with its policy, and says why the others lost. It is pure, and
// the same input gives the same answer.
//
// A policy says what becomes of each group of saved tensors: kept, stashed,
// offloaded or computed again. Recomputation and offloading are chosen by module
// for the whole job, because that is what frameworks have flags for; how much of
// the offloaded groups moves is chosen for each pipeline rank: the least that
// brings its peak under the budget, so that ranks over it end at equal peaks.
//
// This file owns what goes in and what comes out, moves.go which modules there
// are and which exclude each other, table.go the linear model of peaks, solve.go
// the search itself, verify.go the check of the winner against the full
// prediction, explain.go the sentences, layout.go the search over layouts.
package search

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/cost"
)

// Options say within which limits to search.
type Options struct {
	// Budget is the most bytes a rank may take from its device, at the upper end
	// of the prediction; zero is the setup's, or what the hardware leaves.
	Budget int64
	// Host is the most pinned host memory a rank may use; zero is no limit.
	Host int64
	// Micro are the microbatch sizes that a search over layouts tries; none is
	// the setup's own.
	Micro []int
	// Top is how many layouts to report; zero stands for five.
	Top int
}

// Action is what becomes of a group.
type Action uint8

const (
	Keep Action = iota
	Stash
	Offload
	Recompute
)

func (a Action) String() string { return [...]string{"keep", "stash", "offload", "recompute"}[a] }

// Result is the answer of a policy search.
type Result struct {
	// Setup is the setup with the policy and the budget in it. Predicting it says
	// that it fits.
	Setup  *plan.Setup
	Budget int64
	// Nothing says that all fits without doing anything.
	Nothing bool
	// Before is without any policy, After with the chosen one.
	Before, After Outcome
	Ranks         []Share
	Groups        []Decision
	Modules       []Verdict
	Pools         []Pool
	// Tried is how many policies were compared.
	Tried int
}

// Outcome is what a policy comes to.
type Outcome struct {
	// Peaks are what is expected to be allocated, Needs the upper end of what the
	// allocator reserves for it, which the budget bounds; both by pipeline rank.
	Peaks, Needs []int64
	Step         cost.Step
	// Recompute and Late are what recomputation and copies that do not hide
	// add to a step, on the rank where they add most.
	Recompute, Late cost.Seconds
}

// Share is what a pipeline rank moves.
type Share struct {
	// Fraction of the bytes of the offloaded groups, and the bytes in host
	// memory at the rank's peak.
	Fraction float64
	Host     int64
	// Step is what crosses the link in a step, one way, and Link the share of
	// the step in which the busier direction of it works.
	Step int64
	Link float64
}

// Decision is what becomes of one group.
type Decision struct {
	Group  string
	Action Action
	// Module is the one that moves it or computes it again.
	Module string
	// Bytes are those of one layer and microbatch (the largest, where layers
	// differ), of which Away leave the device.
	Bytes, Away int64
	Reason      string
}

// Verdict is what was decided about one module, and why.
type Verdict struct {
	Module   string
	Action   Action
	Chosen   bool
	Possible bool
	// Bytes are what it takes from a layer and microbatch at most; Window and
	// Copy are those of an offload, Again is the time of a recomputation.
	Bytes               int64
	Window, Copy, Again cost.Seconds
	Reason              string
}

func (v Verdict) String() string { return fmt.Sprintf("%s %s: %s", v.Module, v.Action, v.Reason) }

// Pool is memory that the policy allocates beforehand.
type Pool struct {
	Name  string
	Rank  int
	Page  int64 // zero for a slab of exact sizes
	Bytes int64
}

// TooSmall says that no policy meets a budget.
type TooSmall struct {
	Budget int64
	// Least is the smallest budget that some policy meets, Rank the one that
	// needs it, and Policy what to set.
	Least  int64
	Rank   int
	Policy string
}

func (e *TooSmall) Error() string {
	return fmt.Sprintf("plan: no policy fits a budget of %s; the smallest that one does is %s (rank %d), with %s: raise --budget, or search layouts",
		gigabytes(e.Budget), enough(e.Least), e.Rank, e.Policy)
}

// Policy finds the fastest policy that fits.
func Policy(s *plan.Setup, o Options) (*Result, error) {
	best, err := policy(s, o)
	if s.Stash.RankCapacity == 0 || len(s.Stash.Modules) > 0 || err == nil && best.Nothing {
		return best, err
	}
	// Buffers have a fixed capacity, and nothing was said about the stash: try
	// the policies with it as well.
	var small *TooSmall
	if err != nil && !errors.As(err, &small) {
		return nil, err
	}
	n := *s
	n.Stash.Modules = []string{"expert_fc1", "moe_act"}
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

// stashVerdict compares the best policy without the stash and the best with it;
// one of them may not exist.
func stashVerdict(s plan.Stash, without, with *Result) Verdict {
	v := Verdict{Module: strings.Join(s.Modules, ", "), Action: Stash, Possible: true}
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
	if p.fits(p.clean.heights()) {
		return p.result(p.nothing(), nil)
	}
	if err := p.calibrate(); err != nil {
		return nil, err
	}
	list := p.solve()
	best, err := p.verify(list)
	if err != nil {
		return nil, err
	}
	return p.result(best, list)
}

// nothing is the choice of doing nothing.
func (p *problem) nothing() *choice {
	c := p.newChoice(0, 0)
	c.passes, c.heights = p.time.Stages(), p.clean.heights()
	return c
}

// budgetOf is the budget that holds.
func budgetOf(s *plan.Setup, o Options) (int64, error) {
	switch {
	case o.Budget < 0 || s.Budget < 0:
		return 0, fmt.Errorf("plan: the budget is negative; give the bytes that a rank may allocate")
	case o.Budget > 0:
		return o.Budget, nil
	case s.Budget > 0:
		return s.Budget, nil
	case s.Hardware != nil && s.Hardware.Usable > 0:
		return s.Hardware.Usable, nil
	}
	return 0, fmt.Errorf("plan: there is neither a budget nor hardware to take one from; give --budget or --hardware")
}

// bare is a setup without any policy of its own.
func bare(s *plan.Setup) *plan.Setup {
	n := *s
	n.Recompute = plan.Recompute{}
	n.Offload = plan.Offload{MinElements: s.Offload.MinElements}
	return &n
}

func has(list []string, name string) bool { return slices.Contains(list, name) }
