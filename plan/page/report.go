// Package page shows a plan: one report that holds all that is said about a
// setup, and the page that draws it. The page is one file without any request:
// style, script and pictures are inside. It is pure.
//
// This file owns the report, which is also what `stowage plan --json` prints:
// names, once given, stay. page.go owns the page, bars.go and timeline.go its
// pictures.
package page

// Version is that of the report's names.
const Version = 1

// Report is everything that is said about one setup. Sizes are in bytes, times
// in seconds.
type Report struct {
	Version int `json:"version"`
	// Command is the line that asked for it.
	Command string `json:"command"`
	Model   Model  `json:"model"`
	Setup   Setup  `json:"setup"`

	Hardware *Hardware `json:"hardware"` // null if none was named
	// Budget is what a rank may take from its device, and where that figure is
	// from; zero if neither a budget nor hardware was named.
	Budget     int64  `json:"budget_bytes"`
	BudgetFrom string `json:"budget_from"`
	// Fits tells whether even the upper end of what is reserved stays within the
	// budget; Missing is by how much it does not, Spare by how much it does.
	Fits    bool  `json:"fits"`
	Missing int64 `json:"missing_bytes"`
	Spare   int64 `json:"spare_bytes"`

	Heaviest int    `json:"heaviest_rank"`
	Peak     Band   `json:"peak"`
	Reserved Band   `json:"reserved"`
	Ranks    []Rank `json:"ranks"`
	// Timeline is the heaviest rank's step: the highest point of each pass.
	Timeline []Point `json:"timeline"`

	Decisions []Decision `json:"decisions"`
	Search    *Search    `json:"search"` // null if nothing was searched
	Time      *Time      `json:"time"`   // null without hardware

	// Flags ask for this setup in the words of each program.
	Flags    []Flags  `json:"flags"`
	Warnings []string `json:"warnings"`
}

// Model says what is trained.
type Model struct {
	Name       string `json:"name"`
	Layers     int    `json:"layers"`
	Hidden     int    `json:"hidden"`
	Vocab      int    `json:"vocab"`
	Parameters int64  `json:"parameters"`
	Experts    int    `json:"experts"`
	TopK       int    `json:"top_k"`
	MTP        int    `json:"mtp_depth"`
}

// Hardware is one accelerator.
type Hardware struct {
	Name   string `json:"name"`
	Memory int64  `json:"memory_bytes"`
	Usable int64  `json:"usable_bytes"`
}

// Setup is how the job is set up, with everything filled in.
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
	// RecomputeLayers is how many first layers of each stage are computed again in
	// full; zero for all.
	RecomputeLayers int      `json:"recompute_layers"`
	OffloadModules  []string `json:"offload_modules"`
	OffloadFraction float64  `json:"offload_fraction"`
	// OffloadFractions has each pipeline rank's own, where they differ.
	OffloadFractions []float64 `json:"offload_fractions"`
	StashModules     []string  `json:"stash_modules"`
	GraphScopes      []string  `json:"graph_scopes"`
	// Routing is "natural", "balanced", "skewed", "capacity" or "trace FILE", and
	// empty without experts; Imbalance the fullest expert rank over the mean.
	Routing   string  `json:"routing"`
	Imbalance float64 `json:"routing_imbalance"`
}

// Band is a figure with the range it is expected to lie in.
type Band struct {
	Low      int64 `json:"low_bytes"`
	Expected int64 `json:"expected_bytes"`
	High     int64 `json:"high_bytes"`
}

// Rank is one pipeline rank.
type Rank struct {
	Rank int `json:"rank"`
	// Holds says which part of the model it has, as in "embedding, layers 0-3".
	Holds    string  `json:"holds"`
	Causes   []Cause `json:"causes"`
	Items    []Item  `json:"items"`
	Groups   []Group `json:"groups"`
	Static   Band    `json:"static"`
	Peak     Band    `json:"peak"`
	Reserved Band    `json:"reserved"`
	Host     int64   `json:"host_bytes"`
	At       string  `json:"peak_at"` // where in the step the peak is
}

// Cause is why memory is held, and how much is at the peak. All ranks have all
// causes, in one order.
type Cause struct {
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
}

// Item is one part of a cause.
type Item struct {
	Cause  string `json:"cause"`
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	Static bool   `json:"static"`
}

// Group is the saved tensors of one module, at the peak. Bytes are those of one
// layer and microbatch, Live how many such there are, Total what they hold on
// the device, Away and Dropped what offloading and recomputation took from it.
type Group struct {
	Name    string `json:"name"`
	Bytes   int64  `json:"bytes"`
	Live    int    `json:"live"`
	Total   int64  `json:"total_bytes"`
	Away    int64  `json:"offloaded_bytes"`
	Dropped int64  `json:"recomputed_bytes"`
}

// Point is the highest moment of one pass on the heaviest rank. Static, Live and
// Transient add up to what is allocated; Groups has Live once more, in the order
// of the rank's groups.
type Point struct {
	Microbatch int     `json:"microbatch"`
	Chunk      int     `json:"chunk"`
	Backward   bool    `json:"backward"`
	What       string  `json:"what"`
	Static     int64   `json:"static_bytes"`
	Live       int64   `json:"live_bytes"`
	Transient  int64   `json:"transient_bytes"`
	Groups     []int64 `json:"group_bytes"`
}

// Bytes is what is allocated at a point.
func (p Point) Bytes() int64 { return p.Static + p.Live + p.Transient }

// Decision is what happens to one group, and why.
type Decision struct {
	Group  string `json:"group"`
	Choice string `json:"decision"` // "keep", "stash", "offload", "recompute"
	// Bytes are those of a layer and microbatch; Window is the compute that a
	// copy can hide behind, Copy what it takes, Cost what the choice adds to a
	// layer and microbatch.
	Bytes    int64         `json:"bytes"`
	Window   float64       `json:"window_seconds"`
	Copy     float64       `json:"copy_seconds"`
	Cost     float64       `json:"cost_seconds"`
	Reason   string        `json:"reason"`
	Chosen   []Alternative `json:"chosen"`
	Rejected []Alternative `json:"rejected"`
}

// Alternative is what a search says of a module that can take something of the
// group.
type Alternative struct {
	Choice string `json:"decision"`
	Reason string `json:"reason"`
}

// Search says what was looked for, and how it went.
type Search struct {
	Over string `json:"over"` // "policy" or "layout"
	// Tried policies or layouts were compared; of layouts, Possible is how many
	// divide the model and the batch, and Unfit how many of those tried no policy
	// fits.
	Tried    int `json:"tried"`
	Possible int `json:"possible"`
	Unfit    int `json:"unfit"`
	// Nothing says that all fits without doing anything. BarePeak and BareStep are
	// those without a policy.
	Nothing  bool    `json:"fits_without_policy"`
	BarePeak int64   `json:"bare_peak_bytes"`
	BareStep float64 `json:"bare_step_seconds"`
	// Best are the fastest layouts that fit, the chosen one first.
	Best   []Candidate `json:"best"`
	Shares []Share     `json:"ranks"`
	Pools  []Pool      `json:"pools"`
}

// Candidate is a layout with its best policy.
type Candidate struct {
	Name   string  `json:"name"`
	Policy string  `json:"policy"`
	Step   float64 `json:"step_seconds"`
	Peak   int64   `json:"peak_bytes"`
	Reason string  `json:"reason"`
}

// Share is what a pipeline rank offloads: the fraction of the bytes that can
// move, what of it is in host memory at the peak, what crosses the link in a step
// one way, and the share of the step in which the link works.
type Share struct {
	Rank     int     `json:"rank"`
	Fraction float64 `json:"fraction"`
	Host     int64   `json:"host_bytes"`
	Step     int64   `json:"step_bytes"`
	Link     float64 `json:"link_share"`
}

// Pool is memory that the policy allocates beforehand.
type Pool struct {
	Name  string `json:"name"`
	Rank  int    `json:"rank"`
	Page  int64  `json:"page_bytes"` // zero for a slab of exact sizes
	Bytes int64  `json:"bytes"`
}

// Time is one step, and what of it the memory policy costs.
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

// Flags are the words that ask one program for the setup.
type Flags struct {
	For  string `json:"for"` // "megatron", "maxtext", "stowage"
	Text string `json:"text"`
	// Notes are what the program cannot be asked for, a sentence each.
	Notes []string `json:"notes"`
}

// PolicySeconds is what recomputation and late copies add to a step together.
func (t *Time) PolicySeconds() float64 { return t.Recompute + t.Copies }
