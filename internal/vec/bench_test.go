// This file owns the benchmarks of the loops: each form beside Go, on operands in the
// first-level cache.

package vec

import (
	"math/rand/v2"
	"testing"
)

func BenchmarkForms(b *testing.B) {
	names := map[level]string{plain: "go", withAVX2: "avx2", withAVX512: "avx512"}
	for _, c := range calls {
		const n = 1024
		rng := rand.New(rand.NewPCG(1, 1))
		var out, in [][]float32
		for range c.outs {
			out = append(out, draw(rng, n, false))
		}
		for range c.ins {
			in = append(in, draw(rng, n, false))
		}
		with(func(l level) {
			b.Run(c.name+"/"+names[l], func(b *testing.B) {
				for b.Loop() {
					c.do(out, in, 1, 0.5)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/number")
			})
		})
	}
}
