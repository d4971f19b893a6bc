//go:build linux && !purego

package sysinfo

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// The kernel lists the same instruction sets.
func TestInstructionsOfThisMachine(t *testing.T) {
	flags := strings.Fields(field(os.DirFS("/"), "proc/cpuinfo", "flags"))
	if len(flags) == 0 {
		t.Skip("/proc/cpuinfo lists no instruction sets")
	}
	has := func(name string) bool { return slices.Contains(flags, name) }
	want := Instructions{
		AVX2: has("avx2"), FMA: has("fma"), AVX512F: has("avx512f"), AVX512BF16: has("avx512_bf16"), AMXBF16: has("amx_tile") && has("amx_bf16"),
		AMD: field(os.DirFS("/"), "proc/cpuinfo", "vendor_id") == "AuthenticAMD",
	}
	if got := ReadInstructions(); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// An instruction set counts only if the operating system saves its registers, and AMX only
// with its bf16 products.
func TestDecode(t *testing.T) {
	const xsave, avx, fma, avx2, avx512, bf16, amxBF16, amxTile = 1 << 27, 1 << 28, 1 << 12, 1 << 5, 1 << 16, 1 << 5, 1 << 22, 1 << 24
	for _, c := range []struct {
		last, one, ebx, edx, parts, part1, saved uint32
		want                                     string
	}{
		{7, xsave | avx | fma, avx2 | avx512, amxBF16 | amxTile, 1, bf16, 0x600e6, "{true true true true true false}"},
		{7, xsave | avx | fma, avx2 | avx512, amxBF16 | amxTile, 0, bf16, 0x600e6, "{true true true false true false}"},
		{7, xsave | avx | fma, avx2 | avx512, amxTile, 1, bf16, 0x600e6, "{true true true true false false}"},
		{7, xsave | avx | fma, avx2 | avx512, amxBF16 | amxTile, 1, bf16, 0x000e6, "{true true true true false false}"},
		{7, xsave | avx | fma, avx2 | avx512, amxBF16 | amxTile, 1, bf16, 0x00006, "{true true false false false false}"},
		{7, xsave | avx | fma, avx2 | avx512, amxBF16 | amxTile, 1, bf16, 0x00002, "{false false false false false false}"},
		{7, xsave | avx | fma, avx2 | avx512, 0, 1, bf16, 0x00066, "{true true false false false false}"},
		{7, xsave | avx | fma, avx2 | avx512, 0, 1, bf16, 0x000e4, "{false false false false false false}"},
		{7, xsave | avx, avx2, 0, 0, 0, 0x00006, "{true false false false false false}"},
		{7, avx | fma, avx2 | avx512, 0, 1, bf16, 0x600e6, "{false false false false false false}"},
		{7, xsave | fma, avx2 | avx512, 0, 1, bf16, 0x600e6, "{false false false false false false}"},
		{6, xsave | avx | fma, avx2 | avx512, 0, 1, bf16, 0x600e6, "{false false false false false false}"},
	} {
		ask := func(leaf, part uint32) (eax, ebx, ecx, edx uint32) {
			switch [2]uint32{leaf, part} {
			case [2]uint32{0, 0}:
				return c.last, 0x756e6547, 0x6c65746e, 0x49656e69 // GenuineIntel
			case [2]uint32{1, 0}:
				return 0, 0, c.one, 0
			case [2]uint32{7, 0}:
				return c.parts, c.ebx, 0, c.edx
			}
			return c.part1, 0, 0, 0
		}
		saved := func() uint32 {
			if c.one&xsave == 0 {
				t.Errorf("%+v: registers of the system are read that it does not show", c)
			}
			return c.saved
		}
		if got := fmt.Sprint(decode(ask, saved)); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

func TestFeatures(t *testing.T) {
	got, want := fmt.Sprint(Instructions{AVX2: true, AVX512BF16: true}.features()), "[{avx2 true} {avx512f false} {avx512_bf16 true} {amx_bf16 false}]"
	if got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
