// This file owns the sums in Go, in the order that all forms have.

package vec

import "math"

var minusInf = float32(math.Inf(-1))

// fold adds lanes up by halves. Their number is a power of two.
func fold(lanes []float32) float32 {
	for h := len(lanes) / 2; h > 0; h /= 2 {
		for i := range h {
			lanes[i] += lanes[i+h]
		}
	}
	return lanes[0]
}

// The functions below take a multiple of 16 elements.

func dotLanes(a, b []float32) float32 {
	var lanes [64]float32
	for i := 0; i < len(a); i += 16 {
		l, x, y := (*[16]float32)(lanes[i&63:]), (*[16]float32)(a[i:]), (*[16]float32)(b[i:])
		for j := range l {
			l[j] += float32(x[j] * y[j])
		}
	}
	return fold(lanes[:])
}

func dot3Lanes(a, b, c []float32) float32 {
	var lanes [64]float32
	for i := 0; i < len(a); i += 16 {
		l, x, y, z := (*[16]float32)(lanes[i&63:]), (*[16]float32)(a[i:]), (*[16]float32)(b[i:]), (*[16]float32)(c[i:])
		for j := range l {
			l[j] += float32(x[j] * y[j] * z[j])
		}
	}
	return fold(lanes[:])
}

func sumLanes(a []float32) float32 {
	var lanes [64]float32
	for i := 0; i < len(a); i += 16 {
		l, x := (*[16]float32)(lanes[i&63:]), (*[16]float32)(a[i:])
		for j := range l {
			l[j] += x[j]
		}
	}
	return fold(lanes[:])
}

func maxLanes(a []float32) float32 {
	var lanes [64]float32
	for i := range lanes {
		lanes[i] = minusInf
	}
	for i, v := range a {
		if l := &lanes[i&63]; v > *l {
			*l = v
		}
	}
	for h := 32; h > 0; h /= 2 {
		for i := range h {
			if v := lanes[i+h]; v > lanes[i] {
				lanes[i] = v
			}
		}
	}
	return lanes[0]
}

func expSumLanes(dst, x []float32, minus float32) float32 {
	var lanes [16]float32
	for i := range x {
		dst[i] = exp(x[i] - minus)
		lanes[i&15] += dst[i]
	}
	return fold(lanes[:])
}

func swiGLUGradLanes(da, db, y, a, b, dy []float32, w float32) float32 {
	var lanes [16]float32
	for i := range a {
		lanes[i&15] += swiGLUGrad(&da[i], &db[i], &y[i], a[i], b[i], dy[i], w)
	}
	return fold(lanes[:])
}
