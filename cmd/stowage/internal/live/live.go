// Package live shows a training while it goes on: on the terminal, and to browsers and
// Prometheus over HTTP. Nothing here can make a run fail, or wait.
//
// This file owns what a run tells those who watch it. frame.go and bars.go draw a picture
// of it in the letters of ink.go, screen.go puts that on a terminal; address.go reads where
// to serve, server.go owns the server and viewers.go what it says, metrics.go the names
// that Prometheus sees, and history.go the report of a run that writes nothing.
package live

// Run is what is known before the first step.
type Run struct {
	Model    string
	Layout   string   // such as "pp 2 x vpp 1 x dp 2 (ep 2)"
	Policies []string // one, or all that are compared
	Steps    int      // of each
	From     int      // steps that were done before, by a run that is resumed
}

// Step is a step that is over.
type Step struct {
	Policy  string
	Number  int // from one
	Loss    float64
	Held    *float64 // the loss on held-out text, where it was found
	Tokens  int
	Seconds float64
	Reruns  int // since the trainer was opened
	Ranks   []Rank
}

// Speed is in tokens a second.
func (s Step) Speed() float64 { return float64(s.Tokens) / s.Seconds }

// Rank is what one rank holds after a step, and what it did in it.
type Rank struct {
	Device, Host Memory
	Out, In      int64 // bytes copied to host memory and back
	Evicted      int   // storages that left because there was no room
	Late         int   // storages that came back when they were needed already
	Spilled      int64 // pages in host memory, since the trainer was opened
}

// Memory is one tier of a rank, in bytes.
type Memory struct {
	InUse, Peak, Capacity int64
	Budget                int64 // zero is none
}

// Watcher is told how a run goes, by the goroutine that drives it: it must be quick.
type Watcher interface {
	Begin(Run)
	Step(Step)
}
