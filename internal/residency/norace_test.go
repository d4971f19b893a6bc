//go:build !race

// This file owns what tests know of a build without the race detector.

package residency

const raceEnabled = false
