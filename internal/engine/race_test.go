//go:build race

// This file owns what tests know of a build with the race detector.

package engine

const raceEnabled = true
