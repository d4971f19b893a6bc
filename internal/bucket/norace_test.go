//go:build !race

// This file owns the bound on planning without the race detector.

package bucket

import "time"

// Planning 1,000 units of 20 buckets takes under 10 ms on a quiet machine. Five
// times that catches what grew beyond bounds, also on a busy one.
const planningMost = 50 * time.Millisecond
