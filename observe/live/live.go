// Package live shows a training run while it is under way: on a terminal with
// [Screen], and to browsers and Prometheus over HTTP with [Server].
//
// The goroutine that drives the run calls Begin once and Step after each step. These
// calls return quickly whatever the terminal or the viewers do, and a failure to show
// something never reaches the run.
package live

// Run describes a run before its first step.
type Run struct {
	Model    string
	Layout   string   // such as "pp 2 x vpp 1 x dp 2 (ep 2)"
	Policies []string // one, or all those of a comparison
	Steps    int      // of each policy
	From     int      // steps that were done before the run was resumed
}

// Step holds the figures of one step.
type Step struct {
	Policy  string
	Number  int // from one
	Loss    float64
	Held    *float64 // the loss on held-out text; nil if it was not evaluated
	Tokens  int
	Seconds float64
	Reruns  int // the number of reruns so far
	Ranks   []Rank
}

// Speed returns the tokens a second of the step.
func (s Step) Speed() float64 { return float64(s.Tokens) / s.Seconds }

// Rank holds the memory of one rank after a step, and what it did in the step.
type Rank struct {
	Device, Host Memory
	Out, In      int64 // bytes copied to host memory and back
	Evicted      int   // storages that were evicted
	Late         int   // storages that were reloaded only when they were needed
	Spilled      int64 // pages that were spilled so far
}

// Memory holds the bytes of one tier of a rank.
type Memory struct {
	InUse, Peak, Capacity int64
	Budget                int64 // zero if there is none
}
