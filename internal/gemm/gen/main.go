// Command gen writes the assembly of package gemm. It is a module of its own, so
// that the generator is no dependency of the program; go generate in package gemm
// runs it.
//
// This file owns all of it: the micro-kernels, in which a tile of C stays in
// registers while k runs; then the functions that lay out what they read, and
// rounding.
package main

import (
	"fmt"
	"math/bits"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

func main() {
	ConstraintExpr("amd64,!purego")
	avx512().generate("tileAVX512")
	avx2().generate("tileAVX2")
	transpose("transposeF32", false)
	transpose("transposeBF16", true)
	copyRows("copyF32", false)
	copyRows("copyBF16", true)
	round()
	Generate()
}

// param loads an argument. If it counts numbers, it counts bytes afterwards.
func param(name string, size int) GPVirtual {
	r := Load(Param(name), GP64()).(GPVirtual)
	if shift := bits.TrailingZeros(uint(size)); shift > 0 {
		SHLQ(Imm(uint64(shift)), r)
	}
	return r
}

// isa describes how an instruction set does what a tile needs.
type isa struct {
	rows, vectors, lanes int
	vector               func() VecVirtual
	zero                 func(v Op)
	load                 func(from, to Op, column int) // one column of vectors; lanes beyond the edge are zero
	store                func(from, to Op, column int)
	plus                 func(from, to Op, column int)
	// mask prepares load and store for a number of columns.
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

// avx2 has a tile of 6 x 16. Its 12 sums, two vectors of B and two numbers of A take all
// registers, so only the tile of one vector has room for a mask.
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

// onlyColumn is the column of a tile that is one vector wide.
const onlyColumn = -1

// tile has what the loops of one function share.
type tile struct {
	isa
	name           string
	k, aks, ars    GPVirtual
	a              []GPVirtual // of rows 0, 3, 6 and 9
	b, bks, c, ldc GPVirtual
}

// generate writes a function for all tiles up to the largest, with a loop for each number
// of rows and vectors.
func (s isa) generate(name string) {
	TEXT(name, NOSPLIT, "func(k int, a *float32, ars, aks int, b *float32, bks int, c *float32, ldc, rows, cols int, add bool)")
	Pragma("noescape")
	Doc(name+" is C = A B, or C += A B with add, for a tile of C of rows x cols.",
		"Rows of A are ars numbers apart and its columns aks; rows of B bks, rows of C",
		"ldc. k is positive; "+s.doc)
	// Values that are needed once are loaded where they are needed, because registers are
	// scarce.
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
	// Prefetch C while k runs.
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

func elem(wide bool) (name string, size int) {
	if wide {
		return "uint16", 2
	}
	return "float32", 4
}

// load8 loads eight numbers as fp32. The bits of a bf16 are the upper half of the same
// number in fp32.
func load8(from Op, to VecVirtual, wide bool) {
	if wide {
		VPMOVZXWD(from, to)
		VPSLLD(Imm(16), to, to)
	} else {
		VMOVUPS(from, to)
	}
}

// transpose writes a function for blocks of 8 x 8, side by side in the source.
func transpose(name string, wide bool) {
	typ, size := elem(wide)
	TEXT(name, NOSPLIT, "func(dst *float32, ldd int, src *"+typ+", lds, blocks int)")
	Pragma("noescape")
	Doc(name + " transposes 8 rows of 8*blocks numbers; blocks is positive.")
	dst, ldd := param("dst", 1), param("ldd", 4)
	src, lds := param("src", 1), param("lds", size)
	blocks := param("blocks", 1)
	Label(name + "block")
	at := GP64()
	MOVQ(src, at)
	var x, y [8]VecVirtual
	for i := range x {
		x[i], y[i] = YMM(), YMM()
	}
	for i := range x {
		load8(Mem{Base: at}, x[i], wide)
		if i < 7 {
			ADDQ(lds, at)
		}
	}
	// Interleave pairs of numbers, then fours, within the halves. Then exchange the halves.
	for i := 0; i < 8; i += 2 {
		VUNPCKLPS(x[i+1], x[i], y[i])
		VUNPCKHPS(x[i+1], x[i], y[i+1])
	}
	for i := 0; i < 8; i += 4 {
		VUNPCKLPD(y[i+2], y[i], x[i])
		VUNPCKHPD(y[i+2], y[i], x[i+1])
		VUNPCKLPD(y[i+3], y[i+1], x[i+2])
		VUNPCKHPD(y[i+3], y[i+1], x[i+3])
	}
	out := GP64()
	MOVQ(dst, out)
	for _, half := range []uint64{0x20, 0x31} {
		for i := range 4 {
			VPERM2F128(Imm(half), x[i+4], x[i], y[i])
			VMOVUPS(y[i], Mem{Base: out})
			ADDQ(ldd, out)
		}
	}
	MOVQ(out, dst)
	ADDQ(Imm(uint64(8*size)), src)
	DECQ(blocks)
	JNZ(LabelRef(name + "block"))
	VZEROUPPER()
	RET()
}

// copyRows writes a function that copies a rectangle.
func copyRows(name string, wide bool) {
	typ, size := elem(wide)
	TEXT(name, NOSPLIT, "func(dst *float32, ldd int, src *"+typ+", lds, rows, vectors int)")
	Pragma("noescape")
	Doc(name + " copies rows of 8*vectors numbers; both counts are positive.")
	dst, ldd := param("dst", 1), param("ldd", 4)
	src, lds := param("src", 1), param("lds", size)
	rows, vectors := param("rows", 1), param("vectors", 1)
	Label(name + "row")
	from, to, n := GP64(), GP64(), GP64()
	MOVQ(src, from)
	MOVQ(dst, to)
	MOVQ(vectors, n)
	Label(name + "vector")
	x := YMM()
	load8(Mem{Base: from}, x, wide)
	VMOVUPS(x, Mem{Base: to})
	ADDQ(Imm(uint64(8*size)), from)
	ADDQ(Imm(32), to)
	DECQ(n)
	JNZ(LabelRef(name + "vector"))
	ADDQ(lds, src)
	ADDQ(ldd, dst)
	DECQ(rows)
	JNZ(LabelRef(name + "row"))
	VZEROUPPER()
	RET()
}

// round writes a function that rounds sums to bf16.
func round() {
	const name = "roundBF16"
	TEXT(name, NOSPLIT, "func(dst *uint16, src *float32, vectors int)")
	Pragma("noescape")
	Doc(name + " rounds 8*vectors numbers to nearest even; vectors is positive.")
	dst, src, n := param("dst", 1), param("src", 1), param("vectors", 1)
	// half is half of a unit in the last place of bf16, less one.
	half, one := YMM(), YMM()
	VPCMPEQD(half, half, half)
	VPSRLD(Imm(31), half, one)
	VPSRLD(Imm(17), half, half)
	Label(name + "vector")
	x, odd, isNaN, upper := YMM(), YMM(), YMM(), YMM()
	VMOVUPS(Mem{Base: src}, x)
	// Add half, and one more if the last remaining bit is set. A NaN would overflow; it
	// becomes 0x7fff, which are the bits of half.
	VPSRLD(Imm(16), x, odd)
	VPAND(one, odd, odd)
	VPADDD(half, odd, odd)
	VCMPPS(Imm(3), x, x, isNaN)
	VPADDD(odd, x, x)
	VPSRLD(Imm(16), x, x)
	VBLENDVPS(isNaN, half, x, x)
	VEXTRACTI128(Imm(1), x, upper.AsX())
	VPACKUSDW(upper.AsX(), x.AsX(), x.AsX())
	VMOVDQU(x.AsX(), Mem{Base: dst})
	ADDQ(Imm(16), dst)
	ADDQ(Imm(32), src)
	DECQ(n)
	JNZ(LabelRef(name + "vector"))
	VZEROUPPER()
	RET()
}
