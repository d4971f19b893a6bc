package gemm

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"
	"time"
)

func fastest(f func()) float64 {
	best := 1e18
	end := time.Now().Add(400 * time.Millisecond)
	for time.Now().Before(end) {
		t := time.Now()
		f()
		best = min(best, float64(time.Since(t).Nanoseconds()))
	}
	return best
}

func TestTune(t *testing.T) {
	if os.Getenv("TUNE") == "" {
		t.Skip()
	}
	runtime.GOMAXPROCS(1)
	rng := rand.New(rand.NewPCG(1, 1))
	for _, kc := range []int{64, 128, 256, 512, 1024} {
		a, b, c := make([]float32, 48*kc), make([]float32, 64*kc), make([]float32, 48*64)
		for _, kd := range kinds()[1:] {
			mr, nr := kd.rows(), kd.cols()
			d := fastest(func() {
				for range 50 {
					kd.tile(a, kc, 1, b, nr, c, nr, mr, nr, kc, false)
				}
			})
			d2 := fastest(func() {
				for range 50 {
					kd.tile(a, 1, mr, b, nr, c, nr, mr, nr, kc, false)
				}
			})
			f := float64(2*mr*nr*kc) * 50
			fmt.Printf("tile %v k %d: rows %.1f packed %.1f GFLOP/s\n", kd, kc, f/d, f/d2)
		}
	}
	for _, s := range [][3]int{{1024, 1024, 1024}, {512, 256, 256}, {1024, 768, 256}, {1024, 256, 768}, {256, 768, 1024}, {64, 64, 64}, {16, 256, 256}, {1, 256, 256}, {512, 8, 256}, {20, 128, 256}} {
		m, n, k := s[0], s[1], s[2]
		a, w, c := random(rng, false, m, k, 0), random(rng, false, n, k, 0), random(rng, false, m, n, 0)
		a16, w16, c16 := random(rng, true, m, k, 0), random(rng, true, n, k, 0), random(rng, true, m, n, 0)
		forms := []struct {
			name string
			p    Product
		}{
			{"NT", Product{A: a, B: w, C: c, TransB: true}},
			{"NN", Product{A: a, B: random(rng, false, k, n, 0), C: c}},
			{"TN+C", Product{A: random(rng, false, k, m, 0), B: random(rng, false, k, n, 0), C: c, Plus: c, TransA: true}},
			{"NT bf16", Product{A: a16, B: w16, C: c16, TransB: true}},
			{"TN bf16+C", Product{A: random(rng, true, k, m, 0), B: random(rng, true, k, n, 0), C: c, Plus: c, TransA: true}},
		}
		fmt.Printf("%v:", s)
		for _, f := range forms {
			d := fastest(func() { Multiply(f.p) })
			fmt.Printf("  %s %.1f", f.name, 2*float64(m*n*k)/d)
		}
		fmt.Println()
	}
}
