// This file owns the benchmarks of the loops: each vector form beside plain Go, on
// operands in the first-level cache.

package vec

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
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
		if c.name == "Rotate" {
			// The rotation has no angle, because factors other than a cosine and a sine
			// grow or fade.
			for i := range in[0] {
				in[0][i], in[1][i] = 1, 0
			}
		}
		forEachLevel(func(l level) {
			b.Run(c.name+"/"+names[l], func(b *testing.B) {
				// The fastest run counts, because other work of the machine only makes
				// runs slower.
				const calls = 16
				fastest := time.Duration(math.MaxInt64)
				for b.Loop() {
					began := time.Now()
					for range calls {
						c.do(out, in, 1, 0.5)
					}
					fastest = min(fastest, time.Since(began))
				}
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(float64(fastest)/(calls*n), "ns/number")
			})
		})
	}
}
