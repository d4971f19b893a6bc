package gemm

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// kinds returns the kinds that this machine and build can run.
func kinds() (ks []kind) {
	for k := plain; k <= amx; k++ {
		if k.works() {
			ks = append(ks, k)
		}
	}
	return ks
}

// random returns a matrix with gaps between its rows. The gaps and what lies behind the
// last number are NaNs, so a test notices if they are read.
func random(rng *rand.Rand, bf16 bool, rows, cols, gap int) Matrix {
	m := Matrix{Rows: rows, Cols: cols, Pitch: cols + gap}
	n := (rows-1)*m.Pitch + cols
	f := make([]float32, n, n+64)
	for i := range f[:cap(f)] {
		f[:cap(f)][i] = float32(math.NaN())
	}
	for i := range rows {
		for j := range cols {
			f[i*m.Pitch+j] = rng.Float32() - 0.5
		}
	}
	if !bf16 {
		m.F32 = f
		return m
	}
	m.BF16 = make([]uint16, n, n+64)
	for i, v := range f[:cap(f)] {
		m.BF16[:cap(f)][i] = toBF16(v)
	}
	return m
}

func clone(m Matrix) Matrix {
	if m.F32 != nil {
		m.F32 = slices.Clone(m.F32)
	}
	if m.BF16 != nil {
		m.BF16 = slices.Clone(m.BF16)
	}
	return m
}

// bits returns the numbers in memory, including gaps.
func bits(m Matrix) []uint32 {
	var b []uint32
	for _, v := range m.F32 {
		b = append(b, math.Float32bits(v))
	}
	for _, v := range m.BF16 {
		b = append(b, uint32(v))
	}
	return b
}

// rows returns the rows of a matrix, or its columns.
func rows(m *Matrix, columns bool) [][]float64 {
	n, w := m.Rows, m.Cols
	if columns {
		n, w = w, n
	}
	all := make([][]float64, n)
	for i := range all {
		all[i] = make([]float64, w)
		for j := range all[i] {
			at := m.index(i, j)
			if columns {
				at = m.index(j, i)
			}
			all[i][j] = float64(m.value(at))
		}
	}
	return all
}

// truth is a product in float64, and the sums of magnitudes.
type truth struct {
	want, size [][]float64
	k          int
}

func newTruth(p Product) (t truth) {
	a, b, plus := rows(&p.A, p.TransA), rows(&p.B, !p.TransB), rows(&p.Plus, false)
	t.want, t.size = rows(&p.C, false), rows(&p.C, false)
	for i, row := range a {
		for j, col := range b {
			want, size := 0.0, 0.0
			if p.Plus.live() {
				want, size = plus[i][j], math.Abs(plus[i][j])
			}
			for x, v := range row {
				v *= col[x]
				want += v
				size += math.Abs(v)
			}
			t.want[i][j], t.size[i][j], t.k = want, size, len(row)
		}
	}
	return t
}

// verify compares C with the truth. The error of an element is at most half a unit of fp32
// of the sum of magnitudes for each of k+1 additions, and half a unit of bf16 if it is
// rounded to that.
func (w truth) verify(t interface{ Fatalf(string, ...any) }, what string, c Matrix) {
	for i, row := range rows(&c, false) {
		for j, got := range row {
			most := w.size[i][j] * float64(w.k+1) * 0x1p-24
			if c.BF16 != nil {
				most += math.Abs(w.want[i][j]) * 0x1p-8
			}
			if !(math.Abs(got-w.want[i][j]) <= most) {
				t.Fatalf("%s: C[%d][%d] is %v, want %v within %v", what, i, j, got, w.want[i][j], most)
			}
		}
		for j := c.Cols; j < c.Pitch && i+1 < c.Rows; j++ {
			if v := c.value(c.index(i, j)); v == v {
				t.Fatalf("%s: behind row %d of C was written", what, i)
			}
		}
	}
}

func draw(rng *rand.Rand, m, n, k int) Product {
	coin := func() bool { return rng.IntN(2) == 0 }
	matrix := func(trans bool, rows, cols int) Matrix {
		if trans {
			rows, cols = cols, rows
		}
		return random(rng, coin(), rows, cols, rng.IntN(4)*rng.IntN(9))
	}
	p := Product{TransA: coin(), TransB: coin()}
	p.A, p.B, p.C = matrix(p.TransA, m, k), matrix(p.TransB, k, n), matrix(false, m, n)
	switch rng.IntN(3) {
	case 0:
		p.Plus = matrix(false, m, n)
	case 1:
		p.Plus = p.C
	}
	return p
}

// TestMultiply tries all sizes about the edges of tiles with all types and
// transpositions drawn at random, in batches of one to three products.
func TestMultiply(t *testing.T) {
	sizes := rapid.OneOf(rapid.IntRange(1, 70), rapid.SampledFrom([]int{1, 8, 16, 32, 47, 48, 49, 64, 100, 256, 257, 300, 600}))
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		var ps, first []Product
		var truths []truth
		for range rapid.IntRange(1, 3).Draw(t, "products") {
			m, n, k := sizes.Draw(t, "m"), sizes.Draw(t, "n"), sizes.Draw(t, "k")
			if m*n*k > 2<<20 {
				m = 1 + m%16
			}
			ps = append(ps, draw(rng, m, n, k))
			truths = append(truths, newTruth(ps[len(ps)-1]))
		}
		// With little room for B, products are computed in parts and in more than one
		// batch.
		most := rapid.SampledFrom([]int{0, 1000, 60000, packMost}).Draw(t, "room")
		for _, kind := range kinds() {
			var got []Product
			for _, p := range ps {
				q := p
				q.C = clone(p.C)
				if samePlace(p.Plus, p.C) {
					q.Plus = q.C
				}
				got = append(got, q)
			}
			multiply(kind, most, got)
			for i, p := range got {
				m, n, k := p.sizes()
				truths[i].verify(t, fmt.Sprintf("%v, product %d, %d x %d x %d", kind, i, m, n, k), p.C)
				// The same chains of fused multiply-adds give the same bits.
				if kind >= avx512 && !kind.takesPairs(&p, k) && !slices.Equal(bits(p.C), bits(first[i].C)) {
					t.Fatalf("%v and the kind before it differ", kind)
				}
			}
			first = got
		}
	})
}

func samePlace(a, b Matrix) bool {
	return a.F32 != nil && b.F32 != nil && &a.F32[0] == &b.F32[0] || a.BF16 != nil && b.BF16 != nil && &a.BF16[0] == &b.BF16[0]
}

// TestThreads checks that the bits depend neither on the number of threads, nor on the run,
// nor on other rows.
func TestThreads(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	rng := rand.New(rand.NewPCG(3, 3))
	for _, s := range [][3]int{{150, 300, 90}, {50, 600, 310}, {7, 20, 1000}} {
		p := draw(rng, s[0], s[1], s[2])
		p.TransA, p.A = false, random(rng, true, s[0], s[2], 5)
		p.Plus = Matrix{}
		var want []uint32
		for i, threads := range []int{1, 2, 4, 4, 4, 2} {
			runtime.GOMAXPROCS(threads)
			p.C = random(rng, false, s[0], s[1], 0)
			Multiply(p)
			if i == 0 {
				want = bits(p.C)
			} else if !slices.Equal(bits(p.C), want) {
				t.Fatalf("%v: %d threads give other bits than one", s, threads)
			}
		}
		part := p
		part.A.Rows, part.A.BF16 = 5, p.A.BF16[2*p.A.Pitch:]
		part.C = random(rng, false, 5, s[1], 0)
		Multiply(part)
		if !slices.Equal(bits(part.C), want[2*s[1]:7*s[1]]) {
			t.Fatalf("%v: five rows alone give other bits than among others", s)
		}
	}
}

// TestSpecial checks NaNs and infinities, and that bf16 is rounded to nearest even.
func TestSpecial(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	in := []float32{nan, -nan, inf, -inf, 0, math.Float32frombits(0x3f808000), math.Float32frombits(0x3f818000),
		math.Float32frombits(0x3f808001), math.MaxFloat32, math.Float32frombits(0x7f800001), math.Float32frombits(0xffffffff)}
	want := []uint16{0x7fff, 0x7fff, 0x7f80, 0xff80, 0, 0x3f80, 0x3f82, 0x3f81, 0x7f80, 0x7fff, 0x7fff}
	for _, kind := range kinds() {
		one := Matrix{F32: []float32{1}, Rows: 1, Cols: 1, Pitch: 1}
		c := Matrix{BF16: make([]uint16, len(in)), Rows: 1, Cols: len(in), Pitch: len(in)}
		multiply(kind, packMost, []Product{{A: one, B: Matrix{F32: in, Rows: 1, Cols: len(in), Pitch: len(in)}, C: c}})
		if !slices.Equal(c.BF16, want) {
			t.Errorf("%v: %x, want %x", kind, c.BF16, want)
		}
	}
}

// TestNoDepth checks that an empty product is zero, or Plus.
func TestNoDepth(t *testing.T) {
	for _, kind := range kinds() {
		for _, trans := range []bool{false, true} {
			c := []float32{1, 2, 3, 4, 5, 6}
			p := Product{
				A: Matrix{F32: []float32{}, Rows: 2}, B: Matrix{F32: []float32{}, Cols: 3},
				C: Matrix{F32: c, Rows: 2, Cols: 3, Pitch: 3},
			}
			if trans {
				p.TransA, p.TransB = true, true
				p.A.Rows, p.A.Cols, p.B.Rows, p.B.Cols = 0, 2, 3, 0
			}
			p.Plus = p.C
			multiply(kind, packMost, []Product{p})
			if !slices.Equal(c, []float32{1, 2, 3, 4, 5, 6}) {
				t.Errorf("%v: Plus became %v", kind, c)
			}
			p.Plus = Matrix{}
			multiply(kind, packMost, []Product{p})
			if !slices.Equal(c, make([]float32, 6)) {
				t.Errorf("%v: got %v", kind, c)
			}
		}
	}
}

func TestWrongSizesPanic(t *testing.T) {
	m := func(rows, cols int) Matrix {
		return Matrix{F32: make([]float32, 12), Rows: rows, Cols: cols, Pitch: cols}
	}
	short := m(3, 4)
	short.Pitch = 5
	for i, p := range []Product{
		{A: m(3, 4), B: m(3, 4), C: m(3, 4)},
		{A: m(3, 4), B: m(4, 3), C: m(3, 4)},
		{A: m(3, 2), B: m(2, 3), C: m(3, 3), Plus: m(2, 3)},
		{A: short, B: m(4, 3), C: m(3, 3)},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("product %d was taken", i)
				}
			}()
			Multiply(p)
		}()
	}
}
