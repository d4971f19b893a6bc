package gemm

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"
)

func TestTunePack(t *testing.T) {
	if os.Getenv("TUNE") == "" {
		t.Skip()
	}
	runtime.GOMAXPROCS(1)
	rng := rand.New(rand.NewPCG(1, 1))
	for _, s := range [][2]int{{256, 256}, {768, 256}, {256, 768}, {768, 1024}, {1024, 1024}} {
		n, k := s[0], s[1]
		dst := make([]float32, n*k)
		for _, bf := range []bool{false, true} {
			for _, trans := range []bool{false, true} {
				w := random(rng, bf, k, n, 0)
				if trans {
					w = random(rng, bf, n, k, 0)
				}
				d := fastest(func() {
					for j := 0; j < n; j += 32 {
						best.panel(dst[j*k:], &w, trans, k, j, 32)
					}
				})
				fmt.Printf("n %d k %d bf16 %v trans %v: %.2f ns/elem, as 256 rows %.1f%%\n", n, k, bf, trans, d/float64(n*k), 100*d/float64(n*k)/(512/125.))
			}
		}
	}
}
