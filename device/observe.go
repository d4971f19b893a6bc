// This file owns what a device tells its observer.

package device

import (
	"time"

	"github.com/stowage-dev/stowage/memory"
)

// origin is when the process first read the clock.
var origin = time.Now()

// Now returns the time on the clock of [Work] in nanoseconds. All devices of a process
// share this clock, and it never goes back.
func Now() int64 { return int64(time.Since(origin)) }

// Observer is told what a device does. Give one to a device when it is opened; a
// device without one measures nothing. Devices call it from any goroutine and may hold
// locks, so its methods must be quick and must not call the device.
type Observer interface {
	// WorkDone is called when work is done.
	WorkDone(Work)

	// MemoryChanged is called when memory is taken or, with a negative delta, given
	// back. Current is what is in use of that kind afterwards. Calls come in the
	// order of the ledger.
	MemoryChanged(kind memory.Kind, owner string, delta, current memory.Bytes)
}

// WorkKind says what a stream did.
type WorkKind uint8

const (
	Launched WorkKind = iota // a kernel ran
	Copied                   // a copy, fill, upload or download
	Replayed                 // a graph was replayed
	Waited                   // the stream waited for an event of another one
	Mixed                    // several of these, not told apart
)

// Work is one piece of work of a stream, or several in a row that were measured
// together.
type Work struct {
	Kind WorkKind
	// Stream is the stream's name. A number follows it if an earlier stream of the
	// device has the same name: "copy", then "copy 2".
	Stream string
	// First and Last number the pieces of work in the order of issue, as
	// [Stream.Issued] counts them. Last is excluded.
	First, Last uint64
	Name        string       // the kernel's name, if one kernel ran
	Bytes       memory.Bytes // how much was copied
	To          memory.Kind  // where a copy went
	// Begin and End are on the clock of [Now].
	Begin, End int64
}
