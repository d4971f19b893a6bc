// Package bucket plans the pools that sharded parameters are gathered into and that
// their gradients are scattered from.
//
// The package is pure. A [Spec] lists the FSDP units, the order in which a step uses
// them, and how far ahead they are gathered. [NewPoolPlan] computes the slots, offsets
// and bytes of one [PoolKind], with the lower bound for any pool. The planner asks for
// plans before a launch. The runtime allocates a plan once, and nothing moves
// afterwards.
//
// Double buffering follows from the spec: [PoolPlan.Live] is the number of buffers, and
// it is two if one of Prefetch and Behind is 1 and the other 0. The pool of parameters
// takes Prefetch, and the pool of gradients Behind.
//
// Unexported names and their comments say "unit" for an FSDP unit.
//
// This file owns the input of a plan and plan.go its result. uses.go owns lifetimes,
// size.go sizes, and slots.go, max.go, arena.go and recorded.go the kinds of pools.
package bucket

import "github.com/stowage-dev/stowage/memory"

// Type is the number format of stored elements.
type Type struct {
	Name string       // "bf16", "fp32", "fp8"
	Size memory.Bytes // of one element
}

// Bucket is the parameters of an FSDP unit that have one type and one group of ranks.
type Bucket struct {
	Name     string
	Type     Type
	Elements int64
}

// FSDPUnit is a part of a model whose buckets are gathered and released together,
// usually a layer.
type FSDPUnit struct {
	Name    string
	Buckets []Bucket
	// Loose marks parameters that are used inside and between the uses of other
	// FSDP units: an embedding tied to the output layer, or a projection of an MTP
	// head. A loose FSDP unit never causes a prefetch.
	Loose bool
}

// OrderEntry says that a step begins to use an FSDP unit, or that it releases it.
type OrderEntry struct {
	Unit    int // index into Spec.Units
	Release bool
}

// Spec describes the FSDP units of a model and how a step uses them.
type Spec struct {
	Units []FSDPUnit
	// Order is the recorded order of one step. An FSDP unit may be used any number of
	// times. Each use has two entries, its beginning and its release. Uses of different
	// FSDP units may nest; uses of the same one may not.
	Order []OrderEntry
	// Prefetch is how many uses ahead of the present one an FSDP unit is gathered.
	Prefetch int
	// Behind is how many uses later the memory of an FSDP unit is still live. Gradients
	// need it: they are scattered while the next FSDP units compute.
	Behind int
	// Align is the alignment of every bucket. Zero means one byte.
	Align memory.Bytes
	// Multiple pads the elements of every bucket to a multiple, so that they divide
	// evenly over the ranks. Zero means one.
	Multiple int64
}
