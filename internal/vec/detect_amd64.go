//go:build amd64 && !race && !purego

// This file owns the detection of the processor's instructions. It excludes the assembly
// under the race detector, which does not see its stores.

package vec

import "github.com/stowage-dev/stowage/internal/sysinfo"

func detect() level {
	switch has := sysinfo.ReadInstructions(); {
	case has.AVX512F:
		return withAVX512
	case has.AVX2:
		return withAVX2
	}
	return plain
}
