// This file owns what was measured: which figures of a case are compared, in which unit,
// and with which part of a forecast.

package planvalidate

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
)

// Quantity is what a row compares.
type Quantity string

const (
	Peak     Quantity = "peak"     // most allocated on a rank
	Static   Quantity = "static"   // allocated between steps
	Reserved Quantity = "reserved" // taken from the device
	Saving   Quantity = "saving"   // less allocated with offloading or recomputation
	Fits     Quantity = "fits"     // 1 if it ran, 0 if it ran out of memory
	Model    Quantity = "model"    // weights and gradients
	State    Quantity = "state"    // the optimiser's
)

// figure is one measured number.
type figure struct {
	quantity Quantity
	bytes    memory.Bytes
	// rank is the pipeline rank. lastRank and heaviest are special.
	rank int
	what string
	// without reports that the figure is for the setup without offloading.
	without bool
	// module is the module whose recompute saves the memory, if the figure is such a
	// saving.
	module string
}

// recomputedBy returns the module whose recompute saves the memory of a figure of that
// name, or nothing. Figures name the activation function of experts after what it is.
func recomputedBy(name string) string {
	if name == "swiglu" {
		name = "moe_act"
	}
	if slices.Contains(memory.MegatronModules(memory.Recompute), name) {
		return name
	}
	return ""
}

const (
	lastRank = -1
	heaviest = -2
)

const (
	mib = 1 << 20
	gib = 1 << 30
	gb  = 1_000_000_000
)

// units lists the units of the keys of a measurement.
var units = []struct {
	key      string
	unit     float64
	quantity Quantity
	rank     int
}{
	{"peak_allocated_GB", gb, Peak, heaviest},
	{"peak_allocated_GiB", gib, Peak, heaviest},
	{"rank0_peak_allocated_GiB", gib, Peak, 0},
	{"rank0_peak_GB", gb, Peak, 0},
	{"peak_GB", gb, Peak, heaviest},
	{"peak_reserved_GiB", gib, Reserved, heaviest},
	{"mem_allocated_GB", gb, Static, heaviest},
	{"live_peak_alloc_MiB", mib, Peak, heaviest},
	{"real_GB", gb, Peak, heaviest},
	{"total_GB", gb, Peak, heaviest},
	{"peak_MiB_after", mib, Peak, heaviest},
	{"weights_grads_GB", gb, Model, heaviest},
	{"main_weights_optimizer_GB", gb, State, heaviest},
}

// measured lists the figures of a case.
func measured(c record) ([]figure, error) {
	m := c.Measured
	if len(m) == 0 {
		return nil, fmt.Errorf("nothing was measured")
	}
	var out []figure
	number := func(key string) (float64, bool) {
		v, ok := m[key].(float64)
		return v, ok && v > 0
	}
	if peak, rank, ok := goldenPeak(number); ok {
		out = append(out, figure{quantity: Peak, bytes: memory.Bytes(peak), rank: rank})
		if s, ok := number("mem_allocated_bytes_last"); ok {
			out = append(out, figure{quantity: Static, bytes: memory.Bytes(s), rank: rank})
		}
	}
	stages, _ := m["per_pp_stage"].([]any)
	for _, st := range stages {
		s, _ := st.(map[string]any)
		rank, _ := s["pp_rank"].(float64)
		if a, ok := s["max_allocated_MiB"].(float64); ok {
			out = append(out, figure{quantity: Peak, bytes: memory.Bytes(a * mib), rank: int(rank)})
		}
		if a, ok := s["max_reserved_MiB"].(float64); ok {
			out = append(out, figure{quantity: Reserved, bytes: memory.Bytes(a * mib), rank: int(rank)})
		}
	}
	for _, u := range units {
		if v, ok := number(u.key); ok {
			out = append(out, figure{quantity: u.quantity, bytes: memory.Bytes(v * u.unit), rank: u.rank})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m)) {
		saver, is := strings.CutSuffix(name, "_saves_GB")
		if v, ok := number(name); ok && is && recomputedBy(saver) != "" {
			module := recomputedBy(saver)
			out = append(out, figure{quantity: Saving, bytes: memory.Bytes(v * gb), rank: heaviest, module: module, what: "recomputing " + module})
		}
	}
	if before, ok := number("peak_MiB_before"); ok {
		out = append(out, figure{quantity: Peak, bytes: memory.Bytes(before * mib), rank: heaviest, without: true, what: "before offloading"})
		if after, ok := number("peak_MiB_after"); ok {
			out = append(out, figure{quantity: Saving, bytes: memory.Bytes((before - after) * mib), rank: heaviest})
		}
	}
	if status, _ := m["status"].(string); strings.Contains(status, "OOM") {
		// The memory that was allocated before it ran out is not the peak of a whole step.
		out = slices.DeleteFunc(out, func(f figure) bool { return f.quantity == Peak })
		out = append(out, figure{quantity: Fits, bytes: 0, rank: heaviest})
	}
	if c.Args == nil && (c.Batch == nil || c.Batch.Seq == 0) {
		// Without the batch only what does not depend on it can be compared.
		static := map[Quantity]bool{Static: true, Model: true, State: true}
		out = slices.DeleteFunc(out, func(f figure) bool { return !static[f.quantity] })
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("its measurements are not of a kind that is predicted")
	}
	return out, nil
}

// goldenPeak picks the peak of Megatron-LM's tests, which the last rank writes. Moments
// are made at the end of the first step that is not skipped, so the first peak
// lacks them; the next one logged has them, unless loss scaling skipped the
// first steps: then memory between steps grew later on, and the last peak is
// the one to compare.
func goldenPeak(number func(string) (float64, bool)) (peak float64, rank int, ok bool) {
	second, ok := number("mem_max_allocated_bytes_second_logged")
	if !ok {
		second, ok = number("mem_max_allocated_bytes_last")
	}
	first, _ := number("mem_allocated_bytes_first")
	last, _ := number("mem_allocated_bytes_last")
	if most, has := number("mem_max_allocated_bytes_last"); has && first < 0.9*last {
		second = most
	}
	return second, lastRank, ok
}

// compare predicts a setup and sets each figure beside its forecast.
func compare(c record, s *plan.Setup, figures []figure) ([]Row, error) {
	p, err := plan.Predict(s)
	if err != nil {
		return nil, err
	}
	kind := kindOf(c, s)
	var rows []Row
	for _, f := range figures {
		row := Row{ID: c.ID, Kind: kind, Quantity: f.quantity, Measured: f.bytes, What: f.what}
		q := p
		after := p
		switch other := *s; {
		case f.module != "":
			other.Recompute.Modules = append(slices.Clone(s.Recompute.Modules), f.module)
			after, err = plan.Predict(&other)
		case f.without || f.quantity == Saving:
			other.Offload = plan.Offload{}
			q, err = plan.Predict(&other)
		}
		if err != nil {
			return nil, err
		}
		r, err := pick(q, f.rank)
		if err != nil {
			return nil, err
		}
		row.Rank = r.Rank
		switch f.quantity {
		case Peak:
			row.set(r.Peak)
		case Static:
			row.set(r.Static)
		case Reserved:
			row.set(r.Reserved)
		case Saving:
			row.Predicted = r.Peak.Expected - after.Peak.Expected
		case Model:
			row.most(q, plan.CauseWeights, plan.CauseGradients)
		case State:
			row.most(q, plan.CauseOptimizer)
		case Fits:
			row.fits(q)
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func pick(p *plan.Forecast, rank int) (plan.Rank, error) {
	switch {
	case rank == lastRank:
		return p.Ranks[len(p.Ranks)-1], nil
	case rank == heaviest:
		return p.Ranks[p.Heaviest], nil
	case rank >= len(p.Ranks):
		return plan.Rank{}, fmt.Errorf("pipeline rank %d was measured, but the layout has %d", rank, len(p.Ranks))
	}
	return p.Ranks[rank], nil
}

func (r *Row) set(b plan.Band) {
	r.Predicted = b.Expected
	r.Within = r.Measured >= b.Low && r.Measured <= b.High
}

// most predicts the sum of causes on the rank that has the most of them, because such
// figures are given for that rank.
func (r *Row) most(p *plan.Forecast, causes ...plan.Cause) {
	r.Predicted = 0
	for _, k := range p.Ranks {
		var n memory.Bytes
		for _, c := range causes {
			n += k.Sum(c)
		}
		if n > r.Predicted {
			r.Rank, r.Predicted = k.Rank, n
		}
	}
}

// fits notes whether the planner predicts that a job fits which did not.
func (r *Row) fits(p *plan.Forecast) {
	if p.Fits {
		r.Predicted = 1
	}
	r.Within = !p.Fits
}
