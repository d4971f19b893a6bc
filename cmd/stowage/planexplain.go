// This file owns `stowage plan explain`: everything about one group.

package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/page"
	"github.com/stowage-dev/stowage/plan/search"
)

func newPlanExplain() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "explain GROUP",
		Short: "Say why a group of saved tensors is kept, moved or computed again",
		Long: `Say what a group of saved tensors consists of, and what a search for the fastest
policy that fits decides about every module that could move it or compute it
again: bytes of a layer and microbatch, the window a copy has, what it takes, and
how much slower the best policy with it would be. The job is described as for
"stowage plan"; hardware must be named.`,
		Example: `  stowage plan explain core_attn --model mixtral-8x7b --gpu h100 --gpus 64 --pp 4 --ep 8 --seq 4096
  stowage plan explain moe_act --megatron train.yaml --gpu h100 --budget 60GiB --json`,
		Args:               cobra.ArbitraryArgs,
		DisableFlagParsing: true,
	}
	var job jobFlags
	job.add(cmd)
	asJSON := jsonFlag(cmd)
	settingsUsage(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		w, help, err := parsePlan(cmd, args)
		switch {
		case err != nil:
			return err
		case help:
			return cmd.Help()
		case len(w.rest) == 0:
			return usagef("which group? such as `stowage plan explain core_attn --model deepseek-v3 --gpu h100`")
		}
		group := w.rest[0]
		w.rest = w.rest[1:]
		s, _, err := job.setup(w)
		if err != nil {
			return err
		}
		e, err := explain(s, group)
		if err != nil {
			return err
		}
		if *asJSON {
			return printJSON(cmd, e)
		}
		e.text(cmd.OutOrStdout())
		return nil
	}
	return cmd
}

// explanation is everything about one group.
type explanation struct {
	page.Decision
	Budget   int64           `json:"budget_bytes"`
	Tensors  []tensor        `json:"tensors"`
	Verdicts []moduleVerdict `json:"modules"`
	// NoPolicy says why no policy was found, if none was.
	NoPolicy string `json:"no_policy"`
}

// tensor is a part of a group, of one layer and microbatch.
type tensor struct {
	Name      string   `json:"name"`
	Bytes     int64    `json:"bytes"`
	Offload   string   `json:"offload_module"`
	Recompute []string `json:"recompute_modules"`
}

// moduleVerdict is what a search decided about a module.
type moduleVerdict struct {
	Module   string  `json:"module"`
	Action   string  `json:"action"`
	Chosen   bool    `json:"chosen"`
	Possible bool    `json:"possible"`
	Bytes    int64   `json:"bytes"`
	Window   float64 `json:"window_seconds"`
	Copy     float64 `json:"copy_seconds"`
	Again    float64 `json:"again_seconds"`
	Reason   string  `json:"reason"`
}

// explain looks at a group with the eyes of a search. Where no policy fits, the
// figures stand without a comparison.
func explain(s *plan.Setup, name string) (*explanation, error) {
	n, err := s.Normalise()
	if err != nil {
		return nil, planError(err)
	}
	var names []string
	var g *groupOf
	for _, x := range groupsOf(n) {
		names = append(names, x.name)
		if x.name == name {
			g = x
		}
	}
	if g == nil {
		hint := "there are " + strings.Join(names, ", ")
		if near := nearest(name, names); near != "" {
			hint = fmt.Sprintf("did you mean %s? There are %s", near, strings.Join(names, ", "))
		}
		return nil, usagef("no layer of %s saves a group %q; %s", n.Model.Name, name, hint)
	}
	e := &explanation{Verdicts: []moduleVerdict{}}
	for _, t := range g.tensors {
		e.Tensors = append(e.Tensors, tensor{t.Tensor, t.Bytes, t.Offload, orEmpty(t.Recompute)})
	}
	f, err := searchPolicy(s)
	var res *search.Result
	var small *search.TooSmall
	switch {
	case errors.As(err, &small):
		e.NoPolicy, e.Budget = fmt.Sprintf("no policy fits %s; the smallest budget that one fits is %s, with %s", page.Size(small.Budget), page.Size(small.Least), small.Policy), small.Budget
	case err != nil:
		return nil, planError(err)
	default:
		res, n = f.policy, f.setup
		if e.Budget = s.Budget; e.Budget == 0 {
			e.Budget = s.Hardware.Usable
		}
	}
	all, err := decisions(n, res)
	if err != nil {
		return nil, planError(err)
	}
	e.Decision = all[slices.Index(names, name)]
	if res != nil {
		for _, v := range verdictsOn(g, res) {
			e.Verdicts = append(e.Verdicts, moduleVerdict{
				v.Module, v.Action.String(), v.Chosen, v.Possible, v.Bytes, float64(v.Window), float64(v.Copy), float64(v.Again), v.Reason,
			})
		}
	}
	return e, nil
}

func (e *explanation) text(w io.Writer) {
	fmt.Fprintf(w, "%s: %s\n", e.Group, e.Choice)
	fmt.Fprint(w, wrap(e.Reason, "  "))
	if e.NoPolicy != "" {
		fmt.Fprint(w, wrap(e.NoPolicy, "  "))
	}
	fmt.Fprintf(w, "\n%-34s  %9s  %-16s  %s\n", "saved by a layer and microbatch", "MB", "moved by", "computed again by")
	for _, t := range e.Tensors {
		fmt.Fprintf(w, "%-34s  %9.1f  %-16s  %s\n", t.Name, float64(t.Bytes)/1e6, dash(t.Offload), dash(strings.Join(t.Recompute, ", ")))
	}
	if len(e.Verdicts) > 0 {
		fmt.Fprintln(w, "\nalternatives")
	}
	for _, v := range e.Verdicts {
		mark := " "
		if v.Chosen {
			mark = "*"
		}
		fmt.Fprint(w, wrap(fmt.Sprintf("%s %s %s: %s", mark, v.Module, v.Action, v.Reason), ""))
	}
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
