// This file owns that only Linux has files without a name.

//go:build !linux

package atomicfile

const unnamed = 0
