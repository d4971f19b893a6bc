// Package plan predicts what a training job needs before it starts: the memory of
// every pipeline rank, by cause and over the passes of a step. It uses no device.
//
// Fill in a [Setup] and call [Predict]. Setups come from package
// [github.com/stowage-dev/stowage/plan/config], which reads presets, Hugging Face
// configurations and Megatron-LM arguments. Package
// [github.com/stowage-dev/stowage/plan/cost] predicts the time of a step, and package
// [github.com/stowage-dev/stowage/plan/search] finds the fastest memory policy that
// fits a budget.
//
// # Budget
//
// A budget is the device memory that a rank may hold at its peak. A setup fits if
// the upper end of the memory that the allocator reserves stays within the budget on
// every rank. Reserved memory counts, and not allocated memory, because it is what
// the device must hold.
package plan

// This file owns what is known before a job starts: the model, how it is divided over
// ranks, the batch, and every setting that changes what memory holds.

import (
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
)

// Setup describes a training job. The zero value of a setting is what Megatron-LM
// does without the flag; sizes have no default and must be set.
type Setup struct {
	Model    *model.Model
	Hardware *hardware.GPU // may be nil
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

	// ExpandableSegments makes the allocator map memory into growing segments,
	// which leaves no holes.
	ExpandableSegments bool

	// LastReplica selects the last data-parallel rank if ranks differ. By default
	// the forecast is for the heaviest.
	LastReplica bool

	// Budget is the device memory that a rank may hold at its peak, in bytes. Zero
	// stands for what the hardware leaves.
	Budget memory.Bytes
	// HostMemory is what the ranks of a node may pin together, in bytes. Zero stands for
	// what the hardware's nodes leave.
	HostMemory memory.Bytes
}

// Layout describes how the model is divided over ranks.
type Layout struct {
	World int // all GPUs
	// NodeGPUs is how many GPUs share a node and its host memory. Zero stands for the
	// hardware's number.
	NodeGPUs int
	TP       int
	PP       int
	VPP      int // chunks of a pipeline rank; 1 without interleaving
	CP       int
	EP       int
	ETP      int
	// SequenceParallel divides along the sequence what TP would replicate.
	SequenceParallel bool
	// Stages lists what each virtual stage holds, in pipeline order. Stage i is
	// chunk i / PP of rank i % PP. Nil divides the layers evenly.
	Stages []Stage
	// GroupSize is how many microbatches a chunk takes in turn under interleaving.
	// Zero stands for PP.
	GroupSize int
	// OverlapEP runs the expert communication of one microbatch behind the compute
	// of another, which keeps one more microbatch in flight.
	OverlapEP bool
	FSDP      FSDP
	// VocabMultiple is the number that the vocabulary of a TP rank is padded to a
	// multiple of. Zero stands for 128.
	VocabMultiple int
}

// Stage is the part of the model that one chunk of one pipeline rank holds.
type Stage struct {
	Embedding bool
	// First and Last bound the decoder layers of the stage: First is the first one,
	// Last is the one after the last.
	First, Last int
	MTP         bool
	Loss        bool // the final norm, the output layer and the loss
}

// DP returns the number of data-parallel replicas of a dense layer.
func (l Layout) DP() int { return l.World / (l.TP * l.PP * l.CP) }

// EDP returns the number of data-parallel replicas of an expert.
func (l Layout) EDP() int { return l.World / (l.ETP * l.EP * l.PP) }

// Batch is the work of one step.
type Batch struct {
	Micro  int // sequences of a microbatch
	Global int // sequences of a step
	Seq    int // tokens of a sequence
}

// FSDP describes fully sharded data parallelism: what is sharded between steps, and
// what the pools of gathered parameters hold.
type FSDP struct {
	Shard ShardLevel
	// Outer divides the data-parallel ranks into groups. Weights and gradients are
	// sharded over DP/Outer ranks, and with OuterOptimizer the optimiser over all.
	Outer          int
	OuterOptimizer bool
	DoubleBuffer   bool
	Pool           string // "", "fixed", "max", "arena" or "recorded"
	// Prefetch is how many FSDP units are gathered ahead. Zero stands for what
	// Megatron-FSDP does: units with as many parameters as the mean unit, or 500
	// million.
	Prefetch int
	// EarlyGather gathers the first FSDP units of the next step as soon as the
	// optimiser is done (overlap-param-gather).
	EarlyGather bool
}

// ShardLevel is what a data-parallel rank holds only a shard of.
type ShardLevel uint8

// The levels of sharding.
const (
	NoShard         ShardLevel = iota // plain data parallelism
	ShardOptimizer                    // the optimiser (ZeRO-1)
	ShardGradients                    // gradients too (ZeRO-2)
	ShardParameters                   // parameters too (ZeRO-3, FSDP)
)

// Format is a number format of stored values.
type Format uint8

// The number formats.
const (
	BF16 Format = iota
	FP32
	FP16
	FP8 // with a scale for each tensor or block
	MXFP8
	NVFP4
)

// Precision is the formats that values are stored in.
type Precision struct {
	Params Format // BF16, FP16 or FP32
	// Compute is the format of the inputs of matrix products: that of the
	// parameters, or FP8, MXFP8 or NVFP4.
	Compute Format
	// Blockwise gives every block an FP8 scale, and not every tensor.
	Blockwise bool
	// ParamGather stores parameters in the compute format (fp8-param-gather).
	ParamGather bool
	MainGrads   Format // FP32 unless GradsInBF16 is set
	GradsInBF16 bool
	// PlainFirst and PlainLast are how many layers at each end compute in the
	// format of the parameters (first-last-layers-bf16).
	PlainFirst, PlainLast int
	// ActivationInputFP8 stores the input of the activation function in FP8.
	ActivationInputFP8 bool
	// OutputLayer and Attention compute the output layer and the products of attention in
	// the compute format (fp8-output-proj, fp8-dot-product-attention). The first changes
	// time and memory. Of the second only the change of time is predicted.
	OutputLayer, Attention bool
}

// Optimizer describes what updates the parameters.
type Optimizer struct {
	Kind string // "adam", "sgd", "muon" or "dist_muon"
	// Distributed shards main parameters and moments over data-parallel ranks.
	Distributed bool
	// Instances divides the data-parallel ranks into groups that each hold a whole
	// optimiser. Zero stands for one.
	Instances int
	// PrecisionAware stores the state in the formats below, and not in FP32.
	PrecisionAware        bool
	MainParams, MainGrads Format
	Moment1, Moment2      Format
	OffloadFraction       float64 // the part of the state that is in host memory
	// LayerwiseSharding gives whole matrices to data-parallel ranks (Muon). With
	// Distributed, parameters that Muon does not update are sharded evenly.
	LayerwiseSharding bool
}

// Kernels are the implementations that decide what a forward pass saves.
type Kernels struct {
	// Local selects Megatron-LM's own modules, and not TransformerEngine's.
	Local bool
	// Attention is "flash", "fused" or "unfused". Empty stands for what the
	// framework would choose.
	Attention           string
	Dropout             float64 // of hidden states
	AttentionDropout    float64
	GradFusion          bool   // gradients are accumulated inside of matrix products
	Loss                string // "native", "native-fused" or "te"; empty stands for native
	GroupedGEMM         bool
	PermuteFusion       bool
	OpFuser             bool
	RouterFP32          bool
	Dispatcher          string  // "allgather", "alltoall", "deepep" or "hybridep"
	CapacityFactor      float64 // capacity of an expert; zero drops no token
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
	// TPCommOverlap overlaps TP communication with matrix products through user
	// buffers (tp-comm-overlap).
	TPCommOverlap bool
	// NoAttentionMask leaves the seq x seq mask out of batches
	// (no-create-attention-mask-in-dataloader).
	NoAttentionMask bool
	// DeferEmbeddingWgrad puts off the output layer's weight gradients of up to
	// WgradDeferral microbatches. Zero stands for all microbatches.
	DeferEmbeddingWgrad bool
	WgradDeferral       int
	Deterministic       bool
	// CPComm is "p2p", "a2a", "allgather" or "a2a+p2p".
	CPComm string
}

// Recompute selects what the backward pass computes again instead of saving it.
type Recompute struct {
	// Full recomputes whole layers. Modules names parts of layers.
	Full    bool
	Method  string // "uniform" or "block"
	Layers  int    // layers that are recomputed together (uniform), or recomputed layers (block)
	Modules []string
}

// Offload selects which groups are offloaded to host memory.
type Offload struct {
	Modules []string
	// Fraction is the part of the groups that are offloaded, or of their bytes if
	// ByBytes is set. Zero stands for one.
	Fraction float64
	ByBytes  bool
	// Fractions replaces Fraction by one for each pipeline rank. A zero in it means
	// that the rank offloads nothing.
	Fractions   []float64
	MinElements int64        // smallest tensor that is offloaded; zero stands for 1,048,576
	Delta       memory.Bytes // bytes that a pipeline rank keeps beyond those of the rank before it
	MaxInflight int
	// Older selects what Megatron-LM did before January 2026: a group came back when the
	// group needed before it was reached, and none a layer ahead.
	Older bool
	// Layers is how many whole layers are offloaded (cpu-offloading-num-layers).
	Layers int
}

// Stash selects which expert modules are stashed.
type Stash struct {
	Modules []string
	// RankCapacity is how many rows an expert rank can receive, over balanced rows.
	RankCapacity float64
	// Factor and HostFactor size the pages of the two tiers by hand, over balanced
	// rows. Zero sizes them by the schedule.
	Factor, HostFactor float64
	PageBytes          memory.Bytes // zero stands for the default
}

// Graph selects what is captured.
type Graph struct {
	Scopes []string // "attn", "mlp", "moe_router", "moe", "full_iteration", ...
	// Local selects Megatron-LM's own implementation, which records the first step
	// and keeps no inputs, and not TransformerEngine's.
	Local bool
	// Warmup is how many steps run before the capture. Zero stands for Megatron-LM's
	// 3, a negative number for none.
	Warmup int
}

// Routing says how unevenly tokens reach expert ranks.
type Routing struct {
	// Imbalance is the rows of the fullest expert rank over the mean. Zero stands
	// for one.
	Imbalance float64
	// Natural uses [NaturalImbalance] of the layout.
	Natural bool
	// CountsFile names the file of routing counts that Imbalance comes from, if any.
	CountsFile string
}
