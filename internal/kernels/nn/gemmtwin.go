// This file owns matrix products in Go.

package nn

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/gemm"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// matrix returns rows of a strip as a matrix for products.
func (s strip) matrix(row, rows, cols int) gemm.Matrix {
	m := gemm.Matrix{Rows: rows, Cols: cols, Pitch: s.pitch}
	n := (rows-1)*s.pitch + cols
	if s.typ == kernels.BF16 {
		m.BF16 = s.bf16(row, 0, n)
	} else {
		m.F32 = device.Slice[float32](s.addr+4*uint64(row*s.pitch), n)
	}
	return m
}

// turned returns rows and columns as they are stored.
func turned(trans bool, rows, cols int) (int, int) {
	if trans {
		return cols, rows
	}
	return rows, cols
}

func gemmTwin(l *device.Launch) {
	a := l.Args()
	m, n := unpackPair(a[4])
	k, how := int(a[5]), a[8]
	ap, bp := unpackPair(a[6])
	cp, pp := unpackPair(a[7])
	p := gemm.Product{TransA: how&gemmTransA != 0, TransB: how&gemmTransB != 0}
	rows, cols := turned(p.TransA, m, k)
	p.A = stripOf(a[0], ap, how, 0).matrix(0, rows, cols)
	rows, cols = turned(p.TransB, k, n)
	p.B = stripOf(a[1], bp, how, 1).matrix(0, rows, cols)
	p.C = stripOf(a[2], cp, how, 2).matrix(0, m, n)
	if a[3] != 0 {
		p.Plus = stripOf(a[3], pp, how, 3).matrix(0, m, n)
	}
	gemm.Multiply(p)
}

// grouped is what products over experts share.
type grouped struct {
	a, b, c       strip
	seg           []uint32
	wide, narrow  int // argument 4
	rows, experts int
	transB, first bool
}

func groupedOf(l *device.Launch) (g grouped) {
	a := l.Args()
	g.wide, g.narrow = unpackPair(a[4])
	g.rows, g.experts = unpackPair(a[5])
	ap, bp := unpackPair(a[6])
	how := a[8]
	g.a, g.b, g.c = stripOf(a[0], ap, how, 0), stripOf(a[1], bp, how, 1), stripOf(a[2], int(a[7]), how, 2)
	g.seg = device.Slice[uint32](a[3], 2*g.experts)
	g.transB, g.first = how&gemmTransB != 0, how&gemmFirst != 0
	return g
}

// each makes a product for every expert that has rows, and computes all of them at once.
func (g *grouped) each(product func(expert, first, rows int) gemm.Product) {
	ps := make([]gemm.Product, 0, g.experts)
	for e := range g.experts {
		first, rows := int(g.seg[2*e]), int(g.seg[2*e+1])
		if first+rows > g.rows {
			panic(fmt.Sprintf("nn: expert %d has rows %d to %d of a matrix that has %d", e, first, first+rows, g.rows))
		}
		if rows > 0 {
			ps = append(ps, product(e, first, rows))
		}
	}
	gemm.Multiply(ps...)
}

func groupedTwin(l *device.Launch) {
	g := groupedOf(l)
	n, k := g.wide, g.narrow
	below, cols := turned(g.transB, k, n)
	g.each(func(e, first, rows int) gemm.Product {
		return gemm.Product{
			A: g.a.matrix(first, rows, k), B: g.b.matrix(e*below, below, cols), C: g.c.matrix(first, rows, n),
			TransB: g.transB,
		}
	})
}

func groupedGradTwin(l *device.Launch) {
	g := groupedOf(l)
	m, n := g.wide, g.narrow
	g.each(func(e, first, rows int) gemm.Product {
		p := gemm.Product{A: g.a.matrix(first, rows, m), B: g.b.matrix(first, rows, n), C: g.c.matrix(e*m, m, n), TransA: true}
		if !g.first {
			p.Plus = p.C
		}
		return p
	})
	for e := range g.experts {
		for row := e * m; g.first && g.seg[2*e+1] == 0 && row < (e+1)*m; row++ {
			clear(g.c.bytes(row, n))
		}
	}
}
