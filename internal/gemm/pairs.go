// This file owns products of two matrices of bf16, for kinds whose instructions multiply
// pairs of bf16 and add both products to an fp32. A pair lies in the place of a float32, the
// first number in its lower half. A row of A has its pairs side by side. A panel of B has
// a row for each pair of k, with the pairs of 32 columns.
//
// Zeros fill up k to whole steps of an instruction. Tiles of registers are always computed
// whole, rows and columns beyond the edge included, and what lies beyond is not stored. So
// there is one order of sums for all elements of C.

package gemm

import (
	"sync"
	"unsafe"
)

// A thread computes a tile of C of pairRows x pairWide, pairBlock values of k at a time. A
// panel of B, 32 x 512 numbers, takes 32 KiB of the first cache. The tile's part of B, 512
// KiB, and its rows of A, 100 KiB, stay in the second cache.
const (
	pairRows  = 96 // a multiple of every kind's
	pairWide  = 512
	pairCols  = 32 // of a panel
	pairBlock = 512
	pairStep  = 16 // pairs that AMX adds up at a time
	// pairPitch is the distance between rows of A, and cPitch that between rows of C if C
	// cannot hold sums. The excess keeps rows from falling on the same cache lines.
	pairPitch = pairBlock/2 + 16
	cPitch    = pairWide + 16
	// pairLeast is the least n and k that pay.
	pairLeast = 32
)

// pairs returns how many pairs a row of k numbers has, with those that fill it up.
func pairs(k int) int { return (k + 2*pairStep - 1) / (2 * pairStep) * pairStep }

// takesPairs reports whether a kind computes a product in pairs. It does not depend on the
// number of rows: a row has the same bits alone and among others.
func (k kind) takesPairs(p *Product, depth int) bool {
	return k >= avx512BF16 && p.A.BF16 != nil && p.B.BF16 != nil && p.C.Cols >= pairLeast && depth >= pairLeast
}

// pairSpeed returns about how many times as fast as fp32 pairs are.
func (k kind) pairSpeed() int {
	if k == amx {
		return 8
	}
	return 2
}

// pairRoom is what a thread needs: rows of A, what it is about to transpose, sums of a
// panel, and C if that cannot hold sums.
type pairRoom struct {
	a    [pairRows * pairPitch]float32
	turn [pairRows * pairBlock / 2]float32
	sums [pairRows * pairCols]float32
	c    [pairRows * cPitch]float32
}

var pairRooms = sync.Pool{New: func() any { return new(pairRoom) }}

// tilePairs computes the tile that begins at a row and a column.
func (b *batch) tilePairs(x *part, row, col int) {
	room := pairRooms.Get().(*pairRoom)
	defer pairRooms.Put(room)
	rows, cols := min(pairRows, x.m-row), min(pairWide, x.to-col)
	c, ldc := b.begin(x, room.c[:], cPitch, row, col, rows, cols)
	for p := 0; p < x.k; p += pairBlock {
		k, add := min(pairBlock, x.k-p), p > 0 || x.Plus.live()
		b.kind.pairsOfA(room, x, row, rows, p, k)
		for j := 0; j < cols; j += pairCols {
			wide := min(pairCols, cols-j)
			panel := b.packed[x.packed+(col-x.from+j)*x.depth+p/2*pairCols:]
			b.kind.sumPairs(room, panel, rows, pairs(k))
			if x.C.BF16 != nil && p+k == x.k {
				b.kind.mergeBF16(x.C.BF16[x.C.index(row, col+j):], x.C.Pitch, c[j:], ldc, room.sums[:], rows, wide, add)
			} else {
				b.kind.mergeF32(c[j:], ldc, room.sums[:], rows, wide, add)
			}
		}
	}
}

// pairsOfA copies rows of op(A) from row on and columns from p on.
func (k kind) pairsOfA(room *pairRoom, x *part, row, rows, p, depth int) {
	if !x.TransA {
		layRows(room.a[:], &x.A, row, p, rows, depth)
		return
	}
	for j := 0; j < rows; j += pairCols {
		k.weaveRows(room.turn[j:], pairRows, &x.A, p, row+j, depth, min(pairCols, rows-j))
	}
	k.transpose(room.a[:], pairPitch, &Matrix{F32: room.turn[:], Pitch: pairRows}, 0, 0, pairs(depth), (rows+7)&^7)
}

// panelPairs lays out columns of op(B).
func (k kind) panelPairs(dst []float32, b *Matrix, trans bool, depth, col, cols int) {
	room := pairRooms.Get().(*pairRoom)
	defer pairRooms.Put(room)
	for p := 0; p < depth; p += pairBlock {
		n, dst := min(pairBlock, depth-p), dst[p/2*pairCols:]
		if !trans {
			k.weaveRows(dst, pairCols, b, p, col, n, cols)
			continue
		}
		layRows(room.turn[:], b, col, p, cols, n)
		k.transpose(dst, pairCols, &Matrix{F32: room.turn[:], Pitch: pairPitch}, 0, 0, (cols+7)&^7, pairs(n))
	}
}

// layRows copies a part of a matrix. Rows of dst are pairPitch apart and end with zeros.
func layRows(dst []float32, m *Matrix, row, col, rows, cols int) {
	for i := range rows {
		to := unsafe.Slice((*uint16)(unsafe.Pointer(&dst[i*pairPitch])), 2*pairs(cols))
		n := copy(to, m.BF16[m.index(row+i, col):][:cols])
		clear(to[n:])
	}
}

// noRow pairs with the last one of an odd number of rows.
var noRow [pairCols]uint16

// weaveRows pairs each row of a part of a matrix with the next one. Rows of dst are ldd
// apart and as wide as a panel. Rows of zeros follow.
func (k kind) weaveRows(dst []float32, ldd int, m *Matrix, row, col, rows, cols int) {
	src, n := m.BF16[m.index(row, col):], rows/2
	if n > 0 {
		k.weave(dst, ldd, src, src[m.Pitch:], 2*m.Pitch, n, cols)
	}
	if rows%2 > 0 {
		k.weave(dst[n*ldd:], ldd, src[2*n*m.Pitch:], noRow[:], 0, 1, cols)
		n++
	}
	for ; n < pairs(rows); n++ {
		clear(dst[n*ldd:][:pairCols])
	}
}
