// This file owns searches as `stowage plan` asks for them, over policies or over
// layouts, and the flags of what is found.

package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/config"
	"github.com/stowage-dev/stowage/plan/maxtext"
	"github.com/stowage-dev/stowage/plan/megatron"
	"github.com/stowage-dev/stowage/plan/page"
	"github.com/stowage-dev/stowage/plan/search"
)

// found is what a search came to.
type found struct {
	setup  *plan.Setup
	policy *search.Result
	report *page.Search
}

// runSearch finds the fastest setup that fits.
func runSearch(s *plan.Setup, over string) (*found, error) {
	if over == "layout" {
		return searchLayouts(s)
	}
	return searchPolicy(s)
}

func searchPolicy(s *plan.Setup) (*found, error) {
	r, err := search.Policy(s, search.Options{})
	if err != nil {
		return nil, err
	}
	f := newFound("policy", r)
	f.report.Tried = r.Tried
	return f, nil
}

func searchLayouts(s *plan.Setup) (*found, error) {
	r, err := search.Layout(s, search.Options{})
	if err != nil {
		return nil, err
	}
	f := newFound("layout", r.Plans[0].Policy)
	f.report.Tried, f.report.Possible, f.report.Unfit = r.Searched, r.Possible, r.Unfit
	for _, x := range r.Plans {
		f.report.Best = append(f.report.Best, page.Candidate{
			Name: x.Name(), Policy: policyWords(x.Policy.Setup), Step: float64(x.Policy.After.Step.Total),
			Peak: slices.Max(x.Policy.After.Peaks), Reason: x.Reason,
		})
	}
	return f, nil
}

// tooSmall says that no policy fits, and which budget would do, as --budget takes
// it.
func tooSmall(e *search.TooSmall, over, from string) error {
	do := "or look for another layout with --search layout"
	if over == "layout" {
		do = "or more --gpus"
	}
	least := (e.Least + 1<<30 - 1) >> 30
	return fmt.Errorf("no policy fits %s (%s); the smallest budget that one fits is %d GiB, with %s; give --budget %dGiB, %s",
		page.Size(e.Budget), from, least, e.Policy, least, do)
}

func newFound(over string, r *search.Result) *found {
	f := &found{setup: r.Setup, policy: r, report: &page.Search{
		Over: over, Nothing: r.Nothing, Best: []page.Candidate{}, Shares: []page.Share{}, Pools: []page.Pool{},
		BarePeak: slices.Max(r.Before.Peaks), BareStep: float64(r.Before.Step.Total),
	}}
	for rank, x := range r.Ranks {
		f.report.Shares = append(f.report.Shares, page.Share{Rank: rank, Fraction: x.Fraction, Host: x.Host, Step: x.Step, Link: x.Link})
	}
	for _, x := range r.Pools {
		f.report.Pools = append(f.report.Pools, page.Pool(x))
	}
	return f
}

// saidInstead says what the flags really give, where they cannot ask for a setup.
func saidInstead(s, said *plan.Setup) []string {
	if s == said {
		return nil
	}
	p, err := plan.Predict(said)
	if err != nil {
		return nil // the setup itself was predicted; its neighbour has nothing that could fail
	}
	k := p.Ranks[p.Heaviest]
	text := fmt.Sprintf("with the flags rank %d is the heaviest, %s GiB allocated and up to %s reserved", p.Heaviest, page.GiB(k.Peak.Expected), page.GiB(k.Reserved.High))
	if said.Hardware != nil {
		if t, err := timeReport(p.Setup); err == nil {
			text += fmt.Sprintf(", and a step takes %s", page.Seconds(t.Step))
		}
	}
	return []string{text}
}

// policyWords are a policy in a few words.
func policyWords(s *plan.Setup) string {
	r := setupReport(s)
	var parts []string
	if r.Recompute != "none" {
		parts = append(parts, "recompute "+page.Recomputed(r))
	}
	if len(r.OffloadModules) > 0 {
		parts = append(parts, "offload "+page.Offloaded(r))
	}
	if len(parts) == 0 {
		return "everything kept"
	}
	return strings.Join(parts, "; ")
}

// flagsReport are the words that ask each program for a setup.
func flagsReport(s *plan.Setup) []page.Flags {
	said := megatron.Closest(s)
	notes := append(orEmpty(megatron.Unsaid(s)), saidInstead(s, said)...)
	if env := megatron.Environment(s); len(env) > 0 {
		notes = append(notes, "the flags need in the environment: "+strings.Join(env, " "))
	}
	return []page.Flags{
		{For: "megatron", Text: megatron.CommandLine(megatron.Flags(said)), Notes: notes},
		{For: "maxtext", Text: strings.TrimRight(maxtext.Config(s), "\n"), Notes: []string{}},
		{For: "stowage", Text: "stowage train " + strings.Join(config.TrainFlags(s), " "), Notes: config.TrainUnsaid(s)},
	}
}
