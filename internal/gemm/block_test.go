package gemm

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
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

// Every matrix of a block, and of a transposition, must hold its last number, and none more: one
// number less panics in the words of the matrix, whatever the transpositions.
func TestBlockChecksEveryMatrix(t *testing.T) {
	const m, n, k = 3, 5, 7
	panics := func(f func()) (text string) {
		defer func() { text = fmt.Sprint(recover()) }()
		f()
		return ""
	}
	need := func(rows, cols, pitch int, trans bool) int {
		if trans {
			rows, cols = cols, rows
		}
		return (rows-1)*pitch + cols
	}
	for _, ta := range []bool{false, true} {
		for _, tb := range []bool{false, true} {
			a, b, c := need(m, k, 8, ta), need(k, n, 9, tb), need(m, n, 10, false)
			for short, want := range map[string]string{"": "<nil>", "A": "gemm: A: ", "B": "gemm: B: ", "C": "gemm: C: "} {
				less := func(name string, n int) []float32 {
					if name == short {
						n--
					}
					return make([]float32, n, n+8)
				}
				got := panics(func() { Block(less("C", c), 10, less("A", a), 8, ta, less("B", b), 9, tb, m, n, k, false) })
				if !strings.HasPrefix(got, want) {
					t.Errorf("%t, %t, %s is short: %s", ta, tb, short, got)
				}
				// What the race detector is told of lies in the same numbers.
				touched := panics(func() { touchBlock(less("C", c), 10, less("A", a), 8, ta, less("B", b), 9, tb, m, n, k) })
				if (touched == "<nil>") != (short == "") {
					t.Errorf("%t, %t, %s is short: touching it: %s", ta, tb, short, touched)
				}
				x := part{Product: &Product{
					A: Matrix{F32: less("A", a), Pitch: 8}, B: Matrix{F32: less("B", b), Pitch: 9}, C: Matrix{F32: less("C", c), Pitch: 10}, TransA: ta, TransB: tb,
				}, k: k, direct: true}
				if touched := panics(func() { x.touch(1, 2, m-1, n-2) }); (touched == "<nil>") != (short == "") {
					t.Errorf("%t, %t, %s is short: touching a part of it: %s", ta, tb, short, touched)
				}
			}
		}
	}
	src, dst := make([]float32, need(m, n, 6, false)), make([]float32, need(n, m, 4, false))
	for want, f := range map[string]func(){
		"<nil>": func() { Transpose(dst, 4, src, 6, m, n) }, "gemm: what is transposed: ": func() { Transpose(dst, 4, src[:len(src)-1], 6, m, n) },
		"gemm: what a transposition writes: ": func() { Transpose(dst[:len(dst)-1], 4, src, 6, m, n) },
	} {
		if got := panics(f); !strings.HasPrefix(got, want) {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

// Pairs are taken for two matrices of bf16 that are large enough, by kinds that have them.
func TestTakesPairs(t *testing.T) {
	half := Matrix{BF16: make([]uint16, 1)}
	full := Matrix{F32: make([]float32, 1)}
	p := func(a, b Matrix, n int) *Product { return &Product{A: a, B: b, C: Matrix{Cols: n}} }
	for i, x := range []struct {
		k     kind
		p     *Product
		depth int
		want  bool
	}{
		{avx512BF16, p(half, half, pairLeast), pairLeast, true}, {amx, p(half, half, 999), 999, true}, {avx512, p(half, half, 999), 999, false},
		{amx, p(full, half, 999), 999, false}, {amx, p(half, full, 999), 999, false}, {amx, p(half, half, pairLeast-1), 999, false}, {amx, p(half, half, 999), pairLeast - 1, false},
	} {
		if got := x.k.takesPairs(x.p, x.depth); got != x.want {
			t.Errorf("case %d: %t", i, got)
		}
	}
}
