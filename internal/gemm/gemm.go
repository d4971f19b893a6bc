// Package gemm multiplies matrices on the CPU. Inputs and results are fp32 or bf16, and sums
// are fp32. [Multiply] divides products over threads. [Block] multiplies small blocks inside
// other kernels.
//
// A tile of C stays in registers while k runs. Each element of C begins with Plus, if there
// is one. Sums over 256 values of k each follow in order, each one chain of multiply-adds
// that begins with zero. The result is rounded once. So it does not depend on threads, on
// where tiles begin, or on other rows and columns. AVX-512 and AVX2 fuse multiply-adds and
// compute the same bits.
//
// Two matrices of bf16 are multiplied by AMX or VDPBF16PS where that is faster, unless they
// are small: pairs.go. Which one depends on the processor, on n and on k, never on m. Sums
// have an order of their own then, over 512 values of k each, and numbers below 2^-126 count
// as zero. All else holds: the bits of a row do not depend on threads, places or other rows.
//
// This file owns the types and the division of products into tiles.
package gemm

import (
	"fmt"
	"sort"
	"sync"

	"github.com/stowage-dev/stowage/internal/parallel"
)

//go:generate go run -C gen main.go -out ../tile_amd64.s -stubs ../tile_amd64.go -pkg gemm

// Matrix is rows of numbers that are Pitch apart. Either F32 or BF16 has memory.
type Matrix struct {
	F32               []float32
	BF16              []uint16
	Rows, Cols, Pitch int
}

func (m *Matrix) live() bool { return m.F32 != nil || m.BF16 != nil }

// index returns the index of an element.
func (m *Matrix) index(row, col int) int { return row*m.Pitch + col }

// Product is C = op(A) op(B), plus Plus if that has memory. op transposes or does nothing.
// Plus may be C. C must not overlap anything else.
type Product struct {
	A, B, C, Plus  Matrix
	TransA, TransB bool
}

// sizes returns m, n and k. It panics if the matrices do not fit together.
func (p *Product) sizes() (m, n, k int) {
	m, k = p.A.Rows, p.A.Cols
	if p.TransA {
		m, k = k, m
	}
	kb, n := p.B.Rows, p.B.Cols
	if p.TransB {
		kb, n = n, kb
	}
	if kb != k || p.C.Rows != m || p.C.Cols != n || p.Plus.live() && (p.Plus.Rows != m || p.Plus.Cols != n) {
		panic(fmt.Sprintf("gemm: expected matrices that fit, got %d x %d times %d x %d for a result of %d x %d", m, k, kb, n, p.C.Rows, p.C.Cols))
	}
	for _, x := range [...]*Matrix{&p.A, &p.B, &p.C, &p.Plus} {
		check("a matrix", max(len(x.F32), len(x.BF16)), x.Pitch, x.Rows, x.Cols)
	}
	return m, n, k
}

// A thread computes a tile of C of tileRows x tileCols, kBlock values of k at a time. A
// panel of B, 32 x 256 numbers, fills 32 of the first cache's 48 KiB and serves four tiles
// of registers, one below the other. The tile's part of B, 256 KiB, stays in the second
// cache. tileRows is a multiple of every kind's rows.
const (
	tileRows = 48
	tileCols = 256
	kBlock   = 256
	// aPitch is the distance between rows of the copy of A. The excess keeps rows from
	// falling on the same cache lines.
	aPitch = kBlock + 16
	// packMost is how many numbers of B are laid out at a time: 16 MiB.
	packMost = 4 << 20
	// packRun and tileRun are how many numbers and multiply-adds are worth a switch between
	// threads: about 20 µs.
	packRun = 1 << 16
	tileRun = 1 << 20
)

// Multiply computes products that do not depend on each other, on all threads. It panics if
// the sizes of a product do not fit.
func Multiply(ps ...Product) { multiply(best(), packMost, ps) }

func multiply(kind kind, most int, ps []Product) {
	b := batches.Get().(*batch)
	b.kind, b.most = kind, most
	for i := range ps {
		p := &ps[i]
		m, n, k := p.sizes()
		if m == 0 || n == 0 {
			continue
		}
		step := n
		if k*n > most {
			step = max(tileCols, most/k/tileCols*tileCols)
		}
		for from := 0; from < n; from += step {
			b.add(p, m, k, from, min(from+step, n))
		}
	}
	b.run()
	batches.Put(b)
}

// batch is products, or parts of them, that are computed together. B is first laid out in
// panels as wide as a tile of registers. Then tiles are computed.
type batch struct {
	kind          kind
	parts         []part
	packed        []float32
	size, most    int // numbers in packed
	panels, tiles int
	work          int // multiply-adds of AVX-512 that take as long
}

// part is some columns of a product.
type part struct {
	*Product
	m, k, from, to int
	direct         bool // B is read without a copy
	paired         bool // A and B are multiplied in pairs
	tall, wide     int  // a tile
	depth          int  // numbers of a column of B as it is laid out
	packed         int  // where its panels begin
	panel, tile    int  // its first ones in the batch
	rowTiles       int
}

var batches = sync.Pool{New: func() any { return new(batch) }}

func (b *batch) add(p *Product, m, k, from, to int) {
	x := part{Product: p, m: m, k: k, from: from, to: to, panel: b.panels, tile: b.tiles}
	x.tall, x.wide, x.depth = tileRows, tileCols, k
	work := m * k * (to - from)
	if b.kind.takesPairs(p, k) {
		x.paired, x.tall, x.wide, x.depth = true, pairRows, pairWide, pairs(k)
		work /= b.kind.pairSpeed()
	}
	x.rowTiles = (m + x.tall - 1) / x.tall
	// A copy of B does not pay for few rows.
	x.direct = !p.TransB && p.B.F32 != nil && x.rowTiles == 1
	if !x.direct {
		panels := (to - from + b.kind.cols() - 1) / b.kind.cols()
		size := panels * b.kind.cols() * x.depth
		if b.size+size > b.most && len(b.parts) > 0 {
			b.run()
			x.panel, x.tile = 0, 0
		}
		x.packed = b.size
		b.size += size
		b.panels += panels
	}
	b.tiles += x.rowTiles * ((to - from + x.wide - 1) / x.wide)
	b.work += work
	b.parts = append(b.parts, x)
}

// panelsAtOnce and tilesAtOnce return how many are worth a switch between threads.
func (b *batch) panelsAtOnce() int { return b.panels*packRun/max(b.size, packRun) + 1 }
func (b *batch) tilesAtOnce() int  { return b.tiles*tileRun/max(b.work, tileRun) + 1 }

// run computes the added products and removes them.
func (b *batch) run() {
	if len(b.packed) < b.size {
		b.packed = make([]float32, b.size)
	}
	if b.panels > 0 {
		parallel.For(b.panels, b.panelsAtOnce(), b.pack)
	}
	if b.tiles > 0 {
		parallel.For(b.tiles, b.tilesAtOnce(), b.compute)
	}
	clear(b.parts)
	*b = batch{kind: b.kind, most: b.most, parts: b.parts[:0], packed: b.packed}
}

// pack lays out panels of B.
func (b *batch) pack(from, to int) {
	nr := b.kind.cols()
	at := sort.Search(len(b.parts), func(i int) bool { return b.parts[i].panel > from }) - 1
	for i := from; i < to; i++ {
		for at+1 < len(b.parts) && b.parts[at+1].panel <= i {
			at++
		}
		x := &b.parts[at]
		n := i - x.panel
		col := x.from + n*nr
		panel, cols := b.packed[x.packed+n*nr*x.depth:][:nr*x.depth], min(nr, x.to-col)
		if raced {
			x.touchB(col, cols)
		}
		if x.paired {
			b.kind.panelPairs(panel, &x.B, x.TransB, x.k, col, cols)
		} else {
			b.kind.panel(panel, &x.B, x.TransB, x.k, col, cols)
		}
	}
}

// compute computes tiles. Tiles below each other follow each other, because they share a
// part of B.
func (b *batch) compute(from, to int) {
	at := sort.Search(len(b.parts), func(i int) bool { return b.parts[i].tile > from }) - 1
	for i := from; i < to; i++ {
		for at+1 < len(b.parts) && b.parts[at+1].tile <= i {
			at++
		}
		x := &b.parts[at]
		n := i - x.tile
		row, col := n%x.rowTiles*x.tall, x.from+n/x.rowTiles*x.wide
		if raced {
			x.touch(row, col, min(x.tall, x.m-row), min(x.wide, x.to-col))
		}
		if x.paired {
			b.tilePairs(x, row, col)
		} else {
			b.tile(x, row, col)
		}
	}
}

// scratch is a thread's copy of A, and of C if C cannot hold fp32 sums.
type scratch struct {
	a [tileRows * aPitch]float32
	c [tileRows * tileCols]float32
}

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// tile computes the tile that begins at a row and a column.
func (b *batch) tile(x *part, row, col int) {
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	rows, cols, nr := min(tileRows, x.m-row), min(tileCols, x.to-col), b.kind.cols()
	c, ldc := b.begin(x, s.c[:], tileCols, row, col, rows, cols)
	add := x.Plus.live()
	for p := 0; p == 0 || p < x.k; p += kBlock {
		k := min(kBlock, x.k-p)
		a, ars, aks := b.rowsOfA(x, s, row, rows, p, k, cols)
		for j := 0; j < cols; j += nr {
			bs, bks := []float32(nil), nr
			switch {
			case k == 0:
			case x.direct:
				bs, bks = x.B.F32[x.B.index(p, col+j):], x.B.Pitch
			default:
				bs = b.packed[x.packed+(col-x.from+j)*x.k+p*nr:]
			}
			b.kind.column(a, ars, aks, bs, bks, c[j:], ldc, rows, min(nr, cols-j), k, add || p > 0)
		}
	}
	if x.C.BF16 != nil {
		for i := range rows {
			b.kind.round(x.C.BF16[x.C.index(row+i, col):][:cols], c[i*ldc:][:cols])
		}
	}
}

// begin returns where fp32 sums of a tile lie, in C or in scratch. It copies Plus to it.
func (b *batch) begin(x *part, scratch []float32, pitch, row, col, rows, cols int) (c []float32, ldc int) {
	c, ldc = scratch, pitch
	if x.C.F32 != nil {
		c, ldc = x.C.F32[x.C.index(row, col):], x.C.Pitch
	}
	if x.Plus.live() && !x.inPlace() {
		b.kind.copy(c, ldc, &x.Plus, row, col, rows, cols)
	}
	return c, ldc
}

// inPlace reports whether C holds Plus as fp32 before it holds the sum.
func (p *Product) inPlace() bool {
	return p.C.F32 != nil && p.Plus.F32 != nil && &p.C.F32[0] == &p.Plus.F32[0]
}

// column computes tiles of registers, one below the other. A has as many rows as
// C, ars apart, and its columns are aks apart.
func (k kind) column(a []float32, ars, aks int, b []float32, bks int, c []float32, ldc, rows, cols, depth int, add bool) {
	for i := 0; i < rows; i += k.rows() {
		k.tile(a[i*ars:], ars, aks, b, bks, c[i*ldc:], ldc, min(k.rows(), rows-i), cols, depth, add)
	}
}
