// This file owns what the race detector sees. The detector does not see what assembly reads
// and writes, and a product without assembly takes several hundred times as long. So a
// build with the detector first reads or writes every number of a product in Go. These are
// m k + k n + m n numbers, and the product has m n k multiply-adds.

package gemm

import "runtime"

// touch reads a part of a matrix. If write is set, it also writes it back.
func (m *Matrix) touch(write bool, row, col, rows, cols int) {
	if !m.live() {
		return
	}
	sum := float32(0)
	for i := range rows {
		for j := range cols {
			at := m.index(row+i, col+j)
			switch {
			case !write:
				sum += m.value(at)
			case m.F32 != nil:
				v := m.F32[at]
				m.F32[at] = v
			default:
				v := m.BF16[at]
				m.BF16[at] = v
			}
		}
	}
	// The compiler must not remove the reads.
	runtime.KeepAlive(sum)
}

// touch touches the operands of the tile of C that begins at a row and a column. B was
// touched when it was laid out, or is touched here.
func (x *part) touch(row, col, rows, cols int) {
	if x.TransA {
		x.A.touch(false, 0, row, x.k, rows)
	} else {
		x.A.touch(false, row, 0, rows, x.k)
	}
	if x.direct {
		x.touchB(col, cols)
	}
	x.Plus.touch(false, row, col, rows, cols)
	x.C.touch(true, row, col, rows, cols)
}

// touchB touches columns of op(B).
func (x *part) touchB(col, cols int) {
	if x.TransB {
		x.B.touch(false, col, 0, cols, x.k)
	} else {
		x.B.touch(false, 0, col, x.k, cols)
	}
}

// touchBlock does the same for a block.
func touchBlock(c []float32, ldc int, a []float32, lda int, transA bool, b []float32, ldb int, transB bool, m, n, k int) {
	rows, cols := m, k
	if transA {
		rows, cols = k, m
	}
	(&Matrix{F32: a, Pitch: lda}).touch(false, 0, 0, rows, cols)
	rows, cols = k, n
	if transB {
		rows, cols = n, k
	}
	(&Matrix{F32: b, Pitch: ldb}).touch(false, 0, 0, rows, cols)
	(&Matrix{F32: c, Pitch: ldc}).touch(true, 0, 0, m, n)
}
