// This file owns the division of a job: parallel sizes, and the layers of each virtual
// stage of the pipeline.

package megatron

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/stowage-dev/stowage/plan"
)

func readLayout(r *reader, s *plan.Setup, o Options) error {
	l := &s.Layout
	l.TP = r.positive("tensor-model-parallel-size", 1)
	l.PP = r.positive("pipeline-model-parallel-size", 1)
	l.CP = r.positive("context-parallel-size", 1)
	l.EP = r.positive("expert-model-parallel-size", 1)
	l.ETP = r.positive("expert-tensor-parallel-size", l.TP)
	// One tensor-parallel rank does not divide the sequence.
	l.SequenceParallel = r.flag("sequence-parallel") && l.TP > 1
	l.OverlapEP = r.flag("overlap-moe-expert-parallel-comm")
	l.VocabMultiple = r.positive("make-vocab-size-divisible-by", 128)
	unpadded := r.flag("no-pad-vocab-size")
	if r.flag("disable-pad-vocab-size") || r.given("padded-vocab-size") || unpadded {
		l.VocabMultiple = 1
	}
	if l.PP > mostStages {
		return fmt.Errorf("--pipeline-model-parallel-size %d is more than %d", l.PP, mostStages)
	}
	if l.EP > 1 && !hasExperts(s.Model) {
		return fmt.Errorf("--expert-model-parallel-size %d needs experts; give --num-experts, or leave it at 1", l.EP)
	}
	if r.err != nil {
		return r.err
	}
	if l.EP > 1 {
		// Check this before GPUs are counted, because more of them would not help.
		for _, layer := range s.Model.Layers {
			if e := layer.MoE; e != nil && l.EP > e.Experts {
				return fmt.Errorf("--expert-model-parallel-size %d is more than the %d experts; the nearest that divides them is %d", l.EP, e.Experts, e.Experts)
			}
		}
	}
	if err := readWorld(r, s, o); err != nil {
		return err
	}
	pieces, err := readPieces(r, s, o)
	if err != nil {
		return err
	}
	l.Stages = stagesOf(pieces)
	l.VPP = len(pieces) / l.PP
	if g := r.positive("microbatch-group-size-per-virtual-pipeline-stage", l.PP); g != l.PP && l.VPP > 1 {
		l.GroupSize = g
		if g < l.PP {
			return fmt.Errorf("--microbatch-group-size-per-virtual-pipeline-stage %d must be at least --pipeline-model-parallel-size %d", g, l.PP)
		}
	}
	return nil
}

// readWorld reads the number of GPUs from the caller or the launcher, or else takes the
// smallest job with the layout.
func readWorld(r *reader, s *plan.Setup, o Options) error {
	l := &s.Layout
	nodes, each := r.positive("nnodes", 1), r.positive("nproc-per-node", 0)
	instances := r.positive("num-distributed-optimizer-instances", 1)
	expert := []int{1}
	if hasExperts(s.Model) {
		expert = []int{l.ETP, l.EP, l.PP}
	}
	dense, experts := product(l.TP, l.PP, l.CP), product(expert...)
	open := r.args["nnodes"].open
	for _, name := range []string{"nnodes", "nproc-per-node"} {
		word := r.args[name].open
		if word == "" || wordOfLauncher.MatchString(word) {
			continue
		}
		for _, pair := range r.args[givenKey].words {
			if _, value, _ := strings.Cut(pair, "="); value == word {
				return fmt.Errorf("--%s %s: a whole number is expected", name, shown(word))
			}
		}
	}
	if open != "" && each > 0 && o.GPUs == 0 {
		if fewest := lcm(product(dense, instances), experts); fewest <= mostGPUs {
			nodes = lcm(fewest, each) / each
		}
		why := "is no number"
		switch {
		case isVariable(open):
			why = "the text does not set"
		case strings.HasPrefix(open, "in "):
			why = "is not read"
		}
		r.warn("nnodes", fmt.Sprintf("is %.40s, which %s; %d x %d GPUs, the fewest with this layout, are assumed", open, why, nodes, each))
	}
	return setWorld(r, l, o.GPUs, [2]int{nodes, each}, instances, dense, experts)
}

// wordOfLauncher is what torchrun takes in place of a number.
var wordOfLauncher = regexp.MustCompile(`^([0-9]+:[0-9]+|auto|gpu|cpu|xpu)$`)

// mostGPUs bounds the job, so no product of sizes overflows. More than 2^24 GPUs do not
// exist.
const mostGPUs = 1 << 24

// product multiplies up to a little more than mostGPUs.
func product(factors ...int) int {
	p := 1
	for _, f := range factors {
		if p *= f; p > mostGPUs {
			return mostGPUs + 1
		}
	}
	return p
}

func setWorld(r *reader, l *plan.Layout, gpus int, launcher [2]int, instances, dense, expert int) error {
	nodes, each := launcher[0], launcher[1]
	if max(dense, expert, gpus, product(nodes, max(each, 1)), product(dense, instances)) > mostGPUs {
		return fmt.Errorf("the job has more than %d GPUs; check the parallel sizes and the number of GPUs", mostGPUs)
	}
	switch {
	case gpus > 0:
		l.World = gpus
	case each > 0:
		l.World = nodes * each
	default:
		if l.World = lcm(dense*instances, expert); l.World > mostGPUs {
			return fmt.Errorf("the layout needs %d GPUs; --tensor-model-parallel-size and --expert-model-parallel-size should share factors", l.World)
		}
		name, is := "tensor-model-parallel-size", ""
		if open := r.args["nproc-per-node"].open; open != "" {
			name, is = "nproc-per-node", fmt.Sprintf("is %.40s: ", open)
		}
		r.warn(name, fmt.Sprintf("%sthe number of GPUs is not in the arguments; %d, the fewest with this layout, are assumed", is, l.World))
	}
	from, more := "", ""
	if gpus == 0 && each > 0 {
		more = fmt.Sprintf(", and so does every multiple of %d", lcm(dense, expert))
		from = fmt.Sprintf(" (%d processes on each of %d nodes, as the launcher says)", each, nodes)
		if nodes == 1 {
			from = fmt.Sprintf(" (%d processes on one node, as the launcher says)", each)
		}
	}
	near := multiple(l.World, lcm(dense, expert))
	if l.World%dense != 0 {
		return fmt.Errorf("%d GPUs%s do not divide by --tensor-model-parallel-size x --pipeline-model-parallel-size x --context-parallel-size = %d; the nearest number that does is %d%s", l.World, from, dense, near, more)
	}
	if l.World%expert != 0 {
		return fmt.Errorf("%d GPUs%s do not divide by --expert-tensor-parallel-size x --expert-model-parallel-size x --pipeline-model-parallel-size = %d; the nearest number that does is %d%s", l.World, from, expert, near, more)
	}
	return nil
}

// splitFlags are the flags that divide layers.
type splitFlags struct {
	layout                string
	perStage, perRank     int // layers a virtual stage, virtual stages a rank
	firstLayers           int
	lastLayers            int
	givenFirst, givenLast bool
	countEmbedding        bool
	countLoss             bool
}

func readPieces(r *reader, s *plan.Setup, o Options) ([]piece, error) {
	f := splitFlags{
		layout:         joined(r, "pipeline-model-parallel-layout"),
		perStage:       r.positive("num-layers-per-virtual-pipeline-stage", 0),
		perRank:        max(r.positive("num-virtual-stages-per-pipeline-rank", 0), r.positive("virtual-pipeline-model-parallel-size", 0)),
		firstLayers:    r.count("decoder-first-pipeline-num-layers", 0),
		lastLayers:     r.count("decoder-last-pipeline-num-layers", 0),
		givenFirst:     r.given("decoder-first-pipeline-num-layers"),
		givenLast:      r.given("decoder-last-pipeline-num-layers"),
		countEmbedding: r.flag("account-for-embedding-in-pipeline-split"),
		countLoss:      r.flag("account-for-loss-in-pipeline-split"),
	}
	given := 0
	for _, is := range []bool{f.layout != "", f.perStage > 0, f.perRank > 0} {
		if is {
			given++
		}
	}
	if given > 1 {
		return nil, fmt.Errorf("--pipeline-model-parallel-layout, --num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank exclude each other; keep one")
	}
	depth := 0
	if s.Model.MTP != nil {
		depth = s.Model.MTP.Depth
	}
	layers, pp := len(s.Model.Layers), s.Layout.PP
	if text := hybridPattern(r); text != "" { // the model was read from it
		if p, err := parsePattern(text); err != nil {
			return nil, err
		} else if len(p.stages) > 1 {
			return hybridPieces(f, p, pp)
		}
	}
	if f.layout != "" {
		return layoutPieces(f.layout, layers, pp, depth)
	}
	counts, err := f.split(layers, pp, depth)
	if err != nil {
		if chosen := f.balanced(r, s, o, depth); chosen != nil {
			return chosen, nil
		}
		return nil, err
	}
	pieces := make([]piece, len(counts))
	for i, n := range counts {
		pieces[i].Layers = n
	}
	return addEnds(pieces, depth), nil
}

// balanced divides the layers as users do by hand if they do not divide evenly and only the
// number of stages was given. It does so for models that did not come from arguments;
// arguments of a file must be what Megatron-LM accepts.
func (f splitFlags) balanced(r *reader, s *plan.Setup, o Options, depth int) []piece {
	pp, vpp := s.Layout.PP, max(f.perRank, 1)
	asked := splitFlags{perRank: f.perRank}
	if o.Model == nil || f != asked || pp == 1 || pp*vpp > len(s.Model.Layers) {
		return nil
	}
	pieces := piecesOf(plan.DefaultStages(s.Model, pp, vpp), depth)
	text := fmt.Sprintf("%d layers do not divide over %d stages; they are divided as %q", len(s.Model.Layers), pp*vpp, formatLayout(pieces))
	if isHybrid(s.Model) {
		text += " (in a hybrid's flags by | in --hybrid-layer-pattern)"
	}
	r.warn("pipeline-model-parallel-layout", text)
	return pieces
}

// addEnds adds what is before and after the layers to the outermost stages.
func addEnds(pieces []piece, depth int) []piece {
	last := len(pieces) - 1
	pieces[0].Embedding = true
	pieces[last].MTP, pieces[last].Loss = depth, true
	return pieces
}

// joined returns a flag's words as one.
func joined(r *reader, name string) (out string) {
	words, _ := r.get(name)
	for _, w := range words {
		out += w
	}
	return out
}

func hybridPieces(f splitFlags, p pattern, pp int) ([]piece, error) {
	if f != (splitFlags{}) {
		return nil, fmt.Errorf("--hybrid-layer-pattern has | between stages, so no other flag may divide the layers; drop it")
	}
	if len(p.stages)%pp != 0 {
		return nil, fmt.Errorf("--hybrid-layer-pattern has %d stages, which do not divide by --pipeline-model-parallel-size %d; the nearest number that does is %d", len(p.stages), pp, multiple(len(p.stages), pp))
	}
	pieces := make([]piece, len(p.stages))
	for i, stage := range p.stages {
		pieces[i].Layers = len(stage)
	}
	return addEnds(pieces, p.depth), nil
}

func layoutPieces(text string, layers, pp, depth int) ([]piece, error) {
	pieces, err := parseLayout(text)
	if err != nil {
		return nil, err
	}
	found, mtp := 0, 0
	for _, p := range pieces {
		found += p.Layers
		mtp += p.MTP
	}
	switch {
	case found != layers:
		return nil, fmt.Errorf("--pipeline-model-parallel-layout %q holds %d layers, but the model has %d; try %q", text, found, layers, suggestLayout(layers, len(pieces), depth))
	case mtp != depth:
		return nil, fmt.Errorf("--pipeline-model-parallel-layout %q has %d m, but --mtp-num-layers is %d; try %q", text, mtp, depth, suggestLayout(layers, len(pieces), depth))
	case pp == 1 && len(pieces) > 1:
		return nil, fmt.Errorf("--pipeline-model-parallel-layout %q has %d stages, and --pipeline-model-parallel-size is 1; give %d, or a layout of one stage", text, len(pieces), len(pieces))
	case len(pieces)%pp != 0:
		return nil, fmt.Errorf("--pipeline-model-parallel-layout %q has %d stages, which do not divide by --pipeline-model-parallel-size %d; try %q", text, len(pieces), pp, suggestLayout(layers, multiple(len(pieces), pp), depth))
	}
	return pieces, nil
}

// suggestLayout returns a layout string that divides layers over stages as evenly as
// possible. The outermost stages hold more besides, so they get the fewest.
func suggestLayout(layers, stages, depth int) string {
	pieces := make([]piece, stages)
	for i := range layers {
		// Stage 0 and the last one come last in each round.
		pieces[(i+1)%stages].Layers++
	}
	return formatLayout(addEnds(pieces, depth))
}

// split returns the layers of each virtual stage in pipeline order.
func (f splitFlags) split(layers, pp, depth int) ([]int, error) {
	ranks, err := f.perPipelineRank(layers, pp, depth)
	if err != nil {
		return nil, err
	}
	vpp := max(f.perRank, 1)
	if f.perStage > 0 {
		if f.givenFirst || f.givenLast {
			return nil, fmt.Errorf("--num-layers-per-virtual-pipeline-stage wants equal stages; with --decoder-first- or --decoder-last-pipeline-num-layers give --num-virtual-stages-per-pipeline-rank")
		}
		if ranks[0]%f.perStage != 0 {
			return nil, fmt.Errorf("--num-layers-per-virtual-pipeline-stage %d does not divide the %d layers of a pipeline rank; the nearest that does is %d", f.perStage, ranks[0], divisor(ranks[0], f.perStage))
		}
		vpp = ranks[0] / f.perStage
	}
	if vpp > 1 && pp == 1 {
		return nil, fmt.Errorf("%d virtual stages a rank need --pipeline-model-parallel-size of at least 2", vpp)
	}
	if vpp*pp > mostStages {
		return nil, fmt.Errorf("%d pipeline ranks with %d virtual stages each are more than %d stages", pp, vpp, mostStages)
	}
	counts := make([]int, 0, pp*vpp)
	for range vpp {
		for rank, n := range ranks {
			if n%vpp != 0 {
				or := ""
				if pp*vpp <= layers { // further stages would be empty
					or = fmt.Sprintf(", or use --pipeline-model-parallel-layout %q", suggestLayout(layers, pp*vpp, depth))
				}
				return nil, fmt.Errorf("%d virtual stages do not divide the %d layers of pipeline rank %d; the nearest number that does is %d%s", vpp, n, rank, divisor(n, vpp), or)
			}
			counts = append(counts, n/vpp)
		}
	}
	// The embedding and the loss were counted as layers, so each replaces one in the
	// outermost stages.
	last := len(counts) - 1
	if f.countEmbedding {
		counts[0]--
	}
	if f.countLoss {
		counts[last]--
	}
	if counts[0] < 0 || counts[last] < 0 {
		return nil, fmt.Errorf("--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split leave a stage with fewer than no layers; use fewer stages")
	}
	return counts, nil
}

// perPipelineRank returns the layers of each rank, including the embedding and the loss if
// they count as layers.
func (f splitFlags) perPipelineRank(layers, pp, depth int) ([]int, error) {
	uneven := f.givenFirst || f.givenLast
	if uneven && (f.countEmbedding || f.countLoss) {
		return nil, fmt.Errorf("--account-for-embedding- and --account-for-loss-in-pipeline-split exclude --decoder-first- and --decoder-last-pipeline-num-layers; keep one kind")
	}
	total, ranks := layers, make([]int, pp)
	for _, counted := range []bool{f.countEmbedding, f.countLoss} {
		if counted {
			total++
		}
	}
	from, to := 0, pp
	if f.givenFirst {
		ranks[0], from, total = f.firstLayers, 1, total-f.firstLayers
	}
	if f.givenLast {
		if pp == from {
			return nil, fmt.Errorf("--decoder-last-pipeline-num-layers needs --pipeline-model-parallel-size of at least 2 beside --decoder-first-pipeline-num-layers")
		}
		ranks[pp-1], to, total = f.lastLayers, pp-1, total-f.lastLayers
	}
	middle := to - from
	if total < 0 || (middle == 0 && total > 0) || (middle > 0 && total%middle != 0) {
		return nil, unevenError(f, layers, pp, depth)
	}
	for i := from; i < to; i++ {
		ranks[i] = total / middle
	}
	return ranks, nil
}

func unevenError(f splitFlags, layers, pp, depth int) error {
	stages := pp * max(f.perRank, 1)
	if f.givenFirst || f.givenLast {
		return fmt.Errorf("--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers leave a number of the %d layers that does not divide over the other pipeline ranks; use --pipeline-model-parallel-layout %q", layers, suggestLayout(layers, stages, depth))
	}
	return fmt.Errorf("--pipeline-model-parallel-size %d does not divide %d layers; use %d, or keep it with --pipeline-model-parallel-layout %q", pp, layers, divisor(layers, pp), suggestLayout(layers, stages, depth))
}
