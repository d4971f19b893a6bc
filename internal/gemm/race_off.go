//go:build !race

// This file owns the switch that is off in a build without the race detector.

package gemm

const raced = false
