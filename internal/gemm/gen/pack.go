// This file owns the functions that lay out what tiles read: transposition and
// copies of rows, both of fp32 and of bf16 that is widened; and rounding.

package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

func elem(wide bool) (name string, size int) {
	if wide {
		return "uint16", 2
	}
	return "float32", 4
}

// load8 loads eight numbers as fp32. The bits of a bf16 are the upper half of the
// same number's in fp32.
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
	// Pairs of numbers, then fours, within the halves; then halves change places.
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
	// Half is half of a unit in the last place of bf16, less one.
	half, one := YMM(), YMM()
	VPCMPEQD(half, half, half)
	VPSRLD(Imm(31), half, one)
	VPSRLD(Imm(17), half, half)
	Label(name + "vector")
	x, odd, isNaN, upper := YMM(), YMM(), YMM(), YMM()
	VMOVUPS(Mem{Base: src}, x)
	// Half less one is added, and one more if the last bit that stays is set. A
	// NaN would wrap round; it becomes 0x7fff, which are half's bits.
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
