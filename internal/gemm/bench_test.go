// This file owns the benchmarks: products of the sizes that training has, beside
// three loops in Go.

package gemm

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"
)

// naive multiplies with three plain loops.
func naive(c, a, b []float32, m, n, k int) {
	clear(c)
	for i := range m {
		for p, x := range a[i*k:][:k] {
			row := c[i*n:][:n]
			for j, y := range b[p*n:][:n] {
				row[j] += x * y
			}
		}
	}
}

func report(b *testing.B, m, n, k int) {
	b.ReportMetric(2*float64(m)*float64(n)*float64(k)*float64(b.N)/float64(b.Elapsed().Nanoseconds()), "GFLOP/s")
}

// BenchmarkMultiply runs on one thread and on all.
func BenchmarkMultiply(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	all := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(all)
	for _, s := range [][3]int{{1024, 1024, 1024}, {512, 256, 256}, {1024, 768, 256}, {1024, 256, 768}, {256, 768, 1024}, {64, 64, 64}, {16, 256, 256}, {1, 256, 256}, {512, 8, 256}} {
		m, n, k := s[0], s[1], s[2]
		name := fmt.Sprintf("%dx%dx%d", m, n, k)
		a, w, c := random(rng, false, m, k, 0), random(rng, false, n, k, 0), random(rng, false, m, n, 0)
		b.Run(name+"/naive", func(b *testing.B) {
			for b.Loop() {
				naive(c.F32, a.F32, w.F32, m, n, k)
			}
			report(b, m, n, k)
		})
		for _, kind := range kinds() {
			b.Run(name+"/"+kind.String()+"/NT", func(b *testing.B) {
				runtime.GOMAXPROCS(1)
				for b.Loop() {
					multiply(kind, packMost, []Product{{A: a, B: w, C: c, TransB: true}})
				}
				report(b, m, n, k)
			})
		}
		a16, w16, c16 := random(rng, true, m, k, 0), random(rng, true, n, k, 0), random(rng, true, m, n, 0)
		forms := []struct {
			name string
			p    Product
		}{
			{"NN", Product{A: a, B: random(rng, false, k, n, 0), C: c}},
			{"TN plus C", Product{A: random(rng, false, k, m, 0), B: random(rng, false, k, n, 0), C: c, Plus: c, TransA: true}},
			{"NT bf16", Product{A: a16, B: w16, C: c16, TransB: true}},
			{"TN bf16 to fp32 plus C", Product{A: random(rng, true, k, m, 0), B: random(rng, true, k, n, 0), C: c, Plus: c, TransA: true}},
		}
		for _, f := range forms {
			for threads := 1; threads <= all; threads *= 2 {
				b.Run(fmt.Sprintf("%s/%s/%d threads", name, f.name, threads), func(b *testing.B) {
					runtime.GOMAXPROCS(threads)
					b.ReportAllocs()
					for b.Loop() {
						Multiply(f.p)
					}
					report(b, m, n, k)
				})
			}
		}
	}
}

func BenchmarkBlock(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, s := range [][3]int{{64, 64, 64}, {64, 64, 128}, {64, 128, 64}, {64, 192, 64}, {16, 16, 16}} {
		m, n, k := s[0], s[1], s[2]
		// The matrices are columns of a wider one, like heads.
		a, w, c := random(rng, false, max(m, k), max(m, k), 192), random(rng, false, max(n, k), max(n, k), 192), random(rng, false, m, n, 0)
		for _, form := range []struct {
			name           string
			transA, transB bool
		}{{"NN", false, false}, {"NT", false, true}, {"TN", true, false}} {
			b.Run(fmt.Sprintf("%dx%dx%d/%s", m, n, k, form.name), func(b *testing.B) {
				for b.Loop() {
					Block(c.F32, n, a.F32, a.Pitch, form.transA, w.F32, w.Pitch, form.transB, m, n, k, true)
				}
				report(b, m, n, k)
			})
		}
	}
}

// BenchmarkPairs multiplies matrices of bf16 by AVX-512 and by the best kind in turn, on one
// thread and on all. It reports how many times as fast the best one is.
func BenchmarkPairs(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	all := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(all)
	for _, s := range [][3]int{{512, 64, 64}, {512, 128, 128}, {512, 256, 256}, {16, 256, 256}, {512, 512, 512}, {1024, 1024, 1024}, {2048, 2048, 2048}} {
		m, n, k := s[0], s[1], s[2]
		c, c16 := random(rng, false, m, n, 0), random(rng, true, m, n, 0)
		for _, f := range []struct {
			name string
			p    Product
		}{
			{"NT", Product{A: random(rng, true, m, k, 0), B: random(rng, true, n, k, 0), C: c16, TransB: true}},
			{"NN", Product{A: random(rng, true, m, k, 0), B: random(rng, true, k, n, 0), C: c16}},
			{"TN to fp32 plus C", Product{A: random(rng, true, k, m, 0), B: random(rng, true, k, n, 0), C: c, Plus: c, TransA: true}},
		} {
			for threads := 1; threads <= all; threads *= 2 {
				b.Run(fmt.Sprintf("%dx%dx%d/%s/%d threads", m, n, k, f.name, threads), func(b *testing.B) {
					runtime.GOMAXPROCS(threads)
					least := [2]time.Duration{math.MaxInt64, math.MaxInt64}
					for b.Loop() {
						for i, kind := range []kind{min(avx512, best()), best()} {
							from := time.Now()
							multiply(kind, packMost, []Product{f.p})
							least[i] = min(least[i], time.Since(from))
						}
					}
					b.ReportMetric(2*float64(m*n*k)/float64(least[1]), "GFLOP/s")
					b.ReportMetric(float64(least[0])/float64(least[1]), "times-AVX-512")
				})
			}
		}
	}
}
