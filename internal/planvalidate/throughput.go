// This file owns rows of throughput: the layout of a run, and the tokens that a GPU
// processed in a second.

package planvalidate

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/internal/planruns"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/cost"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
)

// speed is a row of throughput. Its keys are the heads of a published table, and its values
// numbers or text.
type speed map[string]any

// TimeRow is a predicted throughput with the measured one.
type TimeRow struct {
	ID   string `json:"id"`
	Kind string `json:"kind"`
	// Predicted and Measured are the tokens that one GPU processes in a second.
	Predicted float64 `json:"predicted_tokens_per_gpu_s"`
	Measured  float64 `json:"measured_tokens_per_gpu_s"`
	// Error is how far the forecast is off, as a part of the measured figure.
	Error float64 `json:"error"`
}

// TimeKind sums up the rows of one kind.
type TimeKind struct {
	Kind         string  `json:"kind"`
	Rows         int     `json:"rows"`
	MeanAbsError float64 `json:"mean_abs_error"`
	Worst        float64 `json:"worst"` // with its sign
	WorstID      string  `json:"worst_id"`
}

func (s speed) text(key string) string {
	switch v := s[key].(type) {
	case string:
		return strings.TrimSpace(v)
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	return ""
}

// count returns a whole number. A dimension that is missing or "n/a" is one.
func (s speed) count(key string) (int, error) {
	t := s.text(key)
	if t == "" || t == "n/a" {
		return 1, nil
	}
	n, err := strconv.Atoi(t)
	if err != nil || n < 0 || n == 0 && key != "FSDP" {
		return 0, fmt.Errorf("%q is %q; it must be a whole number above zero", key, t)
	}
	return n, nil
}

// figure returns a measured number. Zero stands for one that is missing.
func (s speed) figure(key string) (float64, error) {
	t := s.text(key)
	if n, note, ok := strings.Cut(t, "[^"); ok {
		return 0, fmt.Errorf("%q is %s with the footnote %q, so the run is not a plain one", key, n, strings.TrimSuffix(note, "]"))
	}
	if t == "" || t == "n/a" {
		return 0, nil
	}
	v, err := strconv.ParseFloat(t, 64)
	if err != nil || v < 0 || math.IsInf(v, 0) || math.IsNaN(v) {
		return 0, fmt.Errorf("%q is %q; it must be a number", key, t)
	}
	return v, nil
}

// id names a row by what it states.
func (s speed) id() string {
	words := []string{s.text("model"), s.text("#-GPUs"), "x", strings.TrimPrefix(s.text("System"), "DGX-"), s.text("Precision")}
	for _, d := range []string{"FSDP", "TP", "PP", "CP", "VP", "EP", "MBS"} {
		if t := s.text(d); t != "" && t != "n/a" && t != "0" && (t != "1" || d == "MBS") {
			words = append(words, strings.ToLower(d)+t)
		}
	}
	return strings.Join(append(words, s.release()), " ")
}

func (s speed) release() string {
	word, _, _ := strings.Cut(s.text("release"), " ")
	return word
}

const (
	tokensKey = "Tokens / sec / GPU"
	tflopsKey = "Model TFLOP / sec / GPU"
)

// setup returns the setup that a row states, with the planner's defaults for the rest.
func (s speed) setup() (*plan.Setup, string, error) {
	m, err := preset(s.text("model"))
	if err != nil {
		return nil, "", err
	}
	g, err := hardware.ByName(s.text("System"))
	if err != nil {
		return nil, "", err
	}
	format := strings.ToLower(s.text("Precision"))
	compute, ok := map[string]plan.Format{"": plan.BF16, "bf16": plan.BF16, "fp8": plan.FP8, "mxfp8": plan.MXFP8, "nvfp4": plan.NVFP4}[format]
	if !ok {
		return nil, "", fmt.Errorf("the precision %q is none of BF16, FP8, MXFP8 and NVFP4", format)
	}
	layout := []string{m.Name, g.Name, format}
	var n [9]int
	for i, key := range []string{"#-GPUs", "GBS", "MBS", "Sequence Length", "TP", "PP", "CP", "VP", "EP"} {
		if n[i], err = s.count(key); err != nil {
			return nil, "", err
		}
		layout = append(layout, strconv.Itoa(n[i]))
	}
	setup := &plan.Setup{
		Model: m, Hardware: g,
		Layout: plan.Layout{World: n[0], TP: n[4], PP: n[5], CP: n[6], VPP: n[7], EP: n[8], ETP: 1, SequenceParallel: n[4] > 1},
		Batch:  plan.Batch{Global: n[1], Micro: n[2], Seq: n[3]},
	}
	setup.Precision.Compute = compute
	setup.Optimizer.Distributed = true
	setup.Kernels = plan.Kernels{GradFusion: true, Loss: "te", GroupedGEMM: true, PermuteFusion: true, RouterFP32: true, Dispatcher: "alltoall", NoAttentionMask: true}
	if shards, err := s.count("FSDP"); err != nil {
		return nil, "", err
	} else if shards > 1 {
		setup.Layout.FSDP.Shard = plan.ShardParameters
	}
	return setup, strings.Join(layout, ","), nil
}

// frozen is the share of the operations of a whole training step below which a run cannot
// have trained all parameters.
const frozen = 0.75

// speedRow predicts one row. A table does not state graphs, recompute and dispatchers: if
// its release is known, they are those of the release's recipe for the same layout.
func speedRow(s speed, runs []planruns.Run) (row TimeRow, kind string, err error) {
	kind = "not built in"
	setup, layout, err := s.setup()
	if err != nil {
		return row, kind, err
	}
	kind = timeKind(setup)
	tokens, err := s.figure(tokensKey)
	if err != nil {
		return row, kind, err
	}
	tflops, err := s.figure(tflopsKey)
	if err != nil {
		return row, kind, err
	}
	if tokens == 0 {
		return row, kind, fmt.Errorf("%q is not stated", tokensKey)
	}
	predicted, operations, err := forecast(setup)
	if err != nil {
		return row, kind, err
	}
	if stated := tflops * 1e12 / tokens; stated > 0 && stated < frozen*operations {
		return row, kind, fmt.Errorf("it did %.0f %% of the operations that training all parameters takes, so parts of the model were frozen", 100*stated/operations)
	}
	known := slices.ContainsFunc(runs, func(r planruns.Run) bool { return r.Release == s.release() })
	if i := slices.IndexFunc(runs, func(r planruns.Run) bool { return r.Release == s.release() && r.Layout == layout }); i >= 0 {
		if predicted, _, err = forecast(runs[i].Setup); err != nil {
			return row, kind, err
		}
	} else if known {
		return row, kind, fmt.Errorf("release %s has no recipe of this layout that a setup can express, so its graphs, recompute, dispatcher and formats are not known", s.release())
	}
	return TimeRow{ID: s.id(), Kind: kind, Predicted: predicted, Measured: tokens, Error: predicted/tokens - 1}, kind, nil
}

// forecast returns the tokens that a GPU processes in a second, and the operations of the
// model for each of them.
func forecast(s *plan.Setup) (tokens, operations float64, err error) {
	m, err := cost.New(s)
	if err != nil {
		return 0, 0, err
	}
	step := m.Step(m.Policy().Passes)
	tokens = step.Tokens / float64(s.Layout.World)
	return tokens, step.TFLOPS * 1e12 / tokens, nil
}

func timeKind(s *plan.Setup) string {
	has := func(is func(model.Layer) bool) bool { return slices.ContainsFunc(s.Model.Layers, is) }
	switch {
	case s.Layout.FSDP.Shard == plan.ShardParameters:
		return "fsdp"
	case has(func(l model.Layer) bool { return l.Mamba != nil || l.DeltaNet != nil }):
		return "hybrid"
	case has(func(l model.Layer) bool { return l.MoE != nil }):
		return "moe"
	}
	return "dense"
}

// addSpeed predicts one row of throughput.
func (r *Report) addSpeed(s speed, runs []planruns.Run) {
	row, kind, err := speedRow(s, runs)
	if err != nil {
		r.TimeSkipped = append(r.TimeSkipped, Skip{ID: s.id(), Kind: kind, Reason: err.Error()})
		return
	}
	r.Throughput = append(r.Throughput, row)
}

func (r *Report) summariseTime() {
	for _, row := range r.Throughput {
		i := slices.IndexFunc(r.TimeKinds, func(k TimeKind) bool { return k.Kind == row.Kind })
		if i < 0 {
			i = len(r.TimeKinds)
			r.TimeKinds = append(r.TimeKinds, TimeKind{Kind: row.Kind})
		}
		k := &r.TimeKinds[i]
		k.Rows++
		k.MeanAbsError += math.Abs(row.Error)
		r.TimeMeanAbsError += math.Abs(row.Error)
		if math.Abs(row.Error) > math.Abs(k.Worst) {
			k.Worst, k.WorstID = row.Error, row.ID
		}
		if math.Abs(row.Error) > math.Abs(r.TimeWorst) {
			r.TimeWorst = row.Error
		}
	}
	for i := range r.TimeKinds {
		r.TimeKinds[i].MeanAbsError /= float64(r.TimeKinds[i].Rows)
	}
	r.TimeMeanAbsError /= float64(max(len(r.Throughput), 1))
	slices.SortFunc(r.TimeKinds, func(a, b TimeKind) int { return strings.Compare(a.Kind, b.Kind) })
}
