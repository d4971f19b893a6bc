// This file owns what only Linux's memory calls offer.

package cpu

import (
	"syscall"

	"github.com/stowage-dev/stowage/device"
)

const mapNoReserve = syscall.MAP_NORESERVE

// adviseHuge asks for huge pages: copies of many megabytes otherwise spend a
// good part of their time on page-table walks. A refusal changes nothing.
func adviseHuge(m []byte) {
	const madvHugepage = 14
	_ = syscall.Madvise(m, madvHugepage)
}

// machineMemory is the memory of the machine.
func machineMemory() device.Bytes {
	var si syscall.Sysinfo_t
	if syscall.Sysinfo(&si) != nil {
		return 1 << 40
	}
	return device.Bytes(si.Totalram) * device.Bytes(si.Unit)
}
