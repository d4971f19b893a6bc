// This file owns the exponential, the loops of softmax, sigmoid and SiLU, and the maximum.

package vec

import "math"

// exp(x) = 2^n e^r with n the whole number next to x/ln 2 and r = x - n ln 2, so
// that |r| <= ln 2 / 2. There e^r = 1 + r + r² q(r), with q of degree 4 through the
// Chebyshev points: its error is 1e-8 of e^r, a sixth of the rounding at the end.
const (
	expLog2e = 1.44269504
	// Adding 1.5 x 2^23 rounds to a whole number, which is then in the lowest bits. Shifted
	// by 23, it can be added to an exponent.
	expRound = 12582912
	// ln 2 has two parts. The first has 10 bits, so its product with an n of 8 bits is
	// exact, and so is its difference from x.
	expLn2Hi = 0.693359375
	expLn2Lo = -2.12194440e-4
	expQ0    = 0.5
	expQ1    = 0.166665778
	expQ2    = 0.0416665561
	expQ3    = 0.00836317334
	expQ4    = 0.00139261759
	// The result is infinite above expMost and zero below the other bound: e^-87.33 is
	// hardly more than the smallest normal number, 1.18e-38.
	expMost  = 88.7228317
	expLeast = -87.33
)

// exp returns e^x with a relative error below 1.2e-7.
func exp(x float32) float32 {
	t := float32(x*expLog2e) + expRound
	n := t - expRound
	r := x - float32(n*expLn2Hi)
	r -= float32(n * expLn2Lo)
	q := float32(r*expQ4) + expQ3
	q = float32(q*r) + expQ2
	q = float32(q*r) + expQ1
	q = float32(q*r) + expQ0
	y := float32(q*r*r) + r + 1
	switch {
	case x > expMost:
		return float32(math.Inf(1))
	case x < expLeast:
		return 0
	}
	return math.Float32frombits(math.Float32bits(y) + math.Float32bits(t)<<23)
}

func sigmoid(x float32) float32 { return 1 / (1 + exp(-x)) }

// Exp computes dst = e^(x - minus) with a relative error below 1.2e-7. The result
// is zero if x - minus is below -87.33, infinite if it is above 88.7228317, and NaN if it
// is NaN.
func Exp(dst, x []float32, minus float32) { ExpSum(dst, x, minus) }

// ExpSum does the same as Exp and returns the sum of dst.
func ExpSum(dst, x []float32, minus float32) float32 {
	x = x[:len(dst)]
	n, sum := best.expSum(dst, x, minus)
	for i := n; i < len(dst); i++ {
		dst[i] = exp(x[i] - minus)
		sum += dst[i]
	}
	return sum
}

// Max returns the largest number of x, or minus infinity if x is empty. It skips NaNs.
func Max(x []float32) float32 {
	n, most := best.max(x)
	for i := n; i < len(x); i++ {
		if x[i] > most {
			most = x[i]
		}
	}
	return most
}

// Sigmoid computes dst = 1/(1 + e^-x).
func Sigmoid(dst, x []float32) {
	x = x[:len(dst)]
	for i := best.sigmoid(dst, x); i < len(dst); i++ {
		dst[i] = sigmoid(x[i])
	}
}

// SiLU computes dst = x sigmoid(x).
func SiLU(dst, x []float32) {
	x = x[:len(dst)]
	for i := best.silu(dst, x); i < len(dst); i++ {
		dst[i] = x[i] * sigmoid(x[i])
	}
}

// SiLUGrad computes dx = dy times the slope of SiLU at x, s (1 + x (1 - s)) with s the sigmoid.
func SiLUGrad(dx, x, dy []float32) {
	x, dy = x[:len(dx)], dy[:len(dx)]
	for i := best.siluGrad(dx, x, dy); i < len(dx); i++ {
		s := sigmoid(x[i])
		dx[i] = dy[i] * (s * (float32(x[i]*(1-s)) + 1))
	}
}

// SwiGLU computes y = SiLU(a) b w.
func SwiGLU(y, a, b []float32, w float32) {
	a, b = a[:len(y)], b[:len(y)]
	for i := best.swiGLU(y, a, b, w); i < len(y); i++ {
		y[i] = a[i] * sigmoid(a[i]) * b[i] * w
	}
}

// SwiGLUGrad is the backward pass of SwiGLU. It computes da and db from the gradient dy,
// computes y again, and returns the gradient of w. y may be dy, da may be a, and db may be
// b.
func SwiGLUGrad(da, db, y, a, b, dy []float32, w float32) float32 {
	n := len(da)
	db, y, a, b, dy = db[:n], y[:n], a[:n], b[:n], dy[:n]
	n, dw := best.swiGLUGrad(da, db, y, a, b, dy, w)
	for i := n; i < len(da); i++ {
		dw += swiGLUGrad(&da[i], &db[i], &y[i], a[i], b[i], dy[i], w)
	}
	return dw
}

func swiGLUGrad(da, db, y *float32, a, b, dy, w float32) float32 {
	s := sigmoid(a)
	silu := a * s
	slope := s * (float32(a*(1-s)) + 1)
	plain, g := silu*b, dy*w
	*da, *db, *y = g*b*slope, g*silu, plain*w
	return float32(dy * plain)
}
