// This file owns the tests of routing: results against definitions in float64, and
// gradients against their central differences.

package nn

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// drawRouting draws a routing with random logits, some of which are equal.
func drawRouting(t *rapid.T, y *yard) Routing {
	y.reset(t)
	seed := rapid.Uint64().Draw(t, "seed")
	rng := rand.New(rand.NewPCG(seed, 0))
	experts := rapid.IntRange(1, 70).Draw(t, "experts")
	tokens := rapid.IntRange(1, 12).Draw(t, "tokens")
	r := Routing{
		TopK:      rapid.IntRange(1, min(experts, 16)).Draw(t, "top"),
		Sigmoid:   rapid.Bool().Draw(t, "sigmoid"),
		Normalise: rapid.Bool().Draw(t, "normalise"),
		Factor:    float32(1 + rng.IntN(3)),
		Logits:    y.matrix(kernels.F32, tokens, experts),
		Scores:    y.matrix(kernels.F32, tokens, experts),
	}
	coarse := rapid.Bool().Draw(t, "coarse")
	number := func() float32 {
		if coarse {
			return float32(rng.IntN(5)) - 2
		}
		return 2 * float32(rng.NormFloat64())
	}
	y.fill(r.Logits, number)
	if rapid.Bool().Draw(t, "bias") {
		bias := make([]float32, experts)
		for i := range bias {
			bias[i] = number() / 4
		}
		r.Bias = put(y, bias)
	}
	r.Index, r.Weight = place[uint32](y, tokens*r.TopK), place[float32](y, tokens*r.TopK)
	if rapid.Bool().Draw(t, "load") {
		r.Load = put(y, make([]uint32, experts))
		numbersAt[uint32](r.Load)[0] = 7
	}
	return r
}

// row64 returns a row of a matrix in float64.
func (m Matrix) row64(i int) []float64 {
	v := make([]float64, m.Cols)
	for j := range v {
		v[j] = float64(m.get(i, j))
	}
	return v
}

// scores64 computes scores by the definition.
func scores64(logits []float64, sigmoid bool) []float64 {
	v, sum := make([]float64, len(logits)), 0.0
	for i, x := range logits {
		if v[i] = math.Exp(x); sigmoid {
			v[i] = 1 / (1 + math.Exp(-x))
		}
		sum += v[i]
	}
	for i := range v {
		if !sigmoid {
			v[i] /= sum
		}
	}
	return v
}

// weights64 computes weights by the definition.
func weights64(r Routing, scores []float64, chosen []uint32) []float64 {
	w, sum := make([]float64, len(chosen)), 0.0
	for k, e := range chosen {
		w[k] = scores[e]
		sum += w[k]
	}
	for k := range w {
		if r.Normalise {
			w[k] /= sum + 1e-20
		}
		w[k] *= float64(r.Factor)
	}
	return w
}

// chosenBySorting returns the experts of a token, found by sorting all of them.
func chosenBySorting(r Routing, token int) []uint32 {
	v := make([]float32, r.Scores.Cols)
	all := make([]uint32, len(v))
	for e := range v {
		all[e] = uint32(e)
		v[e] = r.Scores.get(token, e)
		if r.Bias.Buf != nil {
			v[e] += numbersAt[float32](r.Bias)[e]
		}
		if v[e] != v[e] {
			v[e] = float32(math.Inf(-1))
		}
	}
	sort.SliceStable(all, func(i, j int) bool { return v[all[i]] > v[all[j]] })
	return all[:r.TopK]
}

func within(got, want, tolerance float64) bool { return math.Abs(got-want) <= tolerance }

func TestRoute(t *testing.T) {
	y := newYard(t, 1<<15)
	rapid.Check(t, func(t *rapid.T) {
		r := drawRouting(t, y)
		logits := r.Logits
		want := make([][]float64, logits.Rows)
		for i := range want {
			want[i] = scores64(logits.row64(i), r.Sigmoid)
		}
		if rapid.Bool().Draw(t, "in place") {
			r.Scores = r.Logits
		}
		Route(y, r)
		load := make([]uint32, logits.Cols)
		load[0] = 7
		for i := range logits.Rows {
			for e, s := range r.Scores.row64(i) {
				if !within(s, want[i][e], 1e-6*want[i][e]) {
					t.Fatalf("score of token %d and expert %d is %g, want %g", i, e, s, want[i][e])
				}
			}
			index := numbersAt[uint32](r.Index)[i*r.TopK:][:r.TopK]
			if best := chosenBySorting(r, i); !slices.Equal(index, best) {
				t.Fatalf("token %d uses %v, want %v", i, index, best)
			}
			for k, w := range weights64(r, r.Scores.row64(i), index) {
				if got := numbersAt[float32](r.Weight)[i*r.TopK+k]; !within(float64(got), w, 1e-6*w) {
					t.Fatalf("weight %d of token %d is %g, want %g", k, i, got, w)
				}
				load[index[k]]++
			}
		}
		if r.Load.Buf != nil && !slices.Equal(numbersAt[uint32](r.Load), load) {
			t.Fatalf("load is %v, want %v", numbersAt[uint32](r.Load), load)
		}
	})
}

// Logits that are NaN or infinite still choose experts that exist, each once.
func TestRouteOfBrokenLogits(t *testing.T) {
	y := newYard(t, 1<<14)
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	for _, logits := range [][]float32{
		{nan, nan, nan, nan}, {1, nan, 2, 3}, {-inf, -inf, -inf, -inf}, {inf, 1, inf, 2}, {0, 0, 0, 0}, {-200, -200, -300, -200}, {100, -inf, 100, nan},
	} {
		for _, sigmoid := range []bool{false, true} {
			y.reset(t)
			r := Routing{TopK: 3, Sigmoid: sigmoid, Normalise: true, Factor: 1}
			r.Logits = NewMatrix(put(y, logits), kernels.F32, 1, 4)
			r.Scores, r.Index, r.Weight = r.Logits, place[uint32](y, 3), place[float32](y, 3)
			Route(y, r)
			index := numbersAt[uint32](r.Index)
			if want := chosenBySorting(r, 0); !slices.Equal(index, want) {
				t.Errorf("%v: chosen are %v, want %v", logits, index, want)
			}
		}
	}
}

// Scores that are all zero give weights and gradients of zero, not NaN.
func TestRouteOfVanishedScores(t *testing.T) {
	y := newYard(t, 1<<14)
	r := Routing{TopK: 2, Sigmoid: true, Normalise: true, Factor: 1, Index: place[uint32](y, 2), Weight: place[float32](y, 2)}
	r.Logits = NewMatrix(put(y, []float32{-200, -300, -200}), kernels.F32, 1, 3)
	r.Scores = r.Logits
	Route(y, r)
	g := RoutingGrad{Routing: r, DWeight: put(y, []float32{1, -1}), DLogits: y.matrix(kernels.F32, 1, 3), Balance: 1, Scale: 1, Scratch: place[float32](y, 4)}
	RouteGrad(y, g)
	if w := numbersAt[float32](r.Weight); w[0] != 0 || w[1] != 0 {
		t.Errorf("weights are %v", w)
	}
	for e, d := range g.DLogits.row64(0) {
		if d != 0 {
			t.Errorf("gradient of expert %d is %g", e, d)
		}
	}
}

// auxiliary computes the loss that balances experts by the definition, without Balance.
func auxiliary(scores [][]float64, chosen []uint32, topK int, sigmoid bool) float64 {
	tokens, experts := len(scores), len(scores[0])
	times, mean := make([]float64, experts), make([]float64, experts)
	for _, e := range chosen {
		times[e]++
	}
	for _, s := range scores {
		sum := 0.0
		for _, v := range s {
			sum += v
		}
		for e, v := range s {
			if sigmoid {
				v /= sum + 1e-20
			}
			mean[e] += v / float64(tokens)
		}
	}
	loss := 0.0
	for e := range times {
		loss += float64(experts) * times[e] / float64(tokens*topK) * mean[e]
	}
	return loss
}

// Gradients follow the definition, with the choice of experts held fixed. SPEC S3.4
func TestRouteGrad(t *testing.T) {
	y := newYard(t, 1<<16)
	rapid.Check(t, func(t *rapid.T) {
		r := drawRouting(t, y)
		tokens, experts := r.Logits.Rows, r.Logits.Cols
		Route(y, r)
		g := RoutingGrad{Routing: r, DLogits: y.matrix(kernels.F32, tokens, experts), Scale: 4}
		g.Logits = Matrix{} // the backward pass does not use them
		dweight := make([]float32, tokens*r.TopK)
		for i := range dweight {
			dweight[i] = float32(y.rng.NormFloat64())
		}
		g.DWeight = put(y, dweight)
		index := slices.Clone(numbersAt[uint32](r.Index))
		if rapid.Bool().Draw(t, "balance") {
			g.Balance = 0.5 * g.Scale
			g.Scratch = place[byte](y, 4+int(RouteScratch(tokens, experts)))
			g.Scratch = g.Scratch.Slice(memory.Bytes(-g.Scratch.Addr()&3), RouteScratch(tokens, experts))
			g.Loss = put(y, []float32{3})
		}
		logits := make([][]float64, tokens)
		for i := range logits {
			logits[i] = r.Logits.row64(i)
		}
		all := func() (scores [][]float64) {
			for i := range logits {
				scores = append(scores, scores64(logits[i], r.Sigmoid))
			}
			return scores
		}
		loss := func() float64 {
			scores, sum := all(), 0.0
			for i := range scores {
				for k, w := range weights64(r, scores[i], index[i*r.TopK:][:r.TopK]) {
					sum += w * float64(dweight[i*r.TopK+k])
				}
			}
			return sum + float64(g.Balance)*auxiliary(scores, index, r.TopK, r.Sigmoid)
		}
		if rapid.Bool().Draw(t, "in place") {
			g.DLogits = g.Scores
		}
		RouteGrad(y, g)
		for i := range logits {
			for e, x := range logits[i] {
				const h = 1e-4
				logits[i][e] = x + h
				up := loss()
				logits[i][e] = x - h
				want := (up - loss()) / (2 * h)
				logits[i][e] = x
				// The gradients of weights of a few small scores are differences of
				// numbers as large as Factor.
				if got := float64(g.DLogits.get(i, e)); !within(got, want, 2e-5) {
					t.Fatalf("gradient of token %d and expert %d is %g, want %g", i, e, got, want)
				}
			}
		}
		if g.Loss.Buf != nil {
			want := 3 + float64(g.Balance/g.Scale)*auxiliary(all(), index, r.TopK, r.Sigmoid)
			if got := float64(numbersAt[float32](g.Loss)[0]); !within(got, want, 1e-5) {
				t.Fatalf("loss is %g, want %g", got, want)
			}
		}
	})
}

func TestUpdateBias(t *testing.T) {
	y := newYard(t, 1<<13)
	rapid.Check(t, func(t *rapid.T) {
		y.reset(t)
		experts, ranks := rapid.IntRange(1, 40).Draw(t, "experts"), rapid.IntRange(1, 3).Draw(t, "ranks")
		load := rapid.SliceOfN(rapid.Uint32Range(0, 6), ranks*experts, ranks*experts).Draw(t, "load")
		if rapid.Bool().Draw(t, "large") {
			load[0] = math.MaxUint32
		}
		bias, counts, sum := make([]float32, experts), make([]float64, experts), 0.0
		for i, n := range load {
			bias[i%experts] = float32(i % experts)
			counts[i%experts] += float64(n)
			sum += float64(n)
		}
		r := Rebalance{Bias: put(y, bias), Load: put(y, load), Experts: experts, Ranks: ranks, Rate: 0.25}
		UpdateBias(y, r)
		for i, n := range counts {
			switch mean := sum / float64(experts); {
			case n < mean:
				bias[i] += 0.25
			case n > mean:
				bias[i] -= 0.25
			}
		}
		if got := numbersAt[float32](r.Bias); !slices.Equal(got, bias) {
			t.Fatalf("bias is %v, want %v", got, bias)
		}
		if got := numbersAt[uint32](r.Load); slices.Max(got) != 0 {
			t.Fatalf("load is left at %v", got)
		}
	})
}

// Results do not depend on threads. SPEC S6.3
func TestRouteThreads(t *testing.T) {
	const tokens, experts, topK = 600, 96, 6 // four runs
	for _, sigmoid := range []bool{false, true} {
		threads(t, func() []byte {
			y := newYard(t, 1<<20)
			y.strict = false
			r := Routing{TopK: topK, Sigmoid: sigmoid, Normalise: true, Factor: 1}
			r.Logits, r.Scores = y.matrix(kernels.F32, tokens, experts), y.matrix(kernels.F32, tokens, experts)
			y.fill(r.Logits, func() float32 { return float32(y.rng.NormFloat64()) })
			r.Index, r.Weight, r.Load = place[uint32](y, tokens*topK), place[float32](y, tokens*topK), put(y, make([]uint32, experts))
			Route(y, r)
			g := RoutingGrad{Routing: r, DWeight: r.Weight, DLogits: y.matrix(kernels.F32, tokens, experts), Balance: 0.1, Scale: 1}
			g.Scratch, g.Loss = place[float32](y, tokens+experts), put(y, []float32{0})
			RouteGrad(y, g)
			return bytes.Clone(y.memory)
		})
	}
}
