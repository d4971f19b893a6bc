//go:build amd64 && !purego

// This file owns asking an x86 processor for its instruction sets.

package sysinfo

// cpuid asks for a leaf and a part of it. xgetbv returns which registers the operating
// system saves; it may be called only if it says that it saves some.
func cpuid(leaf, part uint32) (eax, ebx, ecx, edx uint32)
func xgetbv() uint32

// ReadInstructions asks the processor.
func ReadInstructions() Instructions { return decode(cpuid, xgetbv) }

// decode reads the bits that Intel and AMD document for CPUID.
func decode(cpuid func(leaf, part uint32) (eax, ebx, ecx, edx uint32), xgetbv func() uint32) (i Instructions) {
	last, ebx, ecx, edx := cpuid(0, 0)
	i.AMD = ebx == 0x68747541 && edx == 0x69746e65 && ecx == 0x444d4163 // AuthenticAMD
	const osxsave, avx, fma = 1 << 27, 1 << 28, 1 << 12
	if _, _, ecx, _ = cpuid(1, 0); last < 7 || ecx&osxsave == 0 || ecx&avx == 0 {
		return i
	}
	saved := xgetbv()
	const vectors, masks, tiles = 1<<1 | 1<<2, 1<<5 | 1<<6 | 1<<7, 1<<17 | 1<<18
	if saved&vectors != vectors {
		return i
	}
	parts, ebx, _, edx := cpuid(7, 0)
	i.FMA = ecx&fma != 0
	i.AVX2 = ebx&(1<<5) != 0
	i.AMXBF16 = edx&(1<<22) != 0 && edx&(1<<24) != 0 && saved&tiles == tiles
	i.AVX512F = ebx&(1<<16) != 0 && saved&masks == masks
	if parts >= 1 && i.AVX512F {
		eax, _, _, _ := cpuid(7, 1)
		i.AVX512BF16 = eax&(1<<5) != 0
	}
	return i
}
