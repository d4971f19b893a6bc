// This file owns what only Linux's memory calls offer.

package cpu

import "syscall"

const mapNoReserve = syscall.MAP_NORESERVE

// adviseHuge asks for huge pages: copies of many megabytes otherwise spend a
// good part of their time on page-table walks. A refusal changes nothing.
func adviseHuge(m []byte) {
	const madvHugepage = 14
	_ = syscall.Madvise(m, madvHugepage)
}
