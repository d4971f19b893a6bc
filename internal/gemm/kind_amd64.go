//go:build amd64 && !purego

// This file owns the choice of the assembly and its calls.

package gemm

import "github.com/klauspost/cpuid/v2"

// best is the fastest kind that CPU and operating system support.
var best = detect()

func detect() kind {
	switch {
	case cpuid.CPU.Supports(cpuid.AVX512F, cpuid.AVX2):
		return avx512
	case cpuid.CPU.Supports(cpuid.AVX2, cpuid.FMA3):
		return avx2
	}
	return plain
}

// tile computes a tile of registers. It must stay a call: Go cannot interrupt
// assembly, but checks for preemption as a function is entered, here every few µs.
//
//go:noinline
func (k kind) tile(a []float32, ars, aks int, b []float32, bks int, c []float32, ldc, rows, cols, depth int, add bool) {
	switch {
	case k == plain || depth == 0:
		tilePlain(a, ars, aks, b, bks, c, ldc, rows, cols, depth, add)
	case k == avx512:
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

// round8 rounds whole vectors of 8.
func (kind) round8(dst []uint16, src []float32, vectors int) { roundBF16(&dst[0], &src[0], vectors) }
