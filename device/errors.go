// This file owns the typed errors: operating conditions that a caller can expect and
// a user can mend. Mistakes of the program panic instead.

package device

import (
	"fmt"
	"strings"

	"github.com/stowage-dev/stowage/memory"
)

// OutOfMemory is the error of an allocation or growth that finds too little memory. It
// says who asked for how much, what is free and who holds the rest. If Pending is
// above zero, synchronising with the streams that freed it may be enough.
type OutOfMemory struct {
	Device   string       // "cuda:0"
	Kind     memory.Kind  // which memory
	Owner    string       // who asked
	Asked    memory.Bytes // for how much
	Free     memory.Bytes // what can be allocated now
	Capacity memory.Bytes // what the device may hand out in all
	Pending  memory.Bytes // freed, but work issued before the free may still use it
	Owners   []OwnerUsage // who holds the rest, largest first
	// Refused says why the operating system refused memory that the device may hand out,
	// and which limit to raise. It is empty if the device itself has no more.
	Refused string
}

// Error names the owner, the sizes and the four largest holders, and says what to free.
func (e *OutOfMemory) Error() string {
	var s strings.Builder
	if e.Refused != "" {
		return fmt.Sprintf("%s: out of %s memory: %q asked for %v, which the operating system refused: %s", e.Device, e.Kind, e.Owner, e.Asked, e.Refused)
	}
	fmt.Fprintf(&s, "%s: out of %s memory: %q asked for %v, but only %v of %v are free", e.Device, e.Kind, e.Owner, e.Asked, e.Free, e.Capacity)
	const named = 4
	for i, o := range e.Owners[:min(named, len(e.Owners))] {
		if i == 0 {
			s.WriteString("; held by ")
		} else {
			s.WriteString(", ")
		}
		fmt.Fprintf(&s, "%q %v", o.Owner, o.Current)
	}
	if more := len(e.Owners) - named; more > 0 {
		fmt.Fprintf(&s, " and %d more", more)
	}
	switch {
	case e.Pending > 0:
		fmt.Fprintf(&s, ", of which %v are freed and wait for their stream; synchronise and try again", e.Pending)
	case len(e.Owners) > 0:
		s.WriteString("; free some of it or ask for less")
	}
	return s.String()
}

// DriverError is a failed call of the driver, or work that failed on the device. It is
// final: the device accepts no more work, and every Sync returns this error.
type DriverError struct {
	Device string // "cuda:0"
	Call   string // "cuStreamSynchronize", or the operation on the CPU
	Code   int    // the driver's number, or zero
	Text   string // the driver's words
}

// Error names the call and the driver's reason, and says what to do.
func (e *DriverError) Error() string {
	if e.Code == 0 {
		return fmt.Sprintf("%s: %s failed: %s; close the device and open it again", e.Device, e.Call, e.Text)
	}
	// Many errors of a driver last for as long as the process.
	return fmt.Sprintf("%s: %s failed with error %d: %s; restart the process", e.Device, e.Call, e.Code, e.Text)
}

// Unsupported is the error for something that this machine lacks. It says what is
// missing and how to get it. Tests skip on it.
type Unsupported struct {
	What string // "CUDA device"
	Why  string // "libcuda.so.1 was not found"
	Need string // "install the NVIDIA driver, version 535 or later"
}

// Error says what is missing, why, and what to do.
func (e *Unsupported) Error() string {
	return fmt.Sprintf("%s not available: %s; %s", e.What, e.Why, e.Need)
}

// CaptureError is the error of [Stream.EndCapture] for work that cannot become part of
// a graph.
type CaptureError struct {
	Stream string // the stream on which it was issued
	Why    string // what cannot be captured
	Do     string // what to do instead
}

// Error says what cannot be captured on which stream, and what to do.
func (e *CaptureError) Error() string {
	return fmt.Sprintf("capture on stream %q: %s; %s", e.Stream, e.Why, e.Do)
}
