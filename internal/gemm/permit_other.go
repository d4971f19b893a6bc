//go:build amd64 && !linux && !purego

// This file owns systems without a way to ask for AMX.

package gemm

func permitAMX() bool { return false }
