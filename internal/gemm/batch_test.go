// This file tests how products are divided, checked and laid out.

package gemm

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
)

// shaped is a product without numbers.
func shaped(m, n, k int, halfA, halfB, transA, transB bool) *Product {
	p := &Product{TransA: transA, TransB: transB, C: Matrix{F32: []float32{0}, Rows: m, Cols: n, Pitch: n}}
	for x, half := range map[*Matrix]bool{&p.A: halfA, &p.B: halfB} {
		if half {
			x.BF16 = []uint16{0}
		} else {
			x.F32 = []float32{0}
		}
	}
	return p
}

// Products are divided as the table says: what is laid out and what is read where it lies, what is
// multiplied in pairs, the size of tiles, and how many are worth a switch between threads.
func TestBatches(t *testing.T) {
	var book strings.Builder
	for _, k := range []kind{plain, avx2, avx512, amx} {
		for _, s := range [][3]int{{1, 1, 1}, {48, 100, 300}, {49, 100, 300}, {96, 512, 512}, {97, 513, 513}, {500, 31, 600}, {500, 600, 31}, {7, 3000, 64}} {
			for _, half := range [][2]bool{{false, false}, {true, false}, {true, true}} {
				for _, transB := range []bool{false, true} {
					if transB && half[0] && !half[1] {
						continue
					}
					b := &batch{kind: k, most: packMost}
					b.add(shaped(s[0], s[1], s[2], half[0], half[1], false, transB), s[0], s[2], 0, s[1])
					x := b.parts[0]
					fmt.Fprintf(&book, "%v, %d x %d x %d, bf16 %v, transposed B %t: read where it lies %t, pairs %t, tiles %d of %d x %d with %d rows, depth %d, %d panels, %d numbers, %d work, at once %d and %d\n",
						k, s[0], s[1], s[2], half, transB, x.direct, x.paired, b.tiles, x.tall, x.wide, x.rowTiles, x.depth, b.panels, b.size, b.work, b.panelsAtOnce(), b.tilesAtOnce())
				}
			}
		}
	}
	golden.Check(t, "batches.txt", book.String())
}

// The panels and tiles of the products of a batch follow each other, and no number of the room
// for B is of two of them. A batch ends before a product that finds no room, and one alone has it.
func TestBatchesHaveRoomForB(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 9))
	for range 200 {
		most := 1000 + rng.IntN(30000)
		b := &batch{kind: plain, most: most}
		room, panels, tiles, parts, work := 0, 0, 0, 0, 0
		for range 2 + rng.IntN(6) {
			m, n, k := 1+rng.IntN(120), 1+rng.IntN(40), 1+rng.IntN(300)
			p := Product{A: random(rng, false, m, k, 0), B: random(rng, rng.IntN(2) == 0, k, n, 0), C: random(rng, false, m, n, 0)}
			b.add(&p, m, k, 0, n)
			x := b.parts[len(b.parts)-1]
			size := (n + 3) / 4 * 4 * k
			if direct := p.B.F32 != nil && m <= tileRows; direct != x.direct {
				t.Fatalf("%d rows, fp32 %t: read where it lies: %t", m, p.B.F32 != nil, x.direct)
			} else if direct {
				size = 0
			}
			if size > 0 && room+size > most && parts > 0 {
				room, panels, tiles, parts, work = 0, 0, 0, 0, 0
			}
			if len(b.parts) != parts+1 || x.tile != tiles || x.panel != panels || size > 0 && x.packed != room {
				t.Fatalf("product %d begins at tile %d, panel %d and number %d; want %d, %d and %d", len(b.parts), x.tile, x.panel, x.packed, tiles, panels, room)
			}
			room, parts, tiles, work = room+size, parts+1, tiles+(m+tileRows-1)/tileRows, work+m*n*k
			if size > 0 {
				panels += (n + 3) / 4
			}
			if b.size != room || b.panels != panels || b.tiles != tiles || b.work != work {
				t.Fatalf("a batch of %d numbers, %d panels, %d tiles and %d work; want %d, %d, %d and %d", b.size, b.panels, b.tiles, b.work, room, panels, tiles, work)
			}
		}
		b.run()
		for _, x := range b.parts[:cap(b.parts)] {
			if x.Product != nil {
				t.Fatal("a batch that has run keeps a product")
			}
		}
		if len(b.packed) < room || b.size+b.panels+b.tiles+b.work+len(b.parts) != 0 || b.kind != plain || b.most != most {
			t.Fatalf("a batch that has run is %+v", b)
		}
	}
}

// A wide B is laid out in columns of whole tiles, as many as there is room for.
func TestWideProductsGoInColumns(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 4))
	const m, n, k = 5, 1500, 10
	for most, columns := range map[int]int{n * k: n, n*k - 1: 1280, 600 * k: 512, 255 * k: 256, 0: 256} {
		p := Product{A: random(rng, false, m, k, 0), B: random(rng, true, k, n, 0), C: random(rng, false, m, n, 0)}
		want := newTruth(p)
		b := &batch{kind: plain, most: most}
		batches.Put(b)
		multiply(plain, most, []Product{p})
		want.verify(t, "wide", p.C)
		if size := columns * k; !raced && len(b.packed) > 0 && len(b.packed) != size {
			t.Errorf("with room for %d numbers, %d are laid out; want %d", most, len(b.packed), size)
		}
	}
}

// A product of nothing among others is skipped, and the others are computed.
func TestProductsOfNothing(t *testing.T) {
	m := func(rows, cols int) Matrix {
		x := Matrix{F32: make([]float32, rows*cols), Rows: rows, Cols: cols, Pitch: cols}
		for i := range x.F32 {
			x.F32[i] = 2
		}
		return x
	}
	last := m(2, 2)
	Multiply(Product{A: m(0, 3), B: m(3, 2), C: m(0, 2)}, Product{A: m(2, 3), B: m(3, 0), C: m(2, 0)}, Product{A: m(2, 3), B: m(3, 2), C: last})
	if !slices.Equal(last.F32, []float32{12, 12, 12, 12}) {
		t.Errorf("the product behind them is %v", last.F32)
	}
	Block(nil, 0, nil, 0, false, nil, 0, false, 0, 5, 3, true)
	Block(nil, 0, nil, 0, false, nil, 0, false, 5, 0, 3, true)
	for i, size := range [][3]int{{-1, 1, 1}, {1, -1, 1}, {1, 1, -1}, {0, 0, -1}} {
		func() {
			defer func() {
				if said := fmt.Sprint(recover()); !strings.HasPrefix(said, "gemm: expected sizes of at least zero") {
					t.Errorf("case %d: %s", i, said)
				}
			}()
			Block(make([]float32, 9), 1, make([]float32, 9), 1, false, make([]float32, 9), 1, false, size[0], size[1], size[2], false)
		}()
	}
}

// Every matrix of a product must fit the others and hold its last number.
func TestEveryMatrixOfAProductIsChecked(t *testing.T) {
	const m, n, k = 3, 5, 7
	matrix := func(rows, cols int) Matrix {
		return Matrix{F32: make([]float32, (rows-1)*9+cols), Rows: rows, Cols: cols, Pitch: 9}
	}
	for _, trans := range []bool{false, true} {
		fresh := func() *Product {
			p := &Product{A: matrix(m, k), B: matrix(k, n), C: matrix(m, n), Plus: matrix(m, n), TransA: trans, TransB: trans}
			if trans {
				p.A, p.B = matrix(k, m), matrix(n, k)
			}
			return p
		}
		said := func(p *Product) (said string) {
			defer func() { said = fmt.Sprint(recover()) }()
			Multiply(*p)
			return ""
		}
		if got := said(fresh()); got != "<nil>" {
			t.Errorf("a product that fits: %s", got)
		}
		of := func(p *Product) []*Matrix { return []*Matrix{&p.A, &p.B, &p.C, &p.Plus} }
		for i := range 4 {
			for what, change := range map[string]func(x *Matrix){
				"fewer rows": func(x *Matrix) { x.Rows-- }, "fewer columns": func(x *Matrix) { x.Cols-- },
				"one number less": func(x *Matrix) { x.F32 = x.F32[:len(x.F32)-1] }, "rows too near": func(x *Matrix) { x.Pitch = x.Cols - 1 },
			} {
				p := fresh()
				change(of(p)[i])
				if got := said(p); !strings.HasPrefix(got, "gemm: ") {
					t.Errorf("matrix %d has %s: %s", i, what, got)
				}
			}
		}
	}
	p := &Product{A: matrix(m, k), B: matrix(k+1, n), C: matrix(m+1, n)}
	defer func() {
		if got, want := fmt.Sprint(recover()), "gemm: expected matrices that fit, got 3 x 7 times 8 x 5 for a result of 4 x 5"; got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}()
	Multiply(*p)
}

// Rows of A are read where they lie if a copy does not pay: fp32 in rows, for few columns of C.
func TestWhichRowsAreCopied(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 8))
	b := &batch{kind: plain}
	for _, c := range []struct {
		bf16, trans bool
		cols        int
		copied      bool
	}{{false, false, directCols, false}, {false, false, directCols + 1, true}, {true, false, 1, true}, {false, true, 1, true}} {
		x, s := &part{Product: &Product{A: random(rng, c.bf16, 90, 90, 3), TransA: c.trans}}, new(scratch)
		a, rowStep, colStep := b.rowsOfA(x, s, 40, 20, 30, 50, c.cols)
		if (&a[0] == &s.a[0]) != c.copied {
			t.Errorf("%+v: copied %t", c, !c.copied)
		}
		for i := range 20 {
			for j := range 50 {
				at := x.A.index(40+i, 30+j)
				if c.trans {
					at = x.A.index(30+j, 40+i)
				}
				if a[i*rowStep+j*colStep] != x.A.value(at) {
					t.Fatalf("%+v: element %d of row %d is wrong", c, j, i)
				}
			}
		}
	}
}

// Products leave nothing behind for the next ones to make anew.
func TestProductsAllocateOnce(t *testing.T) {
	if raced {
		t.Skip("pools lose what they hold at random under the race detector")
	}
	rng := rand.New(rand.NewPCG(9, 9))
	p := Product{A: random(rng, false, 100, 70, 0), B: random(rng, true, 70, 100, 0), C: random(rng, true, 100, 100, 0)}
	x := random(rng, false, 64, 64, 0)
	c := make([]float32, 64*64)
	perCall := testing.AllocsPerRun(50, func() { // a pool may be emptied once
		Multiply(p)
		Block(c, 64, x.F32, 64, false, x.F32, 64, true, 64, 64, 64, false)
	})
	if perCall > 3 {
		t.Errorf("%v allocations", perCall)
	}
}

// The environment names the kind, and a name that does not exist is an error with those that do.
func TestKindOfTheEnvironment(t *testing.T) {
	for name, want := range map[string]string{
		"": "<nil>", "avx2": "<nil>", "sse": `STOWAGE_GEMM is "sse"; choose plain, avx2, avx512, avx512_bf16, amx_bf16, or leave it out for the best`,
	} {
		t.Setenv("STOWAGE_GEMM", name)
		if got := fmt.Sprint(Check()); got != want {
			t.Errorf("%q: %s, want %s", name, got, want)
		}
	}
}
