// This file owns the conversion between float32 and bf16, and the optimiser's loop.

package vec

import "math"

// Widen computes dst = x, given as bf16.
func Widen(dst []float32, x []uint16) {
	x = x[:len(dst)]
	for i := best.widen(dst, x); i < len(dst); i++ {
		dst[i] = math.Float32frombits(uint32(x[i]) << 16)
	}
}

// nanBF16 replaces every NaN.
const nanBF16 = 0x7fff

// Narrow computes dst = x as bf16, rounded to nearest even. Every NaN becomes the one with
// all bits set except the sign.
func Narrow(dst []uint16, x []float32) {
	x = x[:len(dst)]
	for i := best.narrow(dst, x); i < len(dst); i++ {
		// Add a little less than half of the last remaining place, or exactly half if that
		// place is odd. A NaN would overflow into the sign.
		b := math.Float32bits(x[i])
		b += 0x7fff + b>>16&1
		if x[i] != x[i] {
			b = nanBF16 << 16
		}
		dst[i] = uint16(b >> 16)
	}
}

// Adam is what an update by AdamW needs. Keep1 is 1 - Beta1, and Keep2 1 - Beta2.
type Adam struct {
	Factor             float32 // of gradients
	Beta1, Keep1       float32
	Beta2, Keep2       float32
	Correct1, Correct2 float32
	Epsilon, Decay, LR float32
}

// AdamW updates weights and both moments by gradients:
//
//	g *= factor; m = beta1 m + keep1 g; v = beta2 v + keep2 g²
//	w -= lr (m correct1 / (sqrt(v correct2) + epsilon) + decay w)
func AdamW(w, m, v, g []float32, h *Adam) {
	m, v, g = m[:len(w)], v[:len(w)], g[:len(w)]
	for i := best.adamW(w, m, v, g, h); i < len(w); i++ {
		d := g[i] * h.Factor
		m[i] = float32(m[i]*h.Beta1) + float32(d*h.Keep1)
		v[i] = float32(v[i]*h.Beta2) + float32(d*d*h.Keep2)
		// The root of a float32 is exact when taken in float64 and rounded.
		root := float32(math.Sqrt(float64(v[i] * h.Correct2)))
		step := float32(m[i]*h.Correct1)/(root+h.Epsilon) + float32(w[i]*h.Decay)
		w[i] -= float32(step * h.LR)
	}
}
