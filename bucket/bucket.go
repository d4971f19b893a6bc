// Package bucket plans the memory that sharded parameters are gathered into,
// and their gradients scattered from. It is pure: from units, the order in which
// a step uses them and how far ahead they are gathered, each kind of pool
// follows with its slots, offsets and bytes, its lower bound and its waste. The
// planner asks before a launch; the runtime allocates what the plan says, once,
// and nothing moves afterwards.
//
// This file owns what goes into a plan and plan.go what comes out of it; uses.go
// owns time, size.go sizes, and slots.go, max.go, arena.go and trace.go the pools.
package bucket

// Type is a number format of stored elements.
type Type struct {
	Name string // "bf16", "fp32", "fp8"
	Size int64  // bytes an element
}

// Bucket is a run of parameters that are gathered together.
type Bucket struct {
	Name     string
	Type     Type
	Elements int64
}

// Unit is a module whose buckets are gathered and released together.
type Unit struct {
	Name    string
	Buckets []Bucket
	// Loose marks a module that is no unit: an embedding tied to the output
	// layer, a projection of an MTP head. It is used inside and between units,
	// so its uses may lie inside another unit's. It never causes a prefetch.
	Loose bool
}

// Event is one entry of the order of a step: a unit is needed, or no longer.
type Event struct {
	Unit    int // index into Spec.Units
	Release bool
}

// Spec is all that a plan depends on.
type Spec struct {
	Units []Unit
	// Order is the recorded order of one step. A unit may be used any number of
	// times; each use begins with an event and ends with a release. The uses of
	// two units may nest, and those of one may not.
	Order []Event
	// Prefetch is how many uses of units ahead of the present one are gathered.
	Prefetch int
	// Behind is how many uses of units later a use's memory is still live: that
	// of gradients, which are scattered while the next units compute.
	Behind int
	// Align is the alignment of every bucket in bytes, and Multiple what its
	// elements are padded to a multiple of, so that they divide over the ranks.
	Align    int64
	Multiple int64
}
