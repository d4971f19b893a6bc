package plan

import (
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// flat returns a model that has only matrices, so bytes a parameter are exact.
func flat(world int) *Setup {
	return &Setup{
		Model: &model.Model{Hidden: 1024, Vocab: 1024, Layers: []model.Layer{
			{Dense: &model.Dense{Width: 4096}}, {MoE: &model.MoE{Experts: 8, TopK: 2, Width: 1024}},
		}},
		Layout: Layout{World: world, EP: 2, ETP: 1}, Batch: Batch{Micro: 1, Global: world, Seq: 128},
	}
}

// The state of dense and expert parameters has the sizes in the table of docs/PLANNER.md,
// on 8 ranks of which 2 share experts.
func TestBytesAParameter(t *testing.T) {
	for _, c := range []struct {
		name          string
		set           func(*Setup)
		dense, expert float64
	}{
		{"plain", func(*Setup) {}, 18, 18},
		{"distributed", func(s *Setup) { s.Optimizer.Distributed = true }, 6 + 12.0/8, 6 + 12.0/4},
		{"two instances", func(s *Setup) { s.Optimizer.Distributed, s.Optimizer.Instances = true, 2 }, 6 + 12.0/4, 6 + 12.0/2},
		{"gradients in bf16", func(s *Setup) { s.Optimizer.Distributed, s.Precision.GradsInBF16 = true, true }, 4 + 12.0/8, 4 + 12.0/4},
		{"moments in bf16", func(s *Setup) {
			s.Optimizer = Optimizer{Distributed: true, PrecisionAware: true, MainParams: FP32, Moment1: BF16, Moment2: BF16}
		}, 6 + 8.0/8, 6 + 8.0/4},
		{"moments in fp8", func(s *Setup) {
			s.Optimizer = Optimizer{Distributed: true, PrecisionAware: true, MainParams: FP32, Moment1: FP8, Moment2: FP8}
		}, 6 + 6.0/8, 6 + 6.0/4},
		{"fp32", func(s *Setup) { s.Precision.Params = FP32 }, 16, 16},
		{"fp16 gradients in fp16", func(s *Setup) { s.Precision.Params, s.Precision.MainGrads = FP16, FP16 }, 16, 16},
		{"half of the state on the host", func(s *Setup) { s.Optimizer.Distributed, s.Optimizer.OffloadFraction = true, 0.5 }, 6 + 6.0/8, 6 + 6.0/4},
		{"muon", func(s *Setup) { s.Optimizer.Kind = "muon" }, 14, 14},
		{"fsdp", func(s *Setup) { s.Layout.FSDP.Shard = ShardParameters }, 18.0 / 8, 18.0 / 4},
		{"hybrid fsdp", func(s *Setup) { s.Layout.FSDP.Shard, s.Layout.FSDP.Outer = ShardParameters, 2 }, 18.0 / 4, 18.0 / 2},
		{"hybrid fsdp with a whole-job optimiser", func(s *Setup) {
			s.Layout.FSDP = FSDP{Shard: ShardParameters, Outer: 2, OuterOptimizer: true}
		}, 6.0/4 + 12.0/8, 6.0/2 + 12.0/4},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := flat(8)
			c.set(s)
			n := mustNormalise(t, s)
			d := newDims(n)
			m := &model.Model{Hidden: 1024}
			dense := d.shareOf(m.LayerParams(model.Layer{Dense: &model.Dense{Width: 1 << 20}}), "layer")
			expert := d.shareOf([]model.Param{{Name: "mlp.experts.linear_fc1.weight", Rows: 1 << 20, Cols: 1024, Count: 8, Split: model.Expert}}, "layer")
			for _, x := range []struct {
				share share
				want  float64
			}{{dense, c.dense}, {expert, c.expert}} {
				items := d.parameterItems(x.share)
				if d.sharded(share{}) != nil {
					items = d.shardedItems(x.share)
				}
				var bytes memory.Bytes
				for _, it := range items {
					if it.Static {
						bytes += it.Bytes
					}
				}
				within(t, "bytes a parameter", float64(bytes)/float64(x.share.dense+x.share.expert), x.want, 0.0001)
			}
		})
	}
}

// An optimiser leaves main gradients in fp32 behind if the gradients' buffer has another
// format, on the ranks that divide its state; a precision-aware one reads the buffer as it
// is, and shards have main gradients of their own.
func TestGradientsLeftBehind(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(*Setup)
		want float64 // bytes a parameter
	}{
		{"gradients in fp32", func(*Setup) {}, 0},
		{"gradients in bf16", func(s *Setup) { s.Precision.GradsInBF16 = true }, 4},
		{"distributed", func(s *Setup) { s.Precision.GradsInBF16, s.Optimizer.Distributed = true, true }, 4.0 / 8},
		{"precision-aware", func(s *Setup) {
			s.Precision.GradsInBF16 = true
			s.Optimizer = Optimizer{Distributed: true, PrecisionAware: true, MainParams: FP32, Moment1: BF16, Moment2: BF16}
		}, 0},
		{"fsdp", func(s *Setup) { s.Precision.GradsInBF16, s.Layout.FSDP.Shard = true, ShardParameters }, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := flat(8)
			c.set(s)
			d := newDims(mustNormalise(t, s))
			m := &model.Model{Hidden: 1024}
			share := d.shareOf(m.LayerParams(model.Layer{Dense: &model.Dense{Width: 1 << 20}}), "layer")
			within(t, "bytes a parameter", float64(d.leftGradients(share))/float64(share.dense), c.want, 0.0001)
		})
	}
}

// Weights for products of eight bits have the expected copies. fp8 has a transposed copy if
// the GPU cannot transpose, and small blocks need both copies on every GPU. Without fp8
// parameters the copies are in addition to those in bf16.
func TestNarrowWeights(t *testing.T) {
	for _, c := range []struct {
		p          Precision
		generation int
		want       float64
	}{
		{Precision{Compute: FP8, ParamGather: true}, 9, 2},
		{Precision{Compute: FP8, ParamGather: true}, 10, 1},
		{Precision{Compute: FP8}, 9, 4},
		{Precision{Compute: MXFP8, ParamGather: true}, 10, 2 + 2.0/32},
		{Precision{Compute: NVFP4, ParamGather: true}, 10, 1 + 2.0/16},
	} {
		s := deepSeek(t)
		s.Precision, s.Hardware.Generation = c.p, c.generation
		d := newDims(mustNormalise(t, s))
		share := d.shareOf([]model.Param{{Name: "mlp.linear_fc1.weight", Rows: 1 << 12, Cols: 1 << 12, Count: 1, Split: model.Tensor}}, "layer")
		var bytes memory.Bytes
		for _, it := range d.parameterItems(share) {
			if it.Cause == CauseWeights {
				bytes += it.Bytes
			}
		}
		within(t, fmt.Sprintf("%+v", c.p), float64(bytes)/float64(share.dense), c.want, 0.0001)
	}
}

// Tensors are dealt to ranks by size, forwards and backwards, as in the example of
// Megatron-LM's comment with ten tensors and four ranks.
func TestDealt(t *testing.T) {
	var tensors []heldTensor
	for i := range int64(10) {
		tensors = append(tensors, heldTensor{elements: i + 1, count: 1, matrix: true})
	}
	d := newDims(mustNormalise(t, flat(8)))
	if got := d.dealt(tensors, 4); got != 8*(2+7+10) {
		t.Errorf("the heaviest rank holds %d bytes, want %d", got, 8*(2+7+10))
	}
	d.s.LastReplica = true
	if got := d.dealt(tensors, 4); got != 8*(4+5) {
		t.Errorf("the last rank holds %d bytes, want %d", got, 8*(4+5))
	}
}

// A tied output layer has a copy if the embedding is on another rank. The heads for further
// tokens need the embedding too.
func TestEnds(t *testing.T) {
	table := int64(1024 * 1024)
	for _, c := range []struct {
		pp          int
		tied, mtp   bool
		first, last int64
	}{
		{1, true, false, 1, 1}, {1, false, false, 2, 2}, {2, true, false, 1, 1}, {2, false, false, 1, 1}, {2, false, true, 1, 2}, {2, true, true, 1, 1},
	} {
		s := flat(8)
		s.Model.Tied, s.Layout.PP = c.tied, c.pp
		if c.mtp {
			s.Model.MTP = &model.MTP{Depth: 1, Layers: s.Model.Layers[:1]}
		}
		d := newDims(mustNormalise(t, s))
		if first, last := d.holds(0).table, d.holds(c.pp-1).table; first != c.first*table || last != c.last*table {
			t.Errorf("pp %d, tied %v, mtp %v: %d and %d tables, want %d and %d", c.pp, c.tied, c.mtp, first/table, last/table, c.first, c.last)
		}
	}
}

// An output layer in eight bits has copies of its weights, also if parameters are gathered
// in eight bits, saves its input in eight bits, and makes copies of the logits' gradient.
func TestNarrowOutput(t *testing.T) {
	at := func(narrow, gather bool) (weights, saved, work memory.Bytes) {
		s := flat(8)
		s.Model.Tied = false
		s.Precision = Precision{Params: BF16, Compute: MXFP8, ParamGather: gather, OutputLayer: narrow, MainGrads: FP32}
		d := newDims(mustNormalise(t, s))
		for _, it := range d.parameterItems(d.holds(0)) {
			if it.Cause == CauseWeights {
				weights += it.Bytes
			}
		}
		for _, x := range d.loss().saved {
			if x.Tensor == "output of the final norm" {
				saved = x.Bytes
			}
		}
		return weights, saved, d.loss().ops[1].work
	}
	d := newDims(mustNormalise(t, flat(8)))
	blocks := func(n int64) memory.Bytes { return memory.Bytes(n + n/32) }
	for _, gather := range []bool{false, true} {
		weights, saved, work := at(false, gather)
		narrowWeights, narrowSaved, narrowWork := at(true, gather)
		if got, want := narrowWeights-weights, 2*blocks(d.vocab*d.h); got != want {
			t.Errorf("gather %v: weights grow by %d bytes, want %d", gather, got, want)
		}
		if saved != d.residual() || narrowSaved != blocks(d.local*d.h) {
			t.Errorf("gather %v: the input has %d and %d bytes", gather, saved, narrowSaved)
		}
		if got, want := narrowWork-work, 2*blocks(d.tokens*d.vocab); got != want {
			t.Errorf("gather %v: the backward pass takes %d bytes more, want %d", gather, got, want)
		}
	}
}
