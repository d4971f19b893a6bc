// Package trace defines the file in which a run records what it did, event by event.
//
// A rank writes one trace. A [Writer] is the [Sink] that turns events into the file,
// and [Read] turns the file back into a [Trace]. The file is compact (about 13 bytes
// an event), bounded in size, and readable up to the point where it was cut off or
// damaged. The package imports no device.
//
// This file owns events, writer.go the form and its writer, reader.go reading, clock.go the
// device's clock, and laws.go what every complete trace obeys.
//
// # Decisions and spans
//
// There are two sorts of events. Decisions ([Begin] to [Spill]) are emitted in the
// order of issue by the goroutine that drives the rank. Spans ([Launch] to [Work])
// record what a stream did and when; any goroutine may emit them, once the times are
// known.
//
// The host decides far ahead of the device. A decision therefore carries in First how
// many pieces of work the compute stream had been given when it was taken, and
// [Trace.Clock] finds the time at which the device came to it.
package trace

import (
	"fmt"

	"github.com/stowage-dev/stowage/memory"
)

// Kind says what happened. The numbers are part of the file format: new kinds of
// decisions cannot be put between old ones.
type Kind uint8

const (
	// Decisions about steps and groups.
	Begin     Kind = iota // a step begins
	End                   // a step ends: Bytes and Offset are the most device and host memory of its storages
	Save                  // a group saves a storage; after its storages, without one, the group as a whole
	Offload               // the copy of a storage to host memory is issued
	Reload                // the copy of a storage back to device memory is issued
	Load                  // the backward pass needs a group
	Release               // the backward pass is done with a group
	Evict                 // a storage is offloaded because there is no room
	Late                  // a storage is reloaded only when it is needed
	Recompute             // a group is computed again
	Capture               // a scope is captured
	Replay                // a scope is replayed
	Rerun                 // a step is run again
	Decide                // a policy is chosen: Bytes is what it moves, Offset the device memory it should take

	// Decisions about memory.
	Alloc   // memory is taken, for a storage or, without one, by an owner
	Free    // that memory is given back
	Stash   // the rows of a group are put into pages; only the device knows how many
	Restore // the rows of a group are copied back
	Spill   // pages of a tier at the end of a step: Bytes is the most in use, Offset what there is

	// Spans.
	Launch // a kernel
	Copy   // a copy between memories
	Graph  // a replayed graph
	Wait   // a wait for another stream
	Work   // several of these, where a device does not time them one by one

	kinds
)

var kindNames = [kinds]string{
	"begin", "end", "save", "offload", "reload", "load", "release", "evict", "late", "recompute", "capture", "replay", "rerun", "decide",
	"alloc", "free", "stash", "restore", "spill", "launch", "copy", "graph", "wait", "work",
}

// String returns the name of the kind, such as "offload".
func (k Kind) String() string {
	if k < kinds {
		return kindNames[k]
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Span reports whether events of this kind record what a stream did.
func (k Kind) Span() bool { return k >= Launch && k < kinds }

// HeapOwner returns the owner under which a ledger counts the memory of a kind that
// the storages of steps lie in. To avoid counting that memory twice, count either the
// owner or the storages.
func HeapOwner(kind memory.Kind) string {
	if kind == memory.Host {
		return "offloaded activations"
	}
	return "saved activations"
}

// Event is one decision or span.
type Event struct {
	Kind Kind
	Rank int
	Step int // zero for a span, whose time says in which step it lies

	// Time is in nanoseconds since the trace began (see Since). For a decision it is
	// the time of issue, for a span its beginning. Took is the length of a span.
	Time, Took int64

	// Stream is the stream of a span. Its pieces of work are numbered in the order of
	// issue: the span has those from First up to, but not including, Last. For a
	// decision, First is the number of the next piece of work on the compute stream.
	// For memory without a storage, First is zero and Time says when.
	Stream      string
	First, Last uint64

	// Name is that of the group, scope, policy or kernel. For memory that is no storage
	// of a step, such as parameters, pools or pages, it is that of the owner.
	Name                     string
	Chunk, Layer, Microbatch int

	Storage int         // the storage's number within its step, from one; zero if there is none
	Tier    memory.Kind // of Alloc, Free and Spill; for a Copy, where it goes
	Offset  int64       // the storage's offset in its heap, or -1 if it has none
	Bytes   int64
	// InUse is the memory in use after the event, by kind. It is that of the step's
	// storages, or of the whole device if the event has an owner and no storage.
	InUse [memory.Kinds]int64
}

// Sink takes events. A rank emits its decisions in the order of issue. Spans may come
// from any goroutine.
type Sink interface{ Emit(Event) }

// Since returns a sink that subtracts zero from the time of each event before it
// passes the event on to s. Zero is a reading of the clock that the emitters use,
// such as device.Now at the start of the run.
func Since(zero int64, s Sink) Sink { return since{zero, s} }

type since struct {
	zero int64
	sink Sink
}

// Emit passes the event on with its time from zero.
func (s since) Emit(e Event) {
	e.Time -= s.zero
	s.sink.Emit(e)
}
