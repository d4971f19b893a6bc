//go:build !race

// This file owns the bound on forecasts without the race detector.

package plan

import "time"

// SPEC S6.1: 61 layers x 16 ranks x 128 microbatches of liveness.
const livenessMost = 100 * time.Millisecond
