// This file owns how a report is made from what the planner predicts, prices and
// finds.

package planview

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/cost"
	"github.com/stowage-dev/stowage/plan/model"
)

// SearchSpace says what a request searches before it predicts.
type SearchSpace string

// The searches of a request.
const (
	NoSearch SearchSpace = "none"
	Policies SearchSpace = "policy" // the fastest memory policy that fits
	Layouts  SearchSpace = "layout" // the fastest layout that fits, with its policy
)

// Request asks for a report about a setup.
type Request struct {
	Setup  *plan.Setup
	Search SearchSpace
	// Given is the arguments of Megatron-LM that the setup was made of. It may be nil.
	Given *Given
	// Command is the command line that asked. BudgetFrom and HostFrom say where the budget
	// and the host memory of a node come from. The report repeats all.
	Command, BudgetFrom, HostFrom string
	// Progress, if it is not nil, is told how much of a search over layouts is done.
	Progress func(done, all int)
}

// New searches if the request asks for it, predicts, and returns the report. New
// returns a *search.TooSmall if the search finds nothing that fits the budget.
func New(q Request) (*Report, error) {
	x := &found{setup: q.Setup}
	if q.Search != NoSearch {
		var err error
		if x, err = runSearch(q.Setup, q.Search, q.Progress); err != nil {
			return nil, err
		}
	}
	p, err := plan.Predict(x.setup)
	if err != nil {
		return nil, err
	}
	r := predicted(p, q.BudgetFrom)
	if r.Node != nil && r.Node.Room > 0 {
		r.Node.From = q.HostFrom
	}
	r.Command, r.Search = q.Command, x.report
	if p.Setup.Hardware != nil {
		if r.Time, err = timeReport(p.Setup); err != nil {
			return nil, err
		}
		if r.Decisions, err = decisions(p.Setup, x.policy); err != nil {
			return nil, err
		}
	}
	if x.policy != nil && x.policy.HostCost != "" {
		r.Warnings = append(r.Warnings, x.policy.HostCost)
	}
	r.Flags = flagsReport(p.Setup, q.Given)
	return r, nil
}

// causes lists all causes of memory in the order in which they are shown.
var causes = []plan.Cause{
	plan.CauseWeights, plan.CauseGradients, plan.CauseOptimizer, plan.CauseFixed,
	plan.CauseActivations, plan.CauseTransient, plan.CausePools, plan.CauseGraphs,
}

// predicted returns a report of a forecast, without decisions, times and flags.
func predicted(p *plan.Forecast, budgetFrom string) *Report {
	s := p.Setup
	r := &Report{
		Version: Version, Model: modelReport(s.Model), Setup: setupReport(s),
		Budget: p.Budget, BudgetFrom: budgetFrom, Fits: p.Fits,
		Heaviest: p.Heaviest, Peak: Band(p.Peak), Reserved: Band(p.Reserved),
		Timeline: []Point{}, Decisions: []Decision{}, Flags: []Flags{}, Warnings: []string{},
	}
	if h := s.Hardware; h != nil {
		r.Hardware = &Hardware{Name: h.Name, Memory: h.Memory, Usable: h.Usable, Free: h.Free}
	}
	r.Node = nodeReport(p.Node)
	if p.Budget > 0 {
		most := memory.Bytes(0)
		for _, k := range p.Ranks {
			most = max(most, k.Reserved.High)
		}
		r.Missing, r.Spare = max(most-p.Budget, 0), max(p.Budget-most, 0)
	}
	for i := range p.Ranks {
		r.Ranks = append(r.Ranks, rankReport(s, &p.Ranks[i]))
	}
	for _, at := range p.Ranks[p.Heaviest].Timeline() {
		r.Timeline = append(r.Timeline, Point{
			Microbatch: at.Pass.Microbatch, Chunk: at.Pass.Chunk, Backward: at.Pass.Backward, What: placeWords(at.What),
			Static: at.Static, Live: at.Live, Transient: at.Transient, Groups: orEmpty(at.Groups),
		})
	}
	return r
}

// nodeReport returns nil if it is not known how many GPUs share a node.
func nodeReport(n plan.Node) *Node {
	if n.GPUs == 0 {
		return nil
	}
	return &Node{GPUs: n.GPUs, Number: n.Number, Pinned: n.Pinned, Room: n.Room, Missing: n.Missing}
}

// orEmpty returns an empty list for nil, so that JSON has [] and not null.
func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

func modelReport(m *model.Model) Model {
	r := Model{Name: cmp.Or(m.Name, "model"), Layers: len(m.Layers), Hidden: m.Hidden, Vocab: m.Vocab, Parameters: m.Parameters(), Active: m.ActiveParameters()}
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

func setupReport(s *plan.Setup) Setup {
	l := s.Layout
	r := Setup{
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

// routingWords returns the name of the assumed routing. It is empty without experts.
func routingWords(s *plan.Setup) string {
	switch {
	case modelReport(s.Model).Experts == 0:
		return ""
	case s.Kernels.PadToCapacity:
		return "capacity"
	case s.Routing.CountsFile != "":
		return "counts " + s.Routing.CountsFile
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

func rankReport(s *plan.Setup, k *plan.Rank) Rank {
	r := Rank{
		Rank: k.Rank, Holds: holds(s, k.Rank), Items: []Item{}, Groups: []Group{},
		Static: Band(k.Static), Peak: Band(k.Peak), Reserved: Band(k.Reserved), Host: k.Host, At: pointWords(s, k.At),
	}
	for _, c := range causes {
		r.Causes = append(r.Causes, Cause{Name: c.String(), Bytes: k.Sum(c)})
	}
	for _, it := range k.Items {
		if it.Bytes != 0 {
			r.Items = append(r.Items, Item{Cause: it.Cause.String(), Name: placeWords(it.Name), Bytes: it.Bytes, Static: it.Static})
		}
	}
	for _, g := range k.Groups {
		r.Groups = append(r.Groups, Group(g))
	}
	return r
}

// holds describes the part of the model that a pipeline rank holds, chunk by chunk.
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

// placeWords describes a part of a pass, "layer 7, mlp_norm". It leaves out the
// operation if the unit ends with the same name.
func placeWords(what string) string {
	if unit, op, two := strings.Cut(what, ", "); two && strings.HasSuffix(unit, op) {
		return unit
	}
	return what
}

// timeReport returns the time of a step and what the memory policy adds to it. It
// compares three steps: without recompute and offload, with recompute alone, and
// with both.
func timeReport(s *plan.Setup) (*Time, error) {
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
	return &Time{
		Step: float64(all.Total), Bubble: float64(all.Bubble), Replicas: float64(all.Replicas), Update: float64(all.Update),
		Recompute: excess(bare.Total, middle.Total), Copies: excess(middle.Total, all.Total),
		Slowest: all.Slowest, Tokens: all.Tokens, TFLOPS: all.TFLOPS,
	}, nil
}

// excess returns by how much one time exceeds another. It ignores rounding.
func excess(from, to cost.Seconds) float64 {
	if to <= from*(1+1e-9) {
		return 0
	}
	return float64(to - from)
}

// rank returns a rank of the report by its number.
func (r *Report) rank(number int) *Rank {
	i := slices.IndexFunc(r.Ranks, func(k Rank) bool { return k.Rank == number })
	return &r.Ranks[i]
}
