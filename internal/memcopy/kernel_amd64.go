//go:build amd64 && !race && !purego

// This file owns the choice and the declarations of the assembly.

package memcopy

import "github.com/stowage-dev/stowage/internal/sysinfo"

// The assembly is left out under the race detector, which does not see its
// stores: plain copy is instrumented, so a race on a copied range is reported.

// best is the fastest kind that CPU and operating system support.
var best = fastest(sysinfo.ReadInstructions())

func fastest(has sysinfo.Instructions) kind {
	switch {
	case !has.AVX2:
		return kindPlain
	case !has.AVX512F:
		return kindAVX2
	}
	return kindAVX512
}

// streams is the number of pages, or rows, that the kind's kernel walks at once.
func (k kind) streams() int {
	if k == kindAVX512 {
		return 8
	}
	return 4
}

// copyBlock copies k.streams() rows of lines*64 bytes. dst and dstride are
// multiples of 64, lines is positive.
//
// It must stay a call: Go cannot interrupt assembly, so a copy in one piece holds
// up a garbage collection, and with it all goroutines, until it ends. A Go
// function checks for preemption as it is entered, here every 32 KiB or 3 µs.
// Stopping the world during copies of 256 MiB took 34 ms with plain copy and
// 0.03 ms with this (medians of 100).
//
//go:noinline
func copyBlock(k kind, dst *byte, dstride int, src *byte, sstride, lines int) {
	if k == kindAVX512 {
		copy8AVX512(dst, dstride, src, sstride, lines)
	} else {
		copy4AVX2(dst, dstride, src, sstride, lines)
	}
}

// fillBlock fills n bytes, a positive multiple of 128; dst is a multiple of 32.
// A call for the same reason.
//
//go:noinline
func fillBlock(dst *byte, value byte, n int) { fillAVX2(dst, value, n) }

// storeFence orders the non-temporal stores before it, which are weakly ordered,
// before every later store, such as the one that tells another core of them.
//
//go:noescape
func storeFence()

//go:noescape
func copy8AVX512(dst *byte, dstride int, src *byte, sstride, lines int)

//go:noescape
func copy4AVX2(dst *byte, dstride int, src *byte, sstride, lines int)

//go:noescape
func fillAVX2(dst *byte, value byte, n int)
