//go:build !linux

// This file owns the same for other systems, where the page size is left to
// the kernel and the memory is not asked for.

package cpu

import "github.com/stowage-dev/stowage/device"

const mapNoReserve = 0

func adviseHuge([]byte) {}

func machineMemory() device.Bytes { return 1 << 40 }
