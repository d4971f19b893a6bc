// This file owns the searches of a request, over policies or over layouts, and the
// flags of what they find.

package planview

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/config"
	"github.com/stowage-dev/stowage/plan/maxtext"
	"github.com/stowage-dev/stowage/plan/megatron"
	"github.com/stowage-dev/stowage/plan/search"
)

// found is the result of a search.
type found struct {
	setup  *plan.Setup
	policy *search.Result
	report *Search
}

// runSearch finds the fastest setup that fits.
func runSearch(s *plan.Setup, over SearchSpace, progress func(done, all int)) (*found, error) {
	if over == Layouts {
		return searchLayouts(s, progress)
	}
	return searchPolicy(s)
}

func searchPolicy(s *plan.Setup) (*found, error) {
	r, err := search.Policy(s, search.Options{})
	if err != nil {
		return nil, err
	}
	f := newFound(Policies, r)
	f.report.Tried = r.Tried
	if len(r.Others) == 0 {
		return f, nil
	}
	for _, x := range append([]*search.Result{r}, r.Others...) {
		f.report.Best = append(f.report.Best, candidate("", x, cmp.Or(x.Reason, "the fastest that fits")))
	}
	return f, nil
}

func searchLayouts(s *plan.Setup, progress func(done, all int)) (*found, error) {
	r, err := search.Layout(s, search.Options{Progress: progress})
	if err != nil {
		return nil, err
	}
	f := newFound(Layouts, r.Best[0].Policy)
	f.report.Tried, f.report.Possible, f.report.Unfit = r.Searched, r.Possible, r.Unfit
	for _, x := range r.Best {
		f.report.Best = append(f.report.Best, candidate(x.Name(), x.Policy, x.Reason))
	}
	return f, nil
}

func candidate(name string, r *search.Result, reason string) Candidate {
	c := Candidate{Name: name, Policy: policyWords(r.Setup), Step: float64(r.After.Step.Total), Peak: slices.Max(r.After.Peaks), Reason: reason}
	for _, rank := range r.Ranks {
		c.Host = max(c.Host, rank.Host)
	}
	return c
}

// what says which layout and policy a candidate is.
func (c Candidate) what() string {
	if c.Name == "" {
		return c.Policy
	}
	return c.Name + "; " + c.Policy
}

func newFound(over SearchSpace, r *search.Result) *found {
	f := &found{setup: r.Setup, policy: r, report: &Search{
		Over: string(over), Nothing: r.Nothing, Best: []Candidate{}, Shares: []Share{}, Pools: []Pool{},
		BarePeak: slices.Max(r.Before.Peaks), BareStep: float64(r.Before.Step.Total),
	}}
	for rank, x := range r.Ranks {
		f.report.Shares = append(f.report.Shares, Share{Rank: rank, Fraction: x.Fraction, Host: x.Host, Step: x.Step, Link: x.Link})
	}
	for _, x := range r.Pools {
		f.report.Pools = append(f.report.Pools, Pool(x))
	}
	return f
}

// saidInstead describes what the flags really ask for, if they cannot ask for the
// setup itself.
func saidInstead(s, said *plan.Setup) []string {
	if s == said {
		return nil
	}
	p, err := plan.Predict(said)
	if err != nil {
		return nil // the setup itself was predicted; its neighbour has nothing that could fail
	}
	k := p.Ranks[p.Heaviest]
	text := fmt.Sprintf("with the flags rank %d is the heaviest, %s GiB allocated and up to %s reserved", p.Heaviest, GiB(k.Peak.Expected), GiB(k.Reserved.High))
	if said.Hardware != nil {
		if t, err := timeReport(p.Setup); err == nil {
			text += fmt.Sprintf(", and a step takes %s", Seconds(t.Step))
		}
	}
	return []string{text}
}

// policyWords describes a policy in a few words.
func policyWords(s *plan.Setup) string {
	r := setupReport(s)
	var parts []string
	if r.Recompute != "none" {
		parts = append(parts, "recompute "+Recomputed(r))
	}
	if len(r.OffloadModules) > 0 {
		parts = append(parts, "offload "+Offloaded(r))
	}
	if len(parts) == 0 {
		return "everything kept"
	}
	return strings.Join(parts, "; ")
}

// flagsReport returns the flags that ask each program for a setup. given may be nil.
func flagsReport(s *plan.Setup, given *Given) []Flags {
	said := megatron.Closest(s)
	f := Flags{For: "megatron", Notes: append(orEmpty(megatron.Unsaid(s)), saidInstead(s, said)...)}
	words, env := megatron.Flags(said), megatron.Environment(s)
	if given != nil {
		if all, changes, ok := given.changed(said); ok {
			words = all
			if given.File != "" {
				f.File, f.Changes, env = given.File, orEmpty(changes), newVariables(given.Setup, s)
			}
		}
	}
	f.Text = megatron.CommandLine(words)
	if len(env) > 0 {
		f.Notes = append(f.Notes, "the flags need in the environment: "+strings.Join(env, " "))
	}
	return []Flags{
		f,
		{For: "maxtext", Text: strings.TrimRight(maxtext.Config(s), "\n"), Notes: []string{}},
		{For: "stowage", Text: "stowage train " + strings.Join(config.TrainFlags(s), " "), Notes: config.TrainUnsaid(s)},
	}
}
