//go:build race

// This file owns the switch that is on in a build with the race detector.

package gemm

const raced = true
