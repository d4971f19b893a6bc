// Package vec provides the inner loops of kernels over float32: loops over elements, sums,
// exponentials, and the fused loops of activations, norms and the optimiser.
//
// Each loop has an AVX-512, an AVX2 and a Go form. All three compute the same bits on every
// machine: no multiplication is fused with an addition, divisions and roots are exact, and
// sums have a fixed order. The order of a sum depends on the length alone. Elements up to
// the last multiple of 16 are added up in 64 lanes (16 lanes in ExpSum and SwiGLUGrad),
// element i in lane i modulo their number. The lanes are then added by halves, lane i and
// lane i+32 and so on down to one. The remaining elements, at most 15, follow one by one.
//
// All slices of a call are cut to the length of the first. A call panics if one is shorter.
// A result may be the same slice as an operand; other overlap is not allowed. Calls
// allocate nothing and are cheap enough for a row of 16 numbers.
//
// This file owns sums and products, and the choice of a form.
package vec

//go:generate go run ./gen

// level is a form of the loops. Its methods handle the elements up to the last multiple of
// 16, or none, and return how many they handled.
type level uint8

const (
	plain level = iota
	withAVX2
	withAVX512
)

// best is the fastest form that the processor has.
var best = detect()

// Add computes dst = a + b.
func Add(dst, a, b []float32) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := best.add(dst, a, b); i < len(dst); i++ {
		dst[i] = a[i] + b[i]
	}
}

// Mul computes dst = a b.
func Mul(dst, a, b []float32) {
	a, b = a[:len(dst)], b[:len(dst)]
	for i := best.mul(dst, a, b); i < len(dst); i++ {
		dst[i] = a[i] * b[i]
	}
}

// Scale computes dst = s x.
func Scale(dst, x []float32, s float32) {
	x = x[:len(dst)]
	for i := best.scale(dst, x, s); i < len(dst); i++ {
		dst[i] = x[i] * s
	}
}

// Axpy computes y += s x.
func Axpy(y []float32, s float32, x []float32) {
	x = x[:len(y)]
	for i := best.axpy(y, x, s); i < len(y); i++ {
		y[i] += float32(x[i] * s)
	}
}

// AddMul computes y += a b s.
func AddMul(y, a, b []float32, s float32) {
	a, b = a[:len(y)], b[:len(y)]
	for i := best.addMul(y, a, b, s); i < len(y); i++ {
		y[i] += float32(a[i] * b[i] * s)
	}
}

// MulScale computes dst = x s w, the last pass of a norm.
func MulScale(dst, x, w []float32, s float32) {
	x, w = x[:len(dst)], w[:len(dst)]
	for i := best.mulScale(dst, x, w, s); i < len(dst); i++ {
		dst[i] = x[i] * s * w[i]
	}
}

// NormGrad computes dx = dy w r - x c, the last pass of a norm's gradient.
func NormGrad(dx, dy, w, x []float32, r, c float32) {
	dy, w, x = dy[:len(dx)], w[:len(dx)], x[:len(dx)]
	for i := best.normGrad(dx, dy, w, x, r, c); i < len(dx); i++ {
		dx[i] = float32(dy[i]*w[i]*r) - float32(x[i]*c)
	}
}

// Rotate rotates each pair (a, b) by an angle: a = a cos - b sin, b = b cos + a sin.
func Rotate(a, b, cos, sin []float32) {
	b, cos, sin = b[:len(a)], cos[:len(a)], sin[:len(a)]
	for i := best.rotate(a, b, cos, sin); i < len(a); i++ {
		x, y, c, s := a[i], b[i], cos[i], sin[i]
		a[i] = float32(x*c) - float32(y*s)
		b[i] = float32(y*c) + float32(x*s)
	}
}

// Dot returns the sum of a b.
func Dot(a, b []float32) float32 {
	b = b[:len(a)]
	n, sum := best.dot(a, b)
	for i := n; i < len(a); i++ {
		sum += float32(a[i] * b[i])
	}
	return sum
}

// Dot3 returns the sum of a b c.
func Dot3(a, b, c []float32) float32 {
	b, c = b[:len(a)], c[:len(a)]
	n, sum := best.dot3(a, b, c)
	for i := n; i < len(a); i++ {
		sum += float32(a[i] * b[i] * c[i])
	}
	return sum
}

// Sum returns the sum of x.
func Sum(x []float32) float32 {
	n, sum := best.sum(x)
	for i := n; i < len(x); i++ {
		sum += x[i]
	}
	return sum
}

// SumSquares returns the sum of the squares of x.
func SumSquares(x []float32) float32 { return Dot(x, x) }
