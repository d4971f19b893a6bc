package gemm

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestBlock(t *testing.T) {
	sizes := []int{1, 2, 3, 5, 8, 12, 13, 15, 16, 17, 24, 31, 32, 33, 40, 64, 65}
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		m, n, k := rapid.SampledFrom(sizes).Draw(t, "m"), rapid.SampledFrom(sizes).Draw(t, "n"), rapid.SampledFrom(sizes).Draw(t, "k")
		p := Product{TransA: rapid.Bool().Draw(t, "transA"), TransB: rapid.Bool().Draw(t, "transB")}
		matrix := func(trans bool, rows, cols int) Matrix {
			if trans {
				rows, cols = cols, rows
			}
			return random(rng, false, rows, cols, rng.IntN(9))
		}
		p.A, p.B, p.C = matrix(p.TransA, m, k), matrix(p.TransB, k, n), matrix(false, m, n)
		add := rapid.Bool().Draw(t, "add")
		if add {
			p.Plus = p.C
		}
		want := newTruth(p)
		var before []uint32
		for _, kind := range kinds() {
			q := p
			q.C = clone(p.C)
			block(kind, q.C.F32, q.C.Pitch, q.A.F32, q.A.Pitch, q.TransA, q.B.F32, q.B.Pitch, q.TransB, m, n, k, add)
			want.verify(t, fmt.Sprintf("%v, %d x %d x %d", kind, m, n, k), q.C)
			if kind == avx512 && !slices.Equal(bits(q.C), before) {
				t.Fatalf("AVX-512 and AVX2 differ")
			}
			before = bits(q.C)
		}
	})
}

func TestBlockOverNothing(t *testing.T) {
	for _, trans := range []bool{false, true} {
		c := []float32{1, 2, 3, 4}
		Block(c, 2, nil, 0, trans, nil, 0, trans, 2, 2, 0, true)
		if !slices.Equal(c, []float32{1, 2, 3, 4}) {
			t.Errorf("adding nothing gave %v", c)
		}
		Block(c, 2, nil, 0, trans, nil, 0, trans, 2, 2, 0, false)
		if !slices.Equal(c, make([]float32, 4)) {
			t.Errorf("nothing is %v", c)
		}
	}
}

func TestTranspose(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rows, cols := rapid.IntRange(1, 40).Draw(t, "rows"), rapid.IntRange(1, 40).Draw(t, "cols")
		src := random(rand.New(rand.NewPCG(1, 1)), false, rows, cols, rapid.IntRange(0, 3).Draw(t, "gap"))
		ldd := rows + rapid.IntRange(0, 3).Draw(t, "gap of dst")
		dst := make([]float32, cols*ldd)
		Transpose(dst, ldd, src.F32, src.Pitch, rows, cols)
		for i := range dst {
			want := float32(0)
			if r := i % ldd; r < rows {
				want = src.F32[r*src.Pitch+i/ldd]
			}
			if dst[i] != want {
				t.Fatalf("number %d is %v, want %v", i, dst[i], want)
			}
		}
	})
}
