// Package device is the contract between Stowage and an accelerator: memory of two
// kinds, streams, events, copies, kernel launches and graphs. Package device/cpu runs
// it on the CPU and package device/cuda on NVIDIA GPUs. Code that is written against
// these interfaces runs unchanged on both. Package device/check wraps any device and
// finds races.
//
// A program opens a device, allocates buffers, and issues work on streams:
//
//	dev, err := cpu.Open(cpu.Options{})
//	...
//	weights, err := dev.Alloc(memory.Device, 1<<20, "weights")
//	saved, err := dev.Alloc(memory.Host, 1<<20, "offload")
//	compute, err := dev.NewStream("compute")
//	compute.Fill(weights.All(), 0)
//	compute.Copy(saved.All(), weights.All())
//	err = compute.Sync()
//
// # Rules
//
// Three rules hold on every device:
//
//  1. Work is stream-ordered and asynchronous. The methods of [Stream] that issue
//     work return no error. The first error of a device sticks: later work is
//     skipped, and every later Sync returns that error.
//  2. Every operation declares the bytes that it reads and writes. The race checker
//     and the trace are made from these declarations.
//  3. Allocate, freeze, run. After [Device.Freeze] only memory that was reserved
//     before may grow.
//
// # Errors
//
// Operating conditions are typed errors: [OutOfMemory], [DriverError], [Unsupported]
// and [CaptureError]. Mistakes of the program panic: a use of a freed buffer, a range
// outside of its buffer, a copy between lengths that differ, an allocation after the
// freeze, a second Close.
//
// # Memory
//
// Words such as device memory, host memory, ledger and borrowed have the meaning that
// package memory gives them. A [Buffer] is a handle; a [Range] is a part of one, and
// what operations take. [Device.Memory] reads the ledger.
//
// # Kernels
//
// A [Kernel] holds the same function in the forms that devices run: PTX for GPUs and a
// Go function for the CPU. A [Launch] carries its arguments and declarations.
package device

// This file owns the interfaces; memory.go the handles, usage.go the readings of the
// ledger, launch.go what a kernel launch carries, observe.go what a device tells about
// its work, errors.go the errors.

import (
	"time"

	"github.com/stowage-dev/stowage/memory"
)

// Device is one accelerator, or the CPU in its place. Its methods may be called from
// any goroutine.
type Device interface {
	// Info describes the device.
	Info() Info

	// Alloc returns a buffer of size bytes that no issued work uses. The owner names
	// the user of the memory in the ledger and in errors. Alloc never waits: it
	// returns an [OutOfMemory] if the memory is not free now, and that error says how
	// much was freed but still waits for its stream.
	Alloc(kind memory.Kind, size memory.Bytes, owner string) (*Buffer, error)

	// Reserve returns an empty buffer that Grow can enlarge up to max. Its address
	// never changes, so graphs that hold the address stay valid. Use it for memory
	// that must grow after the freeze.
	Reserve(kind memory.Kind, max memory.Bytes, owner string) (*Buffer, error)

	// Grow enlarges a reserved buffer to size and keeps its contents in place. It
	// does nothing if the buffer has that size already.
	Grow(b *Buffer, size memory.Bytes) error

	// Backdrop makes the rest of a reserved buffer of device memory readable, from
	// its size to its maximum. That part reads as zeros and takes almost no memory;
	// writing to it is a mistake. Growing such a buffer adds bytes that are zero, and
	// no work may use the buffer while it grows. A second call changes nothing.
	Backdrop(b *Buffer) error

	// Borrow returns a handle to memory that the caller owns. The ledger does not
	// count it, and freeing it only ends the handle. The caller keeps the memory
	// alive until the work that uses the handle is done.
	Borrow(kind memory.Kind, addr uintptr, size memory.Bytes, owner string) *Buffer

	// View returns the bytes of a range of host memory and declares that the host
	// reads or writes them now, before it issues further work. View does not wait:
	// synchronise first with the work that wrote the bytes.
	View(r Range, mode Mode) []byte

	// NewStream returns a new stream. The name is for traces and errors.
	NewStream(name string) (Stream, error)

	// NewEvent returns an event that marks nothing yet.
	NewEvent(flags EventFlags) (Event, error)

	// Freeze makes every later Alloc and Reserve panic. Call it when everything that
	// the program needs is allocated or reserved.
	Freeze()

	// Memory reads the ledger.
	Memory() Usage

	// Counters returns what the host has made the device do so far.
	Counters() Counters

	// Sync waits for all streams and returns the first error of the device.
	Sync() error

	// Close waits for all work and ends the device. It returns an error if the device
	// failed, or if memory was never freed.
	Close() error
}

// Stream is a queue of work that is executed in order. While a stream is captured, its
// work is recorded into a graph and not executed.
type Stream interface {
	// Name returns the name that NewStream was given.
	Name() string

	// Issued returns how many pieces of work the stream was given so far, without
	// those that were captured. It is the number of the next piece; see [Work].
	Issued() uint64

	// Copy copies src to dst. The two have the same length and do not overlap; they
	// may be of different kinds of memory.
	Copy(dst, src Range)

	// Copy2D copies the rows of one rectangle to another of the same size.
	Copy2D(dst, src Rect)

	// Fill sets every byte of dst to value.
	Fill(dst Range, value byte)

	// Launch issues a kernel. The first launch of a kernel on a device loads its
	// code, which may take milliseconds and wait for the device, so launch every
	// kernel once before a capture.
	Launch(l Launch)

	// Host runs fn on a thread of the device when the earlier work of the stream is
	// done; later work waits for it. fn must not call the device. The accesses
	// declare the buffers that fn uses.
	Host(fn func(), access ...Access)

	// Upload copies src into dst. The caller may reuse src at once. An upload cannot
	// be captured.
	Upload(dst Range, src []byte)

	// Download waits for the stream's work so far and copies src to dst. It is the
	// only way for the host to read device memory, and is counted in
	// [Counters].HostReads. It cannot be captured.
	Download(dst []byte, src Range) error

	// Free ends a buffer of this device. The handle is dead at once, and its memory
	// is free when the stream has done the work that it was given so far. See
	// [Buffer] for the life cycle. A free cannot be captured.
	Free(b *Buffer)

	// Record marks the stream's work so far in e and replaces the earlier mark of e.
	Record(e Event)

	// Wait holds the later work of the stream back until the work that e marks now
	// is done. Recording e again later does not change this wait. Waiting for an
	// event that was never recorded does nothing.
	Wait(e Event)

	// BeginCapture makes the later work of the stream the nodes of a graph. Another
	// stream joins the capture when it waits for an event that was recorded in it;
	// this stream must wait for the last work of each such stream before EndCapture.
	// A call that cannot be captured spoils the capture.
	BeginCapture()

	// EndCapture returns the graph. It returns a [CaptureError] if the capture was
	// spoilt; the streams then work as before.
	EndCapture() (Graph, error)

	// Capturing reports whether the stream is part of a capture.
	Capturing() bool

	// Replay issues a captured graph as one piece of work. Two replays of one graph
	// never overlap. Replay panics if memory that the graph declares was freed.
	Replay(g Graph)

	// Sync waits for the stream's work so far and returns the first error of the
	// device.
	Sync() error

	// Close waits like Sync and ends the stream. A second Close panics.
	Close() error
}

// EventFlags say what an event is used for. Flags are combined with |.
type EventFlags uint8

const (
	// Timing makes an event record times, which Since needs.
	Timing EventFlags = 1 << iota
	// External makes an event cross the border of a graph: a recording or a wait
	// that is captured acts at every replay. An event without it orders work inside
	// of one capture, or outside of all captures.
	External
)

// Event marks a point in a stream.
type Event interface {
	// Done reports whether the work that was marked last is done.
	Done() bool

	// Sync waits for the work that was marked last.
	Sync() error

	// Since returns the time from an earlier event to this one. It returns an error
	// if one of them was never recorded or is not done, and panics if one was made
	// without Timing.
	Since(earlier Event) (time.Duration, error)

	// Close ends the event.
	Close() error
}

// Graph is captured work. Replaying it costs the host one call, however many nodes it
// has.
type Graph interface {
	// Nodes returns the number of operations in the graph, without joins and
	// recordings.
	Nodes() int

	// Update gives the launch that was captured under a slot new arguments and
	// declarations, from the next Replay on. It returns an error if no launch has
	// that slot, or if the kernel or its shape differs.
	Update(slot Slot, l Launch) error

	// Close ends the graph when the replays that were issued are done.
	Close() error
}

// Info describes a device.
type Info struct {
	Backend    string `json:"backend"`              // "cpu" or "cuda"
	Ordinal    int    `json:"ordinal"`              // among the devices of the backend
	Name       string `json:"name"`                 // "cpu:0", or the name of the GPU
	Driver     string `json:"driver,omitempty"`     // "13.0"
	Capability string `json:"capability,omitempty"` // "9.0"
	Units      int    `json:"units"`                // multiprocessors, or CPU threads
	// Capacity is what the ledger lets a caller allocate of each kind.
	Capacity [memory.Kinds]memory.Bytes `json:"capacity"`
}

// Counters count what the host has made the device do since it was opened. Compare two
// readings to prove that a step neither read device memory nor waited.
type Counters struct {
	HostReads   uint64 `json:"host_reads"`   // calls of Download
	HostSyncs   uint64 `json:"host_syncs"`   // calls of Sync on a stream, an event or the device
	Launches    uint64 `json:"launches"`     // outside of graphs
	Copies      uint64 `json:"copies"`       // outside of graphs
	CopiedBytes uint64 `json:"copied_bytes"` // outside of graphs
	Replays     uint64 `json:"replays"`
}
