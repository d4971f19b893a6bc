// This file owns the report of a plan: what the planner's parts say, in the
// names that --json prints, the tables show and the page draws.

package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/model"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/cost"
	"github.com/stowage-dev/stowage/plan/page"
)

// causes are all there are, in the order they are shown.
var causes = []plan.Cause{
	plan.CauseWeights, plan.CauseGradients, plan.CauseOptimizer, plan.CauseFixed,
	plan.CauseActivations, plan.CauseTransient, plan.CausePools, plan.CauseGraphs,
}

// newReport says what was predicted, without decisions, times and flags.
func newReport(p *plan.Prediction, budgetFrom string) *page.Report {
	s := p.Setup
	r := &page.Report{
		Version: page.Version, Model: modelReport(s.Model), Setup: setupReport(s),
		Budget: p.Budget, BudgetFrom: budgetFrom, Fits: p.Fits,
		Heaviest: p.Heaviest, Peak: page.Band(p.Peak), Reserved: page.Band(p.Reserved),
		Timeline: []page.Point{}, Decisions: []page.Decision{}, Flags: []page.Flags{}, Warnings: []string{},
	}
	if h := s.Hardware; h != nil {
		r.Hardware = &page.Hardware{Name: h.Name, Memory: h.Memory, Usable: h.Usable}
	}
	if p.Budget > 0 {
		most := int64(0)
		for _, k := range p.Ranks {
			most = max(most, k.Reserved.High)
		}
		r.Missing, r.Spare = max(most-p.Budget, 0), max(p.Budget-most, 0)
	}
	for i := range p.Ranks {
		r.Ranks = append(r.Ranks, rankReport(s, &p.Ranks[i]))
	}
	for _, at := range p.Ranks[p.Heaviest].Timeline() {
		r.Timeline = append(r.Timeline, page.Point{
			Microbatch: at.Pass.Microbatch, Chunk: at.Pass.Chunk, Backward: at.Pass.Backward, What: placeWords(at.What),
			Static: at.Static, Live: at.Live, Transient: at.Transient, Groups: orEmpty(at.Groups),
		})
	}
	return r
}

// orEmpty writes an empty list as [] and not as null.
func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

func modelReport(m *model.Model) page.Model {
	r := page.Model{Name: cmp.Or(m.Name, "model"), Layers: len(m.Layers), Hidden: m.Hidden, Vocab: m.Vocab, Parameters: m.Parameters()}
	for _, l := range m.Layers {
		if l.MoE != nil {
			r.Experts, r.TopK = l.MoE.Experts, l.MoE.TopK
		}
	}
	if m.MTP != nil {
		r.MTP = m.MTP.Depth
	}
	return r
}

func setupReport(s *plan.Setup) page.Setup {
	l := s.Layout
	r := page.Setup{
		GPUs: l.World, TP: l.TP, PP: l.PP, VPP: l.VPP, CP: l.CP, EP: l.EP, ETP: l.ETP, DP: l.DP(), EDP: l.EDP(),
		SequenceParallel: l.SequenceParallel, Shard: shardWords(s),
		MicroBatch: s.Batch.Micro, GlobalBatch: s.Batch.Global, Seq: s.Batch.Seq, Microbatches: s.Batch.Global / (s.Batch.Micro * l.DP()),
		Precision: precisionWords(s.Precision), Optimizer: optimizerWords(s), Loss: cmp.Or(s.Kernels.Loss, "native"),
		Recompute: "none", RecomputeModules: orEmpty(s.Recompute.Modules),
		OffloadModules: orEmpty(s.Offload.Modules), OffloadFraction: s.Offload.Fraction, OffloadFractions: orEmpty(s.Offload.Fractions),
		StashModules: orEmpty(s.Stash.Modules), GraphScopes: orEmpty(s.Graph.Scopes), Imbalance: s.Routing.Imbalance,
		Routing: routingWords(s),
	}
	if len(s.Offload.Fractions) > 0 {
		r.OffloadFraction = slices.Max(s.Offload.Fractions)
	}
	switch {
	case s.Recompute.Full:
		r.Recompute = "full"
		if s.Recompute.Method == "block" {
			r.RecomputeLayers = s.Recompute.Layers
		}
	case len(s.Recompute.Modules) > 0:
		r.Recompute = "selective"
	}
	return r
}

// routingWords says which routing is assumed; nothing without experts.
func routingWords(s *plan.Setup) string {
	switch {
	case modelReport(s.Model).Experts == 0:
		return ""
	case s.Kernels.PadToCapacity:
		return "capacity"
	case s.Routing.Trace != "":
		return "trace " + s.Routing.Trace
	case s.Routing.Natural:
		return "natural"
	case s.Routing.Imbalance <= 1:
		return "balanced"
	}
	return "skewed"
}

func shardWords(s *plan.Setup) string {
	switch {
	case s.Layout.FSDP.Shard == plan.ShardParameters:
		return "parameters"
	case s.Layout.FSDP.Shard == plan.ShardGradients:
		return "gradients"
	case s.Layout.FSDP.Shard == plan.ShardOptimizer || s.Optimizer.Distributed:
		return "optimizer"
	}
	return "none"
}

var formatWords = map[plan.Format]string{
	plan.BF16: "bf16", plan.FP32: "fp32", plan.FP16: "fp16", plan.FP8: "fp8", plan.MXFP8: "mxfp8", plan.NVFP4: "nvfp4",
}

func precisionWords(p plan.Precision) string {
	text := formatWords[p.Params]
	if p.Compute >= plan.FP8 {
		text = formatWords[p.Compute]
		if p.Blockwise {
			text += " blockwise"
		}
		if p.ParamGather {
			text += ", parameters too"
		}
	}
	if p.GradsInBF16 {
		text += ", gradients in bf16"
	}
	return text
}

func optimizerWords(s *plan.Setup) string {
	o := s.Optimizer
	text := o.Kind
	if o.Distributed {
		text += ", distributed"
	}
	if o.PrecisionAware {
		text += fmt.Sprintf(", moments in %s and %s", formatWords[o.Moment1], formatWords[o.Moment2])
	}
	if o.OffloadFraction > 0 {
		text += fmt.Sprintf(", %.3g of its state in host memory", o.OffloadFraction)
	}
	return text
}

func rankReport(s *plan.Setup, k *plan.Rank) page.Rank {
	r := page.Rank{
		Rank: k.Rank, Holds: holds(s, k.Rank), Items: []page.Item{}, Groups: []page.Group{},
		Static: page.Band(k.Static), Peak: page.Band(k.Peak), Reserved: page.Band(k.Reserved), Host: k.Host, At: pointWords(s, k.At),
	}
	for _, c := range causes {
		r.Causes = append(r.Causes, page.Cause{Name: c.String(), Bytes: k.Sum(c)})
	}
	for _, it := range k.Items {
		if it.Bytes != 0 {
			r.Items = append(r.Items, page.Item{Cause: it.Cause.String(), Name: placeWords(it.Name), Bytes: it.Bytes, Static: it.Static})
		}
	}
	for _, g := range k.Groups {
		r.Groups = append(r.Groups, page.Group(g))
	}
	return r
}

// holds says which part of the model a pipeline rank has, chunk by chunk.
func holds(s *plan.Setup, rank int) string {
	var chunks []string
	for i := rank; i < len(s.Layout.Stages); i += s.Layout.PP {
		st := s.Layout.Stages[i]
		var parts []string
		if st.Embedding {
			parts = append(parts, "embedding")
		}
		switch st.Last - st.First {
		case 0:
		case 1:
			parts = append(parts, fmt.Sprintf("layer %d", st.First))
		default:
			parts = append(parts, fmt.Sprintf("layers %d-%d", st.First, st.Last-1))
		}
		if st.MTP && s.Model.MTP != nil {
			parts = append(parts, "MTP")
		}
		if st.Loss {
			parts = append(parts, "loss")
		}
		chunks = append(chunks, cmp.Or(strings.Join(parts, ", "), "nothing"))
	}
	return strings.Join(chunks, " | ")
}

func pointWords(s *plan.Setup, p plan.Point) string {
	text := "in the forward pass"
	if p.Pass.Backward {
		text = "in the backward pass"
	}
	text += fmt.Sprintf(" of microbatch %d", p.Pass.Microbatch)
	if s.Layout.VPP > 1 {
		text += fmt.Sprintf(", chunk %d", p.Pass.Chunk)
	}
	if p.What != "" {
		text += ", " + placeWords(p.What)
	}
	return text
}

// placeWords is the part of a pass, which is a unit and an operation of it: where
// they have the same name, it is said once.
func placeWords(what string) string {
	if unit, op, two := strings.Cut(what, ", "); two && strings.HasSuffix(unit, op) {
		return unit
	}
	return what
}

// timeReport is the step's time and what of it the memory policy costs: steps
// with nothing recomputed or moved, with recomputation alone, and with all of it,
// one after the other.
func timeReport(s *plan.Setup) (*page.Time, error) {
	m, err := cost.New(s)
	if err != nil {
		return nil, err
	}
	policy := m.Policy()
	recomputed := m.Stages()
	bare := m.Step(recomputed)
	for i := range recomputed {
		recomputed[i].Backward += policy.Recompute[i]
	}
	middle, all := m.Step(recomputed), m.Step(policy.Passes)
	return &page.Time{
		Step: float64(all.Total), Bubble: float64(all.Bubble), Replicas: float64(all.Replicas), Update: float64(all.Update),
		Recompute: more(bare.Total, middle.Total), Copies: more(middle.Total, all.Total),
		Slowest: all.Slowest, Tokens: all.Tokens, TFLOPS: all.TFLOPS,
	}, nil
}

// more is what one time has over another, without what rounding adds or takes.
func more(from, to cost.Seconds) float64 {
	if to <= from*(1+1e-9) {
		return 0
	}
	return float64(to - from)
}

// rankOf finds a rank of a report.
func rankOf(r *page.Report, rank int) *page.Rank {
	i := slices.IndexFunc(r.Ranks, func(k page.Rank) bool { return k.Rank == rank })
	return &r.Ranks[i]
}
