// This file owns the parameters that follow from a model's description: names,
// shapes, and how each is divided over ranks.

package model

// Split says how a parameter is divided over the ranks of a pipeline stage.
type Split uint8

const (
	// Whole is held by every tensor-parallel rank: norms, routers, the narrow
	// projections of MLA.
	Whole Split = iota
	// Tensor is divided over the TP ranks.
	Tensor
	// Expert belongs to one of the routed experts: EP divides the experts, ETP
	// each of them.
	Expert
)

// Param is one parameter, or Count equal ones (the experts').
type Param struct {
	// Name is relative to its layer: "self_attention.linear_qkv.weight".
	Name string
	// Rows are the outputs and Cols the inputs of a matrix; a vector has one
	// column.
	Rows, Cols int
	Count      int
	Split      Split
}

// Elements is the number of elements in the whole model.
func (p Param) Elements() int64 { return int64(p.Rows) * int64(p.Cols) * int64(p.Count) }
