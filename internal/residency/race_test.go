//go:build race

// This file owns what tests know of a build with the race detector.

package residency

const raceEnabled = true
