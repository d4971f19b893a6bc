// Package plan predicts what a training job needs before it is launched: the
// memory of every pipeline rank by cause and over time, the time that
// recomputation and copies cost, and the fastest memory policy that fits a
// budget, with the reason for every choice. It is pure.
//
// This file owns what is known beforehand: the model, how it is divided over
// ranks, the batch, and every setting that changes what memory holds.
package plan

import (
	"github.com/stowage-dev/stowage/model"
	"github.com/stowage-dev/stowage/plan/hardware"
)

// Setup is a training job before its launch. The zero value of a setting is
// what Megatron-LM does without the flag, except that sizes must be given.
type Setup struct {
	Model    *model.Model
	Hardware *hardware.GPU
	Layout   Layout
	Batch    Batch

	Precision Precision
	Optimizer Optimizer
	Kernels   Kernels
	Recompute Recompute
	Offload   Offload
	Stash     Stash
	Graph     Graph
	Routing   Routing

	// ExpandableSegments says that the allocator maps memory into growing
	// segments, which leaves no holes.
	ExpandableSegments bool

	// LastReplica asks about the last data-parallel rank where ranks differ,
	// instead of the heaviest.
	LastReplica bool

	// Budget is the most bytes a rank may allocate on its device; zero is what
	// the hardware leaves.
	Budget int64
}

// Layout is how the model is divided over ranks.
type Layout struct {
	World int // GPUs in all
	TP    int
	PP    int
	VPP   int // model chunks a pipeline rank; one without interleaving
	CP    int
	EP    int
	ETP   int
	// SequenceParallel divides what TP would replicate along the sequence.
	SequenceParallel bool
	// Stages lists what each virtual stage holds, in pipeline order: stage i
	// belongs to rank i % PP as chunk i / PP. Layouts strings, uneven splits and
	// even ones all become this; see [Stage].
	Stages []Stage
	// GroupSize is how many microbatches a chunk takes in turn under
	// interleaving; zero stands for PP.
	GroupSize int
	// OverlapEP runs one microbatch's expert communication behind another's
	// compute, which keeps one more in flight.
	OverlapEP bool
	FSDP      FSDP
	// VocabMultiple is what the vocabulary is padded to a multiple of, per TP
	// rank; zero stands for 128.
	VocabMultiple int
}

// Stage is the part of the model that one chunk of one pipeline rank holds.
type Stage struct {
	Embedding bool
	// First and Last are the decoder layers held: First inclusive, Last
	// exclusive, in the model's order.
	First, Last int
	MTP         bool
	Loss        bool // final norm, output layer and loss
}

// DP is the number of data-parallel replicas of a dense layer.
func (l Layout) DP() int { return l.World / (l.TP * l.PP * l.CP) }

// EDP is the number of data-parallel replicas of an expert.
func (l Layout) EDP() int { return l.World / (l.ETP * l.EP * l.PP) }

// Batch is the work of one step.
type Batch struct {
	Micro  int // sequences a microbatch
	Global int // sequences a step
	Seq    int // tokens a sequence
}

// FSDP is fully sharded data parallelism: what is sharded at rest, and what
// the pools of gathered parameters hold.
type FSDP struct {
	Shard ShardLevel
	// Outer divides the data-parallel ranks: weights and gradients are sharded
	// over DP/Outer; with OuterOptimizer the optimiser over all.
	Outer          int
	OuterOptimizer bool
	DoubleBuffer   bool
	Pool           string // "", "fixed", "max", "arena", "trace"
	// Prefetch is how many units are gathered ahead; zero stands for what
	// Megatron-FSDP does: as many as the mean unit has, or 500 million parameters.
	Prefetch int
	// EarlyGather gathers the first units for the next step as soon as the
	// optimiser is done (overlap-param-gather).
	EarlyGather bool
}

// ShardLevel is what a data-parallel rank holds only its share of.
type ShardLevel uint8

const (
	NoShard         ShardLevel = iota // plain data parallel
	ShardOptimizer                    // distributed optimiser (ZeRO-1)
	ShardGradients                    // ZeRO-2
	ShardParameters                   // ZeRO-3, FSDP
)

// Format is a number format of stored values.
type Format uint8

const (
	BF16 Format = iota
	FP32
	FP16
	FP8 // tensorwise or blockwise scales
	MXFP8
	NVFP4
)

// Precision says in which formats values are stored.
type Precision struct {
	Params Format // BF16, FP16, FP32
	// Compute is the format of the inputs of matrix products: the plain one, or
	// FP8, MXFP8, NVFP4.
	Compute Format
	// Blockwise are fp8 scales per block rather than per tensor.
	Blockwise bool
	// ParamGather stores parameters in the compute format (fp8-param-gather).
	ParamGather bool
	MainGrads   Format // FP32 unless set by GradsInBF16
	GradsInBF16 bool
	// PlainFirst and PlainLast are how many layers at each end compute in the
	// format of the parameters (first-last-layers-bf16).
	PlainFirst, PlainLast int
	// ActivationInputFP8 stores the input of the activation function in fp8.
	ActivationInputFP8 bool
}

// Optimizer is what updates the parameters.
type Optimizer struct {
	Kind string // "adam", "sgd", "muon", "dist_muon"
	// Distributed shards main parameters and moments over data-parallel ranks.
	Distributed bool
	// Instances divides the data-parallel ranks into groups that each hold a
	// whole optimiser; zero stands for one.
	Instances int
	// PrecisionAware stores the state in the formats below instead of FP32.
	PrecisionAware        bool
	MainParams, MainGrads Format
	Moment1, Moment2      Format
	OffloadFraction       float64 // of the state, to host memory
	// LayerwiseSharding gives whole matrices to data-parallel ranks (Muon);
	// with Distributed, what Muon does not update is sharded evenly.
	LayerwiseSharding bool
}

// Kernels are the implementations that decide what is saved for backward.
type Kernels struct {
	// Local is Megatron's own modules instead of TransformerEngine's.
	Local bool
	// Attention is "flash", "fused", "unfused" or "" for what the framework
	// would choose.
	Attention           string
	Dropout             float64 // hidden
	AttentionDropout    float64
	GradFusion          bool   // gradient accumulation fused into products
	Loss                string // "native", "native-fused", "te", or "" for native
	GroupedGEMM         bool
	PermuteFusion       bool
	OpFuser             bool
	RouterFP32          bool
	Dispatcher          string  // "allgather", "alltoall", "deepep", "hybridep"
	CapacityFactor      float64 // experts' capacity; zero is dropless
	PadToCapacity       bool
	SharedExpertOverlap bool
	// UnfusedActivation keeps the bias and the activation function apart
	// (no-bias-gelu-fusion, no-bias-swiglu-fusion).
	UnfusedActivation bool
	// WeightedSquaredReLU fuses the experts' squared ReLU with the routing
	// probabilities (use-fused-weighted-squared-relu).
	WeightedSquaredReLU bool
	// RouterFusion fuses the router's scores and choice (moe-router-fusion).
	RouterFusion bool
	// TPCommOverlap overlaps TP communication with products through user
	// buffers (tp-comm-overlap).
	TPCommOverlap bool
	// NoAttentionMask says that batches carry no mask of seq x seq
	// (no-create-attention-mask-in-dataloader).
	NoAttentionMask bool
	// DeferEmbeddingWgrad puts off the output layer's weight gradients of up to
	// WgradDeferral microbatches, of all if that is zero.
	DeferEmbeddingWgrad bool
	WgradDeferral       int
	Deterministic       bool
	// CPComm is "p2p", "a2a", "allgather" or "a2a+p2p".
	CPComm string
}

// Recompute says what is not saved but computed again in backward.
type Recompute struct {
	// Full recomputes whole layers; Modules name parts of them.
	Full    bool
	Method  string // "uniform" or "block"
	Layers  int    // layers a unit (uniform) or recomputed layers (block)
	Modules []string
}

// Offload says which groups move to host memory.
type Offload struct {
	Modules []string
	// Fraction of groups that move, and the share of bytes, are two meanings:
	// ByBytes chooses. Zero stands for one.
	Fraction float64
	ByBytes  bool
	// Fractions, if given, has each pipeline rank's own fraction instead; zero
	// then stands for nothing.
	Fractions   []float64
	MinElements int64 // zero stands for 1,048,576
	Delta       int64 // bytes a pipeline rank keeps more than the one before it
	MaxInflight int
	// Layers is layer-level CPU offloading of so many layers.
	Layers int
}

// Stash says which expert groups go through the paged stash.
type Stash struct {
	Modules []string
	// RankCapacity is the receive budget as a multiple of balanced rows.
	RankCapacity float64
	// Factor and HostFactor size the pools by hand, over balanced rows; zero
	// lets the sizes follow from the schedule.
	Factor, HostFactor float64
	PageBytes          int64 // zero stands for the default
}

// Graph says what is captured.
type Graph struct {
	Scopes []string // "attn", "mlp", "moe_router", "moe", "full_iteration"
	// Local is Megatron's own implementation, which records the first step and
	// keeps no inputs, instead of TransformerEngine's.
	Local bool
	// Warmup is how many steps run without graphs before these are captured;
	// zero stands for Megatron's 3, a negative number for none.
	Warmup int
}

// Routing says how unevenly tokens reach expert ranks.
type Routing struct {
	// Imbalance is the rows of the fullest expert rank over the mean; zero
	// stands for one.
	Imbalance float64
	// Natural takes [NaturalImbalance] of the layout instead, whatever that is.
	Natural bool
	// Trace names the file that Imbalance was read from, if it was.
	Trace string
}
