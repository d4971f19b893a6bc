// This file owns products of small blocks, for use inside other kernels.

package gemm

import (
	"fmt"
	"sync"
)

// Block computes C = op(A) op(B), or C += op(A) op(B) with add, on the calling
// goroutine. op transposes or does nothing: op(A) is m x k, op(B) is k x n, C is
// m x n. Matrices are stored by rows, ldc, lda and ldb numbers apart: A is stored
// k x m with transA, B is stored n x k with transB. C must not overlap A or B.
//
// It is meant for blocks that fit in the second level of the cache, say 64 x 64
// with k from 32 to 512. A and B are read where they lie, with any strides; only
// a transposed B is first copied, which costs about as much as a tenth of a
// product with m = 64. A caller that multiplies by the same transposed B again
// and again transposes it once with [Transpose].
//
// Each element of C is one chain of multiply-adds in the order of k, begun with
// zero; with add it is then added to what C held.
func Block(c []float32, ldc int, a []float32, lda int, transA bool, b []float32, ldb int, transB bool, m, n, k int, add bool) {
	block(best(), c, ldc, a, lda, transA, b, ldb, transB, m, n, k, add)
}

func block(kind kind, c []float32, ldc int, a []float32, lda int, transA bool, b []float32, ldb int, transB bool, m, n, k int, add bool) {
	if m < 0 || n < 0 || k < 0 {
		panic(fmt.Sprintf("gemm: expected sizes of at least zero, got a product of %d x %d with k %d", m, n, k))
	}
	if m == 0 || n == 0 {
		return
	}
	check("C", len(c), ldc, m, n)
	ars, aks := lda, 1
	if transA {
		check("A", len(a), lda, k, m)
		ars, aks = 1, lda
	} else {
		check("A", len(a), lda, m, k)
	}
	if transB {
		check("B", len(b), ldb, n, k)
	} else {
		check("B", len(b), ldb, k, n)
	}
	if raced {
		touchBlock(c, ldc, a, lda, transA, b, ldb, transB, m, n, k)
	}
	if k == 0 {
		ars, aks, transB, b = 0, 0, false, nil
	}
	nr := kind.cols()
	if !transB {
		for j := 0; j < n; j += nr {
			kind.column(a, ars, aks, b[min(j, len(b)):], ldb, c[j:], ldc, m, min(nr, n-j), k, add)
		}
		return
	}
	panel := blockPanels.Get().(*[]float32)
	defer blockPanels.Put(panel)
	if len(*panel) < nr*k {
		*panel = make([]float32, nr*k)
	}
	stored := Matrix{F32: b, Rows: n, Cols: k, Pitch: ldb}
	for j := 0; j < n; j += nr {
		w := min(nr, n-j)
		kind.transpose(*panel, nr, &stored, j, 0, w, k)
		kind.column(a, ars, aks, *panel, nr, c[j:], ldc, m, w, k, add)
	}
}

// blockPanels hold a panel of a transposed B each.
var blockPanels = sync.Pool{New: func() any { return new([]float32) }}

// Transpose writes the transpose of src, rows x cols, to dst. Rows of dst are ldd numbers
// apart and those of src lds. They must not overlap.
func Transpose(dst []float32, ldd int, src []float32, lds, rows, cols int) {
	check("what is transposed", len(src), lds, rows, cols)
	check("what a transposition writes", len(dst), ldd, cols, rows)
	if raced {
		(&Matrix{F32: src, Pitch: lds}).touch(false, 0, 0, rows, cols)
		(&Matrix{F32: dst, Pitch: ldd}).touch(true, 0, 0, cols, rows)
	}
	best().transpose(dst, ldd, &Matrix{F32: src, Pitch: lds}, 0, 0, rows, cols)
}

// check panics if a matrix of rows x cols does not lie in n numbers.
func check(what string, n, pitch, rows, cols int) {
	if rows < 0 || cols < 0 || rows > 0 && cols > 0 && (pitch < cols || n < (rows-1)*pitch+cols) {
		panic(fmt.Sprintf("gemm: %s: a matrix of %d x %d with rows %d apart does not fit into %d numbers", what, rows, cols, pitch, n))
	}
}
