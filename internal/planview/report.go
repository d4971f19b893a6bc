// Package planview shows a plan to people and to scripts. [Report] is the one model
// of a plan's result: the text in a terminal, the JSON and the HTML page all show
// the same Report.
//
// This file owns the report's types and their JSON names, which never change.
package planview

import "github.com/stowage-dev/stowage/memory"

// Version is the version of the report's JSON.
const Version = 1

// Report is everything that is known about one setup. Sizes are in bytes, times in
// seconds.
type Report struct {
	Version int `json:"version"`
	// Command is the command line that asked for the report.
	Command string `json:"command"`
	// Answer is null if the command asked for no value. If it did, the rest of the report is
	// about the job with the value.
	Answer *Answer `json:"answer"`
	Model  Model   `json:"model"`
	Setup  Setup   `json:"setup"`

	Hardware *Hardware `json:"hardware"` // null if none was named
	// Budget is the device memory that a rank may hold at its peak, and BudgetFrom says
	// where it comes from. It is zero without a budget and hardware.
	Budget     memory.Bytes `json:"budget_bytes"`
	BudgetFrom string       `json:"budget_from"`
	// Node is the host memory of the node that pins most, or null if it is not known how
	// many GPUs share a node.
	Node *Node `json:"node"`
	// Fits reports whether the upper end of reserved memory stays within the budget on
	// every rank, and pinned memory within that of every node. Missing is how much
	// reserved memory exceeds the budget, Spare how much it leaves.
	Fits    bool         `json:"fits"`
	Missing memory.Bytes `json:"missing_bytes"`
	Spare   memory.Bytes `json:"spare_bytes"`

	Heaviest int    `json:"heaviest_rank"`
	Peak     Band   `json:"peak"`
	Reserved Band   `json:"reserved"`
	Ranks    []Rank `json:"ranks"`
	// Timeline has the highest point of each pass of the heaviest rank.
	Timeline []Point `json:"timeline"`

	Decisions []Decision `json:"decisions"`
	Search    *Search    `json:"search"` // null if nothing was searched
	Time      *Time      `json:"time"`   // null without hardware

	// Flags has the flags that ask each program for this setup.
	Flags    []Flags  `json:"flags"`
	Warnings []string `json:"warnings"`
}

// Model describes the model.
type Model struct {
	Name       string `json:"name"`
	Layers     int    `json:"layers"`
	Hidden     int    `json:"hidden"`
	Vocab      int    `json:"vocab"`
	Parameters int64  `json:"parameters"`
	// Active is the number of parameters that a token is multiplied with: the chosen
	// experts, and no embedding.
	Active  int64 `json:"active_parameters"`
	Experts int   `json:"experts"`
	TopK    int   `json:"top_k"`
	MTP     int   `json:"mtp_depth"`
}

// Hardware describes one accelerator.
type Hardware struct {
	Name   string       `json:"name"`
	Memory memory.Bytes `json:"memory_bytes"`
	Usable memory.Bytes `json:"usable_bytes"`
	// Free is what was measured to be free of Memory, which Usable then follows from. It
	// is zero if nothing was measured.
	Free memory.Bytes `json:"free_bytes"`
}

// Node is the host memory of the node whose ranks pin most of it. GPUs is how many GPUs of
// the job a node has, and Number the node, counted from zero. Room is what the ranks of a
// node may pin together, and From says where it comes from; it is zero if it is not known.
// Missing is how much Pinned exceeds it.
type Node struct {
	GPUs    int          `json:"gpus"`
	Number  int          `json:"number"`
	Pinned  memory.Bytes `json:"pinned_bytes"`
	Room    memory.Bytes `json:"memory_bytes"`
	From    string       `json:"memory_from"`
	Missing memory.Bytes `json:"missing_bytes"`
}

// Setup is the settings of the job, with all defaults filled in.
type Setup struct {
	GPUs             int      `json:"gpus"`
	TP               int      `json:"tp"`
	PP               int      `json:"pp"`
	VPP              int      `json:"vpp"`
	CP               int      `json:"cp"`
	EP               int      `json:"ep"`
	ETP              int      `json:"etp"`
	DP               int      `json:"dp"`
	EDP              int      `json:"edp"`
	SequenceParallel bool     `json:"sequence_parallel"`
	Shard            string   `json:"shard"` // "none", "optimizer", "gradients", "parameters"
	MicroBatch       int      `json:"micro_batch_size"`
	GlobalBatch      int      `json:"global_batch_size"`
	Seq              int      `json:"seq_length"`
	Microbatches     int      `json:"microbatches"`
	Precision        string   `json:"precision"`
	Optimizer        string   `json:"optimizer"`
	Loss             string   `json:"loss"`
	Recompute        string   `json:"recompute"` // "none", "selective", "full"
	RecomputeModules []string `json:"recompute_modules"`
	// RecomputeLayers is how many layers at the start of each stage are recomputed in
	// full. Zero means all.
	RecomputeLayers int      `json:"recompute_layers"`
	OffloadModules  []string `json:"offload_modules"`
	OffloadFraction float64  `json:"offload_fraction"`
	// OffloadFractions has the fraction of each pipeline rank, if they differ.
	OffloadFractions []float64 `json:"offload_fractions"`
	StashModules     []string  `json:"stash_modules"`
	GraphScopes      []string  `json:"graph_scopes"`
	// Routing is "natural", "balanced", "skewed", "capacity" or "counts FILE". It is
	// empty without experts. Imbalance is the rows of the fullest expert rank over the
	// mean.
	Routing   string  `json:"routing"`
	Imbalance float64 `json:"routing_imbalance"`
}

// Band is an expected figure with the range that measured runs lay in.
type Band struct {
	Low      memory.Bytes `json:"low_bytes"`
	Expected memory.Bytes `json:"expected_bytes"`
	High     memory.Bytes `json:"high_bytes"`
}

// Rank is the memory of one pipeline rank.
type Rank struct {
	Rank int `json:"rank"`
	// Holds describes the part of the model that the rank holds: "embedding, layers 0-3".
	Holds    string       `json:"holds"`
	Causes   []Cause      `json:"causes"`
	Items    []Item       `json:"items"`
	Groups   []Group      `json:"groups"`
	Static   Band         `json:"static"`
	Peak     Band         `json:"peak"`
	Reserved Band         `json:"reserved"`
	Host     memory.Bytes `json:"host_bytes"`
	At       string       `json:"peak_at"` // where in the step the peak is
}

// Cause is the memory that one cause holds at the peak. All ranks have all causes, in
// the same order.
type Cause struct {
	Name  string       `json:"name"`
	Bytes memory.Bytes `json:"bytes"`
}

// Item is a part of a cause.
type Item struct {
	Cause  string       `json:"cause"`
	Name   string       `json:"name"`
	Bytes  memory.Bytes `json:"bytes"`
	Static bool         `json:"static"`
}

// Group is what the groups of one module hold at the peak. Bytes is the size of one
// group, of one layer and microbatch, and Live is the number of live groups. Total is
// what they hold in device memory, Away what was offloaded of them, and Dropped what
// will be recomputed: together Live times Bytes.
type Group struct {
	Name    string       `json:"name"`
	Bytes   memory.Bytes `json:"bytes"`
	Live    int          `json:"live"`
	Total   memory.Bytes `json:"total_bytes"`
	Away    memory.Bytes `json:"offloaded_bytes"`
	Dropped memory.Bytes `json:"recomputed_bytes"`
}

// Point is the highest moment of one pass on the heaviest rank. Static, Live and
// Transient add up to the allocated memory. Groups splits Live in the order of the
// rank's groups.
type Point struct {
	Microbatch int            `json:"microbatch"`
	Chunk      int            `json:"chunk"`
	Backward   bool           `json:"backward"`
	What       string         `json:"what"`
	Static     memory.Bytes   `json:"static_bytes"`
	Live       memory.Bytes   `json:"live_bytes"`
	Transient  memory.Bytes   `json:"transient_bytes"`
	Groups     []memory.Bytes `json:"group_bytes"`
}

// Bytes returns the memory that is allocated at the point.
func (p Point) Bytes() memory.Bytes { return p.Static + p.Live + p.Transient }

// Decision is what happens to one group, and why.
type Decision struct {
	Group  string `json:"group"`
	Choice string `json:"decision"` // "keep", "stash", "offload", "recompute"
	// Bytes is the size of one group. Window is the compute that can hide a copy, Copy
	// is the time of the copy, and Cost is what the choice adds to a layer and
	// microbatch.
	Bytes    memory.Bytes  `json:"bytes"`
	Window   float64       `json:"window_seconds"`
	Copy     float64       `json:"copy_seconds"`
	Cost     float64       `json:"cost_seconds"`
	Reason   string        `json:"reason"`
	Chosen   []Alternative `json:"chosen"`
	Rejected []Alternative `json:"rejected"`
}

// Alternative is a choice that the search considered for the group, and why it was
// chosen or rejected.
type Alternative struct {
	Choice string `json:"decision"`
	Reason string `json:"reason"`
}

// Search describes what was searched, and the result.
type Search struct {
	Over string `json:"over"` // "policy" or "layout"
	// Tried is how many policies or layouts were compared. Of layouts, Possible is how
	// many divide the model and the batch, and Unfit is how many of those tried fit with
	// no policy.
	Tried    int `json:"tried"`
	Possible int `json:"possible"`
	Unfit    int `json:"unfit"`
	// Nothing reports whether the setup fits without a policy. BarePeak and BareStep
	// are the peak and the step without one.
	Nothing  bool         `json:"fits_without_policy"`
	BarePeak memory.Bytes `json:"bare_peak_bytes"`
	BareStep float64      `json:"bare_step_seconds"`
	// Best lists the fastest layouts or policies that fit, the chosen one first.
	Best   []Candidate `json:"best"`
	Shares []Share     `json:"ranks"`
	Pools  []Pool      `json:"pools"`
}

// Candidate is a layout with its best policy, or a policy alone. Host is the most pinned
// host memory that a rank offloads to.
type Candidate struct {
	Name   string       `json:"name"`
	Policy string       `json:"policy"`
	Step   float64      `json:"step_seconds"`
	Peak   memory.Bytes `json:"peak_bytes"`
	Host   memory.Bytes `json:"host_bytes"`
	Reason string       `json:"reason"`
}

// Share is what a pipeline rank offloads: the fraction of the offloadable bytes, what of
// it is in host memory at the peak, the bytes that cross the link in a step one way, and
// the part of the step in which the link works.
type Share struct {
	Rank     int          `json:"rank"`
	Fraction float64      `json:"fraction"`
	Host     memory.Bytes `json:"host_bytes"`
	Step     memory.Bytes `json:"step_bytes"`
	Link     float64      `json:"link_share"`
}

// Pool is memory that the policy allocates before the first step.
type Pool struct {
	Name  string       `json:"name"`
	Rank  int          `json:"rank"`
	Page  memory.Bytes `json:"page_bytes"` // zero for a slab of exact sizes
	Bytes memory.Bytes `json:"bytes"`
}

// Time is the time of one step, with the parts that the memory policy adds.
type Time struct {
	Step      float64 `json:"step_seconds"`
	Bubble    float64 `json:"bubble_seconds"`
	Replicas  float64 `json:"replicas_seconds"`
	Update    float64 `json:"update_seconds"`
	Recompute float64 `json:"recompute_seconds"`
	Copies    float64 `json:"late_copies_seconds"`
	Slowest   int     `json:"slowest_rank"`
	Tokens    float64 `json:"tokens_per_second"`
	TFLOPS    float64 `json:"tflops_per_gpu"`
}

// Flags is the flags that ask one program for the setup.
type Flags struct {
	For  string `json:"for"` // "megatron", "maxtext", "stowage"
	Text string `json:"text"`
	// File names the file that the job came in, if the flags are its own after some
	// changes. Changes lists those, a line each: "- --name old" or "+ --name new".
	File    string   `json:"file,omitempty"`
	Changes []string `json:"changes,omitempty"`
	// Notes lists what the program cannot be asked for, a sentence each.
	Notes []string `json:"notes"`
}

// PolicySeconds returns what recompute and late copies add to a step together.
func (t *Time) PolicySeconds() float64 { return t.Recompute + t.Copies }
