// Package device is the contract in the middle of Stowage: memory of two
// kinds, streams, events, copies, kernel launches and graphs. Everything above
// it (stash, offload, pools, the trainer) is written against these interfaces
// and runs unchanged on the CPU and on a GPU; everything cross-cutting (race
// checking, faults, limits) is a device that wraps another one.
//
// Three rules hold on every device:
//
//  1. Work is stream-ordered and asynchronous. The methods of [Stream] that
//     issue work return nothing: the first error of a device sticks, later work
//     is skipped, and every later Sync returns that error.
//  2. Every operation declares the bytes it reads and writes. The race checker
//     and the trace are made from that declaration.
//  3. Allocate, freeze, run. After [Device.Freeze] only memory that was reserved
//     beforehand may grow.
//
// This file owns the interfaces; memory.go the handles, ledger.go the
// accounting, launch.go what a kernel launch carries, errors.go the errors.
package device

import "time"

// Device is one accelerator, or the CPU standing in for one. Its methods may be
// called from any goroutine.
type Device interface {
	Info() Info

	// Alloc returns size bytes that no work in flight touches. It never waits:
	// memory that was freed and is still pending cannot be had before its stream
	// got there, and [OutOfMemory] says how much that is. The owner tag names the
	// user in the ledger and in out-of-memory errors.
	Alloc(kind Kind, size Bytes, owner string) (*Buffer, error)
	// Reserve returns an empty buffer whose address never changes while Grow
	// gives it memory, up to max. Graphs that hold its address stay valid.
	Reserve(kind Kind, max Bytes, owner string) (*Buffer, error)
	// Grow extends a reserved buffer to size; what it held stays in place.
	// Growing to at most the present size does nothing.
	Grow(b *Buffer, size Bytes) error
	// Backdrop makes the rest of a reserved buffer of the accelerator, from its size
	// to its maximum, readable: it reads as zeros, and takes no memory worth
	// mentioning. Nobody may write there. Growing the buffer moves the border;
	// nothing may use the buffer meanwhile, unlike with an ordinary one. New bytes
	// of such a buffer are zero. A second backdrop changes nothing.
	Backdrop(b *Buffer) error
	// Import describes memory that belongs to someone else. It is counted
	// nowhere and freeing it only ends the handle.
	Import(kind Kind, addr uintptr, size Bytes, owner string) *Buffer
	// View gives the host the bytes of a range of host memory and declares what
	// it is about to do with them, at once, before it issues further work.
	// It does not wait: the caller must have synchronised with whoever wrote.
	View(r Range, mode Mode) []byte

	NewStream(name string) (Stream, error)
	NewEvent(flags EventFlags) (Event, error)

	// Freeze makes every later Alloc and Reserve a programmer's error.
	Freeze()
	Memory() Usage
	Counters() Counters
	// Sync waits for all streams and returns the device's first error.
	Sync() error
	// Close waits for all work and ends the device. It reports memory that was
	// never freed.
	Close() error
}

// Stream is a queue of work executed in order. While a stream captures, its
// work is recorded into a graph instead.
type Stream interface {
	Name() string
	// Issued is how many pieces of work the stream was given so far, those that were
	// captured aside: the number of its next one. See [Work].
	Issued() uint64

	Copy(dst, src Range)
	// Copy2D copies rows of equal width between two pitched rectangles.
	Copy2D(dst, src Rect)
	Fill(dst Range, value byte)
	// Launch issues a kernel. The first launch of a kernel on a device loads its
	// code, which may take milliseconds and wait for the device; warm up before
	// a capture.
	Launch(l Launch)
	// Host runs fn on a thread of the device's choosing when the work before it
	// is done; the work behind waits for it. fn must not call the device.
	Host(fn func(), access ...Access)
	// Upload copies src, which may be reused at once, into dst. It cannot be
	// captured.
	Upload(dst Range, src []byte)
	// Download waits for the stream's work so far and copies src to the host.
	// It is the one way for the host to read device memory, and is counted.
	Download(dst []byte, src Range) error
	// Free gives a buffer back once the work issued on this stream so far is
	// done; the handle is dead at once. See [Buffer] for the life cycle. The
	// buffer must be this device's. It cannot be captured.
	Free(b *Buffer)

	// Record marks the stream's work so far in e, replacing e's earlier mark.
	Record(e Event)
	// Wait holds the stream's later work back until the work that e marks at
	// the time of this call is done. An event never recorded holds nothing back.
	Wait(e Event)

	// BeginCapture turns the stream's work into the nodes of a graph. A stream
	// that waits for an event recorded during the capture joins it; all of them
	// must be waited for by this stream before EndCapture. What cannot be
	// captured spoils the capture: EndCapture then returns the first
	// [CaptureError], and the streams work as before.
	BeginCapture()
	EndCapture() (Graph, error)
	// Capturing tells whether the stream is part of a capture now.
	Capturing() bool
	// Replay issues a captured graph as one piece of work. Replays of one graph
	// never overlap. Memory that the graph declares must be live; what Update
	// has replaced need not be.
	Replay(g Graph)

	// Sync waits for the stream's work so far.
	Sync() error
	// Close waits likewise, and ends the stream. Closing it twice panics.
	Close() error
}

// EventFlags say what an event is for.
type EventFlags uint8

const (
	// Timing makes an event usable with Since.
	Timing EventFlags = 1 << iota
	// External makes an event cross the border of a graph: recorded or waited
	// for during capture it becomes a node that acts at every replay. An event
	// without it orders work inside one capture, or outside of all.
	External
)

// Event marks a point in a stream.
type Event interface {
	// Done tells whether the work marked last is done.
	Done() bool
	// Sync waits for the work marked last.
	Sync() error
	// Since is the time from an earlier event to this one, both recorded with
	// Timing and both done.
	Since(earlier Event) (time.Duration, error)
	Close() error
}

// Graph is captured work that can be replayed. Replaying costs the host one
// call, whatever the number of nodes.
type Graph interface {
	// Nodes is the number of pieces of work in the graph, without empty joins and
	// recordings.
	Nodes() int
	// Update gives the launch captured under a slot new arguments and a new
	// declaration, from the next Replay on. The kernel and its shape stay.
	Update(slot Slot, l Launch) error
	// Close ends the graph once replays already issued are done.
	Close() error
}

// Info describes a device.
type Info struct {
	Backend    string `json:"backend"` // "cpu" or "cuda"
	Ordinal    int    `json:"ordinal"`
	Name       string `json:"name"`
	Driver     string `json:"driver,omitempty"`     // "13.0"
	Capability string `json:"capability,omitempty"` // "9.0"
	Units      int    `json:"units"`                // multiprocessors, or CPU threads
	// Capacity is what the ledger lets a caller allocate of each kind.
	Capacity [Kinds]Bytes `json:"capacity"`
}

// Counters count what the host made the device do since it was opened. Tests
// compare two readings: HostReads and HostSyncs must not move inside a step.
type Counters struct {
	HostReads   uint64 `json:"host_reads"` // Download calls
	HostSyncs   uint64 `json:"host_syncs"` // Sync calls on a stream, an event or the device
	Launches    uint64 `json:"launches"`   // outside graphs
	Copies      uint64 `json:"copies"`     // outside graphs
	CopiedBytes uint64 `json:"copied_bytes"`
	Replays     uint64 `json:"replays"`
}
