// This file owns the speed of the way between device and host memory.

package memory

import (
	"fmt"
	"time"
)

// Links holds the rates between device and host memory, in bytes per second.
type Links struct {
	Out float64 `json:"out"` // to the host, with nothing else under way
	In  float64 `json:"in"`  // from the host, with nothing else under way
	// Both is the sum of both directions while both are busy. They share it in the
	// ratio of Out to In, and neither is faster than alone. Zero means Out + In: the
	// directions do not slow each other down.
	Both    float64       `json:"both"`
	Latency time.Duration `json:"latency"` // of one copy, before its bytes move
}

// Check returns an error unless the rates are positive and the latency is not
// negative.
func (l Links) Check() error {
	if !(l.Out > 0 && l.In > 0 && l.Both >= 0) || l.Latency < 0 {
		return fmt.Errorf("memory: expected positive link rates, got %g bytes/s out, %g in, %g both ways and a latency of %v; measure them again", l.Out, l.In, l.Both, l.Latency)
	}
	return nil
}

// Shared returns the rates of both directions while both are busy.
func (l Links) Shared() (out, in float64) {
	if l.Both == 0 {
		return l.Out, l.In
	}
	f := min(l.Both/(l.Out+l.In), 1)
	return f * l.Out, f * l.In
}
