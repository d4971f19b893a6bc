// This file owns the layout of what tiles read, and the rounding of sums.

package gemm

import "math"

// rowsOfA returns rows of op(A) from row on and columns from p on, and the distances
// between rows and between columns. It copies them, except for fp32 that is not transposed
// and few columns of C.
func (b *batch) rowsOfA(x *part, s *scratch, row, rows, p, k, cols int) (a []float32, ars, aks int) {
	switch {
	case k == 0:
		return s.a[:], 1, 1
	case x.TransA:
		b.kind.copy(s.a[:], tileRows, &x.A, p, row, k, rows)
		return s.a[:], 1, tileRows
	case x.A.F32 != nil && cols <= directCols:
		return x.A.F32[x.A.index(row, p):], x.A.Pitch, 1
	}
	b.kind.copy(s.a[:], aPitch, &x.A, row, p, rows, k)
	return s.a[:], aPitch, 1
}

// directCols is the number of columns of C up to which a copy of A does not pay.
const directCols = 64

// panel lays out columns of op(B) as rows as wide as the kind's tile, one behind the other.
// It does not read beyond the last column. A call of assembly cannot be interrupted, so it
// handles at most kBlock rows, a few µs.
func (k kind) panel(dst []float32, b *Matrix, trans bool, depth, col, cols int) {
	nr := k.cols()
	for p := 0; p < depth; p += kBlock {
		n := min(kBlock, depth-p)
		if trans {
			k.transpose(dst[p*nr:], nr, b, col, p, cols, n)
		} else {
			k.copy(dst[p*nr:], nr, b, p, col, n, cols)
		}
	}
}

// transpose writes the transpose of a part of a matrix to dst, as fp32.
func (k kind) transpose(dst []float32, ldd int, m *Matrix, row, col, rows, cols int) {
	whole := 0
	if k != plain && cols >= 8 {
		for ; whole+8 <= rows; whole += 8 {
			k.transpose8(dst[whole:], ldd, m, m.index(row+whole, col), cols/8)
		}
	}
	for i := range rows {
		from := 0
		if i < whole {
			from = cols &^ 7
		}
		for j := from; j < cols; j++ {
			dst[j*ldd+i] = m.value(m.index(row+i, col+j))
		}
	}
}

// copy writes a part of a matrix to dst, as fp32.
func (k kind) copy(dst []float32, ldd int, m *Matrix, row, col, rows, cols int) {
	whole := 0
	if k != plain && cols >= 8 && rows > 0 {
		whole = cols &^ 7
		k.copyRows(dst, ldd, m, m.index(row, col), rows, whole/8)
	}
	if whole == cols {
		return
	}
	for i := range rows {
		for j := whole; j < cols; j++ {
			dst[i*ldd+j] = m.value(m.index(row+i, col+j))
		}
	}
}

// value returns a number as fp32. A bf16 is the upper half of one.
func (m *Matrix) value(i int) float32 {
	if m.F32 != nil {
		return m.F32[i]
	}
	return math.Float32frombits(uint32(m.BF16[i]) << 16)
}

// round writes src to dst, rounded to bf16.
func (k kind) round(dst []uint16, src []float32) {
	whole := 0
	if k != plain && len(src) >= 8 {
		whole = len(src) &^ 7
		k.round8(dst, src, whole/8)
	}
	for i := whole; i < len(src); i++ {
		dst[i] = toBF16(src[i])
	}
}

// toBF16 rounds to nearest even. A NaN becomes 0x7fff, as in package kernels.
func toBF16(v float32) uint16 {
	b := math.Float32bits(v)
	if v != v {
		return 0x7fff
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}
