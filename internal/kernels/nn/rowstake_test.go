// This file owns the tests of taking and combining rows.

package nn

import (
	"bytes"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/kernels"
)

// drawTable returns n numbers below rows, some of which are None.
func drawTable(y *yard, n, rows int) []uint32 {
	v := make([]uint32, n)
	for i := range v {
		if v[i] = uint32(y.rng.IntN(rows)); y.rng.IntN(5) == 0 {
			v[i] = None
		}
	}
	return v
}

// same reports whether two numbers have the same bits. Zeros of different sign differ.
func same(a, b float32) bool { return math.Float32bits(a) == math.Float32bits(b) }

var types = []kernels.Number{kernels.F32, kernels.BF16}

// Spreading rows to their places is taking them from their sources.
func TestSpreadRows(t *testing.T) {
	y := newYard(t, 1<<18)
	rapid.Check(t, func(t *rapid.T) {
		y.reset(t)
		kind := rapid.SampledFrom(types).Draw(t, "type")
		cols := rapid.SampledFrom([]int{8, 16, 200}).Draw(t, "columns")
		from, every := rapid.IntRange(1, 20).Draw(t, "from"), rapid.IntRange(1, 4).Draw(t, "every")
		rows := from*every + 2
		src, taken, spread := benchMatrix(y, kind, from, cols), benchMatrix(y, kind, rows, cols), benchMatrix(y, kind, rows, cols)
		y.fill(src, func() float32 { return float32(y.rng.NormFloat64()) })
		source, places := slices.Repeat([]uint32{None}, rows), make([]uint32, from*every)
		for pair, row := range y.rng.Perm(rows)[:from*every] {
			if places[pair] = None; y.rng.IntN(5) > 0 {
				places[pair], source[row] = uint32(row), uint32(pair)
			}
		}
		TakeRows(y, Taking{Dst: taken, Src: src, Source: put(y, source), Every: every})
		SpreadRows(y, Spreading{Dst: spread, Src: src, Place: put(y, places), Every: every})
		if !bytes.Equal(numbersAt[byte](taken.Range), numbersAt[byte](spread.Range)) {
			t.Fatalf("spreading and taking give different rows")
		}
	})
}

func TestTakeRows(t *testing.T) {
	y := newYard(t, 1<<17)
	rapid.Check(t, func(t *rapid.T) {
		y.reset(t)
		kind := rapid.SampledFrom(types).Draw(t, "type")
		cols := rapid.SampledFrom([]int{1, 2, 3, 16, 33, 200}).Draw(t, "columns")
		from, to := rapid.IntRange(1, 20).Draw(t, "from"), rapid.IntRange(1, 60).Draw(t, "to")
		k := Taking{Dst: y.matrix(kind, to, cols), Src: y.matrix(kind, from, cols), Every: rapid.IntRange(1, 4).Draw(t, "every"), Zero: rapid.Bool().Draw(t, "zero")}
		normal := func() float32 { return float32(y.rng.NormFloat64()) }
		y.fill(k.Src, normal)
		y.fill(k.Dst, normal)
		source := drawTable(y, to, from*k.Every)
		k.Source = put(y, source)
		want := make([]float32, 0, to*cols)
		for i, n := range source {
			for j := range cols {
				switch {
				case n != None:
					want = append(want, k.Src.get(int(n)/k.Every, j))
				case k.Zero:
					want = append(want, 0)
				default:
					want = append(want, k.Dst.get(i, j))
				}
			}
		}
		TakeRows(y, k)
		for i, w := range want {
			if got := k.Dst.get(i/cols, i%cols); !same(got, w) {
				t.Fatalf("row %d, column %d is %g, want %g", i/cols, i%cols, got, w)
			}
		}
	})
}

func TestCombineRows(t *testing.T) {
	y := newYard(t, 1<<17)
	rapid.Check(t, func(t *rapid.T) {
		y.reset(t)
		cols := rapid.SampledFrom([]int{1, 3, 16, 33, 200, 1024, 1100}).Draw(t, "columns")
		from, to := rapid.IntRange(1, 6).Draw(t, "from"), rapid.IntRange(1, 5).Draw(t, "to")
		kind := func(name string) kernels.Number { return rapid.SampledFrom(types).Draw(t, name) }
		c := Combining{Dst: y.matrix(kind("to"), to, cols), Src: y.matrix(kind("from"), from, cols), Every: rapid.IntRange(1, 4).Draw(t, "every")}
		switch rapid.IntRange(0, 2).Draw(t, "plus") {
		case 1:
			c.Plus = y.matrix(kind("plus"), to, cols)
		case 2:
			c.Plus = c.Dst
		}
		normal := func() float32 { return float32(y.rng.NormFloat64()) }
		y.fill(c.Src, normal)
		y.fill(c.Dst, normal)
		if c.Plus.Buf != nil {
			y.fill(c.Plus, normal)
		}
		place := drawTable(y, to*c.Every, from)
		c.Place = put(y, place)
		var want []float32
		for i := range to {
			for j := range cols {
				var terms []float32
				for _, row := range place[i*c.Every:][:c.Every] {
					if row != None {
						terms = append(terms, c.Src.get(int(row), j))
					}
				}
				if c.Plus.Buf != nil {
					terms = append(terms, c.Plus.get(i, j))
				}
				sum := float32(0)
				for k, v := range terms {
					if k == 0 {
						sum = v
					} else {
						sum += v
					}
				}
				want = append(want, stored(c.Dst.Type, sum))
			}
		}
		CombineRows(y, c)
		for i, w := range want {
			if got := c.Dst.get(i/cols, i%cols); !same(got, w) {
				t.Fatalf("row %d, column %d is %g, want %g", i/cols, i%cols, got, w)
			}
		}
	})
}

// Rows that are taken TopK times and combined again are TopK times the original.
func TestCombineTakenRows(t *testing.T) {
	y := newYard(t, 1<<16)
	rapid.Check(t, func(t *rapid.T) {
		y.reset(t)
		kind := rapid.SampledFrom(types).Draw(t, "type")
		tokens, topK, cols := rapid.IntRange(1, 20).Draw(t, "tokens"), rapid.IntRange(1, 6).Draw(t, "top"), rapid.IntRange(1, 40).Draw(t, "columns")
		pairs := tokens * topK
		x, rows, back := y.matrix(kind, tokens, cols), y.matrix(kind, pairs, cols), y.matrix(kind, tokens, cols)
		y.fill(x, func() float32 { return float32(y.rng.IntN(17) - 8) }) // times 6 exact in bf16
		source, place := y.rng.Perm(pairs), make([]uint32, pairs)
		table := make([]uint32, pairs)
		for row, pair := range source {
			table[row], place[pair] = uint32(pair), uint32(row)
		}
		TakeRows(y, Taking{Dst: rows, Src: x, Source: put(y, table), Every: topK})
		CombineRows(y, Combining{Dst: back, Src: rows, Place: put(y, place), Every: topK})
		for i := range tokens {
			for j := range cols {
				if got, want := back.get(i, j), float32(topK)*x.get(i, j); got != want {
					t.Fatalf("row %d, column %d is %g, want %g", i, j, got, want)
				}
			}
		}
	})
}

// A row that does not exist fails the kernel, and is not read.
func TestRowsThatAreNotThere(t *testing.T) {
	y := newYard(t, 1<<14)
	y.strict = false
	m, src := y.matrix(kernels.F32, 2, 8), y.matrix(kernels.F32, 2, 8)
	one, column := y.matrix(kernels.F32, 2, 1), y.matrix(kernels.F32, 2, 1)
	for name, call := range map[string]func(){
		"take":    func() { TakeRows(y, Taking{Dst: m, Src: src, Source: put(y, []uint32{0, 6}), Every: 3}) },
		"take 1":  func() { TakeRows(y, Taking{Dst: one, Src: column, Source: put(y, []uint32{0, 6}), Every: 3}) },
		"combine": func() { CombineRows(y, Combining{Dst: m, Src: src, Place: put(y, []uint32{0, 2}), Every: 1}) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			call()
		}()
	}
}

// Results do not depend on threads. SPEC S6.3
func TestRowsThreads(t *testing.T) {
	for _, kind := range types {
		threads(t, func() []byte {
			y := newYard(t, 4<<20)
			y.strict = false
			const rows, cols = 900, 256 // several runs of both kernels
			x, taken, back := y.matrix(kind, rows, cols), y.matrix(kind, 2*rows, cols), y.matrix(kind, rows, cols)
			y.fill(x, func() float32 { return float32(y.rng.NormFloat64()) })
			table := drawTable(y, 2*rows, rows)
			TakeRows(y, Taking{Dst: taken, Src: x, Source: put(y, table), Every: 1, Zero: true})
			slices.Reverse(table)
			CombineRows(y, Combining{Dst: back, Src: taken, Place: put(y, table), Every: 2, Plus: x})
			return bytes.Clone(y.memory)
		})
	}
}
