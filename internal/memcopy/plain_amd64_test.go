//go:build amd64 && !race && !purego

// This file owns the tests of copies without vector instructions.

package memcopy

import (
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/internal/sysinfo"
)

// Without vector instructions that store past the caches everything works as well.
func TestPlain(t *testing.T) {
	defer func(k kind) { best = k }(best)
	best = kindPlain
	for name, test := range map[string]func(*testing.T){
		"large": TestLarge, "shorter": TestLengthIsTheShorter, "2D": TestCopy2D, "fill": TestFill, "pieces": TestPieces, "variants": TestVariants,
	} {
		t.Run(name, test)
	}
	for _, v := range Variants() {
		if v.Supported != (v.Name == "copy") {
			t.Errorf("%s is supported: %t", v.Name, v.Supported)
		}
	}
}

// A kind is used only where there are its instructions.
func TestFastest(t *testing.T) {
	for has, want := range map[sysinfo.Instructions]kind{
		{AVX2: true, AVX512F: true}: kindAVX512, {AVX2: true, FMA: true}: kindAVX2, {AVX512F: true}: kindPlain, {}: kindPlain,
	} {
		if got := fastest(has); got != want {
			t.Errorf("%+v: got %v, want %v", has, got, want)
		}
	}
}

// Finished jobs keep nobody's memory.
func TestJobsForget(t *testing.T) {
	dst, src := make([]byte, StreamFrom), make([]byte, StreamFrom)
	Parallel(dst, src, 2)
	Pieces(1, StreamFrom, 1, func(int) (d, s []byte) { return dst, src })
	for range 4 {
		if j := jobs.Get().(*job); j.dst != nil || j.src != nil || j.piece != nil {
			t.Errorf("a finished job keeps %d, %d bytes, pieces: %t", len(j.dst), len(j.src), j.piece != nil)
		}
	}
}

// Rows go together where that pays, as many as whole groups have.
func TestGroups(t *testing.T) {
	buffer, src := make([]byte, 4<<20), make([]byte, 4<<20)
	at := lineGap(buffer)
	for _, x := range []struct {
		offset, dpitch, width int
		pays                  bool
	}{
		{0, 128, 128, true}, {0, 192, 127, false}, {0, 128, 64, false}, {0, 192, 160, false}, {0, 2048, 2048, true}, {1, 2048, 2047, false}, {1, 4096, 2048, true},
		{0, 4096, 2049, true}, {0, 4097, 2048, false}, {0, 1 << 20, 1<<20 - 64, false}, {0, 300 << 10, 299 << 10, true}, {1, 128, 128, false},
	} {
		height := min(19, (len(buffer)-2*lineBytes)/x.dpitch)
		for _, k := range []kind{kindAVX2, kindAVX512} {
			if k > best {
				continue
			}
			want := 0
			if rows := int(4 * k); x.pays {
				want = height - height%rows
			}
			t.Run(fmt.Sprint(k, x), func(t *testing.T) {
				if got := streamGroups(k, buffer[at+x.offset:], x.dpitch, src, x.dpitch, x.width, height); got != want {
					t.Errorf("%d of %d rows, want %d", got, height, want)
				}
			})
		}
	}
}
