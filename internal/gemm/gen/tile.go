// This file owns the micro-kernels: a tile of C that stays in registers while k
// runs.

package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// shl shifts a register to the left.
func shl(by uint64, r Op) { SHLQ(Imm(by), r) }

// isa is how a set of instructions does what a tile needs.
type isa struct {
	rows, vectors, lanes int
	vector               func() VecVirtual
	zero                 func(v Op)
	load                 func(from, to Op, column int) // one column of vectors; lanes beyond the edge are zero
	store                func(from, to Op, column int)
	plus                 func(from, to Op, column int)
	// mask prepares load and store for so many columns of numbers.
	mask func(cols GPVirtual)
	doc  string
}

// avx512 has a tile of 12 x 32: 24 sums, two vectors of B and one number of A
// take 27 of 32 registers. Loads and stores are masked, which costs nothing.
func avx512() isa {
	masks := []Register{K1, K2}
	return isa{
		rows: 12, vectors: 2, lanes: 16,
		vector: func() VecVirtual { return ZMM() },
		zero:   func(v Op) { VPXORD(v, v, v) },
		load:   func(from, to Op, c int) { VMOVUPS_Z(from, masks[c], to) },
		store:  func(from, to Op, c int) { VMOVUPS(from, masks[c], to) },
		plus:   func(from, to Op, c int) { VADDPS(from, to, masks[c], to) },
		mask: func(cols GPVirtual) {
			m := GP64()
			MOVQ(cols, RCX)
			MOVQ(I32(1), m)
			SHLQ(CL, m)
			DECQ(m)
			KMOVW(m.As32(), K1)
			SHRQ(Imm(16), m)
			KMOVW(m.As32(), K2)
		},
		doc: "rows is 1 to 12, cols 1 to 32.",
	}
}

// avx2 has a tile of 6 x 16: 12 sums, two vectors of B and two numbers of A take
// all registers, so that only the tile of one vector has room for a mask.
func avx2() isa {
	table := GLOBL("lanes8", RODATA|NOPTR)
	for i := range 8 {
		DATA(4*i, U32(0xffffffff))
	}
	for i := range 8 {
		DATA(4*(8+i), U32(0))
	}
	mask := Y15
	return isa{
		rows: 6, vectors: 2, lanes: 8,
		vector: func() VecVirtual { return YMM() },
		zero:   func(v Op) { VXORPS(v, v, v) },
		load: func(from, to Op, c int) {
			if c == onlyColumn {
				VMASKMOVPS(from, mask, to)
			} else {
				VMOVUPS(from, to)
			}
		},
		store: func(from, to Op, c int) {
			if c == onlyColumn {
				VMASKMOVPS(from, mask, to)
			} else {
				VMOVUPS(from, to)
			}
		},
		plus: func(from, to Op, c int) {
			if c == onlyColumn {
				x := YMM()
				VMASKMOVPS(from, mask, x)
				VADDPS(x, to, to)
			} else {
				VADDPS(from, to, to)
			}
		},
		mask: func(cols GPVirtual) {
			at, n := GP64(), GP64()
			LEAQ(table, at)
			MOVQ(I32(8), n)
			SUBQ(cols, n)
			VMOVDQU(Mem{Base: at, Index: n, Scale: 4}, mask)
		},
		doc: "rows is 1 to 6, cols 1 to 8 or 16.",
	}
}

// onlyColumn stands for the column of a tile that is one vector wide.
const onlyColumn = -1

// tile is what the loops of one function share.
type tile struct {
	isa
	name           string
	k, aks, ars    GPVirtual
	a              []GPVirtual // of rows 0, 3, 6 and 9
	b, bks, c, ldc GPVirtual
}

// generate writes a function for all tiles up to the largest: for each number of
// rows and of vectors a loop of its own.
func (s isa) generate(name string) {
	TEXT(name, NOSPLIT, "func(k int, a *float32, ars, aks int, b *float32, bks int, c *float32, ldc, rows, cols int, add bool)")
	Pragma("noescape")
	Doc(name+" is C = A B, or C += A B with add, for a tile of C of rows x cols.",
		"Rows of A are ars numbers apart and its columns aks; rows of B bks, rows of C",
		"ldc. k is positive; "+s.doc)
	// What is needed once is loaded where it is needed: registers are scarce.
	cols := param("cols", 1)
	s.mask(cols)
	CMPQ(cols, Imm(uint64(s.lanes)))
	JLE(LabelRef(name + "narrow"))
	s.tile(name).dispatch(s.vectors, "wide")
	Label(name + "narrow")
	s.tile(name).dispatch(1, "slim")
}

// tile loads the arguments.
func (s isa) tile(name string) tile {
	t := tile{isa: s, name: name}
	t.k = param("k", 1)
	t.a = []GPVirtual{param("a", 1)}
	t.ars, t.aks = param("ars", 4), param("aks", 4)
	t.b, t.bks = param("b", 1), param("bks", 4)
	t.c, t.ldc = param("c", 1), param("ldc", 4)
	three := GP64()
	LEAQ(Mem{Base: t.ars, Index: t.ars, Scale: 2}, three)
	for i := 1; i < (s.rows+2)/3; i++ {
		next := GP64()
		LEAQ(Mem{Base: t.a[i-1], Index: three, Scale: 1}, next)
		t.a = append(t.a, next)
	}
	return t
}

// dispatch chooses the loop by the number of rows, the full tile first.
func (t tile) dispatch(vectors int, what string) {
	label := func(r int) string { return fmt.Sprintf("%s%s%d", t.name, what, r) }
	rows := param("rows", 1)
	for r := t.rows; r > 1; r-- {
		CMPQ(rows, Imm(uint64(r)))
		JEQ(LabelRef(label(r)))
	}
	for r := 1; r <= t.rows; r++ {
		Label(label(r))
		t.loop(r, vectors, label(r))
		VZEROUPPER()
		RET()
	}
}

func (t tile) loop(rows, vectors int, label string) {
	column := func(v int) int {
		if vectors == 1 && t.lanes == 8 {
			return onlyColumn
		}
		return v
	}
	width := 4 * t.lanes
	sums := make([][]VecVirtual, rows)
	for i := range sums {
		for range vectors {
			sums[i] = append(sums[i], t.vector())
		}
	}
	// C is on its way to the cache while k runs.
	t.each(rows, vectors, func(i, v int, m Mem) {
		PREFETCHT0(m)
		t.zero(sums[i][v])
	})
	bs := make([]VecVirtual, vectors)
	for v := range bs {
		bs[v] = t.vector()
	}
	Label(label + "k")
	for v, b := range bs {
		t.load(Mem{Base: t.b, Disp: v * width}, b, column(v))
	}
	for i := range rows {
		x := t.vector()
		m := Mem{Base: t.a[i/3]}
		if i%3 > 0 {
			m.Index, m.Scale = t.ars, uint8(i%3)
		}
		VBROADCASTSS(m, x)
		for v, b := range bs {
			VFMADD231PS(b, x, sums[i][v])
		}
	}
	for i := range (rows + 2) / 3 {
		ADDQ(t.aks, t.a[i])
	}
	ADDQ(t.bks, t.b)
	DECQ(t.k)
	JNZ(LabelRef(label + "k"))
	add := Load(Param("add"), GP8())
	TESTB(add, add)
	JZ(LabelRef(label + "store"))
	t.each(rows, vectors, func(i, v int, m Mem) { t.plus(m, sums[i][v], column(v)) })
	Label(label + "store")
	t.each(rows, vectors, func(i, v int, m Mem) { t.store(sums[i][v], m, column(v)) })
}

// each calls f for the vectors of C.
func (t tile) each(rows, vectors int, f func(i, v int, m Mem)) {
	at := GP64()
	MOVQ(t.c, at)
	for i := range rows {
		for v := range vectors {
			f(i, v, Mem{Base: at, Disp: 4 * t.lanes * v})
		}
		if i+1 < rows {
			ADDQ(t.ldc, at)
		}
	}
}
