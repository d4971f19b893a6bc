// Package report turns the folders of runs into figures: where the memory went, what
// overlapped, what waited, and whether the forecast was right.
//
// [Read] reads the folders that training runs and benchmarks have written and returns
// a [Report]. Package report/page shows it as an HTML page. A folder may belong to a
// run that is still under way, was stopped, or is damaged: the report has what can be
// read, and its Missing fields say what cannot. The package imports no device.
//
// The fields of a Report are the data of the page. They may change with it.
package report

// Report is the data of a page. Times are in milliseconds from the beginning of the
// run on the device's clock, and sizes in bytes. Slices that belong to one axis have
// equal lengths.
type Report struct {
	Title   string   `json:"title"`
	Made    string   `json:"made"` // RFC 3339
	Version string   `json:"version"`
	Runs    []Run    `json:"runs"`
	Live    bool     `json:"live,omitempty"` // the run is under way and serves the page
	Missing []string `json:"missing"`        // sentences that say what could not be read
}

// Run is one training run or benchmark.
type Run struct {
	Name        string            `json:"name"` // of the policy or the folder
	Command     string            `json:"command"`
	Environment map[string]string `json:"environment"` // "cpu", "device", "go", "os", "memory", …
	Options     string            `json:"options"`     // the text of config.yaml, or empty
	Figures     []Figure          `json:"figures"`     // the table at the top
	Steps       Steps             `json:"steps"`
	Ranks       []Rank            `json:"ranks"`
	Profile     *profile          `json:"profile,omitempty"` // what each kernel took, if that was measured
	Missing     []string          `json:"missing"`
	// Apart reports whether the run differs from the first one in its model, seed, number
	// of steps or machine. Ratios of times mean nothing then, and parameters need not be
	// equal.
	Apart bool `json:"apart,omitempty"`

	path, folder string // where it was found, and the name of that place

	// Of a run whose ranks live in several processes: its name, the number of its ranks,
	// those with a trace by machine, and how far their clocks may be apart.
	id     string
	world  int
	hosts  map[string][]int
	within int64
}

// Unit says how a figure is formatted.
type Unit string

const (
	Bytes   Unit = "bytes"
	Millis  Unit = "ms"
	Ratio   Unit = "x"
	Percent Unit = "%"
	Count   Unit = "n"
	Text    Unit = "text"
)

// Figure is one number or word of a run, such as its device peak.
type Figure struct {
	Name      string   `json:"name"`  // the key in summary.json: "peak_device_bytes"
	Label     string   `json:"label"` // for people: "device peak"
	Unit      Unit     `json:"unit"`
	Value     float64  `json:"value"`
	Text      string   `json:"text,omitempty"`
	Predicted *float64 `json:"predicted,omitempty"` // the forecast of Value, if there was one
}

// Steps holds one value for each step.
type Steps struct {
	Step   []int     `json:"step"`
	Loss   []float64 `json:"loss"`
	Tokens []float64 `json:"tokens_per_s"`
	Millis []float64 `json:"ms"`
	Device []int64   `json:"device_peak"` // of the largest rank
	Host   []int64   `json:"host_peak"`
	Spills []int64   `json:"spills"`
	Reruns []int     `json:"reruns"`
	// Held are the losses on held-out text after the steps HeldAt.
	HeldAt []int     `json:"held_at,omitempty"`
	Held   []float64 `json:"held,omitempty"`
}

// Rank holds what one rank did.
type Rank struct {
	Rank    int         `json:"rank"`
	Host    string      `json:"host,omitempty"`    // the machine that the rank is on, if there are several processes
	Process int         `json:"process,omitempty"` // the rank's process there
	Budget  int64       `json:"budget,omitempty"`
	Memory  Memory      `json:"memory"`
	Details []Detail    `json:"details"` // the first step, the one with the peak, and the last
	Rates   Rates       `json:"rates"`
	Policy  []PolicyRow `json:"policy"`
	Pools   []Pool      `json:"pools"`
	Counts  []Figure    `json:"counts"` // spills, reruns, late copies, evictions, …
	Steps   []StepTime  `json:"steps"`
	Dropped int64       `json:"dropped,omitempty"` // events that the trace had no room for
}

// StepTime says when a step ran.
type StepTime struct {
	Step  int     `json:"step"`
	Begin float64 `json:"begin"`
	End   float64 `json:"end"`
}

// Memory is memory over time. A sample stands for a stretch of time and shows the
// moment of it with the most device memory in use, so that stacks add up and no peak
// is lost. Pools do not shrink, so many moments are equal in that; among them the
// sample shows the one in which steps use the most. A sample holds until the next.
type Memory struct {
	Time   []float64 `json:"t"`
	Series []Series  `json:"series"` // bottom first
	Peak   Peak      `json:"peak"`
	Events int       `json:"events"` // how many the samples were made from
}

// Series is one band of the stack.
type Series struct {
	Tier  string  `json:"tier"`  // "device" or "host"
	Name  string  `json:"name"`  // of the group or the owner
	Saved bool    `json:"saved"` // whether it is a group's
	Bytes []int64 `json:"bytes"`
}

// Peak is the moment with the most device memory in use.
type Peak struct {
	Time  float64 `json:"t"`
	Step  int     `json:"step"`
	Bytes int64   `json:"bytes"`
	Host  int64   `json:"host"` // the most host memory at any time
}

// Detail holds every storage and every span of one step.
type Detail struct {
	Step     int       `json:"step"`
	Why      string    `json:"why"` // "first", "peak", "last"
	Begin    float64   `json:"begin"`
	End      float64   `json:"end"`
	Storages []Storage `json:"storages"`
	Streams  []Stream  `json:"streams"`
	Cut      int       `json:"cut,omitempty"` // how many spans were left out, the shortest
	// CutStorages is how many storages were left out, the smallest.
	CutStorages int `json:"cut_storages,omitempty"`
}

// Storage is one storage of a step with the times it spent in each place.
type Storage struct {
	Group  string `json:"group"` // such as "core_attn", or empty if no group saved it
	Chunk  int    `json:"chunk"`
	Layer  int    `json:"layer"`
	Micro  int    `json:"microbatch"`
	Bytes  int64  `json:"bytes"`
	Offset int64  `json:"offset"` // in the heap, or -1
	Stays  []Stay `json:"stays"`
}

// Stay is a stretch of time that a storage spent in one place: "device" or "host", or
// "out" or "in" while it was offloaded or reloaded.
type Stay struct {
	Where string  `json:"where"`
	Begin float64 `json:"begin"`
	End   float64 `json:"end"`
}

// Stream holds what one stream did in a step.
type Stream struct {
	Name  string   `json:"name"`
	Names []string `json:"names"` // the names that spans refer to
	// The spans, with one value in each slice. What is "launch", "copy", "graph", "wait"
	// or "work".
	Begin []float64 `json:"begin"`
	Took  []float64 `json:"took"`
	What  []string  `json:"what"`
	Of    []int     `json:"of"` // index into Names, or -1
	Bytes []int64   `json:"bytes"`
	Busy  float64   `json:"busy"`   // share of the step
	Waits float64   `json:"waited"` // share of the step
}

// Rates is the bandwidth of copies over time in bytes a second, averaged over each
// sample.
type Rates struct {
	Time []float64 `json:"t"`
	Out  []float64 `json:"out"`
	In   []float64 `json:"in"`
}

// PolicyRow is one row of the policy table.
type PolicyRow struct {
	Group  string         `json:"group"`
	Units  map[string]int `json:"units"` // the number of units by choice: keep, stash, offload, recompute
	Saved  int64          `json:"saved"`
	Moved  int64          `json:"moved"`
	Reason string         `json:"reason"`
}

// Pool is the occupancy of a pool, step by step: of pages of the stash, or of a heap.
type Pool struct {
	Name  string  `json:"name"` // such as "stash pages, device"
	Unit  int64   `json:"unit"` // bytes of a page, or 1
	Size  []int64 `json:"size"` // by step
	Most  []int64 `json:"most"` // the most that was used, by step
	Steps []int   `json:"steps"`
}
