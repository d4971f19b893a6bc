// Package trace is the one format in which a run says what it did. It is pure:
// devices and mechanisms emit events, whoever wants pictures reads them.
//
// There are two sorts of events. Decisions (Begin to Decide, Alloc, Free) come in the
// order of issue, from the goroutine that drives a rank; the host may be far ahead of
// the device then, so that First, the pieces of work that compute had been given, says
// where on the device's clock they belong. Spans (Launch to Work) say what a stream
// did and when, and come from any goroutine, when it is known.
//
// This file owns the vocabulary, writer.go and reader.go the compact form, clock.go where
// decisions lie on the device's clock, laws.go what holds of every trace.
package trace

import "fmt"

// What is what happened.
type What uint8

const (
	Begin     What = iota // a step begins
	End                   // and ends: Bytes is the most device memory that its storages had, Offset host memory
	Save                  // a storage was saved first by this group; then, without a storage, the whole group
	Leave                 // a storage's copy to the host was issued
	Return                // its copy back was issued
	Load                  // a group is needed
	Release               // and no more
	Evict                 // a storage left because there was no room
	Late                  // a storage came back when it was needed already
	Recompute             // a group is computed again
	Capture               // a scope was captured
	Replay                // and replayed
	Rerun                 // a step is done again
	Decide                // a policy was chosen: Bytes is what it moves, Offset the device memory it is to take

	Alloc   // memory was taken: a storage's, or, without a storage, the device's own
	Free    // and given back
	Stash   // a group's rows were put into pages: how many, the device alone knows
	Restore // and back
	Spill   // pages of a tier, as the end of the step tells: Bytes is the most in use, Offset what there is

	Launch // a kernel ran
	Copy   // a copy
	Graph  // a replayed graph
	Wait   // a stream waited for another
	Work   // some of these together, where a device does not tell them apart
	whats
)

var names = [whats]string{
	"begin", "end", "save", "leave", "return", "load", "release", "evict", "late", "recompute", "capture", "replay", "rerun", "decide",
	"alloc", "free", "stash", "restore", "spill", "launch", "copy", "graph", "wait", "work",
}

func (w What) String() string {
	if w < whats {
		return names[w]
	}
	return fmt.Sprintf("What(%d)", uint8(w))
}

// Span tells whether events of this kind say what a stream did.
func (w What) Span() bool { return w >= Launch && w < whats }

// MarshalText gives the name.
func (w What) MarshalText() ([]byte, error) { return []byte(w.String()), nil }

// UnmarshalText reads a name.
func (w *What) UnmarshalText(text []byte) error {
	for i, n := range names {
		if n == string(text) {
			*w = What(i)
			return nil
		}
	}
	return fmt.Errorf("trace: %q is no kind of event", text)
}

// Tier is where memory is.
type Tier uint8

const (
	Device Tier = iota
	Host
)

// Pool is the owner of the memory in which the storages of steps have their places: who
// counts both counts them twice.
func (t Tier) Pool() string {
	if t == Host {
		return "offloaded activations"
	}
	return "saved activations"
}

// Event is one thing that happened.
type Event struct {
	What What
	Rank int
	Step int // zero of a span: its time tells in which step it lies

	// Time is in nanoseconds since the trace began (see From): of a decision when it
	// was issued, of a span its beginning. Took is a span's length.
	Time, Took int64

	// Stream is the stream of a span, and First and Last number its pieces of work
	// there, in the order of issue, Last excluded. Of a decision First is the number
	// that compute's next piece will have; of memory without a storage it is zero, and
	// its time tells.
	Stream      string
	First, Last uint64

	// Name is the group's, scope's, policy's or kernel's, or for memory that is not a
	// storage of the step (parameters, pools, pages) its owner's.
	Name                     string
	Chunk, Layer, Microbatch int

	// Storage numbers the storages of a step from one; zero is none.
	Storage int
	Tier    Tier  // of Alloc, Free, and by where a Copy goes
	Offset  int64 // of a storage in its pool, where it has a place, or -1
	Bytes   int64
	// InUse is what is in use of both tiers afterwards: by the step's storages, or, if
	// the event has an owner's name and no storage, by the whole device.
	InUse [2]int64
}

// Sink takes events. Decisions of a rank are emitted in the order of issue; spans
// come from any goroutine.
type Sink interface{ Emit(Event) }

// From gives a sink events whose time counts from zero, a reading of the clock of
// whoever emits them: device.Now, for the runtime.
func From(zero int64, s Sink) Sink { return from{zero, s} }

type from struct {
	zero int64
	sink Sink
}

func (f from) Emit(e Event) {
	e.Time -= f.zero
	f.sink.Emit(e)
}
