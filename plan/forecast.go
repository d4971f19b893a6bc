// This file owns the types of a forecast.

package plan

import (
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// Forecast is the memory that a setup needs.
type Forecast struct {
	// Setup is the setup with all defaults filled in.
	Setup *Setup
	// Ranks has an entry for each pipeline rank, in order.
	Ranks []Rank
	// Heaviest is the rank with the highest peak.
	Heaviest int
	// Peak and Reserved are those of the heaviest rank.
	Peak, Reserved Band
	// Budget is the device memory that a rank may hold at its peak: the setup's, or
	// what the hardware leaves. It is zero if the setup has neither.
	Budget memory.Bytes
	// Node is the host memory of the node that needs most.
	Node Node
	// Fits reports whether the upper end of Reserved stays within the budget on every
	// rank, and pinned memory within that of every node. It is false without a budget.
	Fits bool
}

// Band is an expected figure with the range that measured runs lay in.
type Band struct {
	Low, Expected, High memory.Bytes
}

// Cause is the reason why memory is held.
type Cause uint8

// The causes of memory.
const (
	CauseWeights     Cause = iota
	CauseGradients         // the buffers that gradients are accumulated in
	CauseOptimizer         // main parameters and moments
	CauseFixed             // workspaces of libraries, caches, tables
	CauseActivations       // saved tensors
	CauseTransient         // temporaries in use at the peak
	CausePools             // pages of the stash, pools of gathered parameters
	CauseGraphs            // private pools of captured graphs
)

// String returns the name of the cause, such as "weights".
func (c Cause) String() string {
	return [...]string{"weights", "gradients", "optimizer", "fixed", "activations", "transient", "pools", "graphs"}[c]
}

// Item is a part of the memory that a rank holds at its peak.
type Item struct {
	Cause Cause
	// Name describes the item: the name of a group for activations, else a few words.
	Name  string
	Bytes memory.Bytes
	// Static reports whether the item is held between steps too.
	Static bool
}

// GroupUse is what the groups of one module hold at the peak of a rank.
type GroupUse struct {
	Name string
	// Bytes is the size of one group, of one layer and microbatch, wherever its parts
	// are. It is the mean if layers differ. Live is the number of groups that are live at
	// the peak.
	Bytes memory.Bytes
	Live  int
	// Total is what all groups hold in device memory. Away is what was offloaded of
	// them, and Dropped what will be recomputed.
	Total, Away, Dropped memory.Bytes
}

// Rank is the memory that one pipeline rank needs.
type Rank struct {
	Rank  int
	Items []Item
	// Groups splits the activations of Items by module.
	Groups []GroupUse
	// Static is held between steps. Peak is the most memory that is allocated within
	// a step, and Reserved is what the allocator takes from the device for it.
	Static, Peak, Reserved Band
	// Host is pinned host memory.
	Host memory.Bytes
	// Share is the part of the offloaded modules' bytes that is really offloaded. It
	// differs from the fraction that was asked for because whole groups are offloaded.
	Share float64
	// At is the moment of the peak.
	At Point

	points []Point
}

// Point is a moment of a step.
type Point struct {
	Pass schedule.Pass
	// What names the part of the pass, such as "output layer" or "layer 7".
	What string
	// Static, Live and Transient add up to the allocated memory. Live is saved
	// tensors.
	Static, Live, Transient memory.Bytes
	// Groups is what each group holds, in the order of Rank.Groups.
	Groups []memory.Bytes
}

// Bytes returns the memory that is allocated at the point.
func (p Point) Bytes() memory.Bytes { return p.Static + p.Live + p.Transient }

// Timeline returns the rank's memory over one step: the highest point of each pass.
func (r *Rank) Timeline() []Point { return r.points }

// Sum returns the memory of all items of a cause.
func (r *Rank) Sum(c Cause) memory.Bytes {
	var n memory.Bytes
	for _, it := range r.Items {
		if it.Cause == c {
			n += it.Bytes
		}
	}
	return n
}

// SavedTensor is a saved tensor of one layer and microbatch on one rank. Tensors that
// are always treated alike are one SavedTensor.
type SavedTensor struct {
	// Group is the module that saves the tensor, such as "core_attn".
	Group string
	// Tensor describes the tensor.
	Tensor string
	Bytes  memory.Bytes
	// Elements is the number of elements, which Offload.MinElements is compared
	// with. It must be set if Offload is, or the tensor is never offloaded.
	Elements int64
	// Offload is the module that offloads the tensor if it is named. Each module in
	// Recompute drops the tensor. Recomputing whole layers drops all tensors but the
	// layer's input, and is not listed.
	Offload   string
	Recompute []string
	// Stash is the module that stashes the tensor if it is named.
	Stash string
}
