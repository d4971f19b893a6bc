// This file owns the typed errors: operating conditions that a caller can
// expect and a user can mend. Programmers' errors panic instead.

package device

import (
	"fmt"
	"strings"
)

// OutOfMemory says which memory ran out, who asked and who holds the rest.
type OutOfMemory struct {
	Device   string
	Kind     Kind
	Owner    string
	Asked    Bytes
	Free     Bytes
	Capacity Bytes
	Pending  Bytes        // of what is held: freed, but its stream is not there yet
	Owners   []OwnerUsage // largest first
}

func (e *OutOfMemory) Error() string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s: out of %s memory: %q asked for %v, %v of %v are free", e.Device, e.Kind, e.Owner, e.Asked, e.Free, e.Capacity)
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
	if e.Pending > 0 {
		fmt.Fprintf(&s, ", %v of it freed and waiting for its stream; synchronise and try again", e.Pending)
	}
	return s.String()
}

// DriverError is a failed call of the driver, or work that failed on the
// device. It is final: the device refuses further work.
type DriverError struct {
	Device string
	Call   string // "cuStreamSynchronize", or the operation on the CPU
	Code   int
	Text   string
}

func (e *DriverError) Error() string {
	if e.Code == 0 {
		return fmt.Sprintf("%s: %s failed: %s", e.Device, e.Call, e.Text)
	}
	return fmt.Sprintf("%s: %s failed with error %d: %s", e.Device, e.Call, e.Code, e.Text)
}

// Unsupported says what this machine lacks and what would provide it. Tests
// skip on it.
type Unsupported struct {
	What string // "CUDA device"
	Why  string // "libcuda.so.1 was not found"
	Need string // "install the NVIDIA driver, version 535 or later"
}

func (e *Unsupported) Error() string {
	return fmt.Sprintf("%s not available: %s; %s", e.What, e.Why, e.Need)
}

// CaptureError says why work cannot become part of a graph.
type CaptureError struct {
	Stream string
	Why    string
	Do     string
}

func (e *CaptureError) Error() string {
	return fmt.Sprintf("capture on stream %q: %s; %s", e.Stream, e.Why, e.Do)
}
