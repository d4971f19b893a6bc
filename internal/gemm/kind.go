// This file owns the kinds of code that compute products, the choice of one, and the one in
// plain Go.

package gemm

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
)

// kind is a set of instructions.
type kind uint8

const (
	plain kind = iota
	avx2
	avx512
	avx512BF16 // AVX-512, and VDPBF16PS for two matrices of bf16
	amx        // AVX-512, and AMX for two matrices of bf16
)

var kindNames = []string{"plain", "avx2", "avx512", "avx512_bf16", "amx_bf16"}

func (k kind) String() string { return kindNames[k] }

// best returns the kind that computes products here. The first call asks the operating
// system for AMX.
var best = sync.OnceValue(func() kind { return choose(os.Getenv(variable), kind.works, kind.pays) })

// variable is an environment variable that names the best kind to use. Machines that agree
// on avx512 compute the same bits whatever else they have.
const variable = "STOWAGE_GEMM"

// Check returns an error if the environment asks for a kind that does not exist. A product
// would panic.
func Check() error { return known(os.Getenv(variable)) }

func known(name string) error {
	if name != "" && !slices.Contains(kindNames, name) {
		return fmt.Errorf("%s is %q; choose %s, or leave it out for the best", variable, name, strings.Join(kindNames, ", "))
	}
	return nil
}

// choose returns the named kind, or the best one below it that works. Without a name, it
// returns the best one that works and pays.
func choose(name string, works, pays func(kind) bool) kind {
	k := amx
	if name != "" {
		if err := known(name); err != nil {
			panic("gemm: " + err.Error())
		}
		k, pays = kind(slices.Index(kindNames, name)), works
	}
	for !pays(k) || !works(k) {
		k--
	}
	return k
}

// rows returns the rows of a tile of registers.
func (k kind) rows() int { return [...]int{4, 6, 12, 12, 12}[k] }

// cols returns the columns of a tile of registers.
func (k kind) cols() int { return [...]int{4, 16, 32, 32, 32}[k] }

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
