// This file owns the kinds of code that compute products, and the one in plain Go.

package gemm

// kind is a set of instructions.
type kind uint8

const (
	plain kind = iota
	avx2
	avx512
)

func (k kind) String() string { return [...]string{"plain", "AVX2", "AVX-512"}[k] }

// rows returns the rows of a tile of registers.
func (k kind) rows() int { return [...]int{4, 6, 12}[k] }

// cols returns the columns of a tile of registers.
func (k kind) cols() int { return [...]int{4, 16, 32}[k] }

// tilePlain computes a tile of at most 4 x 4 in Go.
func tilePlain(a []float32, ars, aks int, b []float32, bks int, c []float32, ldc, rows, cols, depth int, add bool) {
	var s [4][4]float32
	if rows == 4 && cols == 4 {
		tile4x4(&s, a, ars, aks, b, bks, depth)
	} else {
		for p := range depth {
			y := b[p*bks:][:cols]
			for i := range rows {
				x := a[i*ars+p*aks]
				for j, y := range y {
					s[i][j] += x * y
				}
			}
		}
	}
	for i := range rows {
		c := c[i*ldc:][:cols]
		for j := range c {
			if add {
				s[i][j] += c[j]
			}
			c[j] = s[i][j]
		}
	}
}

// tile4x4 keeps half of a tile at a time in variables, because sixteen sums do not fit into
// sixteen registers.
func tile4x4(s *[4][4]float32, a []float32, ars, aks int, b []float32, bks, depth int) {
	for i := 0; i < 4; i += 2 {
		a0, a1 := a[i*ars:], a[(i+1)*ars:]
		s00, s01, s02, s03 := s[i][0], s[i][1], s[i][2], s[i][3]
		s10, s11, s12, s13 := s[i+1][0], s[i+1][1], s[i+1][2], s[i+1][3]
		for p := range depth {
			x, z := a0[p*aks], a1[p*aks]
			y := b[p*bks:][:4]
			s00 += x * y[0]
			s01 += x * y[1]
			s02 += x * y[2]
			s03 += x * y[3]
			s10 += z * y[0]
			s11 += z * y[1]
			s12 += z * y[2]
			s13 += z * y[3]
		}
		s[i] = [4]float32{s00, s01, s02, s03}
		s[i+1] = [4]float32{s10, s11, s12, s13}
	}
}
