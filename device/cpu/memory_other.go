//go:build !linux

// This file owns the same for other systems, where the page size is left to
// the kernel.

package cpu

const mapNoReserve = 0

func adviseHuge([]byte) {}
