//go:build !amd64 || race || purego

// This file owns the build without assembly: the loops in Go do everything.

package vec

func detect() level { return plain }

func (level) add(dst, a, b []float32) int                       { return 0 }
func (level) mul(dst, a, b []float32) int                       { return 0 }
func (level) scale(dst, x []float32, s float32) int             { return 0 }
func (level) axpy(y, x []float32, s float32) int                { return 0 }
func (level) addMul(y, a, b []float32, s float32) int           { return 0 }
func (level) mulScale(dst, x, w []float32, s float32) int       { return 0 }
func (level) normGrad(dx, dy, w, x []float32, r, c float32) int { return 0 }
func (level) rotate(a, b, cos, sin []float32) int               { return 0 }
func (level) sigmoid(dst, x []float32) int                      { return 0 }
func (level) silu(dst, x []float32) int                         { return 0 }
func (level) siluGrad(dx, x, dy []float32) int                  { return 0 }
func (level) swiGLU(y, a, b []float32, w float32) int           { return 0 }
func (level) widen(dst []float32, x []uint16) int               { return 0 }
func (level) narrow(dst []uint16, x []float32) int              { return 0 }
func (level) adamW(w, m, v, g []float32, h *Adam) int           { return 0 }
func (level) dot(a, b []float32) (int, float32)                 { n := len(a) &^ 15; return n, dotLanes(a[:n], b) }
func (level) dot3(a, b, c []float32) (int, float32) {
	n := len(a) &^ 15
	return n, dot3Lanes(a[:n], b, c)
}
func (level) sum(a []float32) (int, float32) { n := len(a) &^ 15; return n, sumLanes(a[:n]) }
func (level) max(a []float32) (int, float32) { n := len(a) &^ 15; return n, maxLanes(a[:n]) }
func (level) expSum(dst, x []float32, minus float32) (int, float32) {
	n := len(x) &^ 15
	return n, expSumLanes(dst, x[:n], minus)
}
func (level) swiGLUGrad(da, db, y, a, b, dy []float32, w float32) (int, float32) {
	n := len(a) &^ 15
	return n, swiGLUGradLanes(da, db, y, a[:n], b, dy, w)
}
