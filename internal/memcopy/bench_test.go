// This file owns the benchmarks of every variant on warm and cold buffers.

package memcopy

import (
	"fmt"
	"testing"
)

var benchSizes = []int{4 << 10, 256 << 10, StreamFrom, 16 << 20, 256 << 20}

// words names a size, for the names of the benchmarks.
func words(n int) string {
	if n >= 1<<20 {
		return fmt.Sprintf("%dMiB", n>>20)
	}
	if n >= 1<<10 {
		return fmt.Sprintf("%dKiB", n>>10)
	}
	return fmt.Sprintf("%dB", n)
}

// buffers are written once before they are measured: a page never written is
// one shared page of zeros, and reads of it come from the cache.
func buffers(n int) (dst, src []byte) {
	dst, src = make([]byte, n), make([]byte, n)
	Fill(dst, 1)
	Fill(src, 2)
	return dst, src
}

func BenchmarkCopy(b *testing.B) {
	dst, src := buffers(benchSizes[len(benchSizes)-1])
	ways := append(supported(), Variant{Name: "Copy", Func: Copy},
		Variant{Name: "Parallel", Func: func(dst, src []byte) { Parallel(dst, src, 0) }})
	for _, n := range benchSizes {
		for _, v := range ways {
			b.Run(words(n)+"/"+v.Name, func(b *testing.B) {
				b.SetBytes(int64(n))
				for b.Loop() {
					v.Func(dst[:n], src[:n])
				}
			})
		}
	}
}

func BenchmarkCopy2D(b *testing.B) {
	const total, gap = 64 << 20, 64
	dst, src := buffers(2 * total)
	for _, width := range []int{128, 4 << 10, 64 << 10} {
		height := total / width
		b.Run(words(width)+"/rows of copy", func(b *testing.B) {
			b.SetBytes(total)
			for b.Loop() {
				for i := range height {
					copy(dst[i*(width+gap):][:width], src[i*(width+gap):][:width])
				}
			}
		})
		b.Run(words(width)+"/Copy2D", func(b *testing.B) {
			b.SetBytes(total)
			for b.Loop() {
				Copy2D(dst, width+gap, src, width+gap, width, height)
			}
		})
	}
}

func BenchmarkFill(b *testing.B) {
	dst, _ := buffers(benchSizes[len(benchSizes)-1])
	ways := []struct {
		name string
		fill func([]byte)
	}{
		{"clear", func(b []byte) { clear(b) }},
		{"plain", func(b []byte) { fillPlain(b, 1) }},
		{"Fill", func(b []byte) { Fill(b, 1) }},
	}
	for _, n := range benchSizes {
		for _, w := range ways {
			b.Run(words(n)+"/"+w.name, func(b *testing.B) {
				b.SetBytes(int64(n))
				for b.Loop() {
					w.fill(dst[:n])
				}
			})
		}
	}
}
