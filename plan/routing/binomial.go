// This file owns binomial random numbers.

package routing

import (
	"math"
	"math/rand/v2"
)

// binomial draws how many of n trials succeed with probability p each. It counts few
// expected successes one by one. It draws many by rejection from a curve above the
// distribution (Hörmann 1993, BTRS), in a time that does not depend on n.
func binomial(rng *rand.Rand, n int64, p float64) int64 {
	switch {
	case n <= 0 || p <= 0:
		return 0
	case p >= 1:
		return n
	case p > 0.5:
		return n - binomial(rng, n, 1-p)
	case float64(n)*p < 10:
		return fewSuccesses(rng, n, p)
	}
	return rejection(rng, n, p)
}

// fewSuccesses jumps from success to success, because the gaps are geometric.
func fewSuccesses(rng *rand.Rand, n int64, p float64) int64 {
	logq := math.Log1p(-p)
	var at, k int64
	for {
		gap := math.Floor(math.Log(1-rng.Float64())/logq) + 1
		if gap > float64(n-at) {
			return k
		}
		at += int64(gap)
		k++
	}
}

func rejection(rng *rand.Rand, n int64, p float64) int64 {
	trials, q := float64(n), 1-p
	dev := math.Sqrt(trials * p * q)
	b := 1.15 + 2.53*dev
	a := -0.0873 + 0.0248*b + 0.01*p
	c := trials*p + 0.5
	squeeze := 0.92 - 4.2/b
	alpha := (2.83 + 5.1/b) * dev
	odds := math.Log(p / q)
	mode := math.Floor((trials + 1) * p)
	top := logFactorial(mode) + logFactorial(trials-mode)
	for {
		u, v := rng.Float64()-0.5, 1-rng.Float64()
		us := 0.5 - math.Abs(u)
		k := math.Floor((2*a/us+b)*u + c)
		if k < 0 || k > trials { // also where us is zero
			continue
		}
		if us >= 0.07 && v <= squeeze {
			return int64(k)
		}
		v *= alpha / (a/(us*us) + b)
		if math.Log(v) <= top-logFactorial(k)-logFactorial(trials-k)+(k-mode)*odds {
			return int64(k)
		}
	}
}

func logFactorial(n float64) float64 {
	v, _ := math.Lgamma(n + 1)
	return v
}
