// This file owns the benchmarks of routing and rows, each beside a plain copy of the same
// number of bytes with the same number of threads.

package nn

import (
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/memory"
)

// benchMatrix returns a matrix without gaps that begins at a cache line.
func benchMatrix(y *yard, kind kernels.Number, rows, cols int) Matrix {
	y.end = (y.end/4096 + 1) * 4096
	m := NewMatrix(y.buf.Slice(y.end, kind.Size()*memory.Bytes(rows*cols)), kind, rows, cols)
	y.end += m.Len
	for i := range numbersAt[uint16](m.Range) {
		numbersAt[uint16](m.Range)[i] = 0x3f00 + uint16(i%100)
	}
	return m
}

func benchYard(b *testing.B, size int) *yard {
	y := newYard(b, size)
	y.strict = false
	return y
}

// benchMoved times f, which moves the given number of bytes, and a copy that moves the
// same number.
func benchMoved(b *testing.B, name string, moved int, f func()) {
	b.Run(name, func(b *testing.B) {
		b.SetBytes(int64(moved))
		for b.Loop() {
			f()
		}
	})
	// A copy of half the bytes reads and writes that number.
	from, to := make([]byte, moved/2), make([]byte, moved/2)
	for i := range from {
		from[i] = byte(i)
	}
	b.Run(name+"/copy", func(b *testing.B) {
		b.SetBytes(int64(moved))
		for b.Loop() {
			parallel.For(len(to), rowsRun, func(i, j int) { copy(to[i:j], from[i:j]) })
		}
	})
}

// BenchmarkRows moves 32 MiB of rows to random places, the worst order.
func BenchmarkRows(b *testing.B) {
	const bytes = 32 << 20
	y := benchYard(b, 3*bytes+1<<25)
	for _, kind := range types {
		for _, cols := range []int{64, 1024, 8192} {
			y.reset(b)
			rows := bytes / int(kind.Size()) / cols
			x, taken := benchMatrix(y, kind, rows, cols), benchMatrix(y, kind, rows, cols)
			table := make([]uint32, rows)
			for i, n := range y.rng.Perm(rows) {
				table[i] = uint32(n)
			}
			source := put(y, table)
			name := fmt.Sprintf("type%d/%d", kind, cols)
			benchMoved(b, "take/"+name, 2*bytes, func() { TakeRows(y, Taking{Dst: taken, Src: x, Source: source, Every: 1}) })
			for _, every := range []int{2, 8} {
				if rows >= every {
					to := Matrix{Range: taken.Range, Type: kind, Rows: rows / every, Cols: cols}
					benchMoved(b, fmt.Sprintf("combine%d/%s", every, name), bytes+bytes/every, func() {
						CombineRows(y, Combining{Dst: to, Src: x, Place: source, Every: every})
					})
				}
			}
		}
	}
}

func BenchmarkTakeColumn(b *testing.B) {
	y := benchYard(b, 32<<20)
	const n = 1 << 19
	table := make([]uint32, n)
	for i, v := range y.rng.Perm(n) {
		table[i] = uint32(v)
	}
	dst, src, source := benchMatrix(y, kernels.F32, n, 1), benchMatrix(y, kernels.F32, n, 1), put(y, table)
	for b.Loop() {
		TakeRows(y, Taking{Dst: dst, Src: src, Source: source, Every: 1})
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/row")
}

func BenchmarkSortRows(b *testing.B) {
	y := benchYard(b, 64<<20)
	for _, c := range []struct{ tokens, topK, experts int }{{512, 2, 8}, {4096, 8, 64}, {65536, 8, 256}, {65536, 16, 512}} {
		y.reset(b)
		pairs := c.tokens * c.topK
		index := make([]uint32, pairs)
		for i := range index {
			index[i] = uint32(y.rng.IntN(c.experts))
		}
		o := Sorting{Index: put(y, index), Tokens: c.tokens, TopK: c.topK, Experts: c.experts, Room: pairs}
		o.Seg, o.Source, o.Place = Segments{place[uint32](y, 2*c.experts), c.experts}, place[uint32](y, pairs), place[uint32](y, pairs)
		o.Scratch, o.Count = place[uint32](y, int(SortScratch(c.tokens, c.topK, c.experts)/4)), place[uint64](y, 1)
		b.Run(fmt.Sprintf("%dx%d of %d", c.tokens, c.topK, c.experts), func(b *testing.B) {
			for b.Loop() {
				SortRows(y, o)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*pairs), "ns/pair")
		})
	}
}

func BenchmarkRoute(b *testing.B) {
	y := benchYard(b, 256<<20)
	for _, c := range []struct{ tokens, topK, experts int }{{512, 2, 8}, {8192, 8, 64}, {16384, 8, 256}, {16384, 16, 512}} {
		for _, sigmoid := range []bool{false, true} {
			y.reset(b)
			r := Routing{TopK: c.topK, Sigmoid: sigmoid, Normalise: true, Factor: 1}
			r.Logits, r.Scores = benchMatrix(y, kernels.F32, c.tokens, c.experts), benchMatrix(y, kernels.F32, c.tokens, c.experts)
			y.fill(r.Logits, func() float32 { return float32(y.rng.NormFloat64()) })
			r.Index, r.Weight, r.Load = place[uint32](y, c.tokens*c.topK), place[float32](y, c.tokens*c.topK), place[uint32](y, c.experts)
			r.Bias = put(y, make([]float32, c.experts))
			g := RoutingGrad{Routing: r, DWeight: r.Weight, DLogits: benchMatrix(y, kernels.F32, c.tokens, c.experts), Balance: 0.1, Scale: 1}
			g.Scratch = place[float32](y, c.tokens+c.experts)
			name := fmt.Sprintf("%dx%d of %d, sigmoid %v", c.tokens, c.topK, c.experts, sigmoid)
			bytes := 8 * c.tokens * c.experts
			benchMoved(b, name, bytes, func() { Route(y, r) })
			benchMoved(b, "grad "+name, bytes, func() { RouteGrad(y, g) })
		}
	}
}
