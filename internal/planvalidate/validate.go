// Package planvalidate compares forecasts with measured runs. It reads files of cases,
// predicts each case as the planner would before its launch, and reports the errors by
// kind of case. The package treats all cases alike: what a case states becomes a setup,
// what it leaves out gets the planner's defaults, and a case that cannot become a setup
// is skipped with a reason.
package planvalidate

// This file owns the format of case files. args.go turns argument maps into setups,
// external.go and named.go turn published figures into setups, measure.go owns what was
// measured, numbers.go the numbers that cannot be, and throughput.go rows of throughput.

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/internal/planruns"
	"github.com/stowage-dev/stowage/plan"
)

// file is a file of cases.
type file struct {
	Cases    []record `json:"cases"`
	External []record `json:"external_cases"`
	Speeds   []speed  `json:"throughput_rows"`
}

// record is one case. Cases of Megatron-LM's own tests have arguments. Published figures
// have a model, a layout and a few words.
type record struct {
	ID        string         `json:"id"`
	Kind      string         `json:"kind"`
	GPU       string         `json:"gpu"`
	GPUs      int            `json:"n_gpus"`
	Args      map[string]any `json:"args"`
	Model     *modelFacts    `json:"model"`
	Layout    *layoutFacts   `json:"parallelism"`
	Inferred  *layoutFacts   `json:"parallelism_inferred"`
	Batch     *batchFacts    `json:"batch"`
	Precision string         `json:"precision"`
	Settings  string         `json:"settings"`
	Recompute any            `json:"recompute"`
	Offload   any            `json:"offload"`
	FSDP      string         `json:"fsdp"`
	Optimizer *float64       `json:"optimizer_offload_fraction"`
	Measured  map[string]any `json:"measured"`
	Note      string         `json:"note"`
	Source    source         `json:"source"`
}

// File predicts every case of a file and compares it with what was measured. It calls
// progress after each case, unless that is nil. It returns an error if the file is not of the
// expected form, or has a number that cannot be.
func File(data []byte, progress func(done, all int)) (*Report, error) {
	data = input.JSON(data)
	if err := input.Repeated(data); err != nil {
		return nil, err
	}
	if err := checkNumbers(data); err != nil {
		return nil, err
	}
	var f file
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, fmt.Errorf("the file of cases is not JSON of the expected form: %w", err)
	}
	for key, list := range map[string][]record{"cases": f.Cases, "external_cases": f.External} {
		for i := range list {
			list[i].ID = cmp.Or(strings.Join(strings.Fields(list[i].ID), " "), position(i, key))
		}
	}
	all := len(f.Cases) + len(f.External) + len(f.Speeds)
	if all == 0 {
		return nil, fmt.Errorf("the file has neither cases nor external_cases nor throughput_rows")
	}
	r := &Report{}
	done := func() {
		if progress != nil {
			progress(r.Cases+len(r.Throughput)+len(r.TimeSkipped), all)
		}
	}
	for _, c := range f.Cases {
		r.add(c, fromArgs)
		done()
	}
	unsaid := indistinct(f.External)
	for _, c := range f.External {
		if unsaid[c.ID] {
			r.Cases++
			r.skip(c, statedKind(c), fmt.Errorf("other runs with the same stated facts measured something else, so what decides is not stated"))
		} else {
			r.add(completed(c, f.External), fromFacts)
		}
		done()
	}
	runs := planruns.All()
	for _, s := range f.Speeds {
		r.addSpeed(s, runs)
		done()
	}
	r.summarise()
	r.summariseTime()
	return r, nil
}

// indistinct finds cases that state the same facts but measured different figures.
func indistinct(cases []record) map[string]bool {
	type seen struct{ ids, figures []string }
	groups := map[string]*seen{}
	for _, c := range cases {
		facts := c
		facts.ID, facts.Measured, facts.Note = "", nil, ""
		key, err := json.Marshal(facts)
		figures, err2 := json.Marshal(c.Measured)
		if err != nil || err2 != nil {
			panic("validate: a case that was read from JSON cannot be written: " + c.ID)
		}
		g := groups[string(key)]
		if g == nil {
			g = &seen{}
			groups[string(key)] = g
		}
		g.ids, g.figures = append(g.ids, c.ID), append(g.figures, string(figures))
	}
	out := map[string]bool{}
	for _, g := range groups {
		if slices.ContainsFunc(g.figures, func(f string) bool { return f != g.figures[0] }) {
			for _, id := range g.ids {
				out[id] = true
			}
		}
	}
	return out
}

// add predicts one case. Each measured quantity is a row. A case without a quantity that
// can be compared is skipped.
func (r *Report) add(c record, build func(record) (*plan.Setup, error)) {
	r.Cases++
	s, err := build(c)
	if err != nil {
		r.skip(c, statedKind(c), err)
		return
	}
	kind := kindOf(c, s)
	quantities, err := measured(c)
	if err != nil {
		r.skip(c, kind, err)
		return
	}
	rows, err := compare(c, s, quantities)
	if err != nil {
		r.skip(c, kind, err)
		return
	}
	r.Rows = append(r.Rows, rows...)
	r.Modelled++
	r.count(kind).Modelled++
}

func (r *Report) skip(c record, kind string, err error) {
	r.Skipped = append(r.Skipped, Skip{ID: c.ID, Kind: kind, Reason: err.Error()})
	r.count(kind).Skipped++
}

// count returns the entry of a kind in the numbers of cases.
func (r *Report) count(kind string) *Count {
	for i := range r.Counts {
		if r.Counts[i].Kind == kind {
			return &r.Counts[i]
		}
	}
	r.Counts = append(r.Counts, Count{Kind: kind})
	return &r.Counts[len(r.Counts)-1]
}
