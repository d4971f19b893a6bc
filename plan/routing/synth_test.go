package routing

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// whole checks the law of counts: all ranks together have tokens*top_k rows, and no rank
// has more than it can.
func whole(tr *Counts) error {
	for step := range tr.Steps() {
		for layer := range tr.Layers {
			for m := range tr.Microbatches {
				var sum Rows
				for rank := range tr.Ranks {
					n := tr.Rows(step, layer, m, rank)
					if sum += n; n < 0 || n > tr.Worst() {
						return fmt.Errorf("rank %d of microbatch %d of layer %d of step %d has %d rows", rank, m, layer, step, n)
					}
				}
				if sum != tr.Total() {
					return fmt.Errorf("microbatch %d of layer %d of step %d has %d rows, want %d", m, layer, step, sum, tr.Total())
				}
			}
		}
	}
	return nil
}

func anyConfig(t *rapid.T) Config {
	n := func(name string, from, to int) int { return rapid.IntRange(from, to).Draw(t, name) }
	c := Config{
		Kind: Kind(n("kind", 0, 2)), Skew: rapid.Float64Range(0, maxSkew).Draw(t, "skew"),
		Ranks: n("ranks", 1, 6), Layers: n("layers", 1, 3), Microbatches: n("microbatches", 1, 4), Steps: n("steps", 1, 3),
		Tokens: int64(n("tokens", 1, 3000)), Seed: rapid.Uint64().Draw(t, "seed"),
	}
	c.Experts = c.Ranks * n("experts a rank", 1, 20)
	c.TopK = n("top_k", 1, min(c.Experts, 9))
	return c
}

// SPEC S1.1: rows are conserved for every kind, skew and shape, and the same
// configuration gives the same counts.
func TestSynthConserves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := anyConfig(t)
		a, err := Generate(c)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := Generate(c)
		if !slices.Equal(a.rows, b.rows) || a.Steps() != c.Steps {
			t.Fatal("the same configuration gave different counts")
		}
		if err := whole(a); err != nil {
			t.Fatal(err)
		}
	})
}

func mustSynth(t *testing.T, c Config) *Counts {
	t.Helper()
	tr, err := Generate(c)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// More skew makes the largest rank larger, and other seeds give other counts.
func TestSkewShows(t *testing.T) {
	c := Config{Ranks: 8, Layers: 6, Microbatches: 4, Steps: 4, Tokens: 4096, TopK: 4, Experts: 64, Seed: 1}
	last := 0.0
	for _, skew := range []float64{0, 0.6, 1.2, 2} {
		c.Skew = skew
		tr := mustSynth(t, c)
		if skew == 0 && tr.Imbalance() > 1.1 {
			t.Errorf("without skew a rank has %.2f times its share", tr.Imbalance())
		}
		if skew > 0 && tr.Imbalance() < last+0.15 {
			t.Errorf("skew %g: imbalance %.2f after %.2f", skew, tr.Imbalance(), last)
		}
		last = tr.Imbalance()
	}
	a := mustSynth(t, c)
	c.Seed++
	if slices.Equal(a.rows, mustSynth(t, c).rows) {
		t.Error("two seeds gave the same counts")
	}
}

// loads returns the rows of the ranks of one layer in a step.
func loads(tr *Counts, step, layer int) []float64 {
	out := make([]float64, tr.Ranks)
	for rank := range out {
		for m := range tr.Microbatches {
			out[rank] += float64(tr.Rows(step, layer, m, rank))
		}
	}
	return out
}

// moved returns the share of rows that are on different ranks in two steps, as the mean
// over layers.
func moved(tr *Counts, a, b int) float64 {
	var sum float64
	for layer := range tr.Layers {
		x, y := loads(tr, a, layer), loads(tr, b, layer)
		for rank := range x {
			sum += math.Abs(x[rank]-y[rank]) / 2
		}
	}
	return sum / float64(tr.Layers) / float64(tr.Total()) / float64(tr.Microbatches)
}

// Zipf stays the same from step to step and differs between layers. Drift goes far in
// small steps.
func TestZipfStaysAndDriftMoves(t *testing.T) {
	c := Config{Skew: 1.2, Ranks: 8, Layers: 8, Microbatches: 4, Steps: driftSteps + 1, Tokens: 4096, TopK: 4, Experts: 64, Seed: 2}
	zipf := mustSynth(t, c)
	if far := moved(zipf, 0, driftSteps); far > 0.02 {
		t.Errorf("zipf moved %.3f of the rows", far)
	}
	if slices.Equal(loads(zipf, 0, 0), loads(zipf, 0, 1)) {
		t.Error("two layers have the same loads")
	}
	c.Kind = Drift
	drift := mustSynth(t, c)
	far, near := moved(drift, 0, driftSteps), 0.0
	for step := range driftSteps {
		near = max(near, moved(drift, step, step+1))
	}
	if far < 0.1 || near > far/2 {
		t.Errorf("drift moved %.3f of the rows in all, and up to %.3f in one step", far, near)
	}
}

// Bursts are rare and large: most microbatches look like their neighbours, few
// do not.
func TestBurstsAreRareAndLarge(t *testing.T) {
	c := Config{Kind: Burst, Ranks: 8, Layers: 16, Microbatches: 8, Steps: 8, Tokens: 4096, TopK: 2, Experts: 64, Seed: 3}
	tr := mustSynth(t, c)
	bursts, all := 0, 0
	for i := 0; i < len(tr.rows); i += tr.Ranks {
		if most := slices.Max(tr.rows[i : i+tr.Ranks]); most > 2*tr.Balanced() {
			bursts++
		}
		all++
	}
	if want := all / burstEvery; bursts < want/2 || bursts > 2*want {
		t.Errorf("%d of %d microbatches burst, expected about %d", bursts, all, want)
	}
}

// The chance of every expert is proportional to its weight and at most one, and the
// chances add up to the number of experts of a token.
func TestInclusion(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := rapid.SliceOfN(rapid.Float64Range(1e-30, 1e6), 1, 40).Draw(t, "weights")
		k := rapid.IntRange(1, len(w)).Draw(t, "k")
		before := slices.Clone(w)
		var sum, scale float64
		for e, p := range inclusion(w, k) {
			if sum += p; !(p >= 0 && p <= 1) {
				t.Fatalf("chance %g", p)
			}
			if p < 1 {
				s := p / before[e]
				if scale != 0 && math.Abs(s-scale) > 1e-9*scale {
					t.Fatalf("scales %g and %g", s, scale)
				}
				scale = s
			}
		}
		if math.Abs(sum-float64(k)) > 1e-6 {
			t.Fatalf("the chances add up to %g, want %d", sum, k)
		}
	})
}

// A token takes no expert twice, so no expert has more rows than there are tokens; all have k rows a token together.
func TestDrawKeepsToTokens(t *testing.T) {
	const tokens, k = 100, 3
	full := 0
	for seed := range uint64(200) {
		var counts [5]int64
		draw(rand.New(rand.NewPCG(seed, 0)), tokens, k, []float64{0.98, 0.98, 0.98, 0.03, 0.03}, counts[:])
		var sum int64
		for _, n := range counts {
			if sum += n; n < 0 || n > tokens {
				t.Fatalf("seed %d: %v", seed, counts)
			}
			if n == tokens {
				full++
			}
		}
		if sum != tokens*k {
			t.Fatalf("seed %d: %v are %d rows", seed, counts, sum)
		}
	}
	if full == 0 {
		t.Error("no expert has all tokens, so nothing was cut")
	}
}

// Binomial numbers have the binomial distribution: chi-square over the values that are
// not too rare, in both methods and on both sides of a half.
func TestBinomial(t *testing.T) {
	const draws = 40000
	for _, c := range []struct {
		n int64
		p float64
	}{{5, 0.3}, {1000, 0.004}, {40, 0.5}, {200, 0.1}, {1000, 0.9}, {50000, 0.01}} {
		rng := rand.New(rand.NewPCG(7, uint64(c.n)))
		seen := map[int64]float64{}
		for range draws {
			k := binomial(rng, c.n, c.p)
			if k < 0 || k > c.n {
				t.Fatalf("binomial(%d, %g) gave %d", c.n, c.p, k)
			}
			seen[k]++
		}
		var chi, cells, rest, restSeen float64
		for k := range c.n + 1 {
			want := draws * math.Exp(logFactorial(float64(c.n))-logFactorial(float64(k))-logFactorial(float64(c.n-k))+
				float64(k)*math.Log(c.p)+float64(c.n-k)*math.Log1p(-c.p))
			if want < 10 {
				rest, restSeen = rest+want, restSeen+seen[k]
				continue
			}
			chi += (seen[k] - want) * (seen[k] - want) / want
			cells++
		}
		chi += (restSeen - rest) * (restSeen - rest) / max(rest, 1)
		// Chi-square has mean cells and variance 2 cells. Five deviations are allowed.
		if chi > cells+5*math.Sqrt(2*cells)+5 {
			t.Errorf("binomial(%d, %g): chi-square %.1f over %.0f values", c.n, c.p, chi, cells)
		}
	}
	rng := rand.New(rand.NewPCG(1, 1))
	if binomial(rng, 0, 0.5) != 0 || binomial(rng, 9, 0) != 0 || binomial(rng, 9, 1) != 9 {
		t.Error("the edges are wrong")
	}
}

func TestSynthRefuses(t *testing.T) {
	good := Config{Ranks: 2, Layers: 1, Microbatches: 1, Steps: 1, Tokens: 8, TopK: 2, Experts: 4, Skew: 1}
	for name, change := range map[string]func(*Config){
		"ranks": func(c *Config) { c.Ranks = 0 }, "experts": func(c *Config) { c.Experts = 0 }, "odd": func(c *Config) { c.Experts = 3 },
		"top_k": func(c *Config) { c.TopK = 5 }, "skew": func(c *Config) { c.Skew = math.NaN() }, "more skew": func(c *Config) { c.Skew = 17 },
		"steps": func(c *Config) { c.Steps = 1 << 40 }, "tokens": func(c *Config) { c.Tokens = -1 }, "kind": func(c *Config) { c.Kind = 9 },
	} {
		c := good
		change(&c)
		if _, err := Generate(c); err == nil {
			t.Errorf("%s: %+v was accepted", name, c)
		}
	}
	for k := range kindNames {
		if got, err := ParseKind(Kind(k).String()); err != nil || got != Kind(k) {
			t.Errorf("%v was read as %v, %v", Kind(k), got, err)
		}
	}
	if _, err := ParseKind("pareto"); err == nil || Kind(9).String() != "Kind(9)" {
		t.Error("an unknown kind has a name")
	}
}
