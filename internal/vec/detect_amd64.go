//go:build amd64 && !race && !purego

// This file owns the detection of the processor's instructions. It excludes the assembly
// under the race detector, which does not see its stores.

package vec

import "github.com/klauspost/cpuid/v2"

func detect() level {
	switch {
	case cpuid.CPU.Supports(cpuid.AVX512F):
		return withAVX512
	case cpuid.CPU.Supports(cpuid.AVX2):
		return withAVX2
	}
	return plain
}
