// This file owns generated counts. Experts have a Zipf popularity, which stays, drifts from
// step to step, or has bursts.

package routing

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
)

// Kind is how the popularity of experts behaves.
type Kind uint8

const (
	// Zipf chooses the i-th most popular expert of a layer in proportion to 1/i^skew.
	// Every layer has an order of its own, which does not change.
	Zipf Kind = iota
	// Drift is Zipf with an order that turns into another one over some steps.
	Drift
	// Burst is Zipf with bursts: in one of some microbatches of a layer, a few random
	// experts attract half of all rows.
	Burst
)

var kindNames = [...]string{Zipf: "zipf", Drift: "drift", Burst: "burst"}

// String returns the name of the kind.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// ParseKind returns the kind of a name: zipf, drift or burst.
func ParseKind(name string) (Kind, error) {
	for k, n := range kindNames {
		if n == name {
			return Kind(k), nil
		}
	}
	return 0, errors.New("choose zipf, drift or burst")
}

const (
	driftSteps = 16
	burstEvery = 16
	burstShare = 64 // one expert in so many bursts, and at least one
	// maxSkew is the largest skew. Beyond it, rounding would lose the tail of a million
	// experts.
	maxSkew = 16
)

// Config describes the counts to generate.
type Config struct {
	Kind         Kind
	Skew         float64 // zero: all experts are equally popular
	Ranks        int
	Layers       int
	Microbatches int
	Steps        int
	Tokens       int64 // of a microbatch, on all ranks together
	TopK         int
	Experts      int // of a layer, a multiple of Ranks
	Seed         uint64
}

func (c Config) header() Header {
	return Header{Ranks: c.Ranks, Tokens: c.Tokens, TopK: c.TopK, Layers: c.Layers, Microbatches: c.Microbatches, Experts: c.Experts}
}

// Check returns an error if the configuration is not sound.
func (c Config) Check() error {
	h := c.header()
	if err := h.check(); err != nil {
		return err
	}
	switch {
	case c.Experts < 1:
		return errors.New("experts is 0; give the number of experts of a layer")
	case int(c.Kind) >= len(kindNames):
		return fmt.Errorf("there is no %v", c.Kind)
	case !(c.Skew >= 0 && c.Skew <= maxSkew):
		return fmt.Errorf("skew is %g; it must be between 0 and %d", c.Skew, maxSkew)
	case c.Steps < 1 || c.Steps > maxEntries/h.perStep():
		return fmt.Errorf("steps is %d; it must be at least 1, and all steps together at most %d numbers", c.Steps, maxEntries)
	}
	return nil
}

// Generate generates routing counts. The same configuration gives the same counts. The
// rows of each expert are multinomial over all tokens of a microbatch, and a token takes
// no expert twice.
func Generate(c Config) (*Counts, error) {
	if err := c.Check(); err != nil {
		return nil, fmt.Errorf("%w", err)
	}
	t := &Counts{Header: c.header()}
	t.rows = make([]Rows, c.Steps*t.perStep())
	counts := make([]int64, c.Experts)
	for layer := range c.Layers {
		// Each layer has its own stream of random numbers, so more layers do not change
		// those before them.
		rng := rand.New(rand.NewPCG(c.Seed, uint64(layer)))
		p := newPopularity(&c, rng)
		for step := range c.Steps {
			p.advance(step)
			for m := range c.Microbatches {
				draw(rng, c.Tokens, c.TopK, inclusion(p.weights(), c.TopK), counts)
				at := t.place(step, layer, m)
				for e, n := range counts {
					t.rows[at+e/(c.Experts/c.Ranks)] += Rows(n)
				}
			}
		}
	}
	return t, nil
}

// popularity is the popularity of one layer's experts.
type popularity struct {
	c        *Config
	rng      *rand.Rand
	from, to []float64 // logarithms
	now      []float64
	w        []float64
}

func newPopularity(c *Config, rng *rand.Rand) *popularity {
	p := &popularity{c: c, rng: rng, now: make([]float64, c.Experts), w: make([]float64, c.Experts)}
	p.from = p.order()
	p.to = p.from
	if c.Kind == Drift {
		p.to = p.order()
	}
	return p
}

// order returns a Zipf popularity in a new order.
func (p *popularity) order() []float64 {
	log := make([]float64, p.c.Experts)
	for i, e := range p.rng.Perm(p.c.Experts) {
		log[e] = -p.c.Skew * math.Log(float64(i+1))
	}
	return log
}

// advance moves to a step. It is called for each step in turn.
func (p *popularity) advance(step int) {
	if p.c.Kind == Drift && step > 0 && step%driftSteps == 0 {
		p.from, p.to = p.to, p.order()
	}
	way := float64(step%driftSteps) / driftSteps
	for e := range p.now {
		p.now[e] = math.Exp(p.from[e] + way*(p.to[e]-p.from[e]))
	}
}

// weights returns the weights of the next microbatch.
func (p *popularity) weights() []float64 {
	copy(p.w, p.now)
	if p.c.Kind != Burst || p.rng.IntN(burstEvery) > 0 {
		return p.w
	}
	var sum float64
	for _, w := range p.w {
		sum += w
	}
	hot := max(1, p.c.Experts/burstShare)
	for range hot {
		p.w[p.rng.IntN(len(p.w))] += sum / float64(hot)
	}
	return p.w
}

// inclusion turns weights into the chance that a token takes each expert: proportional to
// the weight, at most one, and k in sum. It overwrites them.
func inclusion(w []float64, k int) []float64 {
	full := 0
	isFull := make([]bool, len(w))
	for {
		var sum float64
		for e, x := range w {
			if !isFull[e] {
				sum += x
			}
		}
		scale, before := float64(k-full)/sum, full
		for e, x := range w {
			if !isFull[e] && x*scale >= 1 && full < k {
				isFull[e] = true
				full++
			}
		}
		if full > before && full < k {
			continue
		}
		if full == k {
			scale = 0
		}
		for e := range w {
			if w[e] *= scale; isFull[e] {
				w[e] = 1
			}
		}
		return w
	}
}

// draw draws how many of the tokens take each expert, k for each token. An expert's number
// is binomial in what those before it left. None exceeds the tokens, and the excess goes to
// those after it.
func draw(rng *rand.Rand, tokens int64, k int, chance []float64, counts []int64) {
	left, mass := tokens*int64(k), float64(k)
	for e, p := range chance {
		var n int64
		switch {
		case p >= 1:
			n = tokens
		case p >= mass: // all that is left, but for rounding
			n = left
		default:
			n = binomial(rng, left, p/mass)
		}
		room := tokens * int64(len(chance)-e-1) // of those after it
		counts[e] = min(max(n, left-room), tokens, left)
		left -= counts[e]
		mass -= p
	}
}
