// This file owns the instructions: registers of 16 lanes, operands in memory, and the
// frame of a loop.

package main

import (
	"fmt"
	"math"
	"strings"
)

// slice is an operand in memory.
type slice struct {
	name string
	half bool // of bf16
}

func (s slice) element() string {
	if s.half {
		return "uint16"
	}
	return "float32"
}

// loop is one loop over 16 elements a turn.
type loop struct {
	name    string
	slices  []slice
	scalars []string
	table   bool   // its numbers are fields of an Adam, at h
	sums    int    // how many registers sum up results: none, 1 or 4
	combine string // the instruction that adds to a sum
	empty   string // the result over no elements
	body    func(a *asm)
}

// reg is a register of 16 lanes: Z0 to Z7, or Y0 and Y1 to Y14 and Y15.
type reg int

// spare is the register that holds scalars under AVX2. No body uses it, but sums may.
const spare reg = 6

// number is a constant operand, scalar an argument of that name, and field a field of Adam.
type (
	number uint32
	scalar string
	field  int
	memory string // the current elements of a slice
)

func f32(v float32) number { return number(math.Float32bits(v)) }

// constants are the numbers in memory, each repeated eight times for AVX2.
type constants struct {
	at    map[uint32]int
	order []uint32
}

func (c *constants) place(v uint32) int {
	if _, ok := c.at[v]; !ok {
		c.at[v] = 32 * len(c.order)
		c.order = append(c.order, v)
	}
	return c.at[v]
}

func (c *constants) data() string {
	var b strings.Builder
	b.WriteString("\n")
	for _, v := range c.order {
		for i := range 4 {
			fmt.Fprintf(&b, "DATA numbers<>+%d(SB)/8, $0x%08x%08x\n", c.at[v]+8*i, v, v)
		}
	}
	fmt.Fprintf(&b, "GLOBL numbers<>(SB), RODATA|NOPTR, $%d\n", 32*len(c.order))
	return b.String()
}

// asm is a function under construction.
type asm struct {
	*loop
	*constants
	wide   bool
	code   strings.Builder
	shift  int            // offset in elements from the index
	sum    reg            // the register that the body adds to
	kept   map[string]int // AVX-512: the sources of registers from Z16 on
	keeper strings.Builder
}

var pointers = []string{"DI", "SI", "DX", "R8", "R9", "R10"}

func (a *asm) emit(format string, args ...any) { fmt.Fprintf(&a.code, "\t"+format+"\n", args...) }

// address returns the address of a slice's elements, or of those of a half register.
func (a *asm) address(name string, part int) string {
	for i, s := range a.slices {
		if s.name != name {
			continue
		}
		size := 4
		if s.half {
			size = 2
		}
		return fmt.Sprintf("%d(%s)(AX*%d)", size*(a.shift+8*part), pointers[i], size)
	}
	panic("gen: no slice " + name)
}

// source returns where a number comes from that all lanes share.
func (a *asm) source(x any) string {
	switch x := x.(type) {
	case number:
		return fmt.Sprintf("numbers<>+%d(SB)", a.place(uint32(x)))
	case scalar:
		at := 8*len(a.slices) + 8
		for i, s := range a.scalars {
			if s == string(x) {
				return fmt.Sprintf("%s+%d(FP)", s, at+4*i)
			}
		}
	case field:
		return fmt.Sprintf("%d(BX)", 4*int(x))
	}
	panic(fmt.Sprint("gen: no source ", x))
}

// operand returns the part of an operand that an instruction reads.
func (a *asm) operand(x any, part int) string {
	switch x := x.(type) {
	case reg:
		if a.wide {
			return fmt.Sprintf("Z%d", x)
		}
		return fmt.Sprintf("Y%d", 2*int(x)+part)
	case memory:
		return a.address(string(x), part)
	}
	from := a.source(x)
	if a.wide {
		if _, ok := a.kept[from]; !ok {
			a.kept[from] = 16 + len(a.kept)
			fmt.Fprintf(&a.keeper, "\tVBROADCASTSS %s, Z%d\n", from, a.kept[from])
		}
		if a.kept[from] > 31 {
			panic("gen: too many numbers in " + a.name)
		}
		return fmt.Sprintf("Z%d", a.kept[from])
	}
	if _, ok := x.(number); ok {
		return from
	}
	return fmt.Sprintf("Y%d", 2*int(spare))
}

// fetch loads an operand that is not a constant into the spare register of AVX2.
func (a *asm) fetch(xs ...any) {
	for _, x := range xs {
		switch x.(type) {
		case scalar, field:
			if !a.wide {
				a.emit("VBROADCASTSS %s, Y%d", a.source(x), 2*int(spare))
			}
		}
	}
}

func (a *asm) parts() int {
	if a.wide {
		return 1
	}
	return 2
}

// op emits dst = x op y. y may be any operand.
func (a *asm) op(name string, dst, x reg, y any) {
	a.fetch(y)
	for p := range a.parts() {
		a.emit("%s %s, %s, %s", name, a.operand(y, p), a.operand(x, p), a.operand(dst, p))
	}
}

func (a *asm) add(dst, x reg, y any) { a.op("VADDPS", dst, x, y) }
func (a *asm) sub(dst, x reg, y any) { a.op("VSUBPS", dst, x, y) }
func (a *asm) mul(dst, x reg, y any) { a.op("VMULPS", dst, x, y) }
func (a *asm) div(dst, x reg, y any) { a.op("VDIVPS", dst, x, y) }

// bitwise emits an operation on whole registers. Its name has the width under AVX-512.
func (a *asm) bitwise(name string, dst, x reg, y any) {
	if a.wide {
		name += "D"
	}
	a.op(name, dst, x, y)
}

// shiftBits emits dst = x shifted.
func (a *asm) shiftBits(name string, by int, dst, x reg) {
	for p := range a.parts() {
		a.emit("%s $%d, %s, %s", name, by, a.operand(x, p), a.operand(dst, p))
	}
}

// load emits dst = x: the elements of a slice or a number.
func (a *asm) load(dst reg, x any) {
	for p := range a.parts() {
		switch x.(type) {
		case scalar, field:
			a.emit("VBROADCASTSS %s, %s", a.source(x), a.operand(dst, p))
		default:
			a.emit("VMOVUPS %s, %s", a.operand(x, p), a.operand(dst, p))
		}
	}
}

func (a *asm) store(dst string, x reg) {
	for p := range a.parts() {
		a.emit("VMOVUPS %s, %s", a.operand(x, p), a.address(dst, p))
	}
}

// These are comparisons. Only the last is true for a NaN.
const (
	less    = 0x11
	greater = 0x1e
	unlike  = 0x03
)

// where emits code that writes a number to the lanes of dst in which x compares to y as
// given. AVX2 needs a register for the mask.
func (a *asm) where(dst, x reg, compare int, y any, put number, mask reg) {
	for p := range a.parts() {
		if a.wide {
			a.emit("VCMPPS $%#x, %s, %s, K1", compare, a.operand(y, p), a.operand(x, p))
			a.emit("VMOVAPS %s, K1, %s", a.operand(put, p), a.operand(dst, p))
			continue
		}
		a.emit("VCMPPS $%#x, %s, %s, %s", compare, a.operand(y, p), a.operand(x, p), a.operand(mask, p))
		a.emit("VBLENDVPS %s, %s, %s, %s", a.operand(mask, p), a.operand(put, p), a.operand(dst, p), a.operand(dst, p))
	}
}

// total emits code that combines a register with the sum. A maximum keeps the sum unless
// the register is greater.
func (a *asm) total(x reg) {
	for p := range a.parts() {
		a.emit("%s %s, %s, %s", a.combine, a.operand(a.sum, p), a.operand(x, p), a.operand(a.sum, p))
	}
}

// function returns the whole text. AX is the index in elements.
func (a *asm) function(kind string) string {
	a.kept = map[string]int{}
	a.emit("XORQ AX, AX")
	a.emit("MOVQ n+%d(FP), CX", 8*len(a.slices))
	if a.sums == 4 {
		a.fourSums()
	} else {
		a.oneSum()
	}
	if a.sums > 0 {
		a.fold()
	}
	size := 8*len(a.slices) + 8 + 4*len(a.scalars)
	if a.table {
		size += 8
	}
	var b strings.Builder
	if a.sums > 0 {
		size = (size + 7) / 8 * 8
		a.emit("VMOVSS X%d, ret+%d(FP)", a.first(), size)
		size += 4
	}
	a.emit("VZEROUPPER")
	a.emit("RET")
	fmt.Fprintf(&b, "\nTEXT ·%s%s(SB), NOSPLIT, $0-%d\n", a.name, kind, size)
	for i, s := range a.slices {
		fmt.Fprintf(&b, "\tMOVQ %s+%d(FP), %s\n", s.name, 8*i, pointers[i])
	}
	if a.table {
		fmt.Fprintf(&b, "\tMOVQ h+%d(FP), BX\n", 8*len(a.slices)+8)
	}
	return b.String() + a.keeper.String() + a.code.String()
}

// firstSum is the register of the first sum.
const firstSum = reg(4)

func (a *asm) first() int {
	at := firstSum
	if a.sums == 1 {
		at = 7
	}
	if a.wide {
		return int(at)
	}
	return 2 * int(at)
}

func (a *asm) begin(sum reg) {
	a.load(sum, map[string]number{"VADDPS": f32(0), "VMAXPS": f32(float32(math.Inf(-1)))}[a.combine])
}

func (a *asm) oneSum() {
	if a.sums == 1 {
		a.sum = 7
		a.begin(a.sum)
	}
	a.code.WriteString("\nturn:\n")
	a.body(a)
	a.emit("ADDQ $16, AX")
	a.emit("CMPQ AX, CX")
	a.emit("JNE turn")
}

// fourSums handles 64 elements a turn, and the rest by 16.
func (a *asm) fourSums() {
	for i := range reg(4) {
		a.begin(firstSum + i)
	}
	a.emit("MOVQ CX, BX")
	a.emit("ANDQ $~63, BX")
	a.emit("JEQ rest")
	a.code.WriteString("\nturn:\n")
	for i := range 4 {
		a.shift, a.sum = 16*i, firstSum+reg(i)
		a.body(a)
	}
	a.emit("ADDQ $64, AX")
	a.emit("CMPQ AX, BX")
	a.emit("JNE turn")
	a.code.WriteString("\nrest:\n")
	a.shift = 0
	for i := range 3 {
		a.sum = firstSum + reg(i)
		a.emit("CMPQ AX, CX")
		a.emit("JEQ done")
		a.body(a)
		a.emit("ADDQ $16, AX")
	}
	a.code.WriteString("\ndone:\n")
	for _, pair := range [][2]reg{{4, 6}, {5, 7}, {4, 5}} {
		a.sum = pair[0]
		a.total(pair[1])
	}
}

// fold combines the lanes of the first sum by halves, into its first lane.
func (a *asm) fold() {
	at := a.first()
	if a.wide {
		a.emit("VEXTRACTF64X4 $1, Z%d, Y0", at)
		a.emit("%s Y%d, Y0, Y%d", a.combine, at, at)
	} else {
		a.emit("%s Y%d, Y%d, Y%d", a.combine, at, at+1, at)
	}
	a.emit("VEXTRACTF128 $1, Y%d, X0", at)
	a.emit("%s X%d, X0, X%d", a.combine, at, at)
	a.emit("VPERMILPS $0x0e, X%d, X0", at)
	a.emit("%s X%d, X0, X%d", a.combine, at, at)
	a.emit("VPERMILPS $0x01, X%d, X0", at)
	a.emit("%s X%d, X0, X%d", a.combine, at, at)
}
