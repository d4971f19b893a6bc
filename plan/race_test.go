//go:build race

// This file owns the bound on forecasts under the race detector, which makes
// memory accesses about ten times slower.

package plan

import "time"

const livenessMost = time.Second
