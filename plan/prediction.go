// This file owns what a prediction says: bytes by cause for every pipeline rank,
// with bands that come from how far predictions were off before.

package plan

import "github.com/stowage-dev/stowage/schedule"

// Prediction is what a setup needs, rank by rank.
type Prediction struct {
	// Setup is the setup with everything filled in that it left open.
	Setup *Setup
	// Ranks are the pipeline ranks in order.
	Ranks []Rank
	// Heaviest is the rank with the largest peak.
	Heaviest int
	// Peak and Reserved are the heaviest rank's.
	Peak, Reserved Band
	// Budget is what a rank may allocate, and Fits whether even the upper end of
	// Reserved stays below it. Without hardware and budget Fits says nothing.
	Budget int64
	Fits   bool
}

// Band is a figure with the range that it is expected to lie in.
type Band struct {
	Low, Expected, High int64
}

// Cause is why memory is held.
type Cause uint8

const (
	CauseWeights     Cause = iota
	CauseGradients         // the buffers that gradients are accumulated in
	CauseOptimizer         // main parameters, moments
	CauseFixed             // workspaces, caches, tables
	CauseActivations       // saved for backward
	CauseTransient         // in use while the peak passes
	CausePools             // stash, gathered parameters
	CauseGraphs            // private pools of captured graphs
)

func (c Cause) String() string {
	return [...]string{"weights", "gradients", "optimizer", "fixed", "activations", "transient", "pools", "graphs"}[c]
}

// Item is one cause of memory on a rank, at its peak.
type Item struct {
	Cause Cause
	// Name says what it is: a group for activations, else a few words.
	Name  string
	Bytes int64
	// Static items are there between steps as well.
	Static bool
}

// GroupUse is one group of saved tensors at the peak of a rank.
type GroupUse struct {
	Name string
	// Bytes are those of one layer and microbatch on the device (the mean, where
	// layers differ), and Live is how many such are live at the peak.
	Bytes int64
	Live  int
	// Total is what the group holds at the peak, Away what of it offloading and
	// Dropped what recomputation took from the device.
	Total, Away, Dropped int64
}

// Rank is what one pipeline rank needs.
type Rank struct {
	Rank  int
	Items []Item
	// Groups are the activations of Items once more, group by group.
	Groups []GroupUse
	// Static is held between steps; Peak is the most that is allocated within
	// one, Reserved what the allocator takes from the device for it.
	Static, Peak, Reserved Band
	// Host is pinned host memory.
	Host int64
	// At is where in the step the peak is.
	At Point

	points []Point
}

// Point is a moment of a step.
type Point struct {
	Pass schedule.Pass
	// What says which part of the pass it is: "output layer", "layer 7", ...
	What string
	// Static, Live and Transient add up to what is allocated. Live are saved
	// tensors.
	Static, Live, Transient int64
	// Groups is what each of the rank's groups holds, in the order of
	// Rank.Groups.
	Groups []int64
}

// Bytes is what is allocated at a point.
func (p Point) Bytes() int64 { return p.Static + p.Live + p.Transient }

// Timeline is the rank's memory over one step: the highest point of each pass.
func (r *Rank) Timeline() []Point { return r.points }

// Sum adds up the items of a cause.
func (r *Rank) Sum(c Cause) int64 {
	var n int64
	for _, it := range r.Items {
		if it.Cause == c {
			n += it.Bytes
		}
	}
	return n
}

// GroupBytes is one saved tensor, or several that share a fate, of one layer and
// microbatch on one rank.
type GroupBytes struct {
	// Group is the offload module that owns it: "core_attn", "expert_fc1", ...
	Group string
	// Tensor says what it is.
	Tensor string
	Bytes  int64
	// Elements is the number of elements of the tensor, which offloading's
	// minimum is compared with; zero where it is never moved.
	Elements int64
	// Offload is the module of --offload-modules that moves it, and Recompute
	// are the modules of --recompute-modules that each free it; "full" is not
	// listed, because it frees all but the layer's input.
	Offload   string
	Recompute []string
}
