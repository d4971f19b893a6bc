// Package report makes pictures of runs: where the memory went, what overlapped, what
// waited, whether the plan was right. It is pure: it reads what runs have written.
//
// This file owns the figures of a report, as the page gets them. files.go has the files of
// a run's folder, load.go and summary.go read them, mixed.go puts runs of several together. Of a trace timeline.go makes an order,
// memory.go and sample.go memory over time, detail.go and streams.go steps in full, and
// rank.go the rest. Package report/page shows them.
package report

// Report is what a page shows. All times are milliseconds from the run's beginning, on
// the device's clock; all sizes are bytes. Slices that belong to one axis have equal
// lengths.
type Report struct {
	Title   string   `json:"title"`
	Made    string   `json:"made"` // RFC 3339
	Version string   `json:"version"`
	Runs    []Run    `json:"runs"`
	Live    bool     `json:"live,omitempty"` // the page is served by a run under way
	Missing []string `json:"missing"`        // sentences: what could not be read, and what is shown all the same
}

// Run is one training run or benchmark.
type Run struct {
	Name        string            `json:"name"` // the policy's, or the folder's
	Command     string            `json:"command"`
	Environment map[string]string `json:"environment"` // "cpu", "device", "go", "os", "memory", …
	Options     string            `json:"options"`     // config.yaml, or empty
	Figures     []Figure          `json:"figures"`     // the table on top; comparisons put runs side by side
	Steps       Steps             `json:"steps"`
	Ranks       []Rank            `json:"ranks"`
	Missing     []string          `json:"missing"`
	// Apart is a run of another training than the first one's: of another model, seed,
	// number of steps or machine. Times over the first one's mean nothing then, and
	// parameters need not be equal.
	Apart bool `json:"apart,omitempty"`

	path, folder string // where it was found, and what to call that
}

// Unit is how a figure is written.
type Unit string

const (
	Bytes   Unit = "bytes"
	Millis  Unit = "ms"
	Ratio   Unit = "x"
	Percent Unit = "%"
	Count   Unit = "n"
	Text    Unit = "text"
)

// Figure is one number of a run, as summary.json has it.
type Figure struct {
	Name      string   `json:"name"`  // key, as in summary.json: "peak_device_bytes"
	Label     string   `json:"label"` // for people: "device peak"
	Unit      Unit     `json:"unit"`
	Value     float64  `json:"value"`
	Text      string   `json:"text,omitempty"`
	Predicted *float64 `json:"predicted,omitempty"` // the same, said beforehand
}

// Steps is one value a step.
type Steps struct {
	Step   []int     `json:"step"`
	Loss   []float64 `json:"loss"`
	Tokens []float64 `json:"tokens_per_s"`
	Millis []float64 `json:"ms"`
	Device []int64   `json:"device_peak"` // of the largest rank
	Host   []int64   `json:"host_peak"`
	Spills []int64   `json:"spills"`
	Reruns []int     `json:"reruns"`
	// Held are losses on held-out text, at HeldAt.
	HeldAt []int     `json:"held_at,omitempty"`
	Held   []float64 `json:"held,omitempty"`
}

// Rank is what one rank did.
type Rank struct {
	Rank    int          `json:"rank"`
	Budget  int64        `json:"budget,omitempty"`
	Memory  Memory       `json:"memory"`
	Details []Detail     `json:"details"` // steps in full: the first, the one with the peak, the last
	Rates   Rates        `json:"rates"`
	Policy  []Choice     `json:"policy"`
	Pools   []Pool       `json:"pools"`
	Counts  []Figure     `json:"counts"` // spills, reruns, late copies, evictions, …
	Stages  []StepBorder `json:"steps"`
	Dropped int64        `json:"dropped,omitempty"` // events that the trace had no room for
}

// StepBorder is where a step lies.
type StepBorder struct {
	Step  int     `json:"step"`
	Begin float64 `json:"begin"`
	End   float64 `json:"end"`
}

// Memory is memory over time. Every sample is an instant that was: of the instants
// that one sample stands for, the one with most device memory in use, so that stacks
// add up and no peak is lost. As pools do not shrink, instants with as much are many;
// the one counts then in which steps use most of it. A sample holds until the next.
type Memory struct {
	Time   []float64 `json:"t"`
	Series []Series  `json:"series"` // bottom first
	Peak   Peak      `json:"peak"`
	Events int       `json:"events"` // that the samples were made from
}

// Series is one band of the stack.
type Series struct {
	Tier  string  `json:"tier"`  // "device" or "host"
	Name  string  `json:"name"`  // of the group or the owner
	Saved bool    `json:"saved"` // it is a group's: saved activations
	Bytes []int64 `json:"bytes"`
}

// Peak is the most device memory that was in use, and by whom.
type Peak struct {
	Time  float64 `json:"t"`
	Step  int     `json:"step"`
	Bytes int64   `json:"bytes"`
	Host  int64   `json:"host"` // the most host memory, at whatever time
}

// Detail is a step in full.
type Detail struct {
	Step     int       `json:"step"`
	Why      string    `json:"why"` // "first", "peak", "last"
	Begin    float64   `json:"begin"`
	End      float64   `json:"end"`
	Storages []Storage `json:"storages"`
	Streams  []Stream  `json:"streams"`
	Cut      int       `json:"cut,omitempty"` // spans that were left out: the shortest
	// CutStorages are the storages that were left out: the smallest.
	CutStorages int `json:"cut_storages,omitempty"`
}

// Storage is one storage of a step, and where it was from when to when.
type Storage struct {
	Group  string `json:"group"` // "core_attn", or empty for what no group saved
	Chunk  int    `json:"chunk"`
	Layer  int    `json:"layer"`
	Micro  int    `json:"microbatch"`
	Bytes  int64  `json:"bytes"`
	Offset int64  `json:"offset"` // in the pool, or -1
	Stays  []Stay `json:"stays"`
}

// Stay is a time that a storage spent in a tier: "device", "host", or on its way,
// "out" or "in".
type Stay struct {
	Where string  `json:"where"`
	Begin float64 `json:"begin"`
	End   float64 `json:"end"`
}

// Stream is what one stream did in a step.
type Stream struct {
	Name  string   `json:"name"`
	Names []string `json:"names"` // that spans refer to
	// Spans, one value each: What is "launch", "copy", "graph", "wait" or "work".
	Begin []float64 `json:"begin"`
	Took  []float64 `json:"took"`
	What  []string  `json:"what"`
	Of    []int     `json:"of"` // index into Names, or -1
	Bytes []int64   `json:"bytes"`
	Busy  float64   `json:"busy"`   // share of the step
	Waits float64   `json:"waited"` // share of the step
}

// Rates is copy bandwidth over time, in bytes a second, averaged over each sample.
type Rates struct {
	Time []float64 `json:"t"`
	Out  []float64 `json:"out"`
	In   []float64 `json:"in"`
}

// Choice is one row of the policy table.
type Choice struct {
	Group  string         `json:"group"`
	Units  map[string]int `json:"units"` // modules of layers by choice: keep, stash, offload, recompute
	Saved  int64          `json:"saved"`
	Moved  int64          `json:"moved"`
	Reason string         `json:"reason"`
}

// Pool is a pool's occupancy: pages of a store by step, or places in a heap.
type Pool struct {
	Name  string  `json:"name"` // "stash pages, device"
	Unit  int64   `json:"unit"` // bytes of a page, or 1
	Size  []int64 `json:"size"` // by step
	Most  []int64 `json:"most"` // used, by step
	Steps []int   `json:"steps"`
}
