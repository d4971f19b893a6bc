//go:build !amd64 || purego

// This file owns processors without instruction sets that Stowage has code for.

package sysinfo

// ReadInstructions returns none.
func ReadInstructions() Instructions { return Instructions{} }
