// This file owns the checks of a setup and its defaults.

package plan

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/plan/model"
)

// Check returns an error if the setup cannot run. The error names the setting and the
// nearest value that would do.
func (s *Setup) Check() error {
	_, err := s.Normalise()
	return err
}

// Normalise returns a copy of the setup with all defaults filled in: degrees of one,
// even stages, the formats that follow from each other. It returns an error if the setup
// cannot run.
func (s *Setup) Normalise() (*Setup, error) {
	if s.Model == nil || len(s.Model.Layers) == 0 {
		return nil, fmt.Errorf("the setup has no model; name a preset or give a config.json")
	}
	if err := s.Model.Check(); err != nil {
		return nil, err
	}
	n := *s
	n.fillDefaults()
	for _, check := range []func() error{n.checkSizes, n.checkDivisions, n.checkStages, n.checkSettings, n.checkBounds} {
		if err := check(); err != nil {
			return nil, err
		}
	}
	return &n, nil
}

func (s *Setup) fillDefaults() {
	l := &s.Layout
	for _, p := range []*int{&l.TP, &l.PP, &l.VPP, &l.CP, &l.EP} {
		if *p == 0 {
			*p = 1
		}
	}
	if l.ETP == 0 {
		// Megatron-LM divides experts over TP ranks unless told otherwise.
		l.ETP = l.TP
	}
	if l.World == 0 {
		l.World = max(l.TP*l.CP, l.EP*l.ETP) * l.PP
	}
	if l.NodeGPUs == 0 && s.Hardware != nil {
		l.NodeGPUs = s.Hardware.NodeGPUs
	}
	if l.GroupSize == 0 {
		l.GroupSize = l.PP
	}
	if l.VocabMultiple == 0 {
		l.VocabMultiple = 128
	}
	if len(l.Stages) == 0 && l.PP <= mostStages && l.VPP <= mostStages {
		l.Stages = DefaultStages(s.Model, l.PP, l.VPP)
	}
	if s.Batch.Micro == 0 {
		s.Batch.Micro = 1
	}
	if s.Batch.Global == 0 && l.valid() {
		// This many microbatches fill the pipeline.
		s.Batch.Global = s.Batch.Micro * max(l.DP(), 1) * l.PP * max(l.VPP, 2)
	}
	if s.Optimizer.Kind == "" {
		s.Optimizer.Kind = "adam"
	}
	if s.Optimizer.Instances == 0 {
		s.Optimizer.Instances = 1
	}
	if s.Layout.FSDP.Shard >= ShardOptimizer {
		s.Optimizer.Distributed = true
	}
	if s.Layout.FSDP.Outer == 0 {
		s.Layout.FSDP.Outer = 1
	}
	if s.Offload.Fraction == 0 {
		s.Offload.Fraction = 1
	}
	if s.Offload.MinElements == 0 {
		s.Offload.MinElements = 1 << 20
	}
	if s.Routing.Natural {
		s.Routing.Imbalance = NaturalImbalance(s.Model, *l)
	}
	if s.Routing.Imbalance == 0 {
		s.Routing.Imbalance = 1
	}
	if s.Recompute.Full && s.Recompute.Method == "" {
		s.Recompute.Method = "uniform"
	}
	if s.Recompute.Full && s.Recompute.Layers == 0 {
		s.Recompute.Layers = 1
	}
}

// valid reports whether all degrees are positive, so that numbers can be divided by them.
func (l Layout) valid() bool {
	return l.TP > 0 && l.PP > 0 && l.CP > 0 && l.EP > 0 && l.ETP > 0 && l.product(l.TP, l.PP, l.CP) && l.product(l.ETP, l.EP, l.PP)
}

// product reports whether a product of degrees is possible.
func (l Layout) product(a, b, c int) bool {
	return float64(a)*float64(b)*float64(c) <= mostOfAnything
}

func (s *Setup) checkSizes() error {
	l := s.Layout
	if !l.product(l.TP, l.PP, l.CP) {
		return fmt.Errorf("tp x pp x cp is %d x %d x %d; it can be at most %d", l.TP, l.PP, l.CP, mostOfAnything)
	}
	if !l.product(l.ETP, l.EP, l.PP) {
		return fmt.Errorf("etp x ep x pp is %d x %d x %d; it can be at most %d", l.ETP, l.EP, l.PP, mostOfAnything)
	}
	for _, f := range []struct {
		name string
		v    int
	}{
		{"tp", l.TP}, {"pp", l.PP}, {"vpp", l.VPP}, {"cp", l.CP}, {"ep", l.EP}, {"etp", l.ETP}, {"world", l.World},
		{"--micro-batch-size", s.Batch.Micro}, {"--global-batch-size", s.Batch.Global}, {"--seq-length", s.Batch.Seq},
		{"group size", l.GroupSize}, {"vocabulary multiple", l.VocabMultiple}, {"hidden size", s.Model.Hidden}, {"vocabulary", s.Model.Vocab},
	} {
		if f.v < 1 {
			return fmt.Errorf("%s is %d; it must be at least 1", f.name, f.v)
		}
		if f.v > mostOfAnything {
			return fmt.Errorf("%s is %d; it can be at most %d", f.name, f.v, mostOfAnything)
		}
	}
	switch n := l.PP * l.VPP; {
	case n > mostStages:
		return fmt.Errorf("pp x vpp is %d; it can be at most %d", n, mostStages)
	case l.GroupSize > mostStages:
		return fmt.Errorf("group size is %d; it can be at most %d", l.GroupSize, mostStages)
	}
	return nil
}

// Sizes beyond these are mistakes; see also checkBounds.
const (
	mostOfAnything = 1 << 26
	mostStages     = 1 << 12
)

func (s *Setup) checkDivisions() error {
	if err := s.checkModelDivisions(); err != nil {
		return err
	}
	l := s.Layout
	dense := l.TP * l.PP * l.CP
	if l.World%dense != 0 {
		return fmt.Errorf("world %d does not divide by tp x pp x cp = %d; the nearest that does is %d", l.World, dense, nearest(l.World, dense))
	}
	if hasExperts(s.Model) {
		if expert := l.ETP * l.EP * l.PP; l.World%expert != 0 {
			return fmt.Errorf("world %d does not divide by etp x ep x pp = %d; the nearest that does is %d", l.World, expert, nearest(l.World, expert))
		}
	}
	// The replicas must divide into the groups that share an optimiser.
	ranks := l.DP() * l.CP
	if n := l.FSDP.Outer; l.FSDP.Shard == ShardParameters && (n < 1 || ranks%n != 0) {
		return fmt.Errorf("%d outer groups of fsdp do not divide the %d data-parallel ranks; the nearest number that does is %d", n, ranks, divisor(ranks, max(n, 1)))
	}
	if n := s.Optimizer.Instances; s.Optimizer.Distributed && (n < 1 || ranks%n != 0) {
		return fmt.Errorf("%d instances of the distributed optimizer do not divide the %d data-parallel ranks; the nearest number that does is %d", n, ranks, divisor(ranks, max(n, 1)))
	}
	if step := s.Batch.Micro * l.DP(); s.Batch.Global%step != 0 {
		return fmt.Errorf("--global-batch-size %d does not divide by --micro-batch-size x dp = %d; the nearest that does is %d", s.Batch.Global, step, nearest(s.Batch.Global, step))
	}
	if parts := l.CP * l.seqSplit(); s.Batch.Seq%parts != 0 {
		return fmt.Errorf("--seq-length %d does not divide by %d (cp and sequence parallelism); the nearest that does is %d", s.Batch.Seq, parts, nearest(s.Batch.Seq, parts))
	}
	return nil
}

// seqSplit returns how many TP ranks divide the sequence.
func (l Layout) seqSplit() int {
	if l.SequenceParallel {
		return l.TP
	}
	return 1
}

// nearest returns the multiple of step that is nearest to n, and at least step.
func nearest(n, step int) int {
	return max((n+step/2)/step*step, step)
}

func (s *Setup) checkStages() error {
	l := s.Layout
	if n := l.PP * l.VPP; len(l.Stages) != n {
		return fmt.Errorf("the layout has %d stages, but pp x vpp is %d; give that many", len(l.Stages), n)
	}
	at := 0
	for i, st := range l.Stages {
		if st.First != at || st.Last < st.First {
			return fmt.Errorf("stage %d holds layers %d to %d, but layer %d comes next", i, st.First, st.Last, at)
		}
		at = st.Last
	}
	if at != len(s.Model.Layers) {
		return fmt.Errorf("the stages hold %d layers, but the model has %d", at, len(s.Model.Layers))
	}
	if !l.Stages[0].Embedding || !l.Stages[len(l.Stages)-1].Loss {
		return fmt.Errorf("the first stage must hold the embedding and the last one the loss")
	}
	heads := 0
	for i, st := range l.Stages {
		if st.Embedding && i > 0 || st.Loss && i < len(l.Stages)-1 {
			return fmt.Errorf("stage %d holds the embedding or the loss; only the first stage can hold the one and the last one the other", i)
		}
		if st.MTP {
			heads++
		}
	}
	if s.Model.MTP != nil && heads != 1 {
		return fmt.Errorf("%d stages hold the heads that predict further tokens; one must", heads)
	}
	return nil
}

func (s *Setup) checkModelDivisions() error {
	tp, ep, etp := s.Layout.TP, s.Layout.EP, s.Layout.ETP
	layers := s.Model.Layers
	if s.Model.MTP != nil {
		layers = slices.Concat(layers, s.Model.MTP.Layers)
	}
	for i, l := range layers {
		if l.MLA != nil && l.MLA.Indexer != nil {
			return fmt.Errorf("%s (%.1fB parameters, %.1fB active) has an indexer of sparse attention in layer %d, whose memory is not modelled; describe it with plain attention, as a deepseek_v3",
				s.Model.Name, float64(s.Model.Parameters())/1e9, float64(s.Model.ActiveParameters())/1e9, i)
		}
		if l.Parallel() && l.Mamba.Heads%tp != 0 {
			return fmt.Errorf("layer %d has %d Mamba heads, which do not divide by tp %d; the nearest tp is %d", i, l.Mamba.Heads, tp, divisor(l.Mamba.Heads, tp))
		}
		if n := kvHeads(l); n > 0 && n%tp != 0 && tp%n != 0 {
			return fmt.Errorf("layer %d has %d key/value heads, which tp %d neither divides nor is a multiple of; the nearest tp is %d", i, n, tp, divisor(n, tp))
		}
		for _, f := range []struct {
			name    string
			v, over int
			degree  string
		}{
			{"attention heads", headsOf(l), tp, "tp"},
			{"feed-forward width", denseWidth(l), tp, "tp"},
			{"width of shared experts", sharedWidth(l), tp, "tp"},
			{"experts", experts(l), ep, "ep"},
			{"expert width", expertWidth(l), etp, "etp"},
		} {
			if f.v%f.over != 0 {
				return fmt.Errorf("layer %d has %d %s, which do not divide by %s %d; the nearest %s is %d", i, f.v, f.name, f.degree, f.over, f.degree, divisor(f.v, f.over))
			}
		}
	}
	return nil
}

// divisor returns the divisor of n that is nearest to want, and the smaller of two that are
// equally near.
func divisor(n, want int) int {
	for d := range want {
		if lo := want - d; lo >= 1 && n%lo == 0 {
			return lo
		}
		if n%(want+d) == 0 {
			return want + d
		}
	}
	return 1
}

func headsOf(l model.Layer) int {
	switch {
	case l.Attention != nil:
		return l.Attention.Heads
	case l.MLA != nil:
		return l.MLA.Heads
	case l.Mamba != nil:
		return l.Mamba.Heads
	case l.DeltaNet != nil:
		return l.DeltaNet.KeyHeads
	case l.Lightning != nil:
		return l.Lightning.Heads
	}
	return 0
}

func kvHeads(l model.Layer) int {
	if l.Attention != nil {
		return l.Attention.KVHeads
	}
	return 0
}

func sharedWidth(l model.Layer) int {
	if l.MoE != nil {
		return l.MoE.SharedWidth
	}
	return 0
}

func denseWidth(l model.Layer) int {
	if l.Dense != nil {
		return l.Dense.Width
	}
	return 0
}

func experts(l model.Layer) int {
	if l.MoE != nil {
		return l.MoE.Experts
	}
	return 0
}

func expertWidth(l model.Layer) int {
	if l.MoE != nil {
		return l.MoE.Width
	}
	return 0
}
