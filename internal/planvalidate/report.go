// This file owns the report: rows, and the errors of forecasts by kind.

package planvalidate

import (
	"cmp"
	"math"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// Row is a predicted figure with the measured one.
type Row struct {
	ID        string       `json:"id"`
	Kind      string       `json:"kind"`
	Quantity  Quantity     `json:"quantity"`
	What      string       `json:"what,omitempty"`
	Rank      int          `json:"rank"`
	Predicted memory.Bytes `json:"predicted_bytes"`
	Measured  memory.Bytes `json:"measured_bytes"`
	// Within reports whether the measured figure lies in the predicted band.
	Within bool `json:"within_band"`
}

// Error returns how far the forecast is off, as a part of the measured figure.
func (r Row) Error() float64 {
	if r.Quantity == Fits {
		return 0
	}
	return float64(r.Predicted)/float64(r.Measured) - 1
}

// Skip is a case that was not modelled, and why.
type Skip struct {
	ID     string `json:"id"`
	Kind   string `json:"kind"`
	Reason string `json:"reason"`
}

// Kind sums up the rows of one kind and quantity.
type Kind struct {
	Kind         string   `json:"kind"`
	Quantity     Quantity `json:"quantity"`
	Rows         int      `json:"rows"`
	MeanAbsError float64  `json:"mean_abs_error"`
	Worst        float64  `json:"worst"` // with its sign
	WorstID      string   `json:"worst_id"`
	Within       int      `json:"within_band"`
	// Modelled and Skipped are cases of the kind, whatever their figures.
	Modelled int `json:"modelled"`
	Skipped  int `json:"skipped"`
}

// Count is how many cases of a kind were modelled and skipped.
type Count struct {
	Kind     string `json:"kind"`
	Modelled int    `json:"modelled"`
	Skipped  int    `json:"skipped"`
}

// Report is the result of one file.
type Report struct {
	Cases    int    `json:"cases"`
	Modelled int    `json:"modelled"`
	Rows     []Row  `json:"rows"`
	Kinds    []Kind `json:"kinds"`
	Skipped  []Skip `json:"skipped"`
	// Counts has every kind, even those of which nothing was modelled.
	Counts []Count `json:"cases_by_kind"`
	// MeanAbsError and Worst are over all peaks. FalseFits lists cases that ran out of
	// memory although the planner predicts that they fit.
	MeanAbsError float64  `json:"mean_abs_error"`
	Worst        float64  `json:"worst"`
	FalseFits    []string `json:"false_fits"`

	// Throughput, TimeKinds and TimeSkipped are the rows of throughput.
	// TimeMeanAbsError and TimeWorst are over all that were predicted.
	Throughput       []TimeRow  `json:"throughput"`
	TimeKinds        []TimeKind `json:"time_kinds"`
	TimeSkipped      []Skip     `json:"time_skipped"`
	TimeMeanAbsError float64    `json:"time_mean_abs_error"`
	TimeWorst        float64    `json:"time_worst"`
}

// largeMoE is the peak from which a case counts as large.
const largeMoE = 8 * gib

// kindOf returns the kind by which the accuracy of a case is judged.
func kindOf(c record, s *plan.Setup) string {
	has := func(is func(model.Layer) bool) bool { return slices.ContainsFunc(s.Model.Layers, is) }
	mamba := has(func(l model.Layer) bool { return l.Mamba != nil || l.DeltaNet != nil })
	moe := has(func(l model.Layer) bool { return l.MoE != nil })
	switch {
	case c.Measured["per_pp_stage"] != nil:
		return "per stage"
	case s.Layout.FSDP.Shard == plan.ShardParameters:
		return "fsdp"
	case len(s.Offload.Modules) > 0:
		return "offload"
	case mamba:
		return "hybrid"
	case moe && size(c) >= largeMoE:
		return "moe large"
	case moe:
		return "moe small"
	}
	return "dense"
}

// size returns the largest figure of a case in bytes.
func size(c record) memory.Bytes {
	var most memory.Bytes
	figures, err := measured(c)
	if err != nil {
		return 0
	}
	for _, f := range figures {
		most = max(most, f.bytes)
	}
	return most
}

func (r *Report) summarise() {
	type key struct {
		kind     string
		quantity Quantity
	}
	byKind := map[key]*Kind{}
	var peaks int
	for _, row := range r.Rows {
		if row.Quantity == Fits {
			if !row.Within {
				r.FalseFits = append(r.FalseFits, row.ID)
			}
			continue
		}
		k := byKind[key{row.Kind, row.Quantity}]
		if k == nil {
			k = &Kind{Kind: row.Kind, Quantity: row.Quantity}
			byKind[key{row.Kind, row.Quantity}] = k
		}
		e := row.Error()
		k.Rows++
		k.MeanAbsError += math.Abs(e)
		if math.Abs(e) > math.Abs(k.Worst) {
			k.Worst, k.WorstID = e, row.ID
		}
		if row.Within {
			k.Within++
		}
		if row.Quantity == Peak {
			peaks++
			r.MeanAbsError += math.Abs(e)
			if math.Abs(e) > math.Abs(r.Worst) {
				r.Worst = e
			}
		}
	}
	for _, k := range byKind {
		k.MeanAbsError /= float64(k.Rows)
		n := r.count(k.Kind)
		k.Modelled, k.Skipped = n.Modelled, n.Skipped
		r.Kinds = append(r.Kinds, *k)
	}
	r.MeanAbsError /= float64(max(peaks, 1))
	slices.SortFunc(r.Counts, func(a, b Count) int { return strings.Compare(a.Kind, b.Kind) })
	slices.SortFunc(r.Kinds, func(a, b Kind) int {
		return cmp.Or(strings.Compare(string(a.Quantity), string(b.Quantity)), strings.Compare(a.Kind, b.Kind))
	})
}
