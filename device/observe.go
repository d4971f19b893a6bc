// This file owns what a device tells those who watch it.

package device

import (
	"strconv"
	"time"
)

// origin is when the process first read the clock.
var origin = time.Now()

// Now is a time on the clock of Work: nanoseconds, the same for all devices of a
// process, and it never goes back.
func Now() int64 { return int64(time.Since(origin)) }

// Observer is told what a device did. Devices call it from any goroutine, perhaps with
// locks of theirs held; it must be quick and must not call the device. Without an
// observer nothing is measured and nothing costs anything.
type Observer interface {
	// Worked is told of pieces of work that are over.
	Worked(Work)
	// Took is told of memory that was taken, or, with negative bytes, given back, and
	// of what is in use of its kind then: in the order of the device's ledger.
	Took(kind Kind, owner string, bytes, current Bytes)
}

// Labels tell the streams of one device apart that have the same name.
type Labels map[string]int

// Next is what a new stream goes by: "copy", and then "copy 2".
func (l Labels) Next(name string) string {
	l[name]++
	if n := l[name]; n > 1 {
		return name + " " + strconv.Itoa(n)
	}
	return name
}

// WorkKind is what a stream did.
type WorkKind uint8

const (
	Launched WorkKind = iota // a kernel
	Copied                   // a copy, fill, upload or download
	Replayed                 // a graph
	Waited                   // for another stream's event
	Mixed                    // some of these, where they are not told apart
)

// Work is one piece of work of a stream, or several in a row.
type Work struct {
	Kind WorkKind
	// Stream is the stream's name; the second of a device with one name has a number
	// behind it, as Labels gives them.
	Stream string
	// First and Last number the pieces of work in the order of issue, as
	// Stream.Issued counts them; Last is excluded.
	First, Last uint64
	Name        string // the kernel's
	Bytes       Bytes  // copied
	To          Kind   // of memory, of a copy
	// Begin and End are on the clock of Now.
	Begin, End int64
}
