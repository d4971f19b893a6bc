// This file owns explanations: everything that the planner knows about one group.

package planview

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/search"
)

// Explanation is everything about one group of saved tensors.
type Explanation struct {
	Decision
	Budget   memory.Bytes     `json:"budget_bytes"`
	Tensors  []Tensor         `json:"tensors"`
	Verdicts []ModuleDecision `json:"modules"`
	// NoPolicy says why the search found no policy. It is empty if it found one.
	NoPolicy string `json:"no_policy"`
	// Warnings says what about the job was assumed or left out, a sentence each.
	Warnings []string `json:"warnings"`
}

// Tensor is a part of a group, of one layer and microbatch.
type Tensor struct {
	Name      string       `json:"name"`
	Bytes     memory.Bytes `json:"bytes"`
	Offload   string       `json:"offload_module"`
	Recompute []string     `json:"recompute_modules"`
}

// Judgement is what a search decided about a module, and why.
type ModuleDecision struct {
	Module    string       `json:"module"`
	Choice    string       `json:"action"`
	Chosen    bool         `json:"chosen"`
	Possible  bool         `json:"possible"`
	Bytes     memory.Bytes `json:"bytes"`
	Window    float64      `json:"window_seconds"`
	Copy      float64      `json:"copy_seconds"`
	Recompute float64      `json:"again_seconds"`
	Reason    string       `json:"reason"`
}

// UnknownGroup reports a group that no layer of a model saves.
type UnknownGroup struct {
	Model, Group string
	Known        []string // the groups that the model's layers save
}

// Error names the groups that there are.
func (e *UnknownGroup) Error() string {
	return fmt.Sprintf("no layer of %s saves a group %q; there are %s", e.Model, e.Group, strings.Join(e.Known, ", "))
}

// Explain searches for a policy and returns what it decides about a group. If no
// policy fits, the explanation has the group's figures without a comparison. Explain
// returns an *UnknownGroup if no layer saves the group.
func Explain(s *plan.Setup, name string) (*Explanation, error) {
	n, err := s.Normalise()
	if err != nil {
		return nil, err
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
		return nil, &UnknownGroup{n.Model.Name, name, names}
	}
	e := &Explanation{Verdicts: []ModuleDecision{}, Warnings: []string{}}
	for _, t := range g.tensors {
		e.Tensors = append(e.Tensors, Tensor{t.Tensor, t.Bytes, t.Offload, orEmpty(t.Recompute)})
	}
	f, err := searchPolicy(s)
	var res *search.Result
	var small *search.TooSmall
	switch {
	case errors.As(err, &small):
		e.NoPolicy, e.Budget = fmt.Sprintf("no policy fits %s; the smallest budget that one fits is %s, with %s", Size(small.Budget), Size(small.Least), small.Policy), small.Budget
		if h := s.Hardware; h != nil && small.Least > h.Usable {
			e.NoPolicy += fmt.Sprintf(", and %s leaves %s", h.Name, Size(h.Usable))
		}
	case err != nil:
		return nil, err
	default:
		res, n = f.policy, f.setup
		if e.Budget = s.Budget; e.Budget == 0 {
			e.Budget = s.Hardware.Usable
		}
	}
	all, err := decisions(n, res)
	if err != nil {
		return nil, err
	}
	e.Decision = all[slices.Index(names, name)]
	if res != nil {
		for _, v := range decisionsOn(g, res) {
			e.Verdicts = append(e.Verdicts, ModuleDecision{
				v.Module, v.Choice.String(), v.Chosen, v.Possible, v.Bytes, float64(v.Window), float64(v.Copy), float64(v.Recompute), v.Reason,
			})
		}
	}
	return e, nil
}

// WriteText writes the explanation for a terminal.
func (e *Explanation) WriteText(w io.Writer) {
	fmt.Fprintf(w, "%s: %s\n", e.Group, e.Choice)
	fmt.Fprint(w, Wrap(e.Reason, "  "))
	if e.NoPolicy != "" {
		fmt.Fprint(w, Wrap(e.NoPolicy, "  "))
	}
	fmt.Fprintf(w, "\n%-34s  %9s  %-16s  %s\n", "saved by a layer and microbatch", "MiB", "offloaded by", "recomputed by")
	for _, t := range e.Tensors {
		fmt.Fprintf(w, "%-34s  %9.1f  %-16s  %s\n", t.Name, float64(t.Bytes)/float64(memory.MiB), dash(t.Offload), dash(strings.Join(t.Recompute, ", ")))
	}
	if len(e.Verdicts) > 0 {
		fmt.Fprintln(w, "\nalternatives")
	}
	for _, v := range e.Verdicts {
		mark := " "
		if v.Chosen {
			mark = "*"
		}
		fmt.Fprint(w, Wrap(fmt.Sprintf("%s %s %s: %s", mark, v.Module, v.Choice, v.Reason), ""))
	}
	if len(e.Warnings) > 0 {
		fmt.Fprintln(w)
	}
	writeNotes(w, e.Warnings)
}

// dash returns the text, or a dash for an empty one.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
