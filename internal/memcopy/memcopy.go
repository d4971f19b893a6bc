// Package memcopy copies and fills memory for the CPU device.
//
// A plain store to a line that is not in the cache first reads that line, so a
// copy of n bytes moves 3n over the memory bus: source in, destination in,
// destination out. A non-temporal store skips the middle one. It pays only when
// the destination would have been evicted anyway; below [StreamFrom] it is
// slower, because it throws lines out of a cache in which the reader would have
// found them.
//
// File by file: memcopy.go has the calls and their thresholds, stream.go cuts a
// copy into what the assembly takes, parallel.go spreads it over goroutines,
// kernel_amd64.s moves the bytes.
package memcopy

import (
	"fmt"
	"unsafe"
)

// StreamFrom is the number of bytes from which Copy uses non-temporal stores.
//
// It is the size of one core's second-level cache where it was measured (2 MiB;
// one core of a Sapphire Rapids server, medians of 15 interleaved runs).
// Speed of the AVX-512 kernel over plain copy, on buffers copied again and
// again, on buffers met for the first time, and on the latter when the
// destination is read right after the copy (time of both):
//
//	         512K   1M   2M   4M   8M  16M  64M
//	again    0.42 0.61 1.26 1.16 1.29 1.70 1.54
//	first    1.99 1.84 1.90 1.90 1.86 2.02 1.93
//	+ read   1.00 1.08 1.08 1.15 1.22 1.31 1.26
//
// Only a buffer of 2 to 8 MiB which is both copied again and read at once loses
// (0.59 to 0.82). Offloaded tensors are read a step later.
const StreamFrom = 2 << 20

// fillFrom is the number of bytes from which Fill uses non-temporal stores.
// Twice StreamFrom, because a fill has no source and so half the working set.
// Memory met for the first time is then filled twice as fast at every size (17
// and 8 GB/s). Filled again and again, the two ways tie at 4 MiB (17 GB/s both);
// at 16 MiB the plain one had 8 to 20 GB/s, after what others left of the shared
// cache, and 7 to 9 from 64 MiB on.
const fillFrom = 4 << 20

// Variant is one way of copying, for measuring them side by side on the same
// buffers.
type Variant struct {
	Name      string                // copy, nontemporal-avx2 or nontemporal-avx512
	Func      func(dst, src []byte) // copies min(len(dst), len(src)) bytes whatever the size; panics if not Supported
	Supported bool                  // by this CPU, this operating system and this build
}

// Variants returns the table of all variants, slowest on large buffers first.
func Variants() []Variant {
	return []Variant{
		{kindPlain.String(), func(dst, src []byte) { copy(dst, src) }, true},
		{kindAVX2.String(), func(dst, src []byte) { kindAVX2.copy(dst, src) }, best >= kindAVX2},
		{kindAVX512.String(), func(dst, src []byte) { kindAVX512.copy(dst, src) }, best >= kindAVX512},
	}
}

// Best returns the name of the variant that Copy uses from StreamFrom on.
func Best() string { return best.String() }

// kind orders the variants: a CPU that supports one supports those before it.
type kind uint8

const (
	kindPlain kind = iota
	kindAVX2
	kindAVX512
)

func (k kind) String() string {
	return [...]string{"copy", "nontemporal-avx2", "nontemporal-avx512"}[k]
}

// copy streams whatever the size, so that a benchmark sees both sides of the
// threshold.
func (k kind) copy(dst, src []byte) {
	if k > best {
		panic(fmt.Sprintf("memcopy: %v is not supported here (best is %v)", k, best))
	}
	n := min(len(dst), len(src))
	stream(k, dst[:n], src[:n])
}

// Copy copies min(len(dst), len(src)) bytes. The two ranges must not overlap,
// or must be the same (then there is nothing to do); anything else panics,
// since the kernels read and write pages out of order.
func Copy(dst, src []byte) {
	n := min(len(dst), len(src))
	dst, src = dst[:n], src[:n]
	if same(dst, src) {
		return
	}
	if n < StreamFrom {
		copy(dst, src)
		return
	}
	copyLarge(dst, src)
}

// copyLarge copies a range, or a part of a range, of at least StreamFrom bytes.
func copyLarge(dst, src []byte) {
	if best != kindPlain {
		stream(best, dst, src)
		return
	}
	for i := 0; i < len(dst); i += chunkBytes {
		copyPiece(dst[i:min(i+chunkBytes, len(dst))], src[i:])
	}
}

// copyPiece must stay a call: see copyBlock in kernel_amd64.go, plain copy is
// assembly too.
//
//go:noinline
func copyPiece(dst, src []byte) { copy(dst, src) }

// Copy2D copies height rows of width bytes; row i starts at byte i*dpitch of
// dst and i*spitch of src. Row i of dst must not overlap any row of src, except
// that it may be row i itself. Both slices must hold (height-1)*pitch + width bytes.
func Copy2D(dst []byte, dpitch int, src []byte, spitch int, width, height int) {
	check2D("dst", len(dst), dpitch, width, height)
	check2D("src", len(src), spitch, width, height)
	switch {
	case width == 0 || height == 0:
	case height == 1 || width == dpitch && width == spitch:
		Copy(dst[:width*height], src[:width*height])
	case best == kindPlain || width*height < StreamFrom:
		for i := range height {
			copy(dst[i*dpitch:][:width], src[i*spitch:][:width])
		}
	default:
		streamRows(best, dst, dpitch, src, spitch, width, height)
	}
}

func check2D(name string, have, pitch, width, height int) {
	if width < 0 || height < 0 || pitch < width {
		panic(fmt.Sprintf("memcopy: Copy2D of %d rows of %d bytes with a %s pitch of %d", height, width, name, pitch))
	}
	// Divided, not multiplied, so that an absurd height cannot overflow:
	// (height-1)*pitch + width <= have.
	if height > 0 && (width > have || pitch > 0 && height-1 > (have-width)/pitch) {
		panic(fmt.Sprintf("memcopy: Copy2D of %d rows of %d bytes with a pitch of %d does not fit the %d bytes of %s",
			height, width, pitch, have, name))
	}
}

// Fill sets every byte of dst to value.
func Fill(dst []byte, value byte) {
	switch {
	case best != kindPlain && len(dst) >= fillFrom:
		streamFill(dst, value)
	case value == 0:
		clear(dst)
	default:
		fillPlain(dst, value)
	}
}

// fillPlain doubles a pattern in place up to 16 KiB, which stays in a first-level
// cache of 32 KiB or more, and repeats it from there (with a pattern of 4 KiB
// 64 KiB to 2 MiB were 2 to 14 % slower).
func fillPlain(dst []byte, value byte) {
	if len(dst) == 0 {
		return
	}
	dst[0] = value
	for i := 1; i < len(dst); {
		i += copy(dst[i:], dst[:min(i, 16<<10)])
	}
}

// same reports whether the two slices, of one length, are the same bytes, and
// panics when they overlap otherwise.
func same(dst, src []byte) bool {
	if len(dst) == 0 {
		return true
	}
	d, s, n := address(dst), address(src), uintptr(len(dst))
	// d-s wraps round when s is above d, so each difference tests one order.
	if d != s && (d-s < n || s-d < n) {
		panic(fmt.Sprintf("memcopy: copy of %d bytes onto a range that overlaps it, %d bytes away", n, int(d-s)))
	}
	return d == s
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
