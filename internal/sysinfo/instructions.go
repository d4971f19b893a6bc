// This file owns the instruction sets that Stowage has code for.

package sysinfo

// Instructions are the instruction sets that processor and operating system support. AMX
// counts only with its bf16 products, the one use we have for tiles.
type Instructions struct {
	AVX2, FMA, AVX512F, AVX512BF16, AMXBF16 bool
	AMD                                     bool // the vendor
}

// features lists what Stowage looks at, in the order it is printed.
func (i Instructions) features() []Feature {
	return []Feature{{"avx2", i.AVX2}, {"avx512f", i.AVX512F}, {"avx512_bf16", i.AVX512BF16}, {"amx_bf16", i.AMXBF16}}
}
