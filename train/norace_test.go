//go:build !race

// This file owns the knowledge that Go's race detector is off.

package train

const raceEnabled = false
