// This file owns the loops. Each has the same products and sums in the same order as the Go
// loop of the same name.

package main

import "math"

func floats(names ...string) (s []slice) {
	for _, n := range names {
		s = append(s, slice{name: n})
	}
	return s
}

var loops = []*loop{
	{name: "add", slices: floats("dst", "a", "b"), body: func(a *asm) {
		a.load(0, memory("a"))
		a.add(0, 0, memory("b"))
		a.store("dst", 0)
	}},
	{name: "mul", slices: floats("dst", "a", "b"), body: func(a *asm) {
		a.load(0, memory("a"))
		a.mul(0, 0, memory("b"))
		a.store("dst", 0)
	}},
	{name: "scale", slices: floats("dst", "x"), scalars: []string{"s"}, body: func(a *asm) {
		a.load(0, memory("x"))
		a.mul(0, 0, scalar("s"))
		a.store("dst", 0)
	}},
	{name: "axpy", slices: floats("y", "x"), scalars: []string{"s"}, body: func(a *asm) {
		a.load(0, memory("x"))
		a.mul(0, 0, scalar("s"))
		a.add(0, 0, memory("y"))
		a.store("y", 0)
	}},
	{name: "addMul", slices: floats("y", "a", "b"), scalars: []string{"s"}, body: func(a *asm) {
		a.load(0, memory("a"))
		a.mul(0, 0, memory("b"))
		a.mul(0, 0, scalar("s"))
		a.add(0, 0, memory("y"))
		a.store("y", 0)
	}},
	{name: "mulScale", slices: floats("dst", "x", "w"), scalars: []string{"s"}, body: func(a *asm) {
		a.load(0, memory("x"))
		a.mul(0, 0, scalar("s"))
		a.mul(0, 0, memory("w"))
		a.store("dst", 0)
	}},
	{name: "normGrad", slices: floats("dx", "dy", "w", "x"), scalars: []string{"r", "c"}, body: func(a *asm) {
		a.load(0, memory("dy"))
		a.mul(0, 0, memory("w"))
		a.mul(0, 0, scalar("r"))
		a.load(1, memory("x"))
		a.mul(1, 1, scalar("c"))
		a.sub(0, 0, reg(1))
		a.store("dx", 0)
	}},
	{name: "rotate", slices: floats("a", "b", "cos", "sin"), body: func(a *asm) {
		a.load(0, memory("a"))
		a.load(1, memory("b"))
		a.mul(2, 0, memory("cos"))
		a.mul(3, 1, memory("sin"))
		a.sub(2, 2, reg(3))
		a.mul(1, 1, memory("cos"))
		a.mul(0, 0, memory("sin"))
		a.add(1, 1, reg(0))
		a.store("a", 2)
		a.store("b", 1)
	}},
	{name: "dot", slices: floats("a", "b"), sums: 4, combine: "VADDPS", empty: "0", body: func(a *asm) {
		a.load(0, memory("a"))
		a.mul(0, 0, memory("b"))
		a.total(0)
	}},
	{name: "dot3", slices: floats("a", "b", "c"), sums: 4, combine: "VADDPS", empty: "0", body: func(a *asm) {
		a.load(0, memory("a"))
		a.mul(0, 0, memory("b"))
		a.mul(0, 0, memory("c"))
		a.total(0)
	}},
	{name: "sum", slices: floats("x"), sums: 4, combine: "VADDPS", empty: "0", body: func(a *asm) {
		a.load(0, memory("x"))
		a.total(0)
	}},
	{name: "max", slices: floats("x"), sums: 4, combine: "VMAXPS", empty: "minusInf", body: func(a *asm) {
		a.load(0, memory("x"))
		a.total(0)
	}},
	{name: "expSum", slices: floats("dst", "x"), scalars: []string{"minus"}, sums: 1, combine: "VADDPS", empty: "0", body: func(a *asm) {
		a.load(0, memory("x"))
		a.sub(0, 0, scalar("minus"))
		exp(a)
		a.store("dst", 2)
		a.total(2)
	}},
	{name: "sigmoid", slices: floats("dst", "x"), body: func(a *asm) {
		sigmoid(a, "x")
		a.store("dst", 5)
	}},
	{name: "silu", slices: floats("dst", "x"), body: func(a *asm) {
		sigmoid(a, "x")
		a.mul(5, 5, reg(4))
		a.store("dst", 5)
	}},
	{name: "siluGrad", slices: floats("dx", "x", "dy"), body: func(a *asm) {
		sigmoid(a, "x")
		slope(a)
		a.mul(1, 1, memory("dy"))
		a.store("dx", 1)
	}},
	{name: "swiGLU", slices: floats("y", "a", "b"), scalars: []string{"w"}, body: func(a *asm) {
		sigmoid(a, "a")
		a.mul(4, 4, reg(5))
		a.mul(4, 4, memory("b"))
		a.mul(4, 4, scalar("w"))
		a.store("y", 4)
	}},
	{name: "swiGLUGrad", slices: floats("da", "db", "y", "a", "b", "dy"), scalars: []string{"w"}, sums: 1, combine: "VADDPS", empty: "0", body: swiGLUGrad},
	{name: "widen", slices: []slice{{name: "dst"}, {name: "x", half: true}}, body: func(a *asm) {
		for p := range a.parts() {
			a.emit("VPMOVZXWD %s, %s", a.address("x", p), a.operand(reg(0), p))
		}
		a.shiftBits("VPSLLD", 16, 0, 0)
		a.store("dst", 0)
	}},
	{name: "narrow", slices: []slice{{name: "dst", half: true}, {name: "x"}}, body: narrow},
	{name: "adamW", slices: floats("w", "m", "v", "grad"), table: true, body: adamW},
}

// exp computes e to the power of register 0 in register 2. It uses registers 1 and 3.
func exp(a *asm) {
	const t, y, r = reg(1), reg(2), reg(3)
	a.mul(t, 0, f32(1.44269504))
	a.add(t, t, f32(12582912))
	a.sub(y, t, f32(12582912))
	a.mul(r, y, f32(0.693359375))
	a.sub(r, 0, r)
	a.mul(y, y, f32(-2.12194440e-4))
	a.sub(r, r, y)
	a.mul(y, r, f32(0.00139261759))
	for _, q := range []float32{0.00836317334, 0.0416665561, 0.166665778, 0.5} {
		a.add(y, y, f32(q))
		a.mul(y, y, r)
	}
	a.mul(y, y, r)
	a.add(y, y, r)
	a.add(y, y, f32(1))
	a.shiftBits("VPSLLD", 23, t, t)
	a.op("VPADDD", y, y, t)
	a.where(y, 0, greater, f32(88.7228317), f32(float32(math.Inf(1))), r)
	a.where(y, 0, less, f32(-87.33), f32(0), r)
}

// sigmoid loads register 4 and computes its sigmoid in register 5. It uses registers 0 to
// 3.
func sigmoid(a *asm, from string) {
	a.load(4, memory(from))
	a.bitwise("VPXOR", 0, 4, number(1<<31))
	exp(a)
	a.add(2, 2, f32(1))
	a.load(1, f32(1))
	a.div(5, 1, reg(2))
}

// slope computes the slope of SiLU at register 4 in register 1. Register 5 has the sigmoid.
func slope(a *asm) {
	a.load(1, f32(1))
	a.sub(1, 1, reg(5))
	a.mul(1, 1, reg(4))
	a.add(1, 1, f32(1))
	a.mul(1, 1, reg(5))
}

func swiGLUGrad(a *asm) {
	const silu, slopes, b, dy, plain, g = reg(0), reg(1), reg(2), reg(3), reg(4), reg(5)
	sigmoid(a, "a")
	a.mul(silu, 4, reg(5))
	slope(a)
	a.load(b, memory("b"))
	a.load(dy, memory("dy"))
	a.mul(plain, silu, b)
	a.mul(g, dy, scalar("w"))
	a.mul(dy, dy, plain)
	a.total(dy)
	a.mul(b, b, g)
	a.mul(b, b, slopes)
	a.store("da", b)
	a.mul(silu, silu, g)
	a.store("db", silu)
	a.mul(plain, plain, scalar("w"))
	a.store("y", plain)
}

func narrow(a *asm) {
	a.load(0, memory("x"))
	a.shiftBits("VPSRLD", 16, 1, 0)
	a.bitwise("VPAND", 1, 1, number(1))
	a.op("VPADDD", 1, 1, number(0x7fff))
	a.op("VPADDD", 1, 1, reg(0))
	a.where(1, 0, unlike, reg(0), number(0x7fff0000), 2)
	a.shiftBits("VPSRLD", 16, 1, 1)
	if a.wide {
		a.emit("VPMOVDW Z1, %s", a.address("dst", 0))
		return
	}
	// The instruction packs the halves of both registers in turn.
	a.emit("VPACKUSDW Y3, Y2, Y2")
	a.emit("VPERMQ $0xd8, Y2, Y2")
	a.emit("VMOVDQU Y2, %s", a.address("dst", 0))
}

// The fields of vec.Adam.
const (
	factor field = iota
	beta1
	keep1
	beta2
	keep2
	correct1
	correct2
	epsilon
	decay
	lr
)

func adamW(a *asm) {
	const d, m, v, w, t = reg(0), reg(1), reg(2), reg(3), reg(4)
	a.load(d, memory("grad"))
	a.mul(d, d, factor)
	a.load(m, memory("m"))
	a.mul(m, m, beta1)
	a.mul(t, d, keep1)
	a.add(m, m, t)
	a.store("m", m)
	a.load(v, memory("v"))
	a.mul(v, v, beta2)
	a.mul(d, d, d)
	a.mul(d, d, keep2)
	a.add(v, v, d)
	a.store("v", v)
	a.mul(v, v, correct2)
	for p := range a.parts() {
		a.emit("VSQRTPS %s, %s", a.operand(v, p), a.operand(v, p))
	}
	a.add(v, v, epsilon)
	a.mul(m, m, correct1)
	a.div(m, m, v)
	a.load(w, memory("w"))
	a.mul(t, w, decay)
	a.add(m, m, t)
	a.mul(m, m, lr)
	a.sub(w, w, m)
	a.store("w", w)
}
