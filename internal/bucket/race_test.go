//go:build race

// This file owns the bound on planning under the race detector, which makes
// memory accesses about ten times slower.

package bucket

import "time"

const planningMost = 500 * time.Millisecond
