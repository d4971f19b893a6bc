//go:build amd64 && !purego

// This file owns the choice of the assembly and its calls.

package gemm

import "github.com/stowage-dev/stowage/internal/sysinfo"

// works reports whether CPU and operating system support a kind.
func (k kind) works() bool {
	has := sysinfo.ReadInstructions()
	switch k {
	case amx:
		return avx512.works() && has.AMXBF16 && permitAMX()
	case avx512BF16:
		return avx512.works() && has.AVX512BF16
	case avx512:
		return has.AVX512F && has.AVX2
	case avx2:
		return has.AVX2 && has.FMA
	}
	return true
}

// pays reports whether a kind is faster than those below it. AMD's VDPBF16PS does twice the
// work of a fused multiply-add in the same time, Intel's half of it.
func (k kind) pays() bool { return k != avx512BF16 || sysinfo.ReadInstructions().AMD }

// tile computes a tile of registers. It must stay a call: Go cannot interrupt
// assembly, but checks for preemption as a function is entered, here every few µs.
//
//go:noinline
func (k kind) tile(a []float32, ars, aks int, b []float32, bks int, c []float32, ldc, rows, cols, depth int, add bool) {
	switch {
	case k == plain || depth == 0:
		tilePlain(a, ars, aks, b, bks, c, ldc, rows, cols, depth, add)
	case k >= avx512:
		tileAVX512(depth, &a[0], ars, aks, &b[0], bks, &c[0], ldc, rows, cols, add)
	case cols == 16 || cols <= 8:
		tileAVX2(depth, &a[0], ars, aks, &b[0], bks, &c[0], ldc, rows, cols, add)
	default:
		tileAVX2(depth, &a[0], ars, aks, &b[0], bks, &c[0], ldc, rows, 8, add)
		tileAVX2(depth, &a[0], ars, aks, &b[8], bks, &c[8], ldc, rows, cols-8, add)
	}
}

// transpose8 transposes 8 rows of whole blocks of 8.
func (kind) transpose8(dst []float32, ldd int, m *Matrix, from, blocks int) {
	if m.F32 != nil {
		transposeF32(&dst[0], ldd, &m.F32[from], m.Pitch, blocks)
	} else {
		transposeBF16(&dst[0], ldd, &m.BF16[from], m.Pitch, blocks)
	}
}

// copyRows copies rows of whole vectors of 8.
func (kind) copyRows(dst []float32, ldd int, m *Matrix, from, rows, vectors int) {
	if m.F32 != nil {
		copyF32(&dst[0], ldd, &m.F32[from], m.Pitch, rows, vectors)
	} else {
		copyBF16(&dst[0], ldd, &m.BF16[from], m.Pitch, rows, vectors)
	}
}

// sumPairs computes sums of rows with a panel, and of rows that fill up the last tile of
// registers. Like tile, it must stay a call.
//
//go:noinline
func (k kind) sumPairs(room *pairRoom, panel []float32, rows, pairs int) {
	if k == amx {
		sumAMX((rows+31)/32, pairs/pairStep, &room.a[0], pairPitch, &panel[0], &room.sums[0])
	} else {
		sumBF16((rows+11)/12, pairs/pairStep, &room.a[0], pairPitch, &panel[0], &room.sums[0])
	}
}

// weave makes pairs of rows of even and odd, which are lds apart.
func (kind) weave(dst []float32, ldd int, even, odd []uint16, lds, pairs, cols int) {
	weave(&dst[0], ldd, &even[0], &odd[0], lds, pairs, cols)
}

// mergeF32 writes sums to C, or adds them.
func (kind) mergeF32(c []float32, ldc int, sums []float32, rows, cols int, add bool) {
	mergeF32(&c[0], ldc, &sums[0], rows, cols, add)
}

// mergeBF16 rounds sums, or those of from and sums, to C.
func (kind) mergeBF16(c []uint16, ldc int, from []float32, ldf int, sums []float32, rows, cols int, add bool) {
	mergeBF16(&c[0], ldc, &from[0], ldf, &sums[0], rows, cols, add)
}

// round8 rounds whole vectors of 8.
func (kind) round8(dst []uint16, src []float32, vectors int) { roundBF16(&dst[0], &src[0], vectors) }
